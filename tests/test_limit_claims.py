"""What notebook 06 claims, from rows that were made up: which claims hold, and what their statements say."""

from collections.abc import Callable
from typing import Any

import pytest
from test_measure import DEVICE, PROFILE, FakeBench, noisy
from test_measure import variant as plain_variant

from kda_lib.lab import verdicts
from kda_lib.lab.limit_claims import limit_claims, rivals
from kda_lib.lab.measure import Key, Rows, Variant, measure
from kda_lib.lab.records import ROW, Claim

TOKENS = (1, 8, 16)
LARGE = (17, 64)
MEDIANS = {
    "read_bulk": 21.8, "read_loads": 21.9, "stream": 22.8, "stream_split": 43.0, "sequential": 29.0, "auto": 29.0,
    "overlap": 27.0, "torch_packed": 29.0, "tinygemm_split": 36.0,
}  # fmt: skip
#: What PDL takes off, and what another TP degree reads.
PDL_GAIN, SIZES = 1.6, {8: 1.0, 4: 2.0, 16: 1.0}
ERRORS = {"outputs": 10, "max_ulp": 1, "over_one_ulp": 0, "beyond_bound": 0}

Times = Callable[[Key], float]


def times(changes: dict[tuple[str, bool, int | None], float]) -> Callable[[Key, int], float]:
    """A median for each variant, with noise; ``changes`` are for (variant, pdl, M)."""
    spread = noisy(dict.fromkeys(MEDIANS, 1.0))

    def us(key: Key, sample: int) -> float:
        name = key.variant.removesuffix("_again")
        median = changes.get((name, key.pdl, key.m), MEDIANS[name] - PDL_GAIN * key.pdl) * SIZES[key.tp]
        return median * spread(key, sample)

    return us


def rows(changes: dict[tuple[str, bool, int | None], float] | None = None) -> Rows:
    """Everything that notebook 06 measures, with fewer M."""
    us = times(changes or {})

    def run(variants: list[Variant], control: str) -> Rows:
        found = measure(variants, layers=8, samples=40, seed=3, device=DEVICE, profile=PROFILE, control=control,
                        bench=FakeBench(us))  # fmt: skip
        return found.rows

    def floors(tp: int) -> list[Variant]:
        bulk = [plain_variant("read_bulk", None, pdl=pdl, floor=True, tp=tp) for pdl in (False, True)]
        return [*bulk, plain_variant("read_loads", None, tp=tp)]

    def stream(tp: int) -> list[Variant]:
        return [plain_variant("stream", m, pdl=pdl, tp=tp) for m in TOKENS for pdl in (False, True)]

    whole = [n for n in MEDIANS if n not in ("read_bulk", "read_loads", "stream", "stream_split", "auto")]
    main = run([*floors(8), *stream(8), *(plain_variant(n, m) for n in whole for m in TOKENS)], "sequential")
    above = [
        plain_variant(n, m, pdl=n == "stream_split") for n in ("sequential", "auto", "stream_split") for m in LARGE
    ]
    found = [
        *main,
        *run(above, "sequential"),
        *(r for tp in (4, 16) for r in run([*floors(tp), *stream(tp)], "stream")),
    ]
    found = [row | ERRORS if row["variant"] == "stream" else row for row in found]
    calls: Rows = [
        {"variant": f"stream_{name}", "M": 16, "tp": 8, "differing": 0} for name in ("first_call", "after_idle")
    ]
    return [*found, *calls, {"variant": "stream_replays", "M": 16, "tp": 8, "replays": 1000, "differing": 0}]


def claims(changes: dict[tuple[str, bool, int | None], float] | None = None) -> dict[str, Claim]:
    return {claim.id: claim for claim in limit_claims(rows(changes), seed=0)}


def failing(found: dict[str, Claim]) -> set[str]:
    return {name for name, claim in found.items() if not claim.holds}


def test_rows_are_those_of_result_files() -> None:
    for row in rows():
        assert ROW.validate_python(row) == row


def test_all_hold_where_the_kernel_is_as_fast_as_it_should_be() -> None:
    found = claims()
    assert failing(found) == set()
    assert found["floor-tp8-no-pdl"].value == pytest.approx(22.8 / 21.8, rel=0.005)
    assert found["floor-tp8-pdl"].value == pytest.approx(21.2 / 20.2, rel=0.005)
    assert found["floor-tp4-pdl"].bound == "<= 1.1"
    assert found["speedup-overlap-no-pdl"].value == pytest.approx(27 / 22.8, rel=0.005)
    assert found["speedup-sequential-pdl"].value == pytest.approx(29 / 21.2, rel=0.005)
    assert "it does at M = 1, 8, 16" in found["floor-tp8-pdl"].statement
    assert "1000 replays" in found["replays"].unit


