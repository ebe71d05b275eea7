"""The proof by execution: rows, claims, and planted faults that must be found."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest

from kda_lib.cache import ArtifactCache
from kda_lib.lab import emulation, golden, records
from kda_lib.lab.emulation import BIT_EXACT
from kda_lib.lab.ptx import Check
from kda_lib.lab.ptx.mutations import CLUSTERED, MUTATIONS, FaultNotPlanted, Mutation
from kda_lib.lab.scripted import Row

PLANTED = [(fault, target) for fault in MUTATIONS for target in fault.targets]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def rows(cache: ArtifactCache) -> list[Row]:
    """One M of each kernel, every target and kind of values."""
    return [row for kernel in golden.KERNELS for row in emulation.emulate_unit(kernel, 2, cache=cache)]


def test_targets_and_model_agree_bit_for_bit(rows: list[Row]) -> None:
    assert len(rows) == len(golden.KERNELS) * len(emulation.TARGETS) * len(golden.VALUES)
    for row in rows:
        records.ROW.validate_python(row)
        assert row["outcome"] == BIT_EXACT, row
        assert row["checks"] > row["instructions"] / 20
    claims = emulation.claims_of(rows, {"h200": [row for row in rows if row["target"] == "sm_90a"]})
    assert [claim.id for claim in claims] == ["model", "targets", "checks", "forms", "recorded-h200"]
    assert all(claim.holds for claim in claims), claims


def test_the_same_code_runs_once(rows: list[Row]) -> None:
    """sm_120a has sm_100a's code, and says so; the portable one has another."""
    details = {target: {r["detail"] for r in rows if r["target"] == target} for target in emulation.TARGETS}
    assert details == {"sm_90a": {""}, "sm_100a": {""}, "sm_120a": {"same code as sm_100a, which ran"}}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"differing": 1, "outputs_sha256": "0" * 64}, {"model", "targets", "recorded-h200"}),
        ({"violations": 2}, {"checks"}),
        ({"executed": {"fma.rn.f32.bf16": 1}}, {"forms"}),
        ({"inputs_sha256": "0" * 64}, {"recorded-h200"}),
    ],
)
def test_claims_fail_with_the_rows(rows: list[Row], change: Row, broken: set[str]) -> None:
    recorded = {"h200": [row for row in rows if row["target"] == "sm_90a"]}
    claims = emulation.claims_of([rows[0] | change, *rows[1:]], recorded)
    assert {claim.id for claim in claims if not claim.holds} == broken


def test_all_cases_are_emulated_in_order(cache: ArtifactCache) -> None:
    """Two processes; one target and kind of values, to be quick."""
    found = emulation.emulate_all(m_values=[2, 1], targets=["sm_90a"], values=["ordinary"], processes=2, cache=cache)
    assert [(row["kernel"], row["M"]) for row in found] == list(product(golden.KERNELS, [2, 1]))


@pytest.mark.parametrize(("fault", "target"), PLANTED, ids=[f"{fault.name}-{target}" for fault, target in PLANTED])
def test_planted_fault_is_found(fault: Mutation, target: str, cache: ArtifactCache) -> None:
    row = emulation.plant(fault, target, cache=cache)
    records.ROW.validate_python(row)
    if fault.expected:
        assert row["outcome"] == "reported"
        assert [check for check in fault.expected if f"expected {check}" not in row["detail"]] == []
        assert re.match(r"PTX line \d+: ", row["detail"])
    else:
        assert (row["outcome"], row["violations"]) == ("bits differ", 0)
        assert row["differing"] > 0


def test_without_a_fault_nothing_is_found(cache: ArtifactCache) -> None:
    for kernel, m in {(fault.kernel, fault.m) for fault in MUTATIONS}:
        harmless = Mutation("no change", r"(\.target)", r"\1", frozenset(), kernel=kernel, m=m)
        row = emulation.plant(harmless, "sm_90a", cache=cache)
        assert (row["outcome"], row["violations"], row["differing"]) == ("missed", 0, 0)
        assert not emulation.fault_claim([row]).holds


def test_faults_cover_what_the_issue_names() -> None:
    names = {fault.name for fault in MUTATIONS if set(fault.targets) >= set(CLUSTERED)}
    assert names >= {
        "removed barrier", "wrong shuffle mask", "missing griddepcontrol.wait", "load off by one vector",
        "dropped warp in the reduction", "mbarrier that awaits two arrivals", "wait for the wrong parity",
        "swapped cluster rank", "missing fence after mbarrier.init", "st.async past the end",
    }  # fmt: skip
    assert {check for fault in MUTATIONS for check in fault.expected} == set(Check) - {Check.REGISTER}


@pytest.mark.parametrize("fault", MUTATIONS, ids=lambda fault: fault.name)
def test_a_fault_that_cannot_be_planted_is_an_error(fault: Mutation) -> None:
    with pytest.raises(FaultNotPlanted, match=re.escape(fault.name)):
        fault.apply(".visible .entry k() { ret; }")


def test_a_kernel_without_model_is_not_called_exact(monkeypatch: pytest.MonkeyPatch, cache: ArtifactCache) -> None:
    kernel = golden.KERNELS["skinny_k"]
    without: Callable[..., golden.Kernel] = lambda: golden.Kernel(kernel.config, kernel.inputs, kernel.outputs, None)  # noqa: E731
    monkeypatch.setitem(golden.KERNELS, "skinny_k", without())
    found = emulation.emulate_unit("skinny_k", 1, targets=["sm_90a"], values=["ordinary"], cache=cache)
    assert [(row["outcome"], row["differing"]) for row in found] == [(emulation.NO_MODEL, None)]
