"""Time variants of one layer under CUDA graphs, all in one process, interleaved in random order.

Each variant becomes one graph of all layers, every layer with weights of its own, so that weights come from memory and
not from L2. In each round every graph is replayed once, in an order drawn anew. One variant is captured twice, under
two names: what differs between these two is noise (A/A). The queue never runs dry, so a replay starts when the one
before it ends, and CUDA events give its time.

A result that cannot be true (faster than the memory's peak, an empty graph) raises; what makes it doubtful (clocks,
throttling) is in ``flags``. :mod:`kda_lib.lab.verdicts` says what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kda_lib.errors import KdaError
from kda_lib.lab.device import DeviceInfo, DeviceState, sample_state
from kda_lib.lab.graphs import Topology, node_counts, topology
from kda_lib.lab.profile import Profile

if TYPE_CHECKING:
    import torch

#: Layers of a graph at least, and how many times the L2 cache their bytes must exceed: what is left in L2 from the
#: replay before is then less than a tenth.
MIN_LAYERS = 8
COLD_FACTOR = 10
#: A read may appear this much faster than the published peak bandwidth, which is rounded, before it is refused.
PEAK_TOLERANCE = 1.05
#: Warm-up replays and samples come in this many blocks; clocks are read before each and after the last.
BLOCKS = 10
#: Two SM clocks further apart than this are flagged: less moves a memory-bound time by much less.
CLOCK_TOLERANCE = 0.03
#: Ends the name of the second capture of the control variant.
AGAIN = "_again"

Rows = list[dict[str, Any]]


class Key(NamedTuple):
    """Names a variant, and its row."""

    variant: str
    tp: int
    m: int | None
    pdl: bool


class Refused(KdaError):
    """A measurement that cannot be true; the message says why."""


@dataclass(frozen=True)
class Variant:
    """One way to do a layer.

    enqueue: ``enqueue(layer, stream)`` puts the work of one layer, with that layer's weights, on ``stream``, which is
    also torch's current stream. It must have been warmed up: it is called under capture.
    bytes: what one layer must read at least. m: tokens, None where there are none.
    flush: read a large buffer before each replay, untimed. For variants whose layers together fit into L2.
    floor: this is a read floor: rows of the same tp, bytes and pdl get its time as ``floor_us``, the fastest's if there
    are several. What PDL hides of a launch, it hides of both.
    results: the tensors that enqueue writes, for checks of correctness; not used here.
    """

    name: str
    enqueue: Callable[[int, torch.cuda.Stream], None] = field(repr=False)
    bytes: int
    tp: int
    m: int | None = None
    pdl: bool = False
    flush: bool = False
    floor: bool = False
    results: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @property
    def key(self) -> Key:
        """What tells it from the others of a measurement."""
        return Key(self.name, self.tp, self.m, self.pdl)


class Bench(Protocol):
    """What :func:`measure` needs from a device."""

    def capture(self, variant: Variant, layers: int) -> Any:
        """Warm up and capture ``layers`` layers; returns a handle."""

    def topology(self, graph: Any) -> Topology: ...

    def replay(self, graph: Any) -> None:
        """Enqueue one untimed replay."""

    def timed(self, graph: Any, flush: bool) -> None:
        """Enqueue one timed replay."""

    def collect(self) -> list[float]:
        """Wait, and return the milliseconds of all timed replays since the last call, in their order."""

    def state(self) -> DeviceState: ...


@dataclass(frozen=True)
class Measurement:
    """rows: one for each variant and each control, with the fields of :data:`kda_lib.lab.records.MEASUREMENT_FIELDS`;
    ``samples`` holds the microseconds per layer of every round, in order, so row by row they belong together.
    topologies: of the graphs. states: of the device, while it worked. flags: what makes doubtful.
    """

    rows: Rows
    topologies: Mapping[Key, Topology]
    states: tuple[DeviceState, ...]
    flags: tuple[str, ...]


def measure(
    variants: Sequence[Variant],
    *,
    layers: int,
    samples: int,
    seed: int,
    device: DeviceInfo,
    profile: Profile,
    control: str | None = None,
    bench: Bench | None = None,
) -> Measurement:
    """Time the variants on the current CUDA device.

    Args:
        layers: layers of each graph, and distinct weight sets; ``Variant.enqueue`` gets 0 to ``layers - 1``.
        samples: replays of each variant, at least 10.
        seed: of the order.
        device, profile: L2 size and peak bandwidth, for the checks.
        control: name of the variant (of each M) that is captured twice; the first variant's by default.
        bench: how to capture and time; CUDA by default.

    Raises:
        ValueError: an argument is not legal, or weights would stay in L2; nothing was run.
        Refused: a graph without a kernel, or a time below the byte floor.
    """
    control = variants[0].name if control is None and variants else control
    _check(variants, layers, samples, device, profile, control)
    again = [replace(v, name=v.name + AGAIN, floor=False) for v in variants if v.name == control]
    everything = [*variants, *again]
    if bench is None:
        bench = CudaBench(flush_bytes=COLD_FACTOR * device.l2_bytes if any(v.flush for v in variants) else 0)
    graphs = [bench.capture(variant, layers) for variant in everything]
    topologies = {v.key: bench.topology(graph) for v, graph in zip(everything, graphs, strict=True)}
    for key, graph in topologies.items():
        if node_counts(graph).kernels == 0:
            raise Refused(f"{key}: its graph has no kernel; enqueue must work on the stream that it is given")
    times, states = _run(bench, everything, graphs, samples, np.random.default_rng(seed))
    rows = _rows(everything, times * 1000 / layers)
    peak = profile.bandwidth_bytes_per_s or 0
    for row in rows:
        least = row["bytes"] / (PEAK_TOLERANCE * peak) * 1e6
        if row["min_us"] < least:
            raise Refused(
                f"{row['variant']} at M={row['M']}: {row['min_us']:.3f} us for {row['bytes']} bytes is faster than "
                f"{PEAK_TOLERANCE} times the peak bandwidth allows ({least:.3f} us); it does not read what it declares"
            )
    return Measurement(rows, topologies, tuple(states), tuple(flags(states)))


def cold_layers(bytes: int, device: DeviceInfo) -> int:
    """The fewest layers of this many bytes each whose weights together exceed :data:`COLD_FACTOR` times the L2."""
    return COLD_FACTOR * device.l2_bytes // bytes + 1


def _check(
    variants: Sequence[Variant], layers: int, samples: int, device: DeviceInfo, profile: Profile, control: str | None
) -> None:
    if not variants:
        raise ValueError("variants: expected at least one, got none; give what is to be timed")
    keys = [v.key for v in variants]
    if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
        raise ValueError(f"variants: expected one of each, got twice: {', '.join(repeated)}; give them other names")
    if control not in [v.name for v in variants]:
        raise ValueError(f"control: expected the name of a variant, got {control!r}; use {variants[0].name!r}")
    if layers < MIN_LAYERS:
        raise ValueError(f"layers: expected at least {MIN_LAYERS}, got {layers}; use more weight sets")
    if samples < BLOCKS:
        raise ValueError(f"samples: expected at least {BLOCKS}, got {samples}; medians of fewer mean little")
    if profile.bandwidth_bytes_per_s is None:
        raise ValueError(f"profile: expected one with a bandwidth, got {profile.name!r}; no time can be checked")
    for v in variants:
        if v.bytes < 1:
            raise ValueError(f"{v.name}: expected at least 1 byte, got {v.bytes}; declare what a layer must read")
        if not v.flush and v.bytes * layers <= COLD_FACTOR * device.l2_bytes:
            raise ValueError(
                f"{v.name}: expected weight sets of more than {COLD_FACTOR} times the L2 ({device.l2_bytes} bytes), "
                f"got {layers} x {v.bytes} bytes; use more layers, or flush=True"
            )


def _run(
    bench: Bench, variants: Sequence[Variant], graphs: Sequence[Any], samples: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], list[DeviceState]]:
    """Milliseconds ``[variant, sample]``, and the states of the device before each block and after the last."""
    times = np.empty((len(graphs), samples))
    states = []
    for block in np.array_split(np.arange(samples), BLOCKS):
        states.append(_loaded_state(bench, graphs))
        orders = [rng.permutation(len(graphs)) for _ in block]
        for order in orders:
            for index in order:
                bench.timed(graphs[index], variants[index].flush)
        for sample, order, row in zip(block, orders, np.reshape(bench.collect(), (len(block), -1)), strict=True):
            times[order, sample] = row
    states.append(_loaded_state(bench, graphs))
    return times, states


def _loaded_state(bench: Bench, graphs: Sequence[Any]) -> DeviceState:
    """The state while the device works, and a queue that is long enough for the host to stay ahead of it afterwards."""
    for graph in graphs:
        bench.replay(graph)
    state = bench.state()
    for graph in graphs:
        bench.replay(graph)
    return state


def _rows(variants: Sequence[Variant], times_us: NDArray[np.float64]) -> Rows:
    floors: dict[tuple[int, int, bool], float] = {}
    for variant, times in zip(variants, times_us, strict=True):
        if variant.floor:
            kind = (variant.tp, variant.bytes, variant.pdl)
            floors[kind] = min(floors.get(kind, np.inf), float(np.median(times)))
    rows = []
    for variant, times in zip(variants, times_us, strict=True):
        p10, median, p90 = np.percentile(times, (10, 50, 90)).tolist()
        rows.append(
            {
                "variant": variant.name,
                "M": variant.m,
                "tp": variant.tp,
                "pdl": variant.pdl,
                "median_us": median,
                "p10_us": p10,
                "p90_us": p90,
                "min_us": float(times.min()),
                "samples": [round(time, 4) for time in times.tolist()],
                "bytes": variant.bytes,
                "floor_us": floors.get((variant.tp, variant.bytes, variant.pdl)),
            }
        )
    return rows


def flags(states: Sequence[DeviceState]) -> list[str]:
    """What changed between the states so that times before and after it cannot be compared without care."""
    found = []
    # Idleness between two samples says nothing about the samples.
    reasons = [frozenset(state.throttle_reasons) - {"gpu_idle"} for state in states]
    if changed := sorted(frozenset.union(*reasons) - frozenset.intersection(*reasons)):
        found.append(f"throttle reasons changed: {', '.join(changed)}")
    for name in ("sm_mhz", "mem_mhz"):
        clocks = [clock for state in states if (clock := getattr(state.clocks, name)) is not None]
        if clocks and max(clocks) > (1 + CLOCK_TOLERANCE) * min(clocks):
            found.append(f"{name} changed: {min(clocks)} to {max(clocks)}")
    return found


def capture(variant: Variant, layers: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Warm up on ``stream``, capture ``layers`` layers there and instantiate; the graph is kept for inspection."""
    import torch

    with torch.cuda.stream(stream):
        for layer in range(layers):
            variant.enqueue(layer, stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(layers):
            variant.enqueue(layer, stream)
    graph.instantiate()
    return graph


class CudaBench:
    """:class:`Bench` on the current CUDA device. flush_bytes: what one flush reads, 0 if none is needed."""

    def __init__(self, flush_bytes: int) -> None:
        import torch

        # Any: torch's streams and events are untyped.
        self._torch: Any = torch
        self._stream = self._torch.cuda.Stream()
        self._events: list[tuple[Any, Any]] = []
        self._flushed = torch.zeros(flush_bytes // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.float32, device="cuda")
        torch.cuda.synchronize()

    def capture(self, variant: Variant, layers: int) -> torch.cuda.CUDAGraph:
        return capture(variant, layers, self._stream)

    def topology(self, graph: torch.cuda.CUDAGraph) -> Topology:
        return topology(graph)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with self._torch.cuda.stream(self._stream):
            graph.replay()

    def timed(self, graph: torch.cuda.CUDAGraph, flush: bool) -> None:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._torch.cuda.stream(self._stream):
            if flush:
                # Read, not written: dirty lines would be written back during the timed replay.
                self._torch.sum(self._flushed, dim=0, out=self._sum)
            start.record()
            graph.replay()
            end.record()
        self._events.append((start, end))

    def collect(self) -> list[float]:
        self._torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in self._events]
        self._events.clear()
        return times

    def state(self) -> DeviceState:
        return DeviceState(**sample_state())