@pytest.mark.parametrize("pdl", [False, True])
def test_each_way_of_launching_is_held_against_its_own_floor(pdl: bool) -> None:
    """1.05 times the PDL floor is far below the other floor, and the other way about."""
    end = "pdl" if pdl else "no-pdl"
    slow = (21.8 - PDL_GAIN * pdl) * 1.08
    found = claims({("stream", pdl, 8): slow})
    assert failing(found) == {f"floor-tp8-{end}"}
    claim = found[f"floor-tp8-{end}"]
    assert "it does at M = 1, 16, worst is M = 8" in claim.statement
    assert claim.value == pytest.approx(1.08, rel=0.005)
    assert not claim.required


def test_one_rival_at_one_m_is_enough_to_fail() -> None:
    found = claims({("tinygemm_split", False, 16): 22.0, ("torch_packed", False, 1): 22.9})
    assert failing(found) == {"faster-no-pdl"}, "with PDL stream is still faster than both"
    statement = found["faster-no-pdl"].statement
    assert statement.endswith("not than torch_packed at M = 1 (inside noise), tinygemm_split at M = 16 (loses)")
    assert found["faster-no-pdl"].unit == "of 12 pairs are not wins"


def test_speedups_are_geometric_means_over_all_m() -> None:
    found = claims({("overlap", False, m): us for m, us in ((1, 23.5), (8, 23.5), (16, 23.5 * 1.05**3))})
    assert found["speedup-overlap-no-pdl"].value == pytest.approx(23.5 * 1.05 / 22.8, rel=0.005)
    assert failing(found) >= {"speedup-overlap-no-pdl"}
    assert "speedup-sequential-no-pdl" not in failing(found)


def test_the_crossing_can_fail() -> None:
    found = claims({("stream_split", True, 17): 28.9})
    assert failing(found) == {"crossing"}
    assert found["crossing"].statement.endswith("at M = 17, 64, not at M = 17")


def test_loads_that_beat_the_bulk_copies_are_told() -> None:
    assert failing(claims({("read_loads", False, None): 21.0})) == {"bulk-is-the-floor"}


@pytest.mark.parametrize(
    ("variant", "fields", "broken", "required"),
    [
        ("stream", {"beyond_bound": 1}, "fp64-bound", True),
        ("stream", {"max_ulp": 2, "over_one_ulp": 1}, "one-ulp", False),
        ("stream_first_call", {"differing": 1}, "first-call", True),
        ("stream_after_idle", {"differing": 1}, "after-idle", True),
        ("stream_replays", {"differing": 1}, "replays", True),
    ],
)
def test_what_is_wrong_fails(variant: str, fields: dict[str, Any], broken: str, required: bool) -> None:
    changed = [row | fields if row["variant"] == variant else row for row in rows()]
    found = {claim.id: claim for claim in limit_claims(changed, seed=0)}
    assert failing(found) == {broken}
    assert found[broken].required is required


@pytest.mark.parametrize("variant", ["stream_first_call", "stream_after_idle", "stream_replays"])
def test_what_was_not_checked_is_no_claim(variant: str) -> None:
    left = [row for row in rows() if row["variant"] != variant]
    with pytest.raises(ValueError, match=f"expected rows of '{variant}' with differing, got 0 rows"):
        limit_claims(left, seed=0)


def test_claims_follow_from_the_rows_and_the_seed() -> None:
    same = rows()
    assert limit_claims(same, seed=0) == limit_claims(same, seed=0)


def test_a_floor_of_another_kind_is_none() -> None:
    plain = measure([plain_variant("stream", pdl=True), plain_variant("read_bulk", None, floor=True)], layers=8,
                    samples=20, seed=0, device=DEVICE, profile=PROFILE, bench=FakeBench(times({}))).rows  # fmt: skip
    with pytest.raises(ValueError, match="beside a floor of that kind"):
        verdicts.floor_ratios(plain, "stream", tp=8, pdl=True)
    with pytest.raises(ValueError, match="expected 'stream' at TP4"):
        verdicts.floor_ratios(plain, "stream", tp=4, pdl=True)
    with pytest.raises(ValueError, match="at the same M"):
        verdicts.speedup(plain, "stream", "overlap")


def test_rivals_are_those_that_were_measured() -> None:
    found = rivals([row for row in rows() if (row["M"] or 0) <= 16], 0, pdl=True)
    assert list(found) == ["sequential", "overlap", "torch_packed", "tinygemm_split"]
    assert {verdict.outcome for judged in found.values() for verdict in judged} == {"wins"}
