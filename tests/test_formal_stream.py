"""Formal checks of the stream kernel: proved as far as they say, and not without its waits."""

from __future__ import annotations

import importlib.util

import pytest

from kda_lib.lab import formal_stream, records
from kda_lib.lab.formal_stream import StreamTask, counters_left_out, rows_of, waits
from kda_lib.lab.prover import NOT_PROVED, PROVED, TARGETS

needs_verifier = pytest.mark.skipif(
    importlib.util.find_spec("sentryward") is None, reason='needs the extra: pip install "kda_lib[verify]"'
)


def ptx(target: str = "sm_90a") -> str:
    return formal_stream._artifact(target, None).ptx


def test_only_the_counters_are_left_out() -> None:
    """Three statements differ, and all of them are about the counters."""
    before, after = ptx().splitlines(), counters_left_out(ptx()).splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 3
    assert all(any(word in a for word in ("red.release.gpu", "atom.acq_rel.gpu", "ld.acquire.gpu")) for a, _ in changed)
    with pytest.raises(ValueError, match="expected one"):
        counters_left_out(counters_left_out(ptx()))


@needs_verifier
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [1, 16])
def test_the_first_cluster_is_proved_safe(target: str, m: int) -> None:
    rows = rows_of(StreamTask(target, m))
    for row in rows:
        records.ROW.validate_python(row)
    assert [(row["outcome"], row["detail"]) for row in rows] == [(PROVED, "")] * 2
    assert all(row["variant"].endswith("counters left out") for row in rows)


@needs_verifier
def test_no_wait_can_be_spared() -> None:
    """The ring (full and empty), the sums (full and empty), the message from the other CTA."""
    count = len(waits(ptx()))
    assert count == 5
    for which in range(count):
        (row,) = rows_of(StreamTask("sm_90a", 8, which))
        assert row["outcome"] == NOT_PROVED
        assert "not_wellsynced" in row["detail"]
