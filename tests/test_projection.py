"""KdaProjection on a played CUDA: results of all strategies, order of launches, checks, plans, warm-up and capture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeStream, fake_cuda
from fake_flashinfer import FLASHINFER_0_7_4
from test_reference_model import accumulation_bound

from kda_lib import Arch, KdaProjection, KdaShapes, autotune, projection, strategies
from kda_lib import reference as ref
from kda_lib.autotune import TuningStore, TuningTable
from kda_lib.backends import Backend, BrokenBackend, Installed
from kda_lib.errors import NotWarmedUp
from kda_lib.kernels.config import qkvg_gemv_config, skinny_k_config, skinny_n_config
from kda_lib.runtime import Outputs, Runtime
from kda_lib.shapes import F_A_ROWS, HIDDEN
from kda_lib.strategies import Facts, Overlap, Plan, Sequential, Strategy, make_plan

HOPPER, AMPERE, BLACKWELL = Arch.parse("h200"), Arch.parse("a100"), Arch.parse("b200")
UNKNOWN = Arch.of_capability((13, 0))
TP16 = KdaShapes(16)
Weights = tuple[torch.Tensor, torch.Tensor]
QKVG, FA_BETA, F_B = "n=3072", "n=144", "n=768"


def random(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul_(scale).bfloat16()


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random(TP16.packed_rows, HIDDEN, 1, HIDDEN**-0.5), random(TP16.f_b_rows, F_A_ROWS, 2, 0.1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def project(weights: Weights, **options: Any) -> KdaProjection:
    return KdaProjection(*weights, tp=16, **options)


def launches(cuda: FakeCuda) -> list[str]:
    """The log since the last time, emptied."""
    lines, cuda.log[:] = list(cuda.log), []
    return lines


# --- results --------------------------------------------------------------------------------------------------------


def check_near(got: torch.Tensor, exact: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """Within half a BF16 ulp and what K FP32 additions can lose."""
    error = np.abs(got.double().numpy() - exact)
    assert got.dtype == torch.bfloat16
    assert (error <= 2.0**-8 * np.abs(exact) + accumulation_bound(x, w, x.shape[1]) * (1 + 2.0**-8)).all()


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["sequential", "overlap", Overlap(fork="side_first"), "auto"], ids=str)
def test_results(cuda: FakeCuda, weights: Weights, strategy: str | Strategy, m: int) -> None:
    """Pointers, offsets and strides are right: the played kernels read and write the memory they are given."""
    x = random(m, HIDDEN, 3)
    outputs = project(weights, strategy=strategy)(x)
    bits, packed, f_b = ref.bits_of_tensor(x), ref.bits_of_tensor(weights[0]), ref.bits_of_tensor(weights[1])
    # torch.mm on a CPU and the kernels round f_a alike here, but for one value in a thousand: F_B is judged by itself.
    want = ref.kda_reference(bits, packed, f_b, TP16)
    check_near(outputs.qkvg, want.qkvg, bits, packed[TP16.qkvg_slice])
    check_near(outputs.beta, want.beta, bits, packed[TP16.qkvg_rows + F_A_ROWS :][: TP16.heads])
    f_a = ref.f64_to_bf16(want.f_a)
    slack = 2.0**-7 * ref.project_fp64(f_a & np.uint16(0x7FFF), f_b & np.uint16(0x7FFF))
    assert (np.abs(outputs.g1.double().numpy() - want.g1) <= 2.0**-8 * np.abs(want.g1) + slack).all()
    assert [tuple(part.shape) for part in outputs] == [(m, 3072), (m, 768), (m, 6)]


def test_overlap_gives_the_bits_of_the_host_models(cuda: FakeCuda, weights: Weights) -> None:
    x = random(2, HIDDEN, 4)
    qkvg, g1, beta = (ref.bits_of_tensor(part) for part in project(weights, strategy="overlap")(x))
    bits, packed, f_b = ref.bits_of_tensor(x), ref.bits_of_tensor(weights[0]), ref.bits_of_tensor(weights[1])
    fa_beta = ref.model_skinny_n(skinny_n_config(HOPPER, 2, TP16), bits, packed[TP16.fa_beta_slice])
    np.testing.assert_array_equal(beta, fa_beta[:, F_A_ROWS : F_A_ROWS + TP16.heads])
    np.testing.assert_array_equal(g1, ref.model_skinny_k(skinny_k_config(HOPPER, 2, TP16), fa_beta[:, :F_A_ROWS], f_b))
    gemv = qkvg_gemv_config(HOPPER, 2, TP16)
    np.testing.assert_array_equal(qkvg, ref.model_skinny_n(gemv, bits, packed[TP16.qkvg_slice]))


def test_sequential_outputs_are_views_and_weights_are_not_copied(cuda: FakeCuda, weights: Weights) -> None:
    x = random(3, HIDDEN, 5)
    own = (weights[0].clone(), weights[1])
    proj = project(own, strategy="sequential")
    qkvg, _, beta = proj(x)
    assert qkvg.stride() == beta.stride() == (TP16.packed_rows, 1)
    assert qkvg.untyped_storage().data_ptr() == beta.untyped_storage().data_ptr()
    own[0][0] = 0
    assert (proj(x).qkvg[:, 0] == 0).all()
    assert (qkvg[:, 0] != 0).all()


@pytest.mark.parametrize("strategy", ["sequential", "overlap"])
def test_out_is_written(cuda: FakeCuda, weights: Weights, strategy: str) -> None:
    x = random(2, HIDDEN, 6)
    proj = project(weights, strategy=strategy)
    want = proj(x)
    wide = torch.full((2, 40), float("nan"), dtype=torch.bfloat16)
    out = (*(torch.full_like(part, float("nan")).contiguous() for part in want[:2]), wide[:, 8:14])
    got = proj(x, out=out)
    for mine, theirs, expected in zip(out, got, want, strict=True):
        assert theirs.data_ptr() == mine.data_ptr()
        assert torch.equal(mine, expected)
    assert wide.isnan().sum() == 2 * 34, "nothing beside beta is written"


def test_parameters_that_want_gradients(cuda: FakeCuda, weights: Weights) -> None:
    parameters = tuple(torch.nn.Parameter(weight) for weight in weights)
    for strategy in ("sequential", "overlap"):
        outputs = project(parameters, strategy=strategy)(random(3, HIDDEN, 7).requires_grad_())
        assert not any(part.requires_grad for part in outputs)


# --- order of launches ----------------------------------------------------------------------------------------------

SIDE = [f"skinny_n {FA_BETA} on side1", f"skinny_k {F_B} on side1"]


@pytest.mark.parametrize(("m", "wide"), [(2, f"skinny_n {QKVG} on main"), (3, f"torch.mm {QKVG} on main")])
def test_overlap_forks_and_joins(cuda: FakeCuda, weights: Weights, m: int, wide: str) -> None:
    x = random(m, HIDDEN, 8)
    for fork, branches in (("wide_first", [wide, *SIDE]), ("side_first", [*SIDE, wide])):
        proj = project(weights, strategy=Overlap(fork=fork))  # type: ignore[arg-type]
        proj.warmup([m])
        launches(cuda)
        proj(x)
        side = f"side{len(cuda.streams) - 1}"
        expected = [f"{side} waits for main", *branches, f"main waits for {side}"]
        assert launches(cuda) == [line.replace("side1", side) for line in expected]


def test_sequential_is_one_packed_gemm_then_f_b(cuda: FakeCuda, weights: Weights) -> None:
    proj = project(weights, strategy="sequential")
    proj.warmup([3])
    launches(cuda)
    proj(random(3, HIDDEN, 9))
    assert launches(cuda) == [f"torch.mm n={TP16.packed_rows} on main", f"torch.mm {F_B} on main"]
    assert cuda.compiled == []


@pytest.mark.parametrize("part", [QKVG, FA_BETA, F_B])
@pytest.mark.parametrize("fork", ["wide_first", "side_first"])
@pytest.mark.parametrize("m", [1, 3])
def test_join_also_when_a_branch_raises(cuda: FakeCuda, weights: Weights, m: int, fork: Any, part: str) -> None:
    proj = project(weights, strategy=Overlap(fork=fork))
    x = random(m, HIDDEN, 10)
    want = proj(x)
    launches(cuda)
    cuda.fail, cuda.capturing = part, True
    with pytest.raises(RuntimeError, match=f"no .*{part}"):
        proj(x)
    lines = launches(cuda)
    assert (lines[0], lines[-1]) == ("side1 waits for main", "main waits for side1")
    cuda.fail = None
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))


def test_the_second_stream_is_never_the_callers(
    cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's stream pool may hand out the caller's stream; and the caller may come with what is the second one."""
    handed_out = [cuda.main, FakeStream(cuda, "a"), FakeStream(cuda, "b")]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: handed_out.pop(0))
    proj = project(weights, strategy="overlap")
    proj.warmup([3])
    assert "a waits for main" in launches(cuda)
    cuda.main = next(stream for stream in cuda.streams.values() if stream.name == "a")
    proj(random(3, HIDDEN, 11))
    assert "b waits for a" in launches(cuda)


