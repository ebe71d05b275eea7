"""Captured graphs against eager calls and against their plan: bits of replays, kernels and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kda_lib.lab.graphs import Topology
from kda_lib.lab.validation import differing

if TYPE_CHECKING:
    import torch

    from kda_lib.projection import KdaProjection
    from kda_lib.strategies import Plan

T = TypeVar("T")


def capture(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a warmed-up call. Returns the graph, kept for inspection and ready for replay, and what the call did."""
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = call()
    graph.instantiate()
    return graph, result


def replay_differences(
    replay: Callable[[], None],
    eager: Callable[[], Sequence[torch.Tensor]],
    x: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    inputs: torch.Tensor,
) -> int:
    """Outputs that differ in a bit between replays and eager calls, over all of ``inputs`` [replays, m, k].

    Before each replay x gets the next input and every output is filled with NaN, so a replay that reads an old input
    or leaves an output alone is seen. The device is waited for once, at the end.
    """
    import torch

    count = torch.zeros((), dtype=torch.int64, device=x.device)
    for values in inputs:
        x.copy_(values)
        for part in outputs:
            part.fill_(float("nan"))
        replay()
        for mine, want in zip(outputs, eager(), strict=True):
            count += differing(mine, want)
    return int(count)


class Endurance(NamedTuple):
    """What many replays gave: outputs compared, those that differ in a bit, and whether the projection is armed still
    (:meth:`kda_lib.projection.KdaProjection.armed`).
    """

    replays: int
    outputs: int
    differing: int
    armed: bool


def endurance(proj: KdaProjection, inputs: torch.Tensor, replays: int) -> Endurance:
    """Replay one captured call with each of ``inputs`` [n, m, 7168] in turn, and compare it with an eager call's bits.

    Input, NaN-filled outputs, call and comparison are one graph, which finds its own way through the inputs: the host
    only replays, so that 100,000 replays take a few seconds. proj is warmed up for m, as any capture needs it.
    """
    import torch

    n, m, _ = inputs.shape
    columns = [part.shape[1] for part in proj(inputs[0])]
    ends = [m * sum(columns[:i]) for i in range(len(columns) + 1)]
    flat = inputs.new_empty(1, ends[-1])
    qkvg, g1, beta = (
        flat[0, start:end].view(m, width) for start, end, width in zip(ends[:-1], ends[1:], columns, strict=True)
    )
    wanted = torch.stack([torch.cat([part.flatten() for part in proj(x)]) for x in inputs]).view(torch.int16)
    x, want = inputs.new_empty(1, *inputs.shape[1:]), wanted.new_empty(1, ends[-1])
    turn = torch.zeros(1, dtype=torch.int64, device=inputs.device)
    count = torch.zeros((), dtype=torch.int64, device=inputs.device)

    def step() -> None:
        torch.index_select(inputs, 0, turn, out=x)
        torch.index_select(wanted, 0, turn, out=want)
        flat.fill_(float("nan"))
        proj(x[0], out=(qkvg, g1, beta))
        count.add_((flat.view(torch.int16) != want).sum())
        turn.add_(1).remainder_(n)

    step()  # so that the capture loads no kernel
    turn.zero_()
    count.zero_()
    graph, _ = capture(step)
    for _ in range(replays):
        graph.replay()
    return Endurance(replays, replays * ends[-1], int(count), proj.armed())


def branches(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The parts of one layer in the order of each stream; those that are not in ``plan.kernels`` are library GEMMs."""
    from kda_lib.strategies import Stream

    if isinstance(plan.strategy, Stream):
        return ((Stream.PART,),)
    if plan.qkvg is None:
        return (("packed GEMM", "F_B"),)
    return (("QKVG",), ("F_A/beta", "F_B"))


def predicted_graph(plan: Plan, layers: int, kernels: Mapping[str, int]) -> Topology:
    """The kernels of ``layers`` layers one after the other, and who waits for whom.

    kernels: how many a library GEMM launches, by part; the kernels of this library are one each.
    """
    own = dict(plan.kernels)
    edges: list[tuple[int, int]] = []
    nodes, ends = 0, list[int]()
    for _ in range(layers):
        fork, ends = ends, []
        for branch in branches(plan):
            before = fork
            for part in branch:
                for _ in range(1 if part in own else kernels[part]):
                    edges += [(node, nodes) for node in before]
                    before, nodes = [nodes], nodes + 1
            ends += before
    return Topology(("kernel",) * nodes, tuple(edges))
