"""On a device: kernels bit for bit, strategies against fp64, capture and replay, hazards, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_tools import GPU_ONLY, POISON, LateCopy, device
from kernel_threads import random_bits

from kda_lib import Arch, KdaProjection, KdaShapes, autotune
from kda_lib import reference as ref
from kda_lib.autotune import TuningStore, TuningTable
from kda_lib.backends import Backend, detect_installed, runnable, select_backend
from kda_lib.compile import KernelConfig
from kda_lib.errors import NotWarmedUp
from kda_lib.lab.validation import accumulation_bound, gate_inputs
from kda_lib.launch import check
from kda_lib.runtime import Outputs, Runtime
from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS
from kda_lib.strategies import Overlap, Sequential, Strategy, Stream

pytestmark = GPU_ONLY

ALL_M = range(1, MAX_TOKENS + 1)
TP8 = KdaShapes(8)
STRATEGIES: list[Strategy] = [Sequential(), Overlap(), Overlap(fork="wide_first")]
if torch.cuda.is_available() and Arch.of_device().has_clusters:
    STRATEGIES += [Stream(), Stream(pdl=False)]


@pytest.fixture(scope="module")
def arch() -> Arch:
    return Arch.of_device()


@pytest.fixture
def late_copy(arch: Arch) -> LateCopy:
    if not arch.has_pdl:
        pytest.skip(f"{arch} has no programmatic dependent launch")
    return LateCopy()


# --- strategies against fp64 ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One layer and inputs for 16 tokens, on the device and as fp64 results."""

    shapes: KdaShapes
    packed: torch.Tensor
    f_b: torch.Tensor
    x: torch.Tensor
    exact: ref.KdaReference
    bound: np.ndarray

    def project(self, strategy: str | Strategy, **options: Any) -> KdaProjection:
        """Nothing is tuned unless a test asks for it."""
        options = {"table": TuningTable(), **options}
        return KdaProjection(self.packed, self.f_b, tp=self.shapes.tp, strategy=strategy, **options)


def make_layer(tp: int) -> Layer:
    shapes, rng = KdaShapes(tp), np.random.default_rng(tp)
    x = random_bits(rng, MAX_TOKENS, HIDDEN)
    packed = random_bits(rng, shapes.packed_rows, HIDDEN, scale=HIDDEN**-0.5)
    f_b = random_bits(rng, shapes.f_b_rows, F_A_ROWS, scale=F_A_ROWS**-0.5)
    exact = ref.kda_reference(x, packed, f_b, shapes)
    # Whatever the order, a sum of K products takes at most K roundings.
    return Layer(shapes, device(packed), device(f_b), device(x), exact, accumulation_bound(x, packed, HIDDEN))


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(8)


#: What FP32 accumulation loses in outputs near 1, by far: tensor cores cut each of 7168 / 16 partial sums to about 23
#: bits. Outputs above 16 times this are hence within an ulp of the rounded fp64 result.
LOSS = 2.0**-13


def check_part(name: str, part: torch.Tensor, exact: np.ndarray, bound: np.ndarray) -> None:
    """Half an ulp and what FP32 sums can lose; an ulp where that is more than the loss; cosine."""
    values, rounded = part.double().cpu().numpy(), ref.f64_to_bf16(exact)
    error, half_ulp = np.abs(values - exact), 2.0**-8 * np.abs(exact)
    distance = ref.ulp_distance_bf16(ref.bits_of_tensor(part), rounded)
    assert (error <= half_ulp + bound * (1 + 2.0**-8)).all(), name
    assert (error <= half_ulp + LOSS).all(), name
    assert (distance[np.abs(exact) >= 16 * LOSS] <= 1).all(), name
    wanted = ref.bf16_to_f32(rounded).astype(np.float64)
    cosine = (values * wanted).sum() / np.sqrt((values**2).sum() * (wanted**2).sum())
    assert cosine >= 0.9999998, name