# --- warm-up and capture --------------------------------------------------------------------------------------------


def test_warmup_prepares_everything(cuda: FakeCuda, weights: Weights) -> None:
    """After it, capture neither compiles nor synchronises (the played CUDA fails on both), for every M."""
    proj = project(weights)
    proj.warmup(range(1, 17))
    configs = {*(skinny_n_config(HOPPER, m, TP16) for m in range(1, 15)),
               *(skinny_k_config(HOPPER, m, TP16) for m in range(1, 15)),
               *(qkvg_gemv_config(HOPPER, m, TP16) for m in (1, 2))}  # fmt: skip
    assert set(cuda.compiled) == configs
    assert len(cuda.compiled) == len(configs)
    cuda.capturing = True
    proj.warmup(range(1, 17))
    for m in (1, 2, 3, 14, 15, 16):
        launches(cuda)
        proj(random(m, HIDDEN, m))
        assert (f"skinny_n {FA_BETA} on side1" in launches(cuda)) == (m <= 14)
    assert set(cuda.compiled) == configs


def test_kernels_are_loaded_once_for_all_layers(cuda: FakeCuda, weights: Weights) -> None:
    for _ in range(3):
        project(weights, strategy="overlap").warmup([3])
    assert len(cuda.compiled) == 2


@pytest.mark.parametrize(
    ("strategy", "m", "missing"),
    [
        ("overlap", 2, "M = 2 (overlap: F_A/beta by skinny_n, F_B by skinny_k, QKVG by skinny_n)"),
        ("overlap", 3, "M = 3 (overlap: QKVG by torch.mm, F_A/beta by skinny_n, F_B by skinny_k)"),
        ("sequential", 3, "M = 3 (sequential)"),
    ],
)
def test_capture_of_what_is_not_warmed_up(
    cuda: FakeCuda, weights: Weights, strategy: str, m: int, missing: str
) -> None:
    """Nothing is launched, and the capture goes on with what is ready."""
    proj = project(weights, strategy=strategy)
    proj.warmup([1])
    launches(cuda)
    cuda.capturing = True
    with pytest.raises(NotWarmedUp) as raised:
        proj(random(m, HIDDEN, 12))
    assert raised.value.missing == (missing,)
    assert missing in str(raised.value)
    with pytest.raises(NotWarmedUp) as raised:
        proj.warmup([1, m, m + 1])
    assert len(raised.value.missing) == 2
    assert launches(cuda) == []
    proj(random(1, HIDDEN, 13))
    assert launches(cuda) != []


