"""What the rows of notebook 06 say about the stream kernel. Computed from rows alone, recorded ones included.

Claims about speed are not required: they hold or fail, and the notebook shows which. Where a bound fails, its statement
says for which M it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kda_lib.lab import verdicts
from kda_lib.lab.records import Claim
from kda_lib.shapes import MAX_TOKENS

#: Variants: the kernel, and several launches of it for more tokens than it takes.
STREAM, STREAM_SPLIT = "stream", "stream_split"
#: The floor that it is held against, and the other one.
BULK_FLOOR, LOADS_FLOOR = "read_bulk", "read_loads"
#: Bounds of issue 4: TP degree -> most that it may take, as a multiple of that floor; baseline -> least speedup.
FLOOR_BOUNDS: Mapping[int, float] = {8: 1.06, 4: 1.10, 16: 1.25}
SPEEDUP_BOUNDS: Mapping[str, float] = {"overlap": 1.15, "sequential": 1.25}
#: Variants of a whole projection, of :mod:`kda_lib.lab.comparison` and :mod:`kda_lib.lab.peers`.
WHOLE = ("sequential", "overlap", "torch_packed", "torch_split", "tinygemm_split", "cublaslt_split")

Row = Mapping[str, Any]


def limit_claims(rows: Iterable[Row], seed: int) -> list[Claim]:
    """All of them.

    Raises:
        ValueError: a variant is missing among the rows.
    """
    measured = list(rows)
    few, many = (
        [row for row in measured if (row["M"] is not None and row["M"] > MAX_TOKENS) is above]
        for above in (False, True)
    )
    ways = (False, True)
    return [
        *(_floor(few, tp, bound, pdl) for tp, bound in FLOOR_BOUNDS.items() for pdl in ways),
        *(_faster(few, pdl, seed) for pdl in ways),
        *(_speedup(few, name, bound, pdl) for name, bound in SPEEDUP_BOUNDS.items() for pdl in ways),
        _crossing(many, seed),
        _bulk_is_the_floor(few),
        _noise(few, seed),
        _right(few),
        _within_one_ulp(few),
        *_same_bits(measured),
    ]


def rivals(rows: Iterable[Row], seed: int, *, pdl: bool) -> dict[str, list[verdicts.Verdict]]:
    """The stream kernel, launched with or without PDL, against every other whole projection: a verdict for each M."""
    chosen = verdicts.launched(rows, STREAM, pdl=pdl)
    noise = verdicts.noise(chosen, control="sequential", seed=seed)
    names = [name for name in WHOLE if any(row["variant"] == name for row in chosen)]
    return {name: verdicts.verdicts(chosen, noise, contender=STREAM, baseline=name, seed=seed) for name in names}


def _floor(rows: Sequence[Row], tp: int, bound: float, pdl: bool) -> Claim:
    ratios = verdicts.floor_ratios(rows, STREAM, tp=tp, pdl=pdl)
    worst = max(ratios, key=lambda m: ratios[m])
    largest = round(ratios[worst], 4)
    within = [m for m, ratio in sorted(ratios.items()) if round(ratio, 4) <= bound]
    return Claim(
        id=f"floor-tp{tp}-{_end(pdl)}",
        statement=f"TP{tp} {_way(pdl)}: stream takes at most {bound:.2f} times the bulk-copy floor of the same run and "
        f"kind of launch; it does at {_listed(within)}, worst is M = {worst}",
        value=largest,
        unit="times, at most",
        bound=f"<= {bound}",
        holds=largest <= bound,
        required=False,
    )


def _faster(rows: Sequence[Row], pdl: bool, seed: int) -> Claim:
    found = rivals(rows, seed, pdl=pdl)
    pairs = [(name, verdict) for name, judged in found.items() for verdict in judged]
    others = [f"{name} at M = {verdict.m} ({verdict.outcome})" for name, verdict in pairs if verdict.outcome != "wins"]
    return Claim(
        id=f"faster-{_end(pdl)}",
        statement=f"stream {_way(pdl)} is faster, beyond A/A noise and at every M, than each of {', '.join(found)}"
        f"{'; not than ' * bool(others)}{', '.join(others)}",
        value=len(others),
        unit=f"of {len(pairs)} pairs are not wins",
        bound="== 0",
        holds=not others,
        required=False,
    )


def _speedup(rows: Sequence[Row], baseline: str, bound: float, pdl: bool) -> Claim:
    factor = round(verdicts.speedup(verdicts.launched(rows, STREAM, pdl=pdl), STREAM, baseline), 4)
    return Claim(
        id=f"speedup-{baseline}-{_end(pdl)}",
        statement=f"stream {_way(pdl)} is at least {bound:.2f} times as fast as {baseline}, geometric mean over M",
        value=factor,
        unit="times",
        bound=f">= {bound}",
        holds=factor >= bound,
        required=False,
    )


def _crossing(rows: Sequence[Row], seed: int) -> Claim:
    noise = verdicts.noise(rows, control="sequential", seed=seed)
    judged = verdicts.verdicts(rows, noise, contender=STREAM_SPLIT, baseline="sequential", seed=seed)
    not_slower = [verdict.m for verdict in judged if verdict.outcome != "loses"]
    return Claim(
        id="crossing",
        statement=f"above {MAX_TOKENS} tokens, a launch of stream for every {MAX_TOKENS} of them is slower than "
        f"sequential, beyond A/A noise, so auto loses nothing by leaving stream; at {_listed([v.m for v in judged])}"
        f"{', not at ' * bool(not_slower)}{_listed(not_slower) if not_slower else ''}",
        value=len(not_slower),
        unit=f"of {len(judged)} M are not slower",
        bound="== 0",
        holds=not not_slower,
        required=False,
    )


def _bulk_is_the_floor(rows: Sequence[Row]) -> Claim:
    medians = {
        row["variant"]: row["median_us"]
        for row in rows
        if row["variant"] in (BULK_FLOOR, LOADS_FLOOR) and (row["tp"], row["pdl"]) == (8, False)
    }
    ratio, least = round(medians[LOADS_FLOOR] / medians[BULK_FLOOR], 4), round(1 - verdicts.RUN_TO_RUN, 4)
    return Claim(
        id="bulk-is-the-floor",
        statement="plain loads read the weights no faster than the bulk copies that stream is held against",
        value=ratio,
        unit="times the bulk copies' time",
        bound=f">= {least}",
        holds=ratio >= least,
        required=False,
    )


def _noise(rows: Sequence[Row], seed: int) -> Claim:
    band = round(verdicts.noise(rows, control="sequential", seed=seed).band, 5)
    return Claim(
        id="noise-band",
        statement="the A/A control widens the noise band no further than what runs differ by",
        value=band,
        unit="relative",
        bound=f"<= {verdicts.RUN_TO_RUN}",
        holds=band <= verdicts.RUN_TO_RUN,
        required=False,
    )


def _right(rows: Sequence[Row]) -> Claim:
    checked = _found(rows, STREAM, "beyond_bound")
    beyond = sum(row["beyond_bound"] for row in checked)
    degrees = sorted({row["tp"] for row in checked})
    return Claim(
        id="fp64-bound",
        statement="stream: every output is within half a BF16 ulp and the FP32 accumulation bound of FP64, at TP "
        f"{', '.join(map(str, degrees))} and every M that was timed",
        value=beyond,
        unit=f"of {sum(row['outputs'] for row in checked)} outputs beyond it",
        bound="== 0",
        holds=beyond == 0,
    )


def _within_one_ulp(rows: Sequence[Row]) -> Claim:
    checked = _found(rows, STREAM, "max_ulp")
    largest = max(row["max_ulp"] for row in checked)
    return Claim(
        id="one-ulp",
        statement="stream: every output is within one BF16 ulp of FP64 rounded once, cancelled sums included",
        value=largest,
        unit=f"ulps at most; {sum(row['over_one_ulp'] for row in checked)} of "
        f"{sum(row['outputs'] for row in checked)} outputs are over one",
        bound="<= 1",
        holds=largest <= 1,
        required=False,
    )


def _same_bits(rows: Sequence[Row]) -> list[Claim]:
    """Of the first call, of the call after idling, and of all replays."""
    statements = {
        f"{STREAM}_first_call": "the first eager call of a process gives the bits of a later one",
        f"{STREAM}_after_idle": "a call after the device was left idle gives the bits of one before",
        f"{STREAM}_replays": "every replay of a graph gives the bits of an eager call, also when the input changes",
    }
    claims = []
    for variant, statement in statements.items():
        found = _found(rows, variant, "differing")
        replays = sum(row.get("replays", 0) for row in found)
        differing = sum(row["differing"] for row in found)
        claims.append(
            Claim(
                id=variant.removeprefix(f"{STREAM}_").replace("_", "-"),
                statement=statement,
                value=differing,
                unit="outputs differ" + (f" in {replays} replays" if replays else ""),
                bound="== 0",
                holds=differing == 0,
            )
        )
    return claims


def _found(rows: Sequence[Row], variant: str, field: str) -> list[Row]:
    """The rows of a variant, each with this field."""
    found = [row for row in rows if row["variant"] == variant]
    if not found or any(field not in row for row in found):
        raise ValueError(f"rows: expected rows of {variant!r} with {field}, got {len(found)} rows; check it first")
    return found


def _way(pdl: bool) -> str:
    return "with PDL" if pdl else "without PDL"


def _end(pdl: bool) -> str:
    """Of a claim's id."""
    return "pdl" if pdl else "no-pdl"


def _listed(tokens: Sequence[int | None]) -> str:
    """Such as ``M = 1-8, 16``."""
    spans: list[list[int]] = []
    for m in sorted(m for m in tokens if m is not None):
        if spans and m == spans[-1][-1] + 1:
            spans[-1].append(m)
        else:
            spans.append([m])
    listed = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"M = {', '.join(listed)}" if listed else "no M"
