"""The comparison of notebook 05 once more, in a process of its own: do the verdicts stay?

    python -m kda_lib.lab.rerun <profile> <tp> <samples> <seed> <file>

Nothing is shared with the first measurement but the code: inputs, weights and captures are made anew, and QKVG is timed
anew to choose its backends. The rows go to the named file as JSON, because libraries print.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kda_lib.errors import KdaError
from kda_lib.lab import provenance
from kda_lib.lab.device import DeviceInfo, current_device, resolve_mode
from kda_lib.lab.measure import MIN_LAYERS, Bench, Measurement, Rows, Variant, measure
from kda_lib.lab.profile import Profile, load_profile
from kda_lib.shapes import MAX_TOKENS, KdaShapes

if TYPE_CHECKING:
    from kda_lib.lab.workload import Weights

#: The two that the verdicts are about.
COMPARED = ("sequential", "overlap")


class RerunFailed(KdaError):
    """The second process did not measure; the message has the last line that it wrote."""


class Rerun(NamedTuple):
    """rows: of ``sequential_repeat`` with its A/A control and of ``overlap_repeat``. flags: as of a measurement."""

    rows: Rows
    flags: list[str]


def rerun(profile: Profile, shapes: KdaShapes, *, samples: int, seed: int) -> Rerun:
    """Measure in a fresh process on the current device, which this process must leave idle meanwhile.

    Raises:
        RerunFailed: the process ended with an error, or there is no device of this profile.
    """
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
        file = Path(folder) / "rows.json"
        arguments = (profile.name, shapes.tp, samples, seed, file)
        command = [sys.executable, "-m", "kda_lib.lab.rerun", *map(str, arguments)]
        done = subprocess.run(command, cwd=provenance.repo_root(), capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise RerunFailed(f"rerun: expected a second process to measure, exit code {done.returncode}: {said[-1]}")
        return Rerun(**json.loads(file.read_text(encoding="utf-8")))


def measure_anew(
    weights: Weights,
    tokens: Iterable[int],
    *,
    device: DeviceInfo,
    profile: Profile,
    samples: int,
    seed: int,
    bench: Bench | None = None,
) -> Rerun:
    """Choose QKVG's backends, then time both strategies, in this process. Arguments and errors as of ``measure``."""
    from kda_lib.lab.comparison import ARRANGEMENTS, REPEAT, Comparison, repeated, tuning_table

    compared = Comparison(weights, tokens, seed)

    def timed(variants: list[Variant], control: str, seed: int) -> Measurement:
        return measure(variants, layers=weights.layers, samples=samples, seed=seed, device=device, profile=profile,
                       control=control, bench=bench)  # fmt: skip

    alone = timed(compared.qkvg(), "qkvg_torch_mm", seed)
    table = tuning_table(alone.rows, weights.shapes.tp)
    projections = {name: compared.projections(ARRANGEMENTS[name], table) for name in COMPARED}
    variants = [variant for name, made in projections.items() for variant in compared.arrangement(name, made)]
    found = timed(repeated(variants), COMPARED[0] + REPEAT, seed + 1)
    for row in found.rows:
        if row["variant"] == "overlap" + REPEAT:
            row["detail"] = f"QKVG by {projections['overlap'][0].plan(row['M']).backend}"
    return Rerun(found.rows, sorted({*alone.flags, *found.flags}))


def main(profile_name: str, tp: str, samples: str, seed: str, file: str) -> None:
    """Measure for every M and write the file.

    Raises:
        RerunFailed: there is no device of this profile.
    """
    profile, device = load_profile(profile_name), current_device()
    if device is None or resolve_mode(profile, device) != "full":
        raise RerunFailed(f"no device of profile {profile.name!r}; run it on one")
    from kda_lib.lab.workload import make_weights

    weights = make_weights(KdaShapes(int(tp)), MIN_LAYERS, "cuda", int(seed))
    tokens = range(1, MAX_TOKENS + 1)
    found = measure_anew(weights, tokens, device=device, profile=profile, samples=int(samples), seed=int(seed))
    Path(file).write_text(json.dumps(found._asdict(), allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
