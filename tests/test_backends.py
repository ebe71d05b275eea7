"""The QKVG backend selector: its table over architectures, M and installations; detection; dispatch."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import fake_flashinfer
import pytest
import torch
from fake_flashinfer import FLASHINFER_0_7_4

from kda_lib import backends
from kda_lib.arch import Arch
from kda_lib.autotune import TuningTable
from kda_lib.backends import (
    Backend,
    BrokenBackend,
    Installed,
    candidates,
    detect_installed,
    naming,
    run_gemm,
    runnable,
    select_backend,
)
from kda_lib.shapes import KdaShapes

TP8 = KdaShapes(8)
NOTHING = Installed()
EMPTY = TuningTable()
TOKENS = (1, 2, 3, 4, 5, 14, 16)

GEMV, MM, CUTE = Backend.SKINNY, Backend.TORCH, Backend.CUTE_DSL
TINY, PDL, LT = Backend.TINYGEMM, Backend.TINYGEMM_PDL, Backend.CUBLASLT

#: Capability -> the choice for M = 1, 2; for more without FlashInfer; with 0.7.4 and nothing measured; and with
#: cublaslt measured fastest, then tinygemm, then torch.mm, whether or not they run there.
TABLE = {
    (8, 0): (GEMV, MM, MM, LT),
    (8, 6): (GEMV, MM, MM, LT),
    (8, 9): (GEMV, MM, MM, LT),
    (9, 0): (GEMV, MM, MM, LT),
    (10, 0): (GEMV, MM, CUTE, CUTE),
    (10, 3): (GEMV, MM, CUTE, CUTE),
    (10, 7): (MM, MM, CUTE, CUTE),  # sm_107a is no target of this project yet
    (11, 0): (GEMV, MM, MM, LT),
    (12, 0): (GEMV, MM, MM, LT),
    (12, 1): (GEMV, MM, MM, LT),
    (13, 0): (MM, MM, MM, MM),
}


@pytest.fixture(autouse=True)
def fresh_detection() -> Iterator[None]:
    detect_installed.cache_clear()
    yield
    detect_installed.cache_clear()


def table(**times: float) -> TuningTable:
    """The same times for every M, by name in lower case."""
    row = {Backend[name.upper()]: us for name, us in times.items()}
    return TuningTable(qkvg_us=dict.fromkeys(range(1, 40), row))


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("capability", TABLE, ids=str)
def test_selector_table(capability: tuple[int, int], m: int) -> None:
    arch = Arch.of_capability(capability)
    few, without, unmeasured, measured = TABLE[capability]
    times = table(cublaslt=20, tinygemm=21, torch=22)
    if m <= 2 and few is GEMV:
        without = unmeasured = measured = GEMV
    assert select_backend(arch, TP8, m, NOTHING, EMPTY).backend is without
    assert select_backend(arch, TP8, m, NOTHING, times).backend is without
    assert select_backend(arch, TP8, m, FLASHINFER_0_7_4, EMPTY).backend is unmeasured
    assert select_backend(arch, TP8, m, FLASHINFER_0_7_4, times).backend is measured


@pytest.mark.parametrize("m", [3, 4])
@pytest.mark.parametrize("capability", TABLE, ids=str)
def test_measured_gemv(capability: tuple[int, int], m: int) -> None:
    """Where it runs and cute-dsl is not preferred, it is taken for M = 3, 4 exactly if its time is the best."""
    arch = Arch.of_capability(capability)
    few, without, unmeasured, _ = TABLE[capability]
    fast, slow = table(skinny=19, cublaslt=20, torch=22), table(skinny=23, cublaslt=24, torch=22)
    assert select_backend(arch, TP8, m, NOTHING, fast).backend is few
    assert select_backend(arch, TP8, m, FLASHINFER_0_7_4, fast).backend is (CUTE if unmeasured is CUTE else few)
    for times, tokens in ((slow, m), (fast, 5)):
        assert select_backend(arch, TP8, tokens, NOTHING, times).backend is without
    assert select_backend(arch, TP8, m, FLASHINFER_0_7_4, slow).backend is unmeasured


@pytest.mark.parametrize("capability", TABLE, ids=str)
@pytest.mark.parametrize("installed", [NOTHING, FLASHINFER_0_7_4], ids=["alone", "flashinfer"])
def test_the_choice_is_pure_runnable_and_explained(capability: tuple[int, int], installed: Installed) -> None:
    arch = Arch.of_capability(capability)
    for m in (*TOKENS, 33):
        choices = {select_backend(arch, TP8, m, installed, table(tinygemm=1, torch=2)) for _ in range(2)}
        (choice,) = choices
        assert choice.backend in candidates(arch, m, installed)
        assert set(candidates(arch, m, installed)) <= set(runnable(arch, m, installed))
        assert len(choice.reason.split()) > 3


@pytest.mark.parametrize(
    ("capability", "m", "installed", "times", "words"),
    [
        ((9, 0), 2, NOTHING, EMPTY, "this library's skinny GEMV serves up to 2 tokens"),
        ((9, 0), 3, NOTHING, EMPTY, "none of skinny_gemv, torch.mm has been measured on this device for M = 3, TP8"),
        ((9, 0), 5, NOTHING, EMPTY, "FlashInfer is not installed"),
        ((10, 0), 3, FLASHINFER_0_7_4, EMPTY, "FlashInfer 0.7.4 accepts its cute-dsl backend on sm_100a"),
        ((13, 0), 3, FLASHINFER_0_7_4, EMPTY, "accepts none of its backends used here on sm_130a for M = 3"),
        ((9, 0), 3, FLASHINFER_0_7_4, EMPTY, "been measured on this device for M = 3, TP8"),
        ((9, 0), 3, FLASHINFER_0_7_4, table(skinny=23.96, torch=26.44, tinygemm=24.3),
         "fastest measured for M = 3: skinny_gemv 24.0 us, flashinfer-tinygemm 24.3 us, torch.mm 26.4 us"),
    ],
)  # fmt: skip
def test_reasons(capability: tuple[int, int], m: int, installed: Installed, times: TuningTable, words: str) -> None:
    assert words in select_backend(Arch.of_capability(capability), TP8, m, installed, times).reason


def test_only_this_m_counts() -> None:
    hopper = Arch.parse("h200")
    times = TuningTable(qkvg_us={4: {TINY: 1.0, MM: 2.0}})
    assert select_backend(hopper, TP8, 4, FLASHINFER_0_7_4, times).backend is TINY
    assert select_backend(hopper, TP8, 5, FLASHINFER_0_7_4, times).backend is MM


@pytest.mark.parametrize("capability", [(10, 0), (10, 7)], ids=str)
def test_cute_dsl_only_where_accepted(capability: tuple[int, int]) -> None:
    """A version that has tinygemm there but not cute-dsl; and more tokens than cute-dsl takes."""
    arch = Arch.of_capability(capability)
    older = Installed("0.6.0", FLASHINFER_0_7_4.accepts - {(CUTE, capability)})
    assert candidates(arch, 5, older) == (MM, LT, TINY, PDL)
    assert candidates(arch, 32, FLASHINFER_0_7_4) == (CUTE,)
    assert candidates(arch, 33, FLASHINFER_0_7_4) == (MM, LT, TINY, PDL)


def test_a_rule_leaves_one_candidate_and_hopper_has_five() -> None:
    for m in (1, 2):
        assert candidates(Arch.parse("h100"), m, FLASHINFER_0_7_4) == (GEMV,)
    for m in (3, 4):
        assert candidates(Arch.parse("h100"), m, FLASHINFER_0_7_4) == (GEMV, MM, LT, TINY, PDL)
        assert candidates(Arch.parse("a100"), m, FLASHINFER_0_7_4) == (GEMV, MM, LT)
        assert candidates(Arch.parse("h100"), m, NOTHING) == (GEMV, MM)
        assert candidates(Arch.of_capability((13, 0)), m, NOTHING) == (MM,)
    assert candidates(Arch.parse("h100"), 5, FLASHINFER_0_7_4) == (MM, LT, TINY, PDL)
    assert candidates(Arch.parse("a100"), 5, FLASHINFER_0_7_4) == (MM, LT)
    assert candidates(Arch.parse("h100"), 5, NOTHING) == (MM,)
    assert runnable(Arch.parse("b200"), 2, FLASHINFER_0_7_4) == tuple(Backend)


# --- detection ------------------------------------------------------------------------------------------------------


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.pretend_version(monkeypatch, None)
    assert detect_installed() == NOTHING


def test_what_flashinfer_accepts_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, [])
    assert detect_installed() == FLASHINFER_0_7_4
    assert detect_installed() is detect_installed()


def test_a_broken_flashinfer_is_not_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, but: it does not import; it raises on import; it lacks a function. Each time it is asked."""
    gemm = fake_flashinfer.install(monkeypatch, [])
    monkeypatch.delattr(gemm, "tinygemm_bf16")
    for _ in range(2):
        with pytest.raises(BrokenBackend, match=r"FlashInfer 0\.7\.4 is installed but .*tinygemm_bf16.*repair"):
            detect_installed()
    # None in sys.modules makes the import fail.
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", None)
    with pytest.raises(BrokenBackend, match="does not work"):
        detect_installed()

    def import_fails(name: str) -> ModuleType:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(backends.importlib, "import_module", import_fails)
    with pytest.raises(BrokenBackend, match="libcudart") as raised:
        detect_installed()
    assert isinstance(raised.value.__cause__, OSError)


