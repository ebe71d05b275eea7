"""Formal checks of the stream kernel: its first cluster, with the counters between clusters left out.

The prover (see :mod:`kda_lib.lab.prover`) has no semantics for atomic additions to global memory. So what is proved is
the compiler's PTX without the three places that touch the counters: :func:`counters_left_out`. What is left is all that
happens inside a cluster: bulk copies into the ring, its barriers over all phases, the sums, and the messages between
the two CTAs. The first cluster has F_A/beta blocks and QKVG blocks, and does no F_B. That f_a is read only after it was
written, which rests on the counters, is not proved; it is tested on a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import Artifact, compile_kernel
from kda_lib.kernels.stream_config import RINGS, SPLIT, StreamConfig, stream_config
from kda_lib.lab import records
from kda_lib.lab.golden import SHAPES
from kda_lib.lab.profile import load_profile
from kda_lib.lab.prover import NOT_PROVED, PROVED, SAFETY, TARGETS, prove
from kda_lib.lab.scripted import Row, zero_claim

#: M is an argument of the kernel: both sides of its only boundary, and the ends.
TOKENS = (1, 8, 9, 16)
#: As many SMs as the device of this profile has.
SMS_OF = "h200"
#: The kernel's parameters that are numbers, by position: beta's row stride in elements, M.
BETA_STRIDE, M = 7, 8
LEFT_OUT = ", counters left out"
SMALL_RING = "small ring: "
FAULT = "stream fault: "

_COUNTERS = (
    (re.compile(r"@p red\.release\.gpu\.global\.add\.u32 \[[^\]]+\], 1;"), ""),
    (re.compile(r"atom\.acq_rel\.gpu\.global\.add\.u32 gone, \[[^\]]+\], 1;"), "mov.b32 gone, 0;"),
    (re.compile(r"ld\.acquire\.gpu\.global\.u32 seen, \[[^\]]+\];"), "mov.b32 seen, -1;"),
)
_WAIT = re.compile(r"mbarrier\.try_wait\.parity(?:\.acquire\.cluster)?\.shared::cta\.b64 done, \[[^\]]+\], [^;]+;")


@dataclass(frozen=True)
class StreamTask:
    """One run of the prover. without: which of the kernel's waits for a barrier is taken out, from 0. small_ring: with
    the ring for targets that have less shared memory, in whose stages are only a part of a block's rows.
    """

    target: str
    m: int
    without: int | None = None
    small_ring: bool = False


def counters_left_out(ptx: str) -> str:
    """The PTX without what it does to the counters.

    Raises:
        ValueError: not each of the three places is there once.
    """
    for pattern, instead in _COUNTERS:
        ptx, found = pattern.subn(instead, ptx)
        if found != 1:
            raise ValueError(f"ptx: expected one {pattern.pattern}, got {found}; is it the stream kernel's?")
    return ptx


def waits(ptx: str) -> list[tuple[int, int]]:
    """Where in the text the waits for barriers are."""
    return [match.span() for match in _WAIT.finditer(ptx)]


def without_wait(ptx: str, which: int) -> str:
    """The PTX with one wait for a barrier taken for done at once."""
    start, end = waits(ptx)[which]
    return f"{ptx[:start]}setp.eq.b32 done, 0, 0;{ptx[end:]}"


def tasks() -> list[StreamTask]:
    """Every M of :data:`TOKENS` with both rings, and each wait of each taken out once."""
    found = [StreamTask(target, m, small_ring=small) for target, m, small in product(TARGETS, TOKENS, (False, True))]
    for target, small in product(TARGETS, (False, True)):
        count = len(waits(_artifact(StreamTask(target, 8, small_ring=small), None).ptx))
        found += [StreamTask(target, 8, which, small) for which in range(count)]
    return found


def _artifact(task: StreamTask, cache: ArtifactCache | None) -> Artifact[StreamConfig]:
    sms, rings = load_profile(SMS_OF).sms or 0, RINGS[-1:] if task.small_ring else RINGS
    config = stream_config(Arch.parse(task.target), SHAPES, sms, pdl=True, rings=rings)
    return compile_kernel(config, task.target, cache=cache)


def rows_of(task: StreamTask, *, cache: ArtifactCache | None = None) -> list[Row]:
    """Run one task; a row for each check, or one for a fault.

    Raises:
        prover.VerifierMissing: sentryward is not installed.
    """
    artifact = _artifact(task, cache)
    ptx = counters_left_out(artifact.ptx)
    if task.without is not None:
        ptx = without_wait(ptx, task.without)
    proof = prove(artifact, ctas=SPLIT, ptx=ptx, scalars={BETA_STRIDE: SHAPES.heads, M: task.m})
    base: Row = {"kernel": "stream", "target": task.target, "M": task.m, "tp": SHAPES.tp, "ctas": SPLIT,
                 "grid": artifact.launch.grid}  # fmt: skip
    which = SMALL_RING if task.small_ring else ""
    if task.without is not None:
        found = {"variant": f"{FAULT}{which}wait {task.without} removed", "detail": proof.said}
        return [base | found | {"outcome": PROVED if proof.safe else NOT_PROVED}]
    return [base | proof.row_of(check) | {"variant": which + check + LEFT_OUT} for check in SAFETY]


def claims_of(rows: list[Row]) -> list[records.Claim]:
    """What was proved of the stream kernel."""
    safe = [row for row in rows if row["variant"].endswith(LEFT_OUT)]
    faults = [row for row in rows if row["variant"].startswith(FAULT)]
    return [
        zero_claim("stream-safe", "the first cluster of the stream kernel, its counters left out, is proved "
                   "with both rings synchronised and free of races", sum(row["outcome"] != PROVED for row in safe),
                   f"of {len(safe)} not"),
        zero_claim("stream-faults", "without any one of its waits it is not, with neither ring",
                   sum(row["outcome"] == PROVED for row in faults), f"of {len(faults)} proved"),
    ]  # fmt: skip
