"""Captured graphs against eager calls and against their plan: bits of replays, kernels and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kda_lib.lab.graphs import Topology
from kda_lib.lab.validation import differing

if TYPE_CHECKING:
    import torch

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


def branches(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The parts of one layer in the order of each stream; those that are not in ``plan.kernels`` are library GEMMs."""
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
