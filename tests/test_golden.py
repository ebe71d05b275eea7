"""Golden inputs are the same everywhere, reach every kind of number, and are compared bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kda_lib.arch import Arch
from kda_lib.lab import golden, records
from kda_lib.lab.golden import Case
from kda_lib.reference import Bits

ARCH = Arch.parse("sm_90a")


@cache
def made(case: Case) -> tuple[tuple[Bits, ...], tuple[Bits, ...]]:
    """Inputs and what the model gives."""
    config = case.config(ARCH)
    inputs = case.inputs(config)
    expected = case.expected(config, inputs)
    assert expected is not None
    return inputs, expected


#: Hashes of inputs and outputs, written down once: what they must be with every NumPy and on every machine.
PINNED = {
    Case("skinny_n", 1, "ordinary"): "83ceec69a9d7acf8333c0f5d5bbbeb5489c0cd2cbe928e0d4bfb374a2e39510e",
    Case("skinny_n", 8, "cancelling"): "a6fec5cb4cc4ef6a04ba683d330fd21f948644da5dc2b6f05c543bdf3f5c6a3e",
    Case("skinny_k", 16, "specials"): "205da6486e66871daf2011805184c0fb46a66c9f87d27261453d0776aa9f1830",
}


@pytest.mark.parametrize("case", PINNED, ids=str)
def test_inputs_and_outputs_are_the_same_everywhere(case: Case) -> None:
    inputs, expected = made(case)
    assert golden.sha256([*inputs, *expected]) == PINNED[case]


def test_cases_cover_every_kernel_and_m() -> None:
    found = golden.cases()
    assert len(found) == len(set(found)) == len(golden.KERNELS) * 16 * len(golden.VALUES)
    with pytest.raises(ValueError, match="got gemm"):
        golden.cases(["gemm"])


@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_specials_reach_every_kind_of_output(kernel: str, m: int) -> None:
    _, (out,) = made(Case(kernel, m, "specials"))
    magnitude = out & 0x7FFF
    kinds = {
        "NaN": magnitude > 0x7F80,
        "+Inf": out == 0x7F80,
        "-Inf": out == 0xFF80,
        "+0": out == 0,
        "-0": out == 0x8000,
        "subnormal": (magnitude > 0) & (magnitude < 0x80),
        "largest": magnitude == 0x7F7F,
        "normal": (magnitude >= 0x80) & (magnitude < 0x7F7F),
    }
    assert [name for name, found in kinds.items() if not found.any()] == []
    assert set(out[kinds["NaN"]].tolist()) == {0x7FFF}


@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
def test_cancelling_shows_the_order_of_additions(kernel: str) -> None:
    """Adding up in another order, here NumPy's, gives other bits in most outputs."""
    (x, w), (out,) = made(Case(kernel, 8, "cancelling"))
    k = w.shape[1]
    other = (x[:, :k].astype(np.uint32) << 16).view(np.float32) @ (w.astype(np.uint32) << 16).view(np.float32).T
    assert np.mean((other.view(np.uint32) >> 16) != out) > 0.5


def test_what_lies_between_rows_is_poison() -> None:
    (x, _), _ = made(Case("skinny_k", 8, "ordinary"))
    assert (x[:, 128:] == golden.POISON).all()
    assert not (x[:, :128] == golden.POISON).any()


def test_differences_count_nan_payloads() -> None:
    assert golden.differing([np.array([0x7FFF, 1, 0], np.uint16)], [np.array([0x7FC0, 1, 0x8000], np.uint16)]) == 2


def row(case: Case, **changes: object) -> golden.Row:
    inputs, expected = made(case)
    return golden.row_of(case, case.config(ARCH), "sm_90a", inputs, expected) | changes


def test_rows_are_valid_and_claims_follow_them() -> None:
    case = Case("skinny_k", 1, "ordinary")
    good, bad = row(case), row(case, differing=3)
    records.ROW.validate_python(good)
    assert good["differing"] == 0
    assert [c.holds for c in golden.claims_of([good])] == [True]
    assert [c.holds for c in golden.claims_of([good, bad])] == [False]


def test_disagreements_are_named() -> None:
    cases = [Case("skinny_k", m, "ordinary") for m in (1, 2)]
    rows = [row(case) for case in cases]
    assert golden.disagreements(rows, rows) == []
    changed = [rows[0], rows[1] | {"outputs_sha256": "0" * 64}]
    assert golden.disagreements(rows, changed) == [("skinny_k", 2, "ordinary")]
    assert golden.disagreements(rows, rows[:1]) == [("skinny_k", 2, "ordinary")]
    assert golden.disagreements(rows, [rows[0] | {"inputs_sha256": "1" * 64}, rows[1]]) == [("skinny_k", 1, "ordinary")]


def test_recorded_outputs_are_those_of_the_model() -> None:
    """What any device gave, against the model of today: a stale file of golden outputs fails here, without a GPU."""
    recorded = golden.recorded(records.provenance.repo_root())
    if not recorded:
        pytest.skip("no reports/*/results/golden.json yet; a device makes it: python -m kda_lib.lab golden")
    for rows in recorded.values():
        modelled = [r for r in rows if golden.KERNELS[r["kernel"]].model is not None]
        assert {golden.key_of(r) for r in modelled} == set(golden.cases())
        arch = Arch.parse(rows[0]["target"])
        for case in [c for c in golden.cases() if c.m in (1, 7, 16)]:
            config = case.config(arch)
            inputs = case.inputs(config)
            mine = golden.row_of(case, config, arch.target, inputs, case.expected(config, inputs) or ())
            assert golden.disagreements([mine], rows) == []
