"""KdaProjection on a played CUDA: results of all strategies, order of launches, checks, plans, warm-up and capture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeStream, Weights, fake_cuda, layer_weights, random
from test_reference_model import accumulation_bound

from kda_lib import Arch, KdaProjection, KdaShapes, autotune, projection
from kda_lib import reference as ref
from kda_lib.autotune import TuningStore, TuningTable
from kda_lib.backends import Backend, BrokenBackend
from kda_lib.errors import NotWarmedUp
from kda_lib.kernels.config import qkvg_gemv_config, skinny_k_config, skinny_n_config
from kda_lib.kernels.stream_config import stream_config
from kda_lib.shapes import F_A_ROWS, HIDDEN
from kda_lib.strategies import Overlap, Strategy, Stream

HOPPER = Arch.parse("h200")
TP16 = KdaShapes(16)
QKVG, FA_BETA, F_B = "n=3072", "n=144", "n=768"

#: Measured: our GEMV is the fastest for M = 3, torch.mm for M = 4.
GEMV_AT_3 = TuningTable({m: {Backend.SKINNY: 17.0 + m, Backend.TORCH: 20.5} for m in (3, 4)})


@pytest.fixture
def weights() -> Weights:
    return layer_weights(16)


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


@cache
def reference(m: int) -> tuple[ref.KdaReference, ref.KdaReference]:
    """The outputs for ``random(m, HIDDEN, 3)``, and how far results may be from them.

    qkvg, f_a, beta: half a BF16 ulp and what K FP32 additions can lose. g1: half an ulp and an ulp of every f_a,
    because torch.mm on a CPU and the kernels round f_a alike but for one value in a thousand.
    """
    bits, packed, f_b = (ref.bits_of_tensor(part) for part in (random(m, HIDDEN, 3), *layer_weights(16)))
    exact = ref.kda_reference(bits, packed, f_b, TP16)
    lost = np.split(accumulation_bound(bits, packed, HIDDEN), [3072, 3072 + F_A_ROWS], axis=1)
    lost[2] = lost[2][:, : TP16.heads]
    near = [2.0**-8 * np.abs(part) + loss * (1 + 2.0**-8) for part, loss in zip(exact[:3], lost, strict=True)]
    f_a = ref.f64_to_bf16(exact.f_a) & np.uint16(0x7FFF)
    slack = 2.0**-7 * ref.project_fp64(f_a, f_b & np.uint16(0x7FFF))
    return exact, ref.KdaReference(*near, 2.0**-8 * np.abs(exact.g1) + slack)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize(
    "strategy", ["sequential", "overlap", Overlap(fork="wide_first"), "stream", Stream(pdl=False), "auto"], ids=str
)
def test_results(cuda: FakeCuda, weights: Weights, strategy: str | Strategy, m: int) -> None:
    """Pointers, offsets and strides are right: the played kernels read and write the memory they are given."""
    outputs = project(weights, strategy=strategy)(random(m, HIDDEN, 3))
    exact, bound = reference(m)
    for name in ("qkvg", "g1", "beta"):
        got = getattr(outputs, name)
        assert got.dtype == torch.bfloat16
        assert (np.abs(got.double().numpy() - getattr(exact, name)) <= getattr(bound, name)).all(), name
    assert [tuple(part.shape) for part in outputs] == [(m, 3072), (m, 768), (m, 6)]


@pytest.mark.parametrize("m", [2, 3])
def test_overlap_gives_the_bits_of_the_host_models(cuda: FakeCuda, weights: Weights, m: int) -> None:
    x = random(m, HIDDEN, 4)
    outputs = project(weights, strategy="overlap", table=GEMV_AT_3)(x)
    qkvg, g1, beta = (ref.bits_of_tensor(part) for part in outputs)
    bits, packed, f_b = ref.bits_of_tensor(x), ref.bits_of_tensor(weights[0]), ref.bits_of_tensor(weights[1])
    fa_beta = ref.model_skinny_n(skinny_n_config(HOPPER, m, TP16), bits, packed[TP16.fa_beta_slice])
    np.testing.assert_array_equal(beta, fa_beta[:, F_A_ROWS : F_A_ROWS + TP16.heads])
    np.testing.assert_array_equal(g1, ref.model_skinny_k(skinny_k_config(HOPPER, m, TP16), fa_beta[:, :F_A_ROWS], f_b))
    gemv = qkvg_gemv_config(HOPPER, m, TP16)
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


@pytest.mark.parametrize("strategy", ["sequential", "overlap", "stream"])
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
    for strategy in ("sequential", "overlap", "stream"):
        outputs = project(parameters, strategy=strategy)(random(5, HIDDEN, 7).requires_grad_())
        assert not any(part.requires_grad for part in outputs)


# --- order of launches ----------------------------------------------------------------------------------------------

SIDE = [f"skinny_n {FA_BETA} on side1", f"skinny_k {F_B} on side1"]


@pytest.mark.parametrize(("m", "wide"), [(2, f"skinny_n {QKVG} on main"), (5, f"torch.mm {QKVG} on main")])
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
@pytest.mark.parametrize("m", [1, 5])
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
    proj.warmup([5])
    assert "a waits for main" in launches(cuda)
    cuda.main = next(stream for stream in cuda.streams.values() if stream.name == "a")
    proj(random(5, HIDDEN, 11))
    assert "b waits for a" in launches(cuda)


# --- warm-up and capture --------------------------------------------------------------------------------------------


def test_warmup_prepares_everything(cuda: FakeCuda, weights: Weights) -> None:
    """After it, capture neither compiles nor synchronises (the played CUDA fails on both), for every M.

    With one SM, stream cannot run.
    """
    cuda.sms = 1
    proj = project(weights, table=GEMV_AT_3)
    proj.warmup(range(1, 17))
    configs = {*(skinny_n_config(HOPPER, m, TP16) for m in range(1, 15)),
               *(skinny_k_config(HOPPER, m, TP16) for m in range(1, 15)),
               *(qkvg_gemv_config(HOPPER, m, TP16) for m in (1, 2, 3))}  # fmt: skip
    assert set(cuda.compiled) == configs
    assert len(cuda.compiled) == len(configs)
    cuda.capturing = True
    proj.warmup(range(1, 17))
    for m in (1, 2, 3, 4, 14, 15, 16):
        launches(cuda)
        proj(random(m, HIDDEN, m))
        assert (f"skinny_n {FA_BETA} on side1" in launches(cuda)) == (m <= 14)
    assert set(cuda.compiled) == configs


@pytest.mark.parametrize("strategy", ["auto", "stream"])
def test_one_stream_kernel_is_compiled_for_every_m(cuda: FakeCuda, weights: Weights, strategy: str) -> None:
    proj = project(weights, strategy=strategy)
    proj.warmup(range(1, 17))
    assert cuda.compiled == [stream_config(HOPPER, TP16, cuda.sms, pdl=True)]
    cuda.capturing = True
    for m in (1, 8, 16):
        launches(cuda)
        proj(random(m, HIDDEN, m))
        assert launches(cuda) == [f"stream M={m} on main"]
    assert len(cuda.compiled) == 1


def test_kernels_are_loaded_once_for_all_layers(cuda: FakeCuda, weights: Weights) -> None:
    for _ in range(3):
        project(weights, strategy="overlap").warmup([5])
    assert len(cuda.compiled) == 2


@pytest.mark.parametrize(
    ("strategy", "m", "missing"),
    [
        ("overlap", 2, "M = 2 (overlap: F_A/beta by skinny_n, F_B by skinny_k, QKVG by skinny_n)"),
        ("overlap", 5, "M = 5 (overlap: QKVG by torch.mm, F_A/beta by skinny_n, F_B by skinny_k)"),
        ("sequential", 3, "M = 3 (sequential)"),
        ("stream", 3, "M = 3 (stream: QKVG, F_A/beta and F_B by stream)"),
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
    x = random(5, HIDDEN, 14)
    want = proj(x)
    cuda.capturing = True
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))


# --- tuning and broken backends -------------------------------------------------------------------------------------


@pytest.fixture
def tunable(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    """FlashInfer 0.7.4, and times in which tinygemm is fastest at odd M, torch.mm at even, our GEMV second.

    The list of measured M.
    """
    fake_flashinfer.install(monkeypatch, [])
    measured: list[Any] = []

    def measure(shapes: KdaShapes, options: dict[int, tuple[Backend, ...]], device: Any) -> dict[int, Any]:
        measured.extend(options)
        fastest = (Backend.TORCH, Backend.TINYGEMM)
        return {
            m: {b: 20.0 if b is fastest[m % 2] else 22.0 if b is Backend.SKINNY else 25.0 for b in listed}
            for m, listed in options.items()
        }

    monkeypatch.setattr(autotune, "measure_qkvg", measure)
    monkeypatch.setattr(autotune, "tuning_key", lambda shapes, device, installed: {"tp": shapes.tp})
    monkeypatch.setattr(TuningStore, "default", classmethod(lambda cls: TuningStore(tmp_path)))
    return measured


def test_warmup_tunes_and_capture_chooses_alike(cuda: FakeCuda, weights: Weights, tunable: list[Any]) -> None:
    """Only M with a choice and a separate QKVG; another layer takes the stored times; a later M changes nothing."""
    cuda.sms = 1  # stream cannot run
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


def test_nothing_is_tuned_for_stream(cuda: FakeCuda, weights: Weights, tunable: list[Any]) -> None:
    """And what auto chose unmeasured it chooses in capture."""
    proj = project(weights)
    before = [proj.plan(m) for m in range(1, 17)]
    proj.warmup(range(1, 17))
    cuda.capturing = True
    assert [proj.plan(m) for m in range(1, 17)] == before
    assert {plan.strategy for plan in before} == {Stream()}
    assert tunable == []


def test_without_flashinfer_the_gemv_is_measured_against_torch(
    cuda: FakeCuda, weights: Weights, tunable: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for M = 3 and 4: a rule decides for 1 and 2, and 5 has no kernel."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    proj = project(weights, strategy="overlap")
    proj.warmup(range(1, 6))
    assert tunable == [3, 4]
    wide = (f"skinny_n {QKVG} on main", f"torch.mm {QKVG} on main")
    for m, expected in ((2, wide[0]), (3, wide[0]), (4, wide[1]), (5, wide[1])):
        launches(cuda)
        proj(random(m, HIDDEN, m))
        assert [line for line in launches(cuda) if QKVG in line] == [expected]


def test_a_given_table_or_backend_is_final(cuda: FakeCuda, weights: Weights, tunable: list[Any]) -> None:
    given = TuningTable({3: {Backend.TINYGEMM: 1.0, Backend.TORCH: 2.0}})
    for options, backend in (
        ({"strategy": "overlap", "table": given}, Backend.TINYGEMM),
        ({"strategy": "overlap", "table": TuningTable()}, Backend.TORCH),
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
        project(weights, strategy="overlap").warmup([3])
    gemm = fake_flashinfer.install(monkeypatch, [])
    proj = project(weights, qkvg="flashinfer-cublaslt")
    proj.plan(3)
    monkeypatch.setattr(gemm, "mm_bf16", fails)
    with pytest.raises(BrokenBackend, match=r"flashinfer-cublaslt .*ninja exited with 1.*qkvg='torch\.mm'"):
        proj.warmup([3])
    with pytest.raises(BrokenBackend):
        proj(random(3, HIDDEN, 16))


def test_others_need_no_flashinfer(cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, [])
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", None)
    for strategy in ("sequential", "stream", "auto"):
        project(weights, strategy=strategy).warmup([3])
    with pytest.raises(BrokenBackend):
        project(weights, strategy="overlap").warmup([3])


# --- the package ---------------------------------------------------------------------------------------------------


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
