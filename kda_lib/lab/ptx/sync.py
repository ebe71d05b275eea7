"""Barriers of CTAs and clusters, and waits for mbarriers: who waits, who is let go, and what is ordered by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.mbarrier import Mbarriers
from kda_lib.lab.ptx.parser import Instruction
from kda_lib.lab.ptx.report import Check

if TYPE_CHECKING:
    from kda_lib.lab.ptx.cohort import Cohort

Threads = NDArray[np.int64]
Mask = NDArray[np.bool_]
_NOT_WAITING, _CLUSTER, _MBARRIER = -1, -2, -3


class Sync:
    """Barrier state of every thread of a cohort.

    phase: completed CTA barriers. arrivals, waits: cluster barriers arrived at and waited for. acquired: cluster
    barriers whose released writes the thread may read, by its own wait or by a CTA barrier after another thread's.
    """

    def __init__(self, cohort: Cohort) -> None:
        count = cohort.threads
        self._cohort = cohort
        self.phase = np.zeros(count, np.int64)
        self.arrivals = np.zeros(count, np.int64)
        self.waits = np.zeros(count, np.int64)
        self.acquired = np.zeros(count, np.int64)
        #: Row n: for each thread, its last arrival with release semantics among the first n.
        self._releases = [np.zeros(count, np.int64)]
        #: CTA barrier that the thread waits at, or one of the constants.
        self._barrier = np.full(count, _NOT_WAITING, np.int64)
        self._resume = np.zeros(count, np.int64)
        self.mbarriers = Mbarriers(cohort)
        self._mbarrier = np.zeros((2, count), np.int64)
        self._instructions: dict[int, Instruction] = {}
        self._line = np.zeros(count, np.int64)
        self._touches: list[tuple[Instruction, Threads, Threads, Threads]] = []

    def released(self, readers: Threads, writers: Threads) -> Threads:
        """The last releasing arrival of each writer that its reader has waited for."""
        return np.stack(self._releases)[self.acquired[readers], writers]

    def wait_cta(self, instruction: Instruction, mask: Mask, barrier: int, resume: int) -> None:
        """These threads wait at a CTA barrier and go on at block ``resume``."""
        c = self._cohort
        partial = mask & c.with_absent_lanes(mask)
        c.check(Check.BARRIER, instruction, np.flatnonzero(mask), partial[mask], "only a part of the warp reached it")
        self._block(instruction, mask, barrier, resume)

    def arrive_cluster(self, instruction: Instruction, mask: Mask, release: bool) -> None:
        c, who = self._cohort, np.flatnonzero(mask)
        again = self.arrivals[who] > self.waits[who]
        c.check(Check.CLUSTER_BARRIER, instruction, who, again, "a second arrive without a wait between")
        self.arrivals[who] += 1
        while len(self._releases) <= self.arrivals.max():
            self._releases.append(self._releases[-1].copy())
        if release:
            for number in np.unique(self.arrivals[who]):
                now = who[self.arrivals[who] == number]
                self._releases[number][now] = number

    def wait_cluster(self, instruction: Instruction, mask: Mask, resume: int) -> Mask:
        """These threads wait for the cluster barrier; returns those that cannot, having never arrived."""
        c, who = self._cohort, np.flatnonzero(mask)
        none = self.arrivals[who] == self.waits[who]
        c.check(Check.CLUSTER_BARRIER, instruction, who, none, "a wait without an arrive")
        lost = np.zeros_like(mask)
        lost[who[none]] = True
        self._block(instruction, mask & ~lost, _CLUSTER, resume)
        return lost

    def wait_mbarrier(
        self, instruction: Instruction, threads: Threads, numbers: Threads, parities: Threads, resume: int
    ) -> None:
        """These threads wait until the mbarrier's phase of this parity is complete."""
        mask = np.zeros(self._cohort.threads, bool)
        mask[threads] = True
        self._mbarrier[:, threads] = numbers, parities
        self._block(instruction, mask, _MBARRIER, resume)

    def touch_peers(self, instruction: Instruction, threads: Threads, blocks: Threads) -> None:
        """Remember that threads accessed the shared memory of other CTAs (numbered within the cohort)."""
        self._touches.append((instruction, threads, blocks, self.arrivals[threads]))

    def release(self) -> dict[int, Mask]:
        """Let go whoever waits at a complete barrier: block to resume at -> threads.

        Called when no thread can run. If no barrier is complete, the waiting threads are reported and end.
        """
        go = self._release_ctas() | self._release_clusters() | self._release_mbarriers()
        self._barrier[go] = _NOT_WAITING
        waiting = self._barrier != _NOT_WAITING
        if not go.any() and waiting.any():
            for line in np.unique(self._line[waiting]):
                stuck = waiting & (self._line == line)
                everyone = np.ones(int(stuck.sum()), bool)
                self._cohort.check(Check.BARRIER, self._instructions[int(line)], np.flatnonzero(stuck),
                                   everyone, "it never completes: others do not arrive")  # fmt: skip
            self._barrier[waiting] = _NOT_WAITING
            self._cohort.live &= ~waiting
        return {int(block): go & (self._resume == block) for block in np.unique(self._resume[go])}

    def check_end(self) -> None:
        """Each CTA whose shared memory a peer accessed must have waited for a later barrier of that peer."""
        self.mbarriers.check_received()
        c = self._cohort
        last_wait = self.waits.reshape(-1, c.block_size).max(1)
        for instruction, threads, blocks, arrivals in self._touches:
            c.check(Check.PEER_ALIVE, instruction, threads, last_wait[blocks] <= arrivals,
                    "the peer waits for no later cluster barrier, so it may have exited")  # fmt: skip

    def _block(self, instruction: Instruction, mask: Mask, barrier: int, resume: int) -> None:
        self._barrier[mask], self._resume[mask], self._line[mask] = barrier, resume, instruction.line
        self._instructions[instruction.line] = instruction

    def _release_ctas(self) -> Mask:
        c = self._cohort
        barrier = self._barrier.reshape(-1, c.block_size)
        live = c.live.reshape(barrier.shape)
        number = barrier.max(1, keepdims=True)
        complete = (number >= 0) & ((barrier == number) | ~live).all(1, keepdims=True)
        go: Mask = complete & live
        if go.any():
            done = complete[:, 0]
            self.phase.reshape(barrier.shape)[go] += 1
            for state in (self.acquired, c.dependency_met, *self.mbarriers.observed):
                # What one thread of the CTA has acquired, all have after the barrier.
                rows = state.reshape(barrier.shape)
                rows[done] = rows[done].max(1, keepdims=True)
        return go.reshape(-1)

    def _release_clusters(self) -> Mask:
        c = self._cohort
        rows = (-1, c.cluster_size)
        waiting = (self._barrier == _CLUSTER).reshape(rows)
        arrived = np.where(c.live, self.arrivals, np.iinfo(np.int64).max).reshape(rows).min(1, keepdims=True)
        go: Mask = (waiting & (arrived > self.waits.reshape(rows))).reshape(-1)
        self.waits[go] += 1
        self.acquired[go] = self.waits[go]
        return go

    def _release_mbarriers(self) -> Mask:
        go: Mask = self._barrier == _MBARRIER
        numbers, parities = self._mbarrier[:, go]
        go[go] = self.mbarriers.complete_for(numbers, parities)
        numbers = self._mbarrier[0, go]
        self.mbarriers.observed[numbers, np.flatnonzero(go)] = self.mbarriers.phase[numbers]
        return go