def check_against_fp64(layer: Layer, proj: KdaProjection, m: int) -> None:
    """F_B is judged by the f_a that the projection gave it, which comes out of the same kernel again."""
    shapes, x = layer.shapes, layer.x[:m]
    got = proj(x)
    check_part("qkvg", got.qkvg, layer.exact.qkvg[:m], layer.bound[:m, shapes.qkvg_slice])
    check_part(
        "beta", got.beta, layer.exact.beta[:m], layer.bound[:m, shapes.qkvg_rows + F_A_ROWS :][:, : shapes.heads]
    )
    f_a, f_b = ref.bits_of_tensor(gate_inputs(proj, x, layer.packed)), ref.bits_of_tensor(layer.f_b)
    check_part("g1", got.g1, ref.project_fp64(f_a, f_b), accumulation_bound(f_a, f_b, F_A_ROWS))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_strategies_against_fp64(layer: Layer, strategy: str | Strategy) -> None:
    proj = layer.project(strategy)
    for m in ALL_M:
        check_against_fp64(layer, proj, m)


@pytest.mark.parametrize("tp", [4, 16])
def test_strategies_of_other_degrees(tp: int) -> None:
    layer = make_layer(tp)
    for strategy in STRATEGIES:
        proj = layer.project(strategy)
        for m in (1, 2, 3, 8, 14, 16):
            check_against_fp64(layer, proj, m)


@pytest.mark.parametrize("backend", list(Backend))
def test_backends_against_fp64(arch: Arch, layer: Layer, backend: Backend) -> None:
    tokens = [m for m in ALL_M if backend in runnable(arch, m, detect_installed())]
    if not tokens:
        pytest.skip(f"{backend} is not installed or not for {arch}")
    proj = layer.project("overlap", qkvg=backend)
    for m in tokens:
        assert proj.plan(m).backend is backend
        check_against_fp64(layer, proj, m)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_special_changes_its_own_row_only(layer: Layer, strategy: str | Strategy, special: float) -> None:
    proj = layer.project(strategy)
    for m in ALL_M:
        clean = proj(layer.x[:m])
        x = layer.x[:m].clone()
        row = m // 2
        x[row, 4321] = special
        others = [i for i in range(m) if i != row]
        for before, after in zip(clean, proj(x), strict=True):
            assert torch.equal(before[others], after[others])
            assert not after[row].isfinite().any()


def test_out_is_written(layer: Layer) -> None:
    for strategy in STRATEGIES:
        proj = layer.project(strategy)
        for m in (1, 2, 8, 16):
            want = proj(layer.x[:m])
            out = Outputs(*(torch.full_like(part, POISON).contiguous() for part in want))
            got = proj(layer.x[:m], out=out)
            assert all(a is b and torch.equal(a, c) for a, b, c in zip(got, out, want, strict=True))


# --- capture and replay ---------------------------------------------------------------------------------------------


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> int:
    from cuda.bindings import driver

    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = check("cuGraphGetNodes", driver.cuGraphGetNodes(raw, 0))
    nodes, _ = check("cuGraphGetNodes", driver.cuGraphGetNodes(raw, count))
    types = [check("cuGraphNodeGetType", driver.cuGraphNodeGetType(node)) for node in nodes[:count]]
    return sum(kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL for kind in types)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_replay_equals_eager(layer: Layer, strategy: str | Strategy) -> None:
    """With other inputs each time and outputs poisoned before each replay: 1,000 times at 2, 8 and 14, else 20."""
    proj = layer.project(strategy)
    proj.warmup(ALL_M)
    for m in ALL_M:
        x = layer.x[:m].clone()
        graph, outputs = captured(lambda x=x: proj(x))
        generator = torch.Generator("cuda").manual_seed(m)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000 if m in (2, 8, 14) else 20):
            x.copy_(torch.randn(m, HIDDEN, generator=generator, device="cuda"))
            for part in outputs:
                part.fill_(POISON)
            graph.replay()
            for mine, want in zip(outputs, proj(x), strict=True):
                differing += (mine.view(torch.int16) != want.view(torch.int16)).sum()
        assert differing.item() == 0, f"M = {m}"


