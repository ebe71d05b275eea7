"""What notebook 06 holds against the memory limit: the stream strategy, what it replaces, and the read floors.

``stream`` is timed with and without programmatic dependent launch (PDL). ``stream_split`` is what it would be for more
tokens than it takes: one launch for every 16 of them. Strategies are a :class:`~kda_lib.projection.KdaProjection` for
each layer, peers those of :mod:`kda_lib.lab.peers`. :mod:`kda_lib.lab.limit_claims` says what the rows mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kda_lib.autotune import TuningTable
from kda_lib.cache import ArtifactCache
from kda_lib.lab import peers
from kda_lib.lab.comparison import ARRANGEMENTS, Comparison
from kda_lib.lab.floors import floor_configs, floor_variants
from kda_lib.lab.limit_claims import BULK_FLOOR, STREAM, STREAM_SPLIT
from kda_lib.lab.measure import Rows, Variant
from kda_lib.lab.validation import differing
from kda_lib.projection import KdaProjection
from kda_lib.runtime import Outputs
from kda_lib.shapes import MAX_TOKENS
from kda_lib.strategies import AUTO, Stream

#: Projections for each layer, by whether they are launched with PDL.
StreamProjections = Mapping[bool, Sequence[KdaProjection]]


def stream_projections(compared: Comparison, table: TuningTable) -> StreamProjections:
    """Of the strategy ``stream``, without and with PDL, warmed up. Errors as of :meth:`KdaProjection.warmup`."""
    return {pdl: compared.projections(Stream(pdl=pdl), table) for pdl in (False, True)}


def stream_and_floors(
    compared: Comparison, stream: StreamProjections, sms: int, cache: ArtifactCache | None = None
) -> list[Variant]:
    """``stream`` both ways for every M, and all read floors. ``floor_us`` of a row is that of bulk copies, the way that
    the stream kernel reads.

    Args:
        sms: of the device.
    """
    configs = floor_configs(compared.arch, compared.weights.shapes, sms)
    floors = floor_variants(compared.weights, configs, cache=cache)
    return [
        *(variant for made in stream.values() for variant in compared.arrangement(STREAM, made)),
        *(replace(floor, floor=floor.name == BULK_FLOOR) for floor in floors),
    ]


def replaced(compared: Comparison, table: TuningTable) -> tuple[list[Variant], dict[str, str]]:
    """What stream stands in for, for every M: sequential, overlap, and all peers.

    cuBLASLt is tuned by FlashInfer's autotuner before anything is captured, for every variant that uses it.

    Args:
        table: by which overlap chooses its QKVG.

    Returns:
        The variants, and why GEMMs of :data:`kda_lib.lab.peers.GEMMS` are absent.

    Raises:
        ValueError, CompileError, BrokenBackend: as of :meth:`KdaProjection.warmup`.
    """
    found, absent = list[Variant](), dict[str, str]()
    for x in compared.inputs.values():
        variants, absent = peers.peers(compared.weights, x, compared.arch)
        found += variants
    for name in ("sequential", "overlap"):
        found += compared.arrangement(name, compared.projections(ARRANGEMENTS[name], table))
    return found, absent


def crossing(compared: Comparison, table: TuningTable) -> tuple[list[Variant], dict[int, str]]:
    """For more than 16 tokens: sequential, what ``auto`` makes of them, and several launches of the stream kernel.

    Returns:
        The variants, and by M the strategy that ``auto`` chose, with its reason.
    """
    automatic = compared.projections(AUTO, table)
    split = compared.projections(Stream(), table, {len(part) for x in compared.inputs.values() for part in _parts(x)})

    def enqueue(x: torch.Tensor, layer: int, stream: torch.cuda.Stream) -> None:
        for part in _parts(x):
            split[layer](part)

    found = compared.arrangement("sequential", compared.projections(ARRANGEMENTS["sequential"], table))
    found += compared.arrangement(AUTO, automatic)
    shapes = compared.weights.shapes
    found += [
        Variant(STREAM_SPLIT, partial(enqueue, x), shapes.weight_bytes, tp=shapes.tp, m=m, pdl=True)
        for m, x in compared.inputs.items()
    ]
    plans = {m: automatic[0].plan(m) for m in compared.inputs}
    return found, {m: f"{plan.strategy}, because {plan.reason}" for m, plan in plans.items()}


def _parts(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """At most 16 tokens each."""
    return [x[first : first + MAX_TOKENS] for first in range(0, len(x), MAX_TOKENS)]


def bits_that_pdl_changes(compared: Comparison, stream: StreamProjections) -> int:
    """Outputs of the first layer that differ in a bit between the two ways of launching, over every M."""
    return sum(
        int(differing(without, with_pdl))
        for x in compared.inputs.values()
        for without, with_pdl in zip(stream[False][0](x), stream[True][0](x), strict=True)
    )


def first_and_idle(
    projection: KdaProjection, x: torch.Tensor, idle_s: float, sleep: Callable[[float], None] = time.sleep
) -> Rows:
    """Rows of the first call of a projection that nothing warmed up, and of a call after the device was left idle.

    Both are eager; their outputs are compared with those of a call between them. Their time is the host's, from the
    call until the device is done, and holds what only a first call does: loading, and compiling what is not cached.
    """

    def timed() -> tuple[float, Outputs]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = projection(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6, outputs

    first, (_, wanted) = timed(), timed()
    sleep(idle_s)
    calls = {"first_call": (first, "nothing was warmed up"), "after_idle": (timed(), f"{idle_s:g} s without a launch")}
    return [
        {
            "variant": f"{STREAM}_{name}",
            "M": len(x),
            "tp": projection.shapes.tp,
            "median_us": us,
            "samples": 1,
            "outputs": sum(part.numel() for part in outputs),
            "differing": sum(int(differing(got, want)) for got, want in zip(outputs, wanted, strict=True)),
            "detail": f"eager, by the host's clock; {detail}",
        }
        for name, ((us, outputs), detail) in calls.items()
    ]
