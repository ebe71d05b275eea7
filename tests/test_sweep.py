"""The sweep of launch configurations: what it tries, and what its rows say."""

from collections.abc import Iterator

import fake_flashinfer
import pytest
import torch
from fake_cuda import FakeCuda, fake_cuda, layer_weights

from kda_lib import Arch
from kda_lib.lab import records, sweep
from kda_lib.lab.comparison import Comparison
from kda_lib.lab.measure import AGAIN
from kda_lib.lab.sweep import IN_USE, M_VALUES, Pair, claims_of, pairs, rows_of
from kda_lib.lab.workload import Weights
from kda_lib.shapes import KdaShapes

HOPPER = Arch.parse("h200")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake_flashinfer.pretend_version(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


@pytest.mark.parametrize("arch", [HOPPER, Arch.parse("sm_80")])
@pytest.mark.parametrize("m", M_VALUES)
def test_each_pair_differs_from_the_one_in_use_in_one_kernel(arch: Arch, m: int) -> None:
    (name, narrow, short), *others = pairs(arch, m)
    assert name == IN_USE
    assert len({pair.name for pair in others} - {IN_USE}) == len(others) > 10
    assert all((pair.narrow == narrow) != (pair.short == short) for pair in others)
    for pair in others:
        assert (pair.narrow.m, pair.narrow.split, pair.narrow.steps) == (m, narrow.split, narrow.steps)
        assert pair.narrow.passes == 1
        assert (pair.short.m, pair.short.k, pair.short.x_stride) == (m, short.k, short.x_stride)


@pytest.mark.parametrize("m", [4, 8, 16])
def test_what_was_in_use_before_is_among_them(m: int) -> None:
    names = {pair.name for pair in pairs(HOPPER, m)}
    before = {
        4: {"F_B rows=24 row_tile=2 tokens=2"},
        8: {"F_A/beta rows=4 tokens=8 groups=1", "F_B rows=12 row_tile=2 tokens=4"},
        16: {"F_B rows=12 row_tile=2 tokens=4"},
    }
    assert before[m] <= names


def test_results_are_compared(cuda: FakeCuda) -> None:
    packed, f_b = layer_weights(16)
    compared = Comparison(Weights(KdaShapes(16), (packed,), (f_b,)), (2,), seed=0)
    used = sweep.skinny_n_config(HOPPER, 2, KdaShapes(16)), sweep.skinny_k_config(HOPPER, 2, KdaShapes(16))
    tried = [Pair(IN_USE, *used), Pair("same", *used), Pair("other", *used)]
    variants = [compared.side_variant(*pair, *compared.side_weights(1)) for pair in tried]
    for variant in variants:
        variant.enqueue(0, cuda.main)  # type: ignore[arg-type]
    variants[2].results[1][0, 5] += 1
    measured = [{"variant": name} for name in (IN_USE, "same", "other", IN_USE + AGAIN)]
    assert [row["differing"] for row in rows_of(variants, measured)] == [0, 0, 1, 0]


def row(variant: str, m: int, us: float, differing: int = 0) -> sweep.Row:
    return {"variant": variant, "M": m, "tp": 8, "median_us": 1.0, "p90_us": us, "samples": 15, "differing": differing}


def test_claims_follow_the_rows() -> None:
    rows = [row(IN_USE, 1, 2.0), row("a", 1, 1.98), row(IN_USE, 16, 4.0), row("b", 16, 4.1), row(IN_USE + AGAIN, 16, 4)]
    for each in rows:
        records.ROW.validate_python(each)
    bits, used = claims_of(rows)
    assert bits.holds
    assert bits.unit == "of 2 differ"
    assert used.holds
    assert used.value == 1.0101
    assert "M = 1" in used.statement
    bits, used = claims_of([*rows, row("c", 16, 3.8, differing=2)])
    assert (bits.value, bits.holds, bits.required) == (1, False, True)
    assert (used.value, used.holds, used.required) == (1.0526, False, False)
    slow_again = [*rows[:-1], row(IN_USE + AGAIN, 16, 4.4)]
    assert (claims_of(slow_again)[1].value, claims_of(slow_again)[1].holds) == (1.1, False)
