"""Formal checks of the stream kernel: proved as far as they say, and not without its waits."""

from __future__ import annotations

import importlib.util

import pytest

from kda_lib.arch import Arch
from kda_lib.kernels.stream_config import stream_config
from kda_lib.lab import formal_stream, records
from kda_lib.lab.formal_stream import StreamTask, counters_left_out, rows_of
from kda_lib.lab.prover import NOT_PROVED, PROVED, TARGETS

needs_verifier = pytest.mark.skipif(
    importlib.util.find_spec("sentryward") is None, reason='needs the extra: pip install "kda_lib[verify]"'
)


def ptx(target: str = "sm_90a") -> str:
    return formal_stream._artifact(StreamTask(target, 1), None).ptx


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
@pytest.mark.parametrize(("m", "small_ring"), [(1, False), (16, False), (16, True)])
def test_the_first_cluster_is_proved_safe(target: str, m: int, small_ring: bool) -> None:
    rows = rows_of(StreamTask(target, m, small_ring=small_ring))
    for row in rows:
        records.ROW.validate_python(row)
    assert [(row["outcome"], row["detail"]) for row in rows] == [(PROVED, "")] * 2
    assert all(row["variant"].endswith("counters left out") for row in rows)
    assert all(row["variant"].startswith("small ring: ") == small_ring for row in rows)


def test_the_small_ring_is_that_of_targets_with_less_shared_memory() -> None:
    small = formal_stream._artifact(StreamTask("sm_90a", 1, small_ring=True), None).config
    shipped = stream_config(Arch.parse("sm_120a"), formal_stream.SHAPES, small.ctas, pdl=True)
    assert (small.rows, small.stages) == (shipped.rows, shipped.stages) != (8, 3)
    assert small.parts > 1


@needs_verifier
@pytest.mark.parametrize(("small_ring", "count"), [(False, 5), (True, 8)])
def test_no_wait_can_be_spared(small_ring: bool, count: int) -> None:
    """The ring (full and empty), the sums (full and empty), the message from the other CTA; the small ring is waited
    for four times a block, and of its waits some stand for all here.
    """
    faults = [
        task
        for task in formal_stream.tasks()
        if task.without is not None and (task.target, task.small_ring) == ("sm_90a", small_ring)
    ]
    assert len(faults) == count
    for task in faults[:: 3 if small_ring else 1]:
        (row,) = rows_of(task)
        assert row["variant"].startswith("stream fault: small ring: " if small_ring else "stream fault: wait")
        assert row["outcome"] == NOT_PROVED
        assert "not_wellsynced" in row["detail"]
