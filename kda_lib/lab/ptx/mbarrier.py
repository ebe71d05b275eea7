"""mbarrier objects: phases that end when all arrivals and all announced bytes are in (PTX ISA, "mbarrier")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.parser import Instruction
from kda_lib.lab.ptx.report import Check

if TYPE_CHECKING:
    from kda_lib.lab.ptx.cohort import Cohort

Threads = NDArray[np.int64]

MBARRIER_BYTES = 8


class Mbarriers:
    """The mbarriers of a cohort, numbered in the order of their initialisation.

    phase: completed phases of each. observed: [mbarrier, thread], the phases that a thread knows to be complete.
    """

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort
        self._number: dict[int, int] = {}
        none = np.zeros(0, np.int64)
        self._count, self._pending, self._bytes, self.phase = none, none, none, none
        self._maker, self._made_phase, self._made_arrivals = none, none, none
        self._fenced = np.zeros(0, bool)
        self.observed = np.zeros((0, cohort.threads), np.int64)
        self._sent: list[tuple[Instruction, Threads, Threads, Threads, Threads]] = []

    def make(self, instruction: Instruction, threads: Threads, places: Threads, counts: Threads) -> None:
        """``mbarrier.init`` at places in shared memory."""
        sync = self._cohort.sync
        again = np.array([int(place) in self._number for place in places], bool)
        self._cohort.check(Check.BARRIER, instruction, threads, again, "it is an mbarrier already")
        threads, places, counts = threads[~again], places[~again], counts[~again]
        for place in places:
            self._number[int(place)] = len(self._number)
        zeros = np.zeros(len(places), np.int64)
        self._count = np.append(self._count, counts)
        self._pending = np.append(self._pending, counts)
        self._bytes, self.phase = np.append(self._bytes, zeros), np.append(self.phase, zeros)
        self._maker = np.append(self._maker, threads)
        self._made_phase = np.append(self._made_phase, sync.phase[threads])
        self._made_arrivals = np.append(self._made_arrivals, sync.arrivals[threads])
        self._fenced = np.append(self._fenced, zeros != 0)
        self.observed = np.vstack([self.observed, np.zeros((len(places), self._cohort.threads), np.int64)])

    def fence(self, threads: Threads) -> None:
        """``fence.mbarrier_init.release.cluster``: a relaxed arrive on the cluster barrier now publishes them."""
        self._fenced |= np.isin(self._maker, threads)

    def find(self, instruction: Instruction, threads: Threads, places: Threads) -> tuple[NDArray[np.bool_], Threads]:
        """Which threads name an mbarrier, and the numbers of those."""
        numbers = np.array([self._number.get(int(place), -1) for place in places], np.int64)
        found = numbers >= 0
        self._cohort.check(Check.INITIALISED, instruction, threads, ~found, "no mbarrier is there")
        self._check_visible(instruction, threads[found], numbers[found])
        return found, numbers[found]

    def expect_and_arrive(self, threads: Threads, numbers: Threads, count: Threads) -> None:
        """``mbarrier.arrive.expect_tx``: announce bytes, then arrive once."""
        np.add.at(self._bytes, numbers, count)
        np.subtract.at(self._pending, numbers, 1)
        self._settle()

    def complete(
        self, instruction: Instruction, threads: Threads, numbers: Threads, width: int, blocks: Threads
    ) -> Threads:
        """``width`` bytes of each thread have arrived in CTAs of the cohort; returns the phases they count for."""
        phases = self.phase[numbers]
        np.subtract.at(self._bytes, numbers, width)
        surplus = (self._bytes < 0) & (self._pending == 0)
        self._cohort.check(
            Check.BARRIER, instruction, threads, surplus[numbers], "more bytes arrive than the phase expects"
        )
        self._sent.append((instruction, threads, numbers, phases, blocks))
        self._settle()
        return phases

    def complete_for(self, numbers: Threads, parities: Threads) -> NDArray[np.bool_]:
        """Whether the phase of this parity is complete."""
        return np.not_equal(self.phase[numbers] % 2, parities)

    def check_received(self) -> None:
        """At the end: each CTA must have waited for what was sent into its shared memory."""
        c = self._cohort
        known = self.observed.reshape(len(self.observed), c.threads // c.block_size, c.block_size).max(2)
        for instruction, threads, numbers, phases, blocks in self._sent:
            c.check(Check.PEER_ALIVE, instruction, threads, known[numbers, blocks] <= phases,
                    "its CTA does not wait for the bytes, so it may have exited")  # fmt: skip

    def _check_visible(self, instruction: Instruction, threads: Threads, numbers: Threads) -> None:
        c, maker = self._cohort, self._maker[numbers]
        visible = maker == threads
        visible |= (maker // c.block_size == threads // c.block_size) & (
            c.sync.phase[threads] > self._made_phase[numbers]
        )
        published = np.where(self._fenced[numbers], c.sync.acquired[threads], c.sync.released(threads, maker))
        near = maker // c.cluster_size == threads // c.cluster_size
        visible |= near & (published > self._made_arrivals[numbers])
        c.check(Check.RACE, instruction, threads, ~visible, "the initialisation of the mbarrier is not ordered before")

    def _settle(self) -> None:
        done = (self._pending == 0) & (self._bytes == 0)
        self.phase[done] += 1
        self._pending[done] = self._count[done]