def test_kernel_nodes(layer: Layer) -> None:
    """Overlap: QKVG and two more. Sequential: the packed GEMM and F_B. A GEMM counts as it does when captured alone.

    Stream: one.
    """
    sequential, overlap = layer.project("sequential"), layer.project("overlap")
    streams = [layer.project(strategy) for strategy in STRATEGIES if isinstance(strategy, Stream)]
    for proj in (sequential, overlap, *streams):
        proj.warmup(ALL_M)
    packed, f_b, f_a = layer.packed, layer.f_b, torch.mm(layer.x, layer.packed.T)[:, TP8.fa_beta_slice][:, :F_A_ROWS]
    for m in ALL_M:
        x = layer.x[:m]
        gemm, short, qkvg = (
            kernel_nodes(captured(call)[0])
            for call in (
                lambda x=x: torch.mm(x, packed.T),
                lambda m=m: torch.mm(f_a[:m], f_b.T),
                lambda x=x: torch.mm(x, packed[: TP8.qkvg_rows].T),
            )
        )
        assert kernel_nodes(captured(lambda x=x: sequential(x))[0]) == gemm + short
        if m <= 2 or overlap.plan(m).backend is Backend.TORCH:
            assert kernel_nodes(captured(lambda x=x: overlap(x))[0]) == (1 if m <= 2 else qkvg) + 2
        for stream in streams:
            assert kernel_nodes(captured(lambda x=x, stream=stream: stream(x))[0]) == 1


@pytest.mark.parametrize("strategy", STRATEGIES[1:2] + STRATEGIES[3:4], ids=str)
def test_many_layers_in_one_graph(layer: Layer, strategy: Strategy) -> None:
    """69 layers, 8 of them with weights of their own, captured once; every layer's outputs are those of eager."""
    weights = [layer.packed.roll(place, 0) for place in range(8)]
    projections = [KdaProjection(weights[i % 8], layer.f_b, strategy=strategy, table=TuningTable()) for i in range(69)]
    for m in (2, 14):
        for proj in projections:
            proj.warmup([m])
        x = layer.x[:m].clone()
        one, _ = captured(lambda x=x: projections[0](x))
        graph, outputs = captured(lambda x=x: [proj(x) for proj in projections])
        assert kernel_nodes(graph) == 69 * kernel_nodes(one)
        x.copy_(layer.x[:m].flip(0))
        graph.replay()
        for proj, mine in zip(projections, outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, proj(x), strict=True))


def test_not_warmed_up_leaves_the_capture_usable(layer: Layer) -> None:
    for strategy in STRATEGIES:
        proj = layer.project(strategy)
        proj.warmup([4])
        x = layer.x[:4].clone()

        def call(proj: KdaProjection = proj, x: torch.Tensor = x) -> Outputs:
            with pytest.raises(NotWarmedUp, match="M = 5"):
                proj(layer.x[:5])
            return proj(x)

        graph, outputs = captured(call)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, proj(x), strict=True))


@pytest.mark.parametrize("part", ["QKVG", "F_A/beta", "F_B"])
@pytest.mark.parametrize("fork", ["wide_first", "side_first"])
def test_a_branch_that_raises_in_capture(layer: Layer, monkeypatch: pytest.MonkeyPatch, fork: Any, part: str) -> None:
    """The error arrives, the capture ends in order, and the context and the projection go on."""
    proj = layer.project(Overlap(fork=fork))
    x = layer.x[:2]
    want = proj(x)
    failing, launch = proj.plan(2).kernel(part), Runtime.launch

    def fails(self: Runtime, config: KernelConfig, *arguments: Any) -> None:
        if config == failing:
            raise ArithmeticError(part)
        launch(self, config, *arguments)

    monkeypatch.setattr(Runtime, "launch", fails)
    with pytest.raises(ArithmeticError, match=part):
        captured(lambda: proj(x))
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))
    graph, outputs = captured(lambda: proj(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, want, strict=True))


# --- a predecessor that lets its dependents start early -------------------------------------------------------------


def test_projections_wait_for_their_input(arch: Arch, layer: Layer, late_copy: LateCopy) -> None:
    """Every strategy and backend, eager and replayed, right behind such a predecessor."""
    options: list[tuple[str | Strategy, Backend | None]] = [(strategy, None) for strategy in STRATEGIES]
    options += [("overlap", backend) for backend in Backend if backend is not Backend.SKINNY]
    for strategy, backend in options:
        for m in (1, 2, 3, 8, 16):
            if backend is not None and backend not in runnable(arch, m, detect_installed()):
                continue
            proj = layer.project(strategy, qkvg=backend)
            source, x = layer.x[:m], torch.zeros_like(layer.x[:m])
            want = proj(source)

            def call(proj: KdaProjection = proj, source: torch.Tensor = source, x: torch.Tensor = x) -> Outputs:
                late_copy(source, x)
                return proj(x)

            graph, replayed = captured(call)
            for run in (call, lambda graph=graph, replayed=replayed: graph.replay() or replayed):
                x.zero_()
                torch.cuda.synchronize()
                outputs = cast(Outputs, run())
                assert all(torch.equal(a, b) for a, b in zip(outputs, want, strict=True)), (strategy, backend, m)