def test_outside_capture_a_call_warms_itself_up(cuda: FakeCuda, weights: Weights) -> None:
    proj = project(weights, strategy="overlap")
    x = random(3, HIDDEN, 14)
    want = proj(x)
    cuda.capturing = True
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))


# --- tuning and broken backends -------------------------------------------------------------------------------------


@pytest.fixture
def tunable(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    """FlashInfer 0.7.4, and times in which tinygemm is fastest at odd M, torch.mm at even; the list of measured M."""
    fake_flashinfer.install(monkeypatch, [])
    measured: list[Any] = []

    def measure(shapes: KdaShapes, options: dict[int, tuple[Backend, ...]], device: Any) -> dict[int, Any]:
        measured.extend(options)
        return {
            m: {b: 20.0 if b is (Backend.TINYGEMM if m % 2 else Backend.TORCH) else 25.0 for b in listed}
            for m, listed in options.items()
        }

    monkeypatch.setattr(autotune, "measure_qkvg", measure)
    monkeypatch.setattr(autotune, "tuning_key", lambda shapes, device, installed: {"tp": shapes.tp})
    monkeypatch.setattr(TuningStore, "default", classmethod(lambda cls: TuningStore(tmp_path)))
    return measured


def test_warmup_tunes_and_capture_chooses_alike(cuda: FakeCuda, weights: Weights, tunable: list[Any]) -> None:
    """Only M with a choice and a separate QKVG; another layer takes the stored times; a later M changes nothing."""
    proj = project(weights)
    proj.warmup([1, 2, 3, 15])
    assert tunable == [3]
    chosen = proj.plan(3)
    assert chosen.backend is Backend.TINYGEMM
    assert "fastest measured for M = 3" in proj.explain(3)
    proj.warmup([4, 3])
    assert tunable == [3, 4]
    assert proj.plan(4).backend is Backend.TORCH
    assert proj.plan(3) is chosen
    other = project(weights)
    other.warmup([3])
    cuda.capturing = True
    assert (other(random(3, HIDDEN, 15)).qkvg == 1).all(), "the played tinygemm writes 1"
    assert other.plan(3) == chosen
    assert tunable == [3, 4]


def test_a_given_table_or_backend_is_final(cuda: FakeCuda, weights: Weights, tunable: list[Any]) -> None:
    given = TuningTable({3: {Backend.TINYGEMM: 1.0, Backend.TORCH: 2.0}})
    for options, backend in (
        ({"table": given}, Backend.TINYGEMM),
        ({"table": TuningTable()}, Backend.TORCH),
        ({"qkvg": "flashinfer-cublaslt"}, Backend.CUBLASLT),
    ):
        proj = project(weights, **options)
        before = proj.plan(3)
        proj.warmup([3])
        assert proj.plan(3) == before
        assert before.backend is backend
    assert tunable == []


def test_a_broken_backend_is_not_replaced(
    cuda: FakeCuda, weights: Weights, tunable: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("ninja exited with 1")

    flashinfer = sys.modules["flashinfer"]
    monkeypatch.setattr(flashinfer.gemm, "mm_bf16", fails)
    with pytest.raises(BrokenBackend, match=r"lacks|is_backend_supported"):
        project(weights).warmup([3])
    gemm = fake_flashinfer.install(monkeypatch, [])
    proj = project(weights, qkvg="flashinfer-cublaslt")
    proj.plan(3)
    monkeypatch.setattr(gemm, "mm_bf16", fails)
    with pytest.raises(BrokenBackend, match=r"flashinfer-cublaslt .*ninja exited with 1.*qkvg='torch\.mm'"):
        proj.warmup([3])
    with pytest.raises(BrokenBackend):
        proj(random(3, HIDDEN, 16))


def test_sequential_needs_no_flashinfer(cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, [])
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", None)
    project(weights, strategy="sequential").warmup([3])
    with pytest.raises(BrokenBackend):
        project(weights, strategy="overlap").warmup([3])


# --- plans ----------------------------------------------------------------------------------------------------------


def facts(arch: Arch, installed: Installed = FLASHINFER_0_7_4, **fields: Any) -> Facts:
    return Facts(arch, TP16, detect=lambda: installed, **fields)


@pytest.mark.parametrize("arch", ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1", "13.0"])
@pytest.mark.parametrize("installed", [Installed(), FLASHINFER_0_7_4], ids=["alone", "flashinfer"])
def test_auto_is_overlap_up_to_the_limit_where_kernels_exist(arch: str, installed: Installed) -> None:
    for m in (1, 2, 3, 8, 14, 15, 16, 17, 1000):
        found = facts(Arch.parse(arch), installed)
        plan = make_plan(found, m, None)
        overlaps = m <= 14 and arch not in ("10.7", "13.0")
        assert plan.strategy == (Overlap() if overlaps else Sequential())
        assert plan == make_plan(found, m, None), "the same facts give the same plan"
        assert [part for part, _ in plan.kernels] == (["F_A/beta", "F_B"] + ["QKVG"] * (m <= 2) if overlaps else [])
    with pytest.raises(FrozenInstanceError):
        plan.m = 3  # type: ignore[misc]


def test_auto_takes_the_fastest_measured_strategy() -> None:
    def plan(**times: float) -> Plan:
        return make_plan(facts(HOPPER, table=TuningTable(strategy_us=dict.fromkeys((3, 17), times))), 3, None)

    assert plan(sequential=25.0, overlap=26.0).strategy == Sequential()
    assert plan(sequential=27.0, overlap=26.0).strategy == Overlap()
    assert "fastest measured: sequential 25.0 us, overlap 26.0 us" in plan(sequential=25.0, overlap=26.0).reason
    assert plan(sequential=25.0).strategy == Overlap(), "one time decides nothing"
    assert plan(sequential=25.0, unheard_of=1.0).strategy == Overlap()
    table = TuningTable(strategy_us={17: {"sequential": 25.0, "overlap": 20.0}}, overlap_limit=2)
    assert make_plan(facts(HOPPER, table=table), 17, None).strategy == Sequential(), "overlap does not take 17"
    assert make_plan(facts(HOPPER, table=table), 3, None).strategy == Sequential()
    assert "above the overlap limit, 2" in make_plan(facts(HOPPER, table=table), 3, None).reason


def test_explain(cuda: FakeCuda, weights: Weights) -> None:
    assert project(weights).explain(3) == (
        "sm_90a, TP16, M = 3: overlap (wide first), because overlap is the default up to M = 14, and no strategies "
        "were measured against each other.\n"
        "QKVG: torch.mm, because FlashInfer is not installed.\n"
        "F_A/beta: kernel skinny_n (portable-shift FMA), 252 CTAs of 64 threads in clusters of 7, with PDL.\n"
        "F_B: kernel skinny_k (portable-shift FMA), 32 CTAs of 384 threads, with PDL."
    )
    assert project(weights).explain(16) == (
        "sm_90a, TP16, M = 16: sequential, because M is above the overlap limit, 14."
    )


def test_explicit_strategies_are_refused_where_they_cannot_run() -> None:
    for arch, m, words in ((UNKNOWN, 3, "its kernels are not built for sm_130a"), (HOPPER, 17, "up to 16 tokens")):
        with pytest.raises(ValueError, match=f"strategy: .*{words}.*use 'auto' or 'sequential'"):
            make_plan(facts(arch), m, Overlap())
        assert make_plan(facts(arch), m, Sequential()).strategy == Sequential()


def test_a_backend_asked_for_must_run_there() -> None:
    asked = facts(HOPPER, qkvg=Backend.SKINNY)
    assert make_plan(asked, 2, Overlap()).backend is Backend.SKINNY
    with pytest.raises(
        ValueError, match=r"qkvg: expected a backend that runs on sm_90a for M = 3 \(torch\.mm, .*skinny"
    ):
        make_plan(asked, 3, Overlap())
    with pytest.raises(ValueError, match="plan: expected one with a QKVG backend"):
        _ = make_plan(asked, 2, Sequential()).backend


@dataclass(frozen=True)
class Zeros(Strategy):
    """A strategy from outside: up to 2 tokens."""

    name = "zeros"

    def refusal(self, arch: Arch, m: int) -> str | None:
        return None if m <= 2 else "it takes up to 2 tokens"

    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        return Plan(m, self, reason)

    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        shapes = runtime.shapes
        return Outputs(*(runtime.empty(plan.m, n).zero_() for n in (shapes.qkvg_rows, shapes.f_b_rows, shapes.heads)))


def test_registry_is_open(cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not project(weights, strategy=Zeros())(random(2, HIDDEN, 17)).qkvg.any()
    monkeypatch.setattr(strategies, "STRATEGIES", dict(strategies.STRATEGIES))
    strategies.register(Zeros())
    for name in ("zeros", "auto"):
        with pytest.raises(ValueError, match=f"expected a new name, got '{name}'"):
            strategies.register(type("Other", (Zeros,), {"name": name})())
    assert project(weights, strategy="zeros").plan(1).strategy == Zeros()
    times = {"zeros": 1.0, "overlap": 2.0, "sequential": 3.0}
    proj = project(weights, table=TuningTable(strategy_us={2: times, 3: times}))
    assert proj.plan(2).strategy == Zeros()
    assert proj.plan(3).strategy == Overlap()


# --- arguments ------------------------------------------------------------------------------------------------------


def shifted(rows: int, columns: int) -> torch.Tensor:
    """Contiguous, but 2 bytes after a multiple of 16."""
    return torch.zeros(rows * columns + 8, dtype=torch.bfloat16)[1 : rows * columns + 1].view(rows, columns)


def zeros(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "shape", "rows"), [("packed_weight", (3216, HIDDEN), True), ("f_b_weight", (768, 128), True),
                                ("hidden_states", (3, HIDDEN), False)],
)  # fmt: skip
@pytest.mark.parametrize("flaw", ["list", "dtype", "rows", "columns", "dims", "stride", "gaps", "alignment", "device"])
def test_tensors_are_checked(
    cuda: FakeCuda,
    weights: Weights,
    name: str,
    shape: tuple[int, int],
    rows: bool,
    flaw: str,
) -> None:
    n, k = shape
    bad, error, words = {
        "list": (lambda: [1.0], TypeError, "expected a torch.Tensor, got list"),
        "dtype": (lambda: zeros(n, k).half(), TypeError, r"expected torch.bfloat16, got torch.float16; convert"),
        "rows": (lambda: zeros(n + 16 if rows else 0, k), ValueError, f"expected shape .*{k}\\], got \\["),
        "columns": (lambda: zeros(n, k + 8), ValueError, f"expected shape .*{k}\\], got \\[{n}, {k + 8}\\]"),
        "dims": (lambda: zeros(n, k)[None], ValueError, r"expected shape .*got \[1, "),
        "stride": (lambda: zeros(k, n).T, ValueError, f"expected strides .*{k}, 1.*got"),
        "gaps": (lambda: zeros(n, k + 8)[:, :k], ValueError, f"strides .*got \\[{k + 8}, 1\\]; use .contiguous"),
        "alignment": (lambda: shifted(n, k), ValueError, "expected an address divisible by 16, got 0x"),
        "device": (lambda: zeros(n, k).to("meta"), ValueError, "device.* got meta; move it"),
    }[flaw]  # fmt: skip
    arguments: dict[str, Any] = {"packed_weight": weights[0], "f_b_weight": weights[1]}
    x = random(3, HIDDEN, 18)
    if name == "hidden_states":
        x = bad()  # type: ignore[operator]
    else:
        arguments[name] = bad()  # type: ignore[operator]
    with pytest.raises(error, match=f"^{name}: .*{words}"):  # type: ignore[call-overload]
        KdaProjection(**arguments, tp=16)(x)
    assert cuda.log == []


def test_no_cuda_device_at_all(weights: Weights) -> None:
    """Nothing played: CPU tensors are refused in words."""
    with pytest.raises(ValueError, match=r"packed_weight: expected a CUDA device, got cpu; move it with \.cuda\(\)"):
        project(weights)


def out_of(m: int = 3) -> list[Any]:
    return [zeros(m, 3072), zeros(m, 768), zeros(m, 6)]


def test_out_is_checked(cuda: FakeCuda, weights: Weights) -> None:
    x = random(3, HIDDEN, 19)
    proj = project(weights, strategy="overlap")
    proj.warmup([3])
    launches(cuda)
    both = zeros(2, 3 * 768 + 3 * 3072).view(-1)
    overlapping = [both[: 3 * 3072].view(3, 3072), both[8 : 8 + 3 * 768].view(3, 768), zeros(3, 6)]
    inside_x = [zeros(3, 3072), x.view(-1)[: 3 * 768].view(3, 768), zeros(3, 6)]
    inside_weight = [weights[0].view(-1)[: 3 * 3072].view(3, 3072), zeros(3, 768), zeros(3, 6)]
    for out, error, words in (
        (zeros(3, 6), TypeError, r"out: expected \(qkvg, g1, beta\), got Tensor"),
        (out_of()[:2], TypeError, "out: expected .* got 2 items"),
        ([None, *out_of()[1:]], TypeError, r"out\[0\] \(qkvg\): expected a torch.Tensor, got NoneType"),
        (out_of(2), ValueError, r"out\[0\] \(qkvg\): expected shape \[3, 3072\], got \[2, 3072\]"),
        ([zeros(3, 3216)[:, :3072], *out_of()[1:]], ValueError, r"out\[0\] \(qkvg\): expected strides"),
        ([*out_of()[:2], zeros(6, 3).T], ValueError, r"out\[2\] \(beta\): expected a column stride of 1, got 3"),
        ([out_of()[0], shifted(3, 768), out_of()[2]], ValueError, r"out\[1\] \(g1\): expected an address"),
        (overlapping, ValueError, r"out\[0\]: expected memory of its own"),
        (inside_x, ValueError, r"out\[1\]: expected memory of its own"),
        (inside_weight, ValueError, r"out\[0\]: expected memory of its own"),
    ):
        with pytest.raises(error, match=words):
            proj(x, out=out)  # type: ignore[arg-type]
    assert launches(cuda) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 5}, ValueError, "tp: expected a divisor of 96"),
        (
            {"tp": 8},
            ValueError,
            r"packed_weight: expected shape \[6288, 7168\], got \[3216, 7168\]; check the tensor-par",
        ),
        ({"strategy": "stream!"}, ValueError, "strategy: expected one of auto, sequential, overlap, got 'stream!'"),
        ({"strategy": None}, TypeError, "strategy: expected a name or a Strategy, got NoneType"),
        ({"qkvg": "cublas"}, ValueError, r"qkvg: expected one of skinny_gemv, torch\.mm, .* got 'cublas'"),
        ({"qkvg": 1}, TypeError, "qkvg: expected the name of a backend, got int"),
    ],
)
def test_options_are_checked(
    cuda: FakeCuda, weights: Weights, options: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        KdaProjection(*weights, **{"tp": 16, **options})
    assert cuda.log == []


def test_tokens_are_checked(cuda: FakeCuda, weights: Weights) -> None:
    proj = project(weights)
    for m, error in ((0, ValueError), (-1, ValueError), (True, TypeError), ("3", TypeError), (2.0, TypeError)):
        for call in (proj.plan, proj.explain, lambda m: proj.warmup([m])):
            with pytest.raises(error, match=r"^M: expected"):
                call(m)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fork: expected one of wide_first, side_first, got 'both'"):
        Overlap(fork="both")  # type: ignore[arg-type]
    assert cuda.log == []


def test_the_package_exports_it_lazily() -> None:
    code = (
        "import sys, kda_lib; heavy = lambda: [m for m in ('torch', 'cutlass', 'flashinfer') if m in sys.modules]; "
        "before = heavy(); name = kda_lib.KdaProjection.__name__; print(before, name, heavy())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[] KdaProjection ['torch']\n"
    import kda_lib

    assert kda_lib.KdaProjection is projection.KdaProjection
    with pytest.raises(AttributeError, match="no attribute 'KdaProjektion'"):
        _ = kda_lib.KdaProjektion
