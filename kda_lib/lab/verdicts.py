"""Is one variant faster than another, or is the difference noise? Computed from rows alone, recorded ones included.

The ratio of two medians gets a confidence interval by bootstrap over rounds: a round holds one replay of each variant,
so both are resampled together and slow drift cancels. The band of noise is what two captures of one variant differ by
in the same run, over all M, and at least :data:`RUN_TO_RUN`. Only an interval wholly outside the band is a win or loss.

The verdicts follow from the rows and the seed alone. Between runs they can change only where the interval comes close
to the edge of the band; ``margin`` says how close: near 0 is a verdict that another run may not repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.measure import AGAIN

#: What the median of one kernel may differ by between two runs on one H200: plain reads took 22.8 to 23.4 us over
#: several runs, 1.3% around their middle. An A/A control within one run cannot see this part.
RUN_TO_RUN = 0.013
#: Of the bootstrap interval.
CONFIDENCE = 0.95
RESAMPLES = 2000

Row = Mapping[str, Any]
Outcome = Literal["wins", "loses", "inside noise"]


@dataclass(frozen=True)
class Ratio:
    """Median over median, and the limits of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Noise:
    """aa: the ratio of the two captures for each (tp, M). band: relative differences up to this are noise."""

    aa: Mapping[tuple[int, int | None], Ratio]
    band: float


@dataclass(frozen=True)
class Verdict:
    """margin: distance of the deciding limit from the edge of the band, as a ratio: small where it is close."""

    m: int | None
    tp: int
    outcome: Outcome
    ratio: Ratio
    band: float
    margin: float


def compare(numerator: Sequence[float], denominator: Sequence[float], seed: int) -> Ratio:
    """The ratio of the medians of two variants' samples, paired by round.

    Raises:
        ValueError: the numbers of samples differ.
    """
    above, below = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if above.shape != below.shape:
        raise ValueError(f"samples: expected as many of both, got {len(above)} and {len(below)}; measure them together")
    rounds = np.random.default_rng(seed).integers(len(above), size=(RESAMPLES, len(above)))
    ratios: NDArray[np.float64] = np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    low, high = np.quantile(ratios, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Ratio(float(np.median(above) / np.median(below)), float(low), float(high))


def noise(rows: Iterable[Row], *, control: str, seed: int) -> Noise:
    """The noise band of a run, from its rows of ``control`` and of its second capture.

    Raises:
        ValueError: there is no second capture.
    """
    first, second = _samples(rows, control), _samples(rows, control + AGAIN)
    if not second or first.keys() != second.keys():
        raise ValueError(f"control: expected rows of {control!r} and {control + AGAIN!r} at the same M, got "
                         f"{list(first)} and {list(second)} as (tp, M); measure with control={control!r}")  # fmt: skip
    aa = {key: compare(second[key], first[key], _seed(seed, key)) for key in first}
    return Noise(aa, max(RUN_TO_RUN, *(max(ratio.high - 1, 1 - ratio.low) for ratio in aa.values())))


def verdicts(
    rows: Sequence[Row], noise: Noise, *, contender: str = "overlap", baseline: str = "sequential", seed: int = 0
) -> list[Verdict]:
    """One verdict for each (tp, M) that both variants were measured at, in the order of the rows: the contender wins
    where it takes less time.

    Raises:
        ValueError: the two have no M in common.
    """
    ours, theirs = _samples(rows, contender), _samples(rows, baseline)
    found = []
    for key in (key for key in ours if key in theirs):
        ratio = compare(ours[key], theirs[key], _seed(seed, key))
        outcome, margin = _decide(ratio, noise.band)
        found.append(Verdict(key[1], key[0], outcome, ratio, noise.band, margin))
    if not found:
        raise ValueError(f"rows: expected {contender!r} and {baseline!r} at the same M, got {list(ours)} and "
                         f"{list(theirs)} as (tp, M); measure both")  # fmt: skip
    return found


def launched(rows: Iterable[Row], variant: str, *, pdl: bool) -> list[Row]:
    """The rows without those of ``variant`` that were launched the other way: a verdict takes one of each."""
    return [row for row in rows if row["variant"] != variant or row["pdl"] is pdl]


def floor_ratios(rows: Iterable[Row], variant: str, *, tp: int, pdl: bool) -> dict[int, float]:
    """Median over the median of the read floor of the same run, by M.

    Raises:
        ValueError: the variant was not measured there, or beside no floor.
    """
    chosen = [row for row in rows if (row["variant"], row["tp"], row.get("pdl")) == (variant, tp, pdl)]
    if not chosen or any(row["floor_us"] is None for row in chosen):
        raise ValueError(f"rows: expected {variant!r} at TP{tp} with pdl={pdl} and a floor_us, got "
                         f"{len(chosen)} rows; measure it beside a floor of that kind")  # fmt: skip
    return {row["M"]: row["median_us"] / row["floor_us"] for row in chosen}


def speedup(rows: Sequence[Row], contender: str, baseline: str) -> float:
    """How many times faster the contender is: the geometric mean, over every (tp, M) of both, of the median ratios.

    Raises:
        ValueError: the two have no M in common, or one has several rows for one.
    """
    ours, theirs = _samples(rows, contender), _samples(rows, baseline)
    ratios = [float(np.median(theirs[key]) / np.median(ours[key])) for key in ours if key in theirs]
    if not ratios:
        raise ValueError(f"rows: expected {contender!r} and {baseline!r} at the same M, got {list(ours)} and "
                         f"{list(theirs)} as (tp, M); measure both")  # fmt: skip
    return geometric_mean(ratios)


def _decide(ratio: Ratio, band: float) -> tuple[Outcome, float]:
    win, loss = 1 - band - ratio.high, ratio.low - (1 + band)
    if win > 0:
        return "wins", win
    if loss > 0:
        return "loses", loss
    return "inside noise", -max(win, loss)


def _samples(rows: Iterable[Row], variant: str) -> dict[tuple[int, int | None], list[float]]:
    found: dict[tuple[int, int | None], list[float]] = {}
    for row in rows:
        if row["variant"] == variant:
            key = (row["tp"], row["M"])
            if key in found:
                raise ValueError(f"rows: expected one of {variant!r} at (tp, M) = {key}, got two; choose one")
            found[key] = row["samples"]
    return found


def _seed(seed: int, key: tuple[int, int | None]) -> int:
    """A seed of its own for each (tp, M), so that adding an M changes no other verdict."""
    tp, m = key
    return int(np.random.SeedSequence([seed, tp, m or 0]).generate_state(1)[0])