# --- arguments, devices, tuning -------------------------------------------------------------------------------------


def test_what_is_refused_leaves_the_context_usable(layer: Layer) -> None:
    proj = layer.project("overlap")
    x = layer.x[:4]
    want = proj(x)
    shifted = torch.zeros(4 * HIDDEN + 8, dtype=torch.bfloat16, device="cuda")[1 : 4 * HIDDEN + 1].view(4, HIDDEN)
    for bad, error, words in (
        (x.cpu(), ValueError, "hidden_states: expected device cuda:0.* got cpu"),
        (x.half(), TypeError, "hidden_states: expected torch.bfloat16"),
        (layer.x[0], ValueError, r"hidden_states: expected shape \[M >= 1, 7168\]"),
        (layer.packed[:4, :64], ValueError, r"got \[4, 64\]"),
        (layer.x[::2], ValueError, "hidden_states: expected strides"),
        (shifted, ValueError, "hidden_states: expected an address divisible by 16"),
    ):
        with pytest.raises(error, match=words):
            proj(bad)
    with pytest.raises(ValueError, match=r"f_b_weight: expected device cuda:0.* got cpu"):
        KdaProjection(layer.packed, layer.f_b.cpu())
    with pytest.raises(ValueError, match="up to 16 tokens"):
        proj(torch.zeros(17, HIDDEN, dtype=torch.bfloat16, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))


def test_more_tokens_than_the_kernels_take(layer: Layer) -> None:
    proj = layer.project("auto")
    g1 = proj(layer.x.repeat(2, 1)).g1
    assert torch.equal(g1[16:], g1[:16])


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_other_than_the_current_one(layer: Layer) -> None:
    for strategy in STRATEGIES:
        here = layer.project(strategy)
        there = KdaProjection(layer.packed.to("cuda:1"), layer.f_b.to("cuda:1"), strategy=strategy, table=TuningTable())
        for m in (1, 3, 16):
            outputs = there(layer.x[:m].to("cuda:1"))
            assert {part.device for part in outputs} == {torch.device("cuda:1")}
            assert torch.cuda.current_device() == 0
            assert all(torch.equal(a.to("cuda:0"), b) for a, b in zip(outputs, here(layer.x[:m]), strict=True))


def test_tuning(arch: Arch, layer: Layer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every candidate gets a time that memory allows; the next layer takes it from the file; plans stay in capture."""
    monkeypatch.setattr(TuningStore, "default", classmethod(lambda cls: TuningStore(tmp_path)))
    monkeypatch.setattr("kda_lib.projection.shipped_table", lambda shapes, name: TuningTable())
    proj = layer.project("overlap", table=None)
    untuned = autotune.untuned(arch, [2, 3, 8], detect_installed(), TuningTable())
    proj.warmup([2, 3, 8])
    assert sorted(proj.table.qkvg_us) == untuned
    for times in proj.table.qkvg_us.values():
        # 8 TB/s is more than any memory of these devices delivers.
        assert all(2 * TP8.qkvg_rows * HIDDEN / 8e6 < us < 1000 for us in times.values())
    monkeypatch.setattr(autotune, "measure_qkvg", lambda *_: pytest.fail("measured twice"))
    other = layer.project("overlap", table=None)
    other.warmup([2, 3, 8])
    assert other.table == proj.table
    for m in (2, 3, 8):
        assert other.plan(m) == proj.plan(m)
        assert other.plan(m).qkvg == select_backend(arch, TP8, m, detect_installed(), proj.table)
        x = layer.x[:m].clone()
        graph, outputs = captured(lambda x=x: other(x))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, proj(x), strict=True))
