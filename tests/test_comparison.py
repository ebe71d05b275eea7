"""The comparison of notebook 05 on a played CUDA: its variants, its stamps, and the tuning table from its rows."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
import torch
from conftest import example_result
from fake_cuda import FakeCuda, fake_cuda, layer_weights
from test_measure import DEVICE, PROFILE, FakeBench, noisy
from test_measure import variant as plain_variant

from kda_lib import Arch, autotune
from kda_lib.autotune import OVERLAP_LIMIT, TuningTable, shipped_table
from kda_lib.backends import Backend, detect_installed, select_backend
from kda_lib.lab import comparison, verdicts
from kda_lib.lab.comparison import (
    ARRANGEMENTS,
    QKVG,
    REPEAT,
    Comparison,
    repeated,
    timeline_rows,
    tuning_table,
    write_tuning,
)
from kda_lib.lab.measure import Variant, measure
from kda_lib.lab.records import ROW
from kda_lib.lab.stamps import Branch, Interval
from kda_lib.lab.workload import Weights
from kda_lib.shapes import KdaShapes
from kda_lib.strategies import Facts, make_plan

HOPPER = Arch.parse("h200")
TP16 = KdaShapes(16)
MAIN: Any = None  # a stream that no variant looks at


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def compare(tokens: tuple[int, ...] = (2, 13)) -> Comparison:
    packed, f_b = layer_weights(16)
    return Comparison(Weights(TP16, (packed, packed.flip(0)), (f_b, f_b)), tokens, seed=0)


def launches(cuda: FakeCuda) -> list[str]:
    lines, cuda.log[:] = list(cuda.log), []
    return lines


def by_m(variants: list[Variant]) -> dict[int | None, Variant]:
    return {variant.m: variant for variant in variants}


# --- variants -------------------------------------------------------------------------------------------------------


def test_arrangements_run_as_shipped_on_their_own_layer(cuda: FakeCuda) -> None:
    compared = compare()
    for name, strategy in ARRANGEMENTS.items():
        projections = compared.projections(strategy, TuningTable())
        assert compared.largest_error(projections) < 2**-5
        with pytest.raises(AssertionError):
            assert compared.largest_error(projections[::-1]) < 2**-5, "the second layer has other weights"
        variants = by_m(compared.arrangement(name, projections))
        launches(cuda)
        for m, variant in variants.items():
            assert (variant.name, variant.tp, variant.bytes) == (name, 16, TP16.weight_bytes)
            assert variant.pdl is (name == "stream"), "overlap's QKVG by a library is launched without"
            variant.enqueue(1, MAIN)
            lines = [line for line in launches(cuda) if "=" in line]
            if not name.startswith("overlap"):
                sequential = ["torch.mm n=3216 on main", "torch.mm n=768 on main"]
                assert lines == (sequential if name == "sequential" else [f"stream M={m} on main"])
                continue
            wide = "skinny_n n=3072 on main" if m == 2 else "torch.mm n=3072 on main"
            side = [line for line in lines if line != wide]
            assert [line.split(" on ")[0] for line in side] == ["skinny_n n=144", "skinny_k n=768"]
            assert "main" not in side[0] + side[1]
            assert lines.index(wide) == (0 if name == "overlap_wide_first" else 2)


def test_what_a_device_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for sms, names in ((132, set(ARRANGEMENTS)), (1, set(ARRANGEMENTS) - {"stream"})):
        with monkeypatch.context() as patch, fake_cuda(patch, HOPPER, sms):
            assert set(compare((13,)).arrangements()) == names
            assert set(compare((17,)).arrangements()) == {"sequential"}


def test_side_branch(cuda: FakeCuda) -> None:
    compared = compare()
    x = compared.inputs[13]
    w_fa_beta, w_f_b = compared.side_weights(3)
    branch = by_m(compared.side_branch(w_fa_beta, w_f_b))[13]
    assert branch.bytes == compared.side_bytes == 2 * (144 * 7168 + 768 * 128)
    branch.enqueue(1, cuda.main)  # type: ignore[arg-type]
    assert launches(cuda) == ["skinny_n n=144 on main", "skinny_k n=768 on main"]
    fa_beta, g1 = branch.results
    wanted = x.double() @ w_fa_beta[1].double().T
    torch.testing.assert_close(fa_beta.double(), wanted, rtol=2**-7, atol=2**-7)
    exact_g1 = fa_beta[:, :128].double() @ w_f_b[1].double().T
    torch.testing.assert_close(g1.double(), exact_g1, rtol=2**-7, atol=2**-7)


def test_qkvg_alone_by_every_backend(cuda: FakeCuda) -> None:
    compared = compare()
    variants = compared.qkvg()
    assert [(v.name, v.m, v.pdl) for v in variants] == [
        ("qkvg_gemv", 2, True), ("qkvg_torch_mm", 2, False), ("qkvg_torch_mm", 13, False),
    ]  # fmt: skip
    for variant in variants:
        assert variant.m
        variant.enqueue(1, cuda.main)  # type: ignore[arg-type]
        wanted = compared.inputs[variant.m].double() @ compared.weights.packed[1][TP16.qkvg_slice].double().T
        torch.testing.assert_close(variant.results[0].double(), wanted, rtol=2**-7, atol=2**-7)


def test_qkvg_alone_with_flashinfer(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fake_flashinfer.install(monkeypatch, calls)
    variants = {v.name: v for v in compare((13,)).qkvg()}
    assert list(variants) == ["qkvg_torch_mm", "qkvg_cublaslt", "qkvg_tinygemm", "qkvg_tinygemm_pdl"]
    for name, call in {
        "qkvg_cublaslt": ("mm_bf16", "cublaslt", False, (7168, 3072)),
        "qkvg_tinygemm": ("tinygemm_bf16", False, (3072, 7168)),
        "qkvg_tinygemm_pdl": ("tinygemm_bf16", True, (3072, 7168)),
    }.items():
        calls.clear()
        variants[name].enqueue(0, MAIN)
        assert calls == [call]
        assert variants[name].pdl is name.endswith("_pdl")


def test_whole_peers(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = compare()
    assert [(v.name, v.m) for v in compared.whole_peers()] == [
        (name, m) for m in (2, 13) for name in ("torch_packed", "torch_split")
    ]
    assert compared.tuned_peers() == []
    monkeypatch.setattr(comparison.peers, "absent", lambda arch: {})
    tuned: list[int] = []
    monkeypatch.setattr(comparison.peers, "tune_cublaslt", lambda weights, x: tuned.append(len(x)))
    assert {v.name for v in compared.whole_peers()} == {
        "torch_packed", "torch_split", "tinygemm_split", "cublaslt_split",
    }  # fmt: skip
    assert tuned == [], "tuning cuBLASLt would change what is captured after it"
    assert {v.name for v in compared.tuned_peers()} == {"qkvg_cublaslt_tuned", "cublaslt_tuned_split"}
    assert tuned == [2, 13]


def test_a_repeat_has_its_own_names() -> None:
    first = Variant("overlap", lambda layer, stream: None, 1, tp=8, m=1)
    (again,) = repeated([first])
    assert (again.name, again.enqueue) == ("overlap_repeat", first.enqueue)


# --- stamps ---------------------------------------------------------------------------------------------------------


def test_stamps_enclose_both_branches(cuda: FakeCuda) -> None:
    class Stamps:
        def mark(self, layer: int, branch: str, edge: str, stream: Any) -> None:
            cuda.log.append(f"{branch} {edge} of {layer} on {stream.name}")

    compared = compare((13,))
    runtime = comparison.StampedRuntime(Stamps(), 1, compared.weights)  # type: ignore[arg-type]
    plan = make_plan(Facts(HOPPER, TP16), 13, ARRANGEMENTS["overlap"])
    plan.strategy.run(runtime, plan, compared.inputs[13], None)
    lines = launches(cuda)
    side = lines[0].split()[0]
    assert lines == [
        f"{side} waits for main",
        "wide start of 1 on main", f"side start of 1 on {side}",
        f"skinny_n n=144 on {side}", f"skinny_k n=768 on {side}", "torch.mm n=3072 on main",
        "wide end of 1 on main", f"side end of 1 on {side}",
        f"main waits for {side}",
    ]  # fmt: skip


def test_timeline_rows() -> None:
    def replay(shift: int) -> dict[Branch, Interval]:
        return {
            Branch(0, "wide"): Interval(1000, 21000 + shift),
            Branch(0, "side"): Interval(3000, 8000),
            Branch(1, "wide"): Interval(32000, 50000),
            Branch(1, "side"): Interval(31000, 53000),
        }

    rows = timeline_rows([replay(0), replay(2000)], tp=8, m=5)
    assert all(ROW.validate_python(row) and (row["M"], row["tp"], row["samples"]) == (5, 8, 4) for row in rows)
    median = {row["variant"]: row["median_us"] for row in rows}
    assert median == {
        "stamp_wide_start": 0.5,  # 0, 1, 0, 1
        "stamp_wide_end": 19.5,  # 20, 19, 22, 19
        "stamp_side_start": 1.0,  # 2, 0, 2, 0
        "stamp_side_end": 14.5,  # 7, 22, 7, 22
        "stamp_overlap": 11.5,  # 5, 18, 5, 18
        "stamp_exposed": 1.5,  # 0, 3, 0, 3
    }
    assert {row["variant"]: row["min_us"] for row in rows}["stamp_wide_end"] == 19.0


# --- the tuning table -----------------------------------------------------------------------------------------------


def row(variant: str, m: int | None, us: float, tp: int = 8, **fields: Any) -> dict[str, Any]:
    return {"variant": variant, "M": m, "tp": tp, "pdl": False, "median_us": us, **fields}


ROWS = [
    row("qkvg_gemv", 2, 22.0),
    row("qkvg_torch_mm", 2, 26.0),
    row("qkvg_torch_mm", 13, 26.45678),
    row("qkvg_torch_mm_again", 13, 20.0),
    row("qkvg_tinygemm", 13, 24.0),
    row("qkvg_cublaslt", 13, 24.5),
    row("qkvg_tinygemm_pdl", 13, 25.0),
    row("qkvg_cublaslt_tuned", 13, 19.0),
    *(row("sequential", m, 29.0) for m in (2, 13, 14, 15)),
    *(row("overlap", m, us) for m, us in ((2, 25.0), (13, 29.0), (14, 29.5), (15, 25.0))),
    *(row("stream", m, 30.0, pdl=True) for m in (2, 12, 13)),
    row("overlap_wide_first", 13, 20.0),
    row("overlap_repeat", 13, 20.0),
    row("torch_packed", 13, 20.0),
    row("read_bulk", None, 20.0),
    {"kernel": "skinny_n", "M": 13, "target": "sm_90a", "outcome": "ok"},
]
GPU = {
    "name": "NVIDIA Imaginary", "capability": "9.0", "sms": 132, "memory_bytes": 1, "l2_bytes": 1,
    "power_limit_w": None, "mig": None, "before": {}, "after": {},
}  # fmt: skip
FULL = {"notebook": "05_overlap_vs_disable", "mode": "full", "gpu": GPU, "rows": ROWS}


def test_the_table_holds_what_the_library_can_choose() -> None:
    table = tuning_table(ROWS, tp=8)
    assert table.qkvg_us == {
        2: {Backend.SKINNY: 22.0, Backend.TORCH: 26.0},
        13: {
            Backend.TORCH: 26.457, Backend.TINYGEMM: 24.0, Backend.CUBLASLT: 24.5, Backend.TINYGEMM_PDL: 25.0,
        },
    }  # fmt: skip
    assert table.strategy_us[13] == {"sequential": 29.0, "overlap": 29.0, "stream": 30.0}
    assert table.strategy_us[12] == {"stream": 30.0}, "which says nothing about the limit of overlap"
    assert table.overlap_limit == 13, "it loses at 14; that it wins again at 15 does not raise a limit"
    assert tuning_table(ROWS, tp=4) == TuningTable()
    assert tuning_table(ROWS[:8], tp=8).overlap_limit == OVERLAP_LIMIT
    assert tuning_table([row("overlap", 1, 2.0), row("sequential", 1, 1.0)], tp=8).overlap_limit == 0


def test_every_backend_has_a_row_name() -> None:
    assert sorted(QKVG.values()) == sorted(Backend)


def test_what_is_written_is_what_the_library_chooses_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch, [])
    folder = tmp_path / "tuning"
    folder.mkdir()
    written = write_tuning(example_result(**FULL), folder / "h200.json")
    monkeypatch.setattr(autotune.resources, "files", lambda package: tmp_path)
    shapes = KdaShapes(8)
    assert shipped_table(shapes, "NVIDIA Imaginary") == written == tuning_table(ROWS, tp=8)
    assert shipped_table(shapes, "NVIDIA H200") == TuningTable()
    assert json.loads((folder / "h200.json").read_text())["tp"] == 8
    assert [file.name for file in folder.iterdir()] == ["h200.json"]
    assert select_backend(HOPPER, shapes, 13, detect_installed(), written).backend is Backend.TINYGEMM
    facts = Facts(HOPPER, shapes, written)
    assert [make_plan(facts, m, None).strategy.name for m in (2, 14, 15, 16)] == [
        "overlap", "sequential", "overlap", "sequential",
    ]  # fmt: skip
    ahead = [*ROWS, row("stream", 14, 21.0, pdl=True)]
    measured = replace(facts, table=tuning_table(ahead, tp=8), sms=132)
    assert make_plan(measured, 14, None).strategy.name == "stream"
    assert autotune.untuned(HOPPER, [13], detect_installed(), written) == [], "nothing is left to measure"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "compile-only", "gpu": None}, "expected a full run that ended well, got compile-only"),
        ({"rows": ROWS[-2:]}, r"expected qkvg_\* rows of one TP degree, got \[\]"),
        ({"rows": [*ROWS, row("qkvg_gemv", 1, 1.0, tp=4)]}, r"one TP degree, got \[4, 8\]"),
        (
            {
                "status": "failed",
                "claims": [{"id": "x", "statement": "x", "value": 1, "bound": "== 0", "holds": False}],
            },
            "expected a full run that ended well, got full, failed",
        ),
    ],
)
def test_no_table_from_anything_else(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tuning(example_result(**{**FULL, **changes}), tmp_path / "h200.json")
    assert list(tmp_path.iterdir()) == []


def test_verdicts_of_a_repeat_need_no_other_functions() -> None:
    medians = {"sequential_repeat": 29.0, "overlap_repeat": 25.0}
    variants = repeated([plain_variant("sequential"), plain_variant("overlap")])
    rows = measure(
        variants, layers=8, samples=20, seed=1, device=DEVICE, profile=PROFILE, bench=FakeBench(noisy(medians))
    ).rows
    noise = verdicts.noise(rows, control="sequential" + REPEAT, seed=0)
    (found,) = verdicts.verdicts(rows, noise, contender="overlap" + REPEAT, baseline="sequential" + REPEAT)
    assert found.outcome == "wins"
