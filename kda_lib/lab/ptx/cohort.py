"""State of the CTAs that run together: one array element a thread, whole clusters, warps padded to 32 lanes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.alu import DTYPES, Array
from kda_lib.lab.ptx.errors import PtxError, UnsupportedPtx
from kda_lib.lab.ptx.memory import GlobalMemory, SharedMemory
from kda_lib.lab.ptx.parser import BITS, Immediate, Instruction, Kernel, Not, Operand, Register, Symbol
from kda_lib.lab.ptx.report import Check, RunReport
from kda_lib.lab.ptx.sync import Sync

WARP = 32
Extent = tuple[int, int, int]
#: What holds a register of each width.
STORAGE: dict[int, type[np.generic]] = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass(frozen=True)
class Geometry:
    """Launch extents along x, y and z: CTAs, threads of a CTA, CTAs of a cluster."""

    grid: Extent
    block: Extent
    cluster: Extent


class Active:
    """The threads that execute an instruction. whole: no living thread is missing, so registers need no merging."""

    def __init__(self, mask: NDArray[np.bool_], live: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.whole = not (live & ~mask).any()

    @cached_property
    def threads(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.mask)

    @cached_property
    def count(self) -> int:
        return int(np.count_nonzero(self.mask))

    def take(self, values: Array) -> Array:
        """The values of the active threads, in order."""
        return np.broadcast_to(values, self.mask.shape)[self.threads]


class Cohort:
    """Some clusters of one launch, run in lockstep.

    blocks: linear CTA numbers, cluster by cluster in rank order. first_block: how many CTAs of the run came before, so
    that threads of different cohorts have different numbers. ``block_size`` counts the padding of the last warp.
    """

    def __init__(
        self,
        kernel: Kernel,
        geometry: Geometry,
        blocks: list[int],
        first_block: int,
        parameters: dict[str, int],
        memory: GlobalMemory,
        report: RunReport,
    ) -> None:
        self.kernel, self.geometry, self.memory, self.report = kernel, geometry, memory, report
        self.parameters = parameters
        self.blocks = np.array(blocks)
        self.cluster_blocks = prod(geometry.cluster)
        real = prod(geometry.block)
        self.block_size = -(-real // WARP) * WARP
        self.cluster_size = self.block_size * self.cluster_blocks
        self.threads = len(blocks) * self.block_size
        self.first_thread = first_block * self.block_size
        self.local = np.tile(np.arange(self.block_size), len(blocks))
        self.lane = self.local % WARP
        self.live: NDArray[np.bool_] = self.local < real
        self.dependency_met = np.zeros(self.threads, bool)
        self.shared = SharedMemory(len(blocks), kernel.shared_bytes)
        self.sync = Sync(self)
        self._registers: dict[str, Array] = {}
        #: For registers that not every thread has written: which have.
        self._written: dict[str, NDArray[np.bool_]] = {}

    def check(
        self, check: Check, instruction: Instruction, threads: NDArray[np.int64], bad: NDArray[np.bool_], detail: str
    ) -> None:
        """Count a check by some threads, and record those for which it is ``bad``."""
        self.report.checks[check] += len(threads)
        if bad.any():
            who = np.unique(threads[bad])
            self.report.add(check, instruction, (self.blocks[who // self.block_size], self.local[who]), detail)

    def check_alignment(
        self, instruction: Instruction, threads: NDArray[np.int64], addresses: Array, width: int
    ) -> NDArray[np.bool_]:
        aligned = np.asarray(addresses % width == 0)
        self.check(Check.ALIGNMENT, instruction, threads, ~aligned, f"{width} bytes are accessed")
        return aligned

    def with_absent_lanes(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """All threads of the warps in which a living thread is not in ``mask``."""
        absent = (self.live & ~mask).reshape(-1, WARP).any(1)
        return np.repeat(absent, WARP)

    def read(self, operand: Operand, kind: str, active: Active, instruction: Instruction) -> Array:
        """Values of an operand as PTX type ``kind``: one for each thread, or a single one for all."""
        dtype = DTYPES[kind]
        if isinstance(operand, Not):
            return ~self.read(operand.of, kind, active, instruction)
        if isinstance(operand, Register) and operand.bits == BITS[kind]:
            return self._register(operand, active, instruction).view(dtype)
        if isinstance(operand, Immediate):
            size = np.dtype(dtype).itemsize
            value = np.array([operand.bits & ((1 << 8 * size) - 1)], f"u{size}")
            return value.astype(bool) if kind == "pred" else value.view(dtype)
        if not isinstance(operand, Symbol):
            raise PtxError(f"{instruction.text}: {operand} cannot be used as {kind}", instruction.line)
        return self._symbol(operand, instruction).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)

    def write(self, register: Register, values: Array, active: Active) -> None:
        """Set a register of the active threads; ``values`` is not copied and must not change afterwards."""
        values = values.view(STORAGE[register.bits])
        if active.whole:
            self._registers[register.name] = values
            self._written.pop(register.name, None)
            return
        old = self._registers.get(register.name)
        if old is None:
            self._written[register.name] = active.mask.copy()
            old = np.zeros(1, values.dtype)
        elif register.name in self._written:
            self._written[register.name] = self._written[register.name] | active.mask
        self._registers[register.name] = np.where(active.mask, values, old)

    def _register(self, register: Register, active: Active, instruction: Instruction) -> Array:
        values = self._registers.get(register.name)
        if values is None:
            self.check(Check.REGISTER, instruction, active.threads, np.ones(active.count, bool), register.name)
            return np.zeros(1, STORAGE[register.bits])
        written = self._written.get(register.name)
        if written is not None:
            self.check(Check.REGISTER, instruction, active.threads, ~written[active.mask], register.name)
        return values

    def _symbol(self, symbol: Symbol, instruction: Instruction) -> Array:
        if symbol.name in self.kernel.shared:
            return np.array([self.kernel.shared[symbol.name].offset])
        special = self._special.get(symbol.name)
        if special is None:
            raise UnsupportedPtx(symbol.name, instruction.line, "no such register, variable or special register here")
        return special

    @cached_property
    def _special(self) -> dict[str, Array]:
        """Special registers by name."""
        g = self.geometry
        rank = np.arange(len(self.blocks)) % self.cluster_blocks
        values: dict[str, Array] = {
            "%laneid": self.lane,
            "%cluster_ctarank": np.repeat(rank, self.block_size),
            "%cluster_nctarank": np.array([self.cluster_blocks]),
        }
        position = _coordinates(self.blocks, g.grid)
        tables = {
            "tid": ([np.tile(v, len(self.blocks)) for v in _coordinates(np.arange(self.block_size), g.block)], g.block),
            "ctaid": ([np.repeat(v, self.block_size) for v in position], g.grid),
            "cluster_ctaid": (
                [np.repeat(v % n, self.block_size) for v, n in zip(position, g.cluster, strict=True)], g.cluster
            ),
            "clusterid": (
                [np.repeat(v // n, self.block_size) for v, n in zip(position, g.cluster, strict=True)],
                tuple(a // b for a, b in zip(g.grid, g.cluster, strict=True)),
            ),
        }  # fmt: skip
        counts = {"tid": "ntid", "ctaid": "nctaid", "cluster_ctaid": "cluster_nctaid", "clusterid": "nclusterid"}
        for name, (coordinates, extent) in tables.items():
            for axis, value, size in zip("xyz", coordinates, extent, strict=True):
                values[f"%{name}.{axis}"] = value
                values[f"%{counts[name]}.{axis}"] = np.array([size])
        return values


def _coordinates(linear: NDArray[np.int64], extent: Extent) -> list[NDArray[np.int64]]:
    """x, y and z of linear numbers, x fastest."""
    x, y, _ = extent
    return [linear % x, linear // x % y, linear // (x * y)]