def test_selecting_needs_no_torch() -> None:
    code = (
        "import sys; from kda_lib import Arch, KdaShapes; from kda_lib.backends import Installed, select_backend; "
        "from kda_lib.autotune import TuningTable; "
        "print(select_backend(Arch.parse('h200'), KdaShapes(8), 3, Installed(), TuningTable()).backend, "
        "[m for m in ('torch', 'cutlass', 'flashinfer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "torch.mm []\n"


# --- running --------------------------------------------------------------------------------------------------------


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fake_flashinfer.install(monkeypatch, calls)
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(32, 64, dtype=torch.bfloat16)
    for backend in (CUTE, LT, TINY, PDL):
        out = torch.zeros(2, 32, dtype=torch.bfloat16)
        run_gemm(backend, x, weight, out)
        assert (out == 1).all()
    assert calls == [
        ("mm_bf16", "cute-dsl", False, (64, 32)),
        ("mm_bf16", "cublaslt", False, (64, 32)),
        ("tinygemm_bf16", False, (32, 64)),
        ("tinygemm_bf16", True, (32, 64)),
    ]
    out = torch.zeros(2, 32, dtype=torch.bfloat16)
    run_gemm(MM, x, weight, out)
    assert (out == 64).all()
    assert len(calls) == 4
    with pytest.raises(ValueError, match="compiled kernel"):
        run_gemm(GEMV, x, weight, out)


def test_a_backend_that_fails_is_named() -> None:
    with pytest.raises(BrokenBackend, match=r"flashinfer-tinygemm .*ninja: not found.*qkvg='torch.mm'"), naming(TINY):
        raise RuntimeError("ninja: not found")
    with pytest.raises(torch.OutOfMemoryError), naming(TINY):
        raise torch.OutOfMemoryError("full")
    with pytest.raises(RuntimeError, match="cuBLAS"), naming(MM):
        raise RuntimeError("cuBLAS")
    with naming(TINY):
        pass
