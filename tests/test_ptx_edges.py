"""The operand pairs at the edges of FP32: counts by reasoning against brute force, and the FMA by its definition."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kda_lib.lab import fma_edges, records
from kda_lib.lab.fma_edges import EDGES, Pair
from kda_lib.reference import f32_to_bf16


def test_every_pair_is_counted_once() -> None:
    counts = fma_edges.count_pairs()
    assert sum(counts.values()) == 1 << 32
    assert set(counts) == set(Pair)
    # 254 of 65536 patterns are NaN; 2 infinities meet 2 zeros in either order.
    assert counts[Pair.NAN] == 2 * 254 * 65536 - 254**2 + 8


def test_counts_are_those_of_forming_products() -> None:
    """Every 997th magnitude with all others, by FP64; the result file has all of them."""
    rows = range(1, fma_edges.INF, 997)
    formed = fma_edges.count_exhaustively(rows)
    a = np.array(rows, np.uint16)
    b = np.arange(1, fma_edges.INF, dtype=np.uint16)
    classes, found = np.unique(fma_edges.classify(*np.broadcast_arrays(a[:, None], b)), return_counts=True)
    assert dict(zip(classes.tolist(), (4 * found).tolist(), strict=True)) == {str(k): n for k, n in formed.items()}
    share = len(rows) / (fma_edges.INF - 1)
    for kind, number in fma_edges.count_pairs().items():
        if kind in formed:
            assert formed[kind] == pytest.approx(number * share, rel=0.1)


def test_exact_fma_against_fractions() -> None:
    """Rounding by definition: the FP32 neighbours of the exact value, and the nearer of the two, ties to even."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 1 << 16, 1500, dtype=np.uint16) for _ in range(2))
    c = fma_edges.addends(a, b)
    checked = 0
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        values = [np.array([bits], np.uint32).view(np.float32)[0] for bits in (x << 16, y << 16, z)]
        if not np.isfinite(values).all():
            continue
        exact = Fraction(float(values[0])) * Fraction(float(values[1])) + Fraction(float(values[2]))
        got = fma_edges.exact_fma(x, y, z)
        assert got is not None
        rounded = np.array([got], np.uint32).view(np.float32)[0]
        limit = Fraction(2) ** 128 - Fraction(2) ** 103
        if abs(exact) >= limit:
            assert abs(rounded) == np.inf
            continue
        error = abs(Fraction(float(rounded)) - exact)
        for towards in (np.float32(-np.inf), np.float32(np.inf)):
            with np.errstate(over="ignore"):
                neighbour = np.nextafter(rounded, towards)
            if np.isfinite(neighbour):
                other = abs(Fraction(float(neighbour)) - exact)
                assert error < other or (error == other and got & 1 == 0)
        checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (0x3F80, 0x8000, 0x00000000, 0x00000000),
        (0x3F80, 0x8000, 0x80000000, 0x80000000),
        (0x3F80, 0xBF80, 0x3F800000, 0x00000000),
        (0x7F80, 0x3F80, 0xFF800000, None),
        (0x7F80, 0x0000, 0x00000000, None),
        (0x7FC0, 0x3F80, 0x00000000, None),
        (0x7F80, 0xBF80, 0x3F800000, 0xFF800000),
        (0x7F7F, 0x7F7F, 0xFF7FFFFF, 0x7F800000),
        (0x0001, 0x0001, 0x00000001, 0x00000001),
        # 2**-133 * 2**-17 is half of the last place: a tie with 0, which is even; a bit more rounds up.
        (0x0001, 0x3700, 0x00000000, 0x00000000),
        (0x0003, 0x3700, 0x00000000, 0x00000002),
    ],
)
def test_exact_fma_specials(a: int, b: int, c: int, expected: int | None) -> None:
    assert fma_edges.exact_fma(a, b, c) == expected


@pytest.mark.parametrize("kind", Pair)
def test_forms_agree_with_whole_numbers(kind: Pair) -> None:
    a, b = fma_edges.samples(kind, 512)
    assert set(fma_edges.classify(a, b).tolist()) == {str(kind)}
    assert fma_edges.compare(kind, 512)[0] == 0


def test_a_rounded_product_is_noticed_at_the_edges_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device or compiler that does not fuse would do differs exactly for the pairs that are counted."""
    unfused = fma_edges._FORMS.replace(
        "fma.rn.f32 %r6, %r4, %r5, %r2;", "mul.rn.f32 %r6, %r4, %r5; add.rn.f32 %r6, %r6, %r2;"
    )
    assert unfused != fma_edges._FORMS
    monkeypatch.setattr(fma_edges, "_FORMS", unfused)
    wrong = {kind: fma_edges.compare(kind, 768)[0] for kind in Pair}
    assert {kind for kind, count in wrong.items() if count} == set(EDGES), wrong


def test_margins_tell_data_that_would_leave_fp32() -> None:
    one, tiny = (f32_to_bf16(np.array([value], np.float32)) for value in (1.0, 1e-30))
    assert fma_edges.margins(one, tiny)[0] == pytest.approx(1e-30, rel=0.01)
    assert fma_edges.margins(tiny, tiny)[0] < 2.0**fma_edges.NORMAL
    assert fma_edges.margins(np.array([0, 0x3F80], np.uint16), one) == (1.0, 1.0)


def test_rows_and_claims() -> None:
    rows, claims = fma_edges.prove(256, exhaustive=False, weight_rows=16)
    for row in rows:
        records.ROW.validate_python(row)
    assert all(claim.holds for claim in claims), claims
    assert {"pairs-total", "pairs-equal", "pairs-data"} == {claim.id for claim in claims}
