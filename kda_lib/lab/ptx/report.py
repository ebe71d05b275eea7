"""What a run did and what it did wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.parser import Instruction


class Check(StrEnum):
    """What is checked; the value is the wording of tables."""

    BOUNDS = "access inside a buffer"
    ALIGNMENT = "access aligned to its size"
    INITIALISED = "memory written before it is read"
    REGISTER = "register written before it is read"
    READ_ONLY = "no write to a read-only buffer"
    DEPENDENT = "no access to a dependent buffer before griddepcontrol.wait"
    COHERENT = "no non-coherent load of memory that a kernel in flight may write"
    RACE = "conflicting accesses ordered by a barrier"
    BARRIER = "barrier reached by whole warps, and completed"
    CLUSTER_BARRIER = "cluster barrier: arrive and wait alternate"
    PEER_ALIVE = "peer shared memory accessed only while the peer is known to run"
    SHUFFLE = "lanes of a warp-wide instruction take part in it"


@dataclass
class Violation:
    """One check that failed at one instruction.

    block, thread: the first offender: ``blockIdx`` linearised, ``threadIdx`` linearised. count: offending threads, over
    all executions of the instruction.
    """

    check: Check
    line: int
    text: str
    block: int
    thread: int
    detail: str
    count: int

    def __str__(self) -> str:
        return (
            f"PTX line {self.line}: {self.text}: expected {self.check}: {self.detail} "
            f"(block {self.block}, thread {self.thread}; {self.count} in all)"
        )


@dataclass
class RunReport:
    """executed: instructions by opcode, counted for each thread. checks: how often each check was made, in threads.

    blocks, threads: how many ran.
    """

    entry: str
    blocks: int = 0
    threads: int = 0
    executed: Counter[str] = field(default_factory=Counter)
    checks: Counter[Check] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations

    def failed(self, check: Check) -> list[Violation]:
        """The violations of one check."""
        return [v for v in self.violations if v.check is check]

    def add(
        self,
        check: Check,
        instruction: Instruction,
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        detail: str,
    ) -> None:
        """Record a violation by the threads at ``places`` (blocks, threads)."""
        blocks, threads = places
        for known in self.violations:
            if known.check is check and known.line == instruction.line and known.text == instruction.text:
                known.count += len(blocks)
                return
        self.violations.append(
            Violation(check, instruction.line, instruction.text, int(blocks[0]), int(threads[0]), detail, len(blocks))
        )

    def __str__(self) -> str:
        head = f"{self.entry}: {self.blocks} blocks, {self.threads} threads, {self.executed.total()} instructions"
        return "\n".join([head, *map(str, self.violations)] if self.violations else [f"{head}, no violation"])
