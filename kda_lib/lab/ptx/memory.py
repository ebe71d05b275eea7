"""Global and shared memory: bounds, alignment, initialisation and data races, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.alu import Array
from kda_lib.lab.ptx.mbarrier import MBARRIER_BYTES
from kda_lib.lab.ptx.parser import Instruction
from kda_lib.lab.ptx.report import Check

if TYPE_CHECKING:
    from kda_lib.lab.ptx.cohort import Cohort

Threads = NDArray[np.int64]

#: Buffer i starts at ``(i + 1) << _BUFFER_SHIFT``: no offset that a 32-bit computation makes leads from one to another.
_BUFFER_SHIFT = 40
#: A peer's shared memory is seen at ``(rank + 1) << PEER_SHIFT``. On hardware a CTA's window is inside its cluster's;
#: keeping plain addresses apart shows where ``mapa`` was forgotten.
PEER_SHIFT = 24
#: Memory that nobody wrote holds this byte: NaN as FP32 and as BF16, so that using it shows in the bits too.
_POISON = 0xFF
#: Widest access, ``v4.b64``; storage is padded to it.
_WIDEST = 32
#: Instead of a thread. Mbarrier n stands as writer ``_MBARRIER - n``: what it counted is ordered by its phase.
_NOBODY, _MANY, _MBARRIER = -1, -2, -3


@dataclass
class Buffer:
    """Global memory that is passed to a kernel as a pointer.

    data: C-contiguous; a buffer that is not ``readonly`` is written in place and counts as uninitialised before.
    dependent: the previous kernel on the stream may still use it: not to be touched before ``griddepcontrol.wait``.
    Leave it False where there is no programmatic dependent launch.
    """

    data: NDArray[Any]
    name: str
    readonly: bool = True
    dependent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.data, np.ndarray):
            raise TypeError(f"{self.name}: expected a NumPy array, got {type(self.data).__name__}; convert it")
        if not self.data.flags.c_contiguous:
            raise ValueError(f"{self.name}: expected a C-contiguous array, got strides {self.data.strides}; copy it")
        if not (self.readonly or self.data.flags.writeable):
            raise ValueError(f"{self.name}: expected a writeable array, got a read-only one; copy it")


def _wide_view(storage: NDArray[np.uint8], width: int) -> Array:
    return storage.view(f"u{width}" if width <= 8 else f"V{width}")


def _gather(storage: NDArray[np.uint8], offsets: Threads, width: int) -> NDArray[np.uint8]:
    """[threads, width] bytes at aligned offsets."""
    return _wide_view(storage, width)[offsets // width].view(np.uint8).reshape(-1, width)


def _scatter(storage: NDArray[np.uint8], offsets: Threads, data: NDArray[np.uint8]) -> None:
    width = data.shape[1]
    _wide_view(storage, width)[offsets // width] = _wide_view(np.ascontiguousarray(data).reshape(-1), width)


class Shadow:
    """Who last wrote and read each byte, and when, in barrier phases: enough to tell a race from an ordered access.

    Of several unordered readers only "many" is kept, with the latest phases; a writer must be ordered after those.
    one_cluster: only the threads of one cluster can reach a byte (shared memory).
    """

    def __init__(self, size: int, one_cluster: bool) -> None:
        self.one_cluster = one_cluster
        self.writer = np.full(size, _NOBODY, np.int64)
        self.write_phase = np.zeros(size, np.int64)
        self.write_arrivals = np.zeros(size, np.int64)
        self.reader = np.full(size, _NOBODY, np.int64)
        self.read_block = np.full(size, _NOBODY, np.int64)
        self.read_phase = np.zeros(size, np.int64)
        self.read_arrivals = np.zeros(size, np.int64)

    def read(self, c: Cohort, instruction: Instruction, threads: Threads, offsets: Threads, width: int) -> None:
        who, at = _bytes(threads, offsets, width)
        me = c.first_thread + who
        unwritten = self.writer[at] == _NOBODY
        c.check(Check.INITIALISED, instruction, who, unwritten, "nobody wrote it")
        c.check(Check.RACE, instruction, who, ~unwritten & ~self._after_write(c, who, at), "the write to it is not "
                "ordered before")  # fmt: skip
        block, phase, arrivals = me // c.block_size, c.sync.phase[who], c.sync.arrivals[who]
        concurrent = (self.reader[at] != _NOBODY) & ~self._after_read(c, who, at)
        readers, blocks = concurrent & (self.reader[at] != me), concurrent & (self.read_block[at] != block)
        self.read_phase[at] = np.where(concurrent, np.maximum(phase, self.read_phase[at]), phase)
        self.read_arrivals[at] = np.where(concurrent, np.maximum(arrivals, self.read_arrivals[at]), arrivals)
        self.reader[at], self.read_block[at] = me, block
        # Where another thread reads the same byte by this very instruction, one of the two does not find itself there.
        self.reader[at[readers | (self.reader[at] != me)]] = _MANY
        self.read_block[at[blocks | (self.read_block[at] != block)]] = _MANY

    def write(
        self,
        c: Cohort,
        instruction: Instruction,
        threads: Threads,
        offsets: Threads,
        width: int,
        counted: tuple[Threads, Threads] | None = None,
    ) -> None:
        """counted: mbarriers and their phases that count the bytes of each thread."""
        who, at = _bytes(threads, offsets, width)
        me = c.first_thread + who
        known = self.writer[at] != _NOBODY
        unordered = known & ~self._after_write(c, who, at)
        unordered |= (self.reader[at] != _NOBODY) & ~self._after_read(c, who, at)
        self.writer[at] = me
        unordered |= self.writer[at] != me
        c.check(Check.RACE, instruction, who, unordered, "another access to it is not ordered before")
        if counted is None:
            self.write_phase[at] = c.sync.phase[who]
        else:
            mbarriers, phases = (np.repeat(values, width) for values in counted)
            self.writer[at], self.write_phase[at] = _MBARRIER - mbarriers, phases
        self.write_arrivals[at] = c.sync.arrivals[who]
        self.reader[at] = _NOBODY

    def _after_write(self, c: Cohort, who: Threads, at: Threads) -> NDArray[np.bool_]:
        """Whether the last write is ordered before what threads ``who`` do now."""
        writer, me = self.writer[at], c.first_thread + who
        ordered: NDArray[np.bool_] = writer == me
        ordered |= (writer // c.block_size == me // c.block_size) & (c.sync.phase[who] > self.write_phase[at])
        peer = ~ordered & (writer // c.cluster_size == me // c.cluster_size)
        if peer.any():
            released = c.sync.released(who[peer], writer[peer] - c.first_thread)
            ordered[peer] = released > self.write_arrivals[at[peer]]
        counted = writer <= _MBARRIER
        if counted.any():
            observed = c.sync.mbarriers.observed[_MBARRIER - writer[counted], who[counted]]
            ordered[counted] = observed > self.write_phase[at[counted]]
        return ordered

    def _after_read(self, c: Cohort, who: Threads, at: Threads) -> NDArray[np.bool_]:
        """Whether all reads since the last write are ordered before what threads ``who`` do now."""
        me = c.first_thread + who
        ordered: NDArray[np.bool_] = self.reader[at] == me
        ordered |= (self.read_block[at] == me // c.block_size) & (c.sync.phase[who] > self.read_phase[at])
        near = self.one_cluster | (self.read_block[at] // c.cluster_blocks == me // c.cluster_size)
        ordered |= near & (c.sync.acquired[who] > self.read_arrivals[at])
        return ordered


def _bytes(threads: Threads, offsets: Threads, width: int) -> tuple[Threads, Threads]:
    """One entry for each byte that a thread accesses."""
    return np.repeat(threads, width), (offsets[:, None] + np.arange(width)).ravel()


@dataclass
class _Region:
    buffer: Buffer
    start: int
    storage: NDArray[np.uint8]
    shadow: Shadow | None


class GlobalMemory:
    """All buffers of a launch, far apart in one address space."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    def place(self, buffer: Buffer) -> int:
        """The address of a buffer; the same buffer given twice has one address."""
        for region in self._regions:
            if region.buffer is buffer:
                return region.start
        size = buffer.data.nbytes
        storage = np.full(-(-size // _WIDEST) * _WIDEST, _POISON, np.uint8)
        if buffer.readonly:
            storage[:size] = np.frombuffer(buffer.data, np.uint8)
        start = (len(self._regions) + 1) << _BUFFER_SHIFT
        self._regions.append(
            _Region(buffer, start, storage, None if buffer.readonly else Shadow(size, one_cluster=False))
        )
        return start

    def write_back(self) -> None:
        """Copy what was written into the callers' arrays; bytes that nobody wrote keep the caller's value."""
        for region in self._regions:
            if region.shadow is not None:
                data = region.buffer.data.reshape(-1).view(np.uint8)
                written = region.shadow.writer != _NOBODY
                data[written] = region.storage[: data.size][written]

    def load(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, width: int, coherent: bool
    ) -> NDArray[np.uint8]:
        data = np.full((len(threads), width), _POISON, np.uint8)
        for region, mine, offsets in self._visits(c, instruction, threads, addresses, width):
            who = threads[mine]
            writable = region.buffer.dependent or not region.buffer.readonly
            if not coherent:
                c.check(Check.COHERENT, instruction, who, np.full(len(who), writable), f"it is in {region.buffer.name}")
            if region.shadow is not None:
                region.shadow.read(c, instruction, who, offsets, width)
            data[mine] = _gather(region.storage, offsets, width)
        return data

    def store(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, data: NDArray[np.uint8]
    ) -> None:
        width = data.shape[1]
        for region, mine, offsets in self._visits(c, instruction, threads, addresses, width):
            who, read_only = threads[mine], region.shadow is None
            c.check(Check.READ_ONLY, instruction, who, np.full(len(who), read_only), f"it is in {region.buffer.name}")
            if region.shadow is not None:
                region.shadow.write(c, instruction, who, offsets, width)
                _scatter(region.storage, offsets, data[mine])

    def _visits(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, width: int
    ) -> list[tuple[_Region, Threads, Threads]]:
        """For each buffer: which of the accesses are legal ones into it, and at what offsets."""
        visits = []
        aligned = c.check_alignment(instruction, threads, addresses, width)
        inside = np.zeros(len(threads), bool)
        for region in self._regions:
            offsets = addresses.astype(np.int64) - region.start
            hit = (offsets >= 0) & (offsets <= region.buffer.data.nbytes - width)
            inside |= hit
            mine = np.flatnonzero(hit & aligned)
            if len(mine):
                if region.buffer.dependent:
                    early = ~c.dependency_met[threads[mine]]
                    c.check(Check.DEPENDENT, instruction, threads[mine], early, f"it is in {region.buffer.name}")
                visits.append((region, mine, offsets[mine]))
        c.check(Check.BOUNDS, instruction, threads, ~inside, self._nearest(addresses[~inside]))
        return visits

    def _nearest(self, outside: Array) -> str:
        """Where the first of some addresses would be, in words."""
        if not len(outside):
            return ""
        number = min(max(int(outside[0] + (1 << (_BUFFER_SHIFT - 1))) >> _BUFFER_SHIFT, 1), len(self._regions)) - 1
        if number < 0:
            return f"address {int(outside[0]):#x}, and the kernel has no buffer"
        region = self._regions[number]
        return f"byte {int(outside[0]) - region.start} of {region.buffer.name}, which has {region.buffer.data.nbytes}"


@dataclass
class SharedMemory:
    """Shared memory of all CTAs of a cohort, ``size`` bytes each."""

    blocks: int
    size: int
    storage: NDArray[np.uint8] = field(init=False)
    shadow: Shadow = field(init=False)
    stride: int = field(init=False)

    def __post_init__(self) -> None:
        self.stride = -(-self.size // _WIDEST) * _WIDEST
        self.storage = np.full(self.blocks * self.stride, _POISON, np.uint8)
        self.shadow = Shadow(self.blocks * self.stride, one_cluster=True)

    def load(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, width: int, cluster: bool
    ) -> NDArray[np.uint8]:
        data = np.full((len(threads), width), _POISON, np.uint8)
        mine, places = self._places(c, instruction, threads, addresses, width, cluster)
        self.shadow.read(c, instruction, threads[mine], places, width)
        data[mine] = _gather(self.storage, places, width)
        return data

    def store(
        self,
        c: Cohort,
        instruction: Instruction,
        threads: Threads,
        addresses: Array,
        data: NDArray[np.uint8],
        cluster: bool,
    ) -> None:
        mine, places = self._places(c, instruction, threads, addresses, data.shape[1], cluster)
        self.shadow.write(c, instruction, threads[mine], places, data.shape[1])
        _scatter(self.storage, places, data[mine])

    def store_async(
        self,
        c: Cohort,
        instruction: Instruction,
        threads: Threads,
        addresses: Array,
        data: NDArray[np.uint8],
        mbarriers: Array,
    ) -> None:
        """Store into the cluster, and count the bytes on mbarriers in the CTAs that get them."""
        width = data.shape[1]
        mine, places = self._places(c, instruction, threads, addresses, width, cluster=True, keep_alive=False)
        found, numbers, at = self.mbarriers(c, instruction, threads[mine], mbarriers[mine], cluster=True)
        mine, places = mine[found], places[found]
        block = places // self.stride
        apart = block != at // self.stride
        c.check(Check.BOUNDS, instruction, threads[mine], apart, "data and mbarrier are in different CTAs")
        phases = c.sync.mbarriers.complete(instruction, threads[mine], numbers, width, block)
        self.shadow.write(c, instruction, threads[mine], places, width, (numbers, phases))
        _scatter(self.storage, places, data[mine])

    def make_mbarriers(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, counts: Threads
    ) -> None:
        mine, places = self._places(c, instruction, threads, addresses, MBARRIER_BYTES, cluster=False)
        self.shadow.write(c, instruction, threads[mine], places, MBARRIER_BYTES)
        c.sync.mbarriers.make(instruction, threads[mine], places, counts[mine])

    def mbarriers(
        self, c: Cohort, instruction: Instruction, threads: Threads, addresses: Array, cluster: bool
    ) -> tuple[NDArray[np.bool_], Threads, Threads]:
        """Which threads name an mbarrier; the numbers of those, and their places in the storage."""
        mine, places = self._places(c, instruction, threads, addresses, MBARRIER_BYTES, cluster, keep_alive=False)
        known, numbers = c.sync.mbarriers.find(instruction, threads[mine], places)
        found = np.zeros(len(threads), bool)
        found[mine[known]] = True
        return found, numbers, places[known]

    def _places(
        self,
        c: Cohort,
        instruction: Instruction,
        threads: Threads,
        addresses: Array,
        width: int,
        cluster: bool,
        keep_alive: bool = True,
    ) -> tuple[Threads, Threads]:
        """Which accesses are legal, and where in the storage they go.

        keep_alive: a peer must be kept alive by a cluster barrier (not where it waits for the access itself).
        """
        own = threads // c.block_size
        offsets = (addresses & ((1 << PEER_SHIFT) - 1)).astype(np.int64)
        rank = (addresses >> PEER_SHIFT).astype(np.int64) - 1
        block = np.where(rank < 0, own, own // c.cluster_blocks * c.cluster_blocks + rank)
        reachable = (rank < c.cluster_blocks) if cluster else (block == own)
        inside = reachable & (offsets <= self.size - width)
        c.check(Check.BOUNDS, instruction, threads, ~inside, f"shared memory has {self.size} bytes a CTA")
        aligned = c.check_alignment(instruction, threads, offsets, width)
        peer = inside & (block != own)
        if peer.any():
            early = peer & (c.sync.waits[threads] == 0)
            c.check(Check.PEER_ALIVE, instruction, threads, early, "no cluster barrier has completed, so the peer may "
                    "not have started")  # fmt: skip
            if keep_alive:
                c.sync.touch_peers(instruction, threads[peer], block[peer])
        mine = np.flatnonzero(inside & aligned)
        return mine, block[mine] * self.stride + offsets[mine]
