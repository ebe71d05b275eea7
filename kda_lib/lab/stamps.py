"""When and where the branches of a graph ran: time stamps between its kernels.

Stamps are kernels themselves and break programmatic dependent launch, so they belong into a graph of their own, never
into a timed one. A branch reaches from its start stamp to its end stamp; that the intervals of two branches intersect
says that they could run together, and that one's end sticks out beyond the other says what was not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import compile_kernel
from kda_lib.kernels.lab_config import StampConfig
from kda_lib.launch import LoadedKernel

if TYPE_CHECKING:
    import torch

Edge = Literal["start", "end"]
WORDS = 2


@dataclass(frozen=True)
class Interval:
    """start_ns, end_ns: of the device's ``%globaltimer``, comparable within one device. sms: where the stamps ran."""

    start_ns: int
    end_ns: int
    sms: tuple[int, int] = (-1, -1)

    @property
    def length_us(self) -> float:
        return (self.end_ns - self.start_ns) / 1000


class Branch(NamedTuple):
    layer: int
    name: str


def overlap_us(a: Interval, b: Interval) -> float:
    """Length of the intersection in microseconds, 0 where the two are apart."""
    return max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) / 1000


def exposed_us(side: Interval, main: Interval) -> float:
    """How long ``side`` goes on after ``main`` has ended, in microseconds, 0 where it ends first."""
    return max(0, side.end_ns - main.end_ns) / 1000


def resolution_ns(intervals: Mapping[Branch, Interval]) -> int:
    """The step of the timer as the stamps show it: the greatest common divisor of their differences."""
    times = [time for interval in intervals.values() for time in (interval.start_ns, interval.end_ns)]
    return math.gcd(*(time - times[0] for time in times))


class Stamps:
    """Enqueues stamps and reads them.

    Args:
        slots: how many stamps at most, two for each branch of each layer.
        device: a CUDA device.
        cache: of compiled kernels, see :func:`kda_lib.compile.compile_kernel`.
    """

    def __init__(self, slots: int, device: torch.device, cache: ArtifactCache | None = None) -> None:
        import torch

        self._kernel = LoadedKernel(compile_kernel(StampConfig(), Arch.of_device(device), cache=cache))
        self._words = torch.zeros(slots, WORDS, dtype=torch.int64, device=device)
        self._places: dict[tuple[Branch, Edge], int] = {}

    def mark(self, layer: int, branch: str, edge: Edge, stream: torch.cuda.Stream) -> None:
        """Enqueue one stamp on ``stream``. Marking the same place again, in another capture say, uses the same slot.

        Raises:
            ValueError: more marks than slots.
        """
        place = self._places.setdefault((Branch(layer, branch), edge), len(self._places))
        if place >= len(self._words):
            raise ValueError(f"slots: expected at least {place + 1}, got {len(self._words)}; ask for more")
        self._kernel(self._words[place].data_ptr(), stream=stream.cuda_stream)

    def read(self) -> dict[Branch, Interval]:
        """Wait for the device and return the interval of every branch that was marked at both ends.

        Raises:
            ValueError: a branch lacks one of its ends, or was not run since the stamps were made.
        """
        import torch

        torch.cuda.synchronize(self._words.device)
        return intervals(self._places, self._words.tolist())


def intervals(places: Mapping[tuple[Branch, Edge], int], words: list[list[int]]) -> dict[Branch, Interval]:
    """The intervals in what the stamps wrote, ``[slot][time in ns, SM]``. Raises as :meth:`Stamps.read`."""
    found = {}
    for branch in dict.fromkeys(branch for branch, _ in places):
        ends = [(edge, places.get((branch, edge))) for edge in ("start", "end")]
        times = []
        for edge, place in ends:
            if place is None:
                raise ValueError(f"{branch}: expected a start and an end, got no {edge}; mark both")
            if words[place][0] == 0:
                raise ValueError(f"{branch}: expected a time at its {edge}, got none; replay the graph first")
            times.append(words[place])
        (start, start_sm), (end, end_sm) = times
        found[branch] = Interval(start, end, (start_sm, end_sm))
    return found
