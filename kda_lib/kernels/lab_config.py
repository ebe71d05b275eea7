"""Configurations of the kernels that measure the device rather than compute: read floors and time stamps.

Frozen, validated before anything is compiled, importable without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_lib.arch import Arch
from kda_lib.kernels.config import MAX_THREADS, WARP, Launch, _require

#: Bytes of the widest load, ``ld.global.v4.b32``, and the alignment that ``cp.async.bulk`` asks for.
VECTOR_BYTES = 16
#: Bytes of an mbarrier object (PTX ISA, "mbarrier: Size and alignment of mbarrier object").
BARRIER_BYTES = 8
#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the most shared memory of a block,
#: 227 KB on 9.0, 10.x and 11.0, 99 KB on 12.x.
SHARED_BYTES = 227 * 1024
SHARED_BYTES_CONSUMER = 99 * 1024


def shared_bytes(arch: Arch) -> int:
    """The most shared memory that one block may have on this target, from sm_90 on."""
    return SHARED_BYTES_CONSUMER if arch.major == 12 else SHARED_BYTES


@dataclass(frozen=True)
class ReadLoadsConfig:
    """Read two regions once by plain 16-byte loads. See :mod:`kda_lib.kernels.read_floor`.

    packed_bytes, f_b_bytes: sizes of the regions. ctas: blocks. loads: independent loads of a thread in flight.
    evict_first: whether lines are marked for early eviction from L2.
    """

    packed_bytes: int
    f_b_bytes: int
    ctas: int
    threads: int
    loads: int
    evict_first: bool
    pdl: bool

    @property
    def launch(self) -> Launch:
        return Launch(self.ctas, self.threads, 1, self.pdl)

    def validate(self, arch: Arch) -> ReadLoadsConfig:
        """Return self.

        Raises:
            ValueError: the target lacks something, or the numbers do not divide.
        """
        _validate_regions(self.packed_bytes, self.f_b_bytes, VECTOR_BYTES)
        _require(self.ctas >= 1, "ctas", "at least 1", self.ctas, "use a multiple of the number of SMs")
        _require(self.threads in range(WARP, MAX_THREADS + 1, WARP), "threads",
                f"a multiple of {WARP} up to {MAX_THREADS}", self.threads, "fill whole warps")  # fmt: skip
        _require(1 <= self.loads <= 16, "loads", "1 to 16 vectors in flight a thread", self.loads,
                "more of them spill registers")  # fmt: skip
        _require(not self.pdl or arch.has_pdl, "pdl", f"False on {arch}, which has no griddepcontrol", self.pdl,
                "use pdl=False")  # fmt: skip
        return self


@dataclass(frozen=True)
class ReadBulkConfig:
    """Read two regions once by bulk copies into shared memory. See :mod:`kda_lib.kernels.read_floor`.

    packed_bytes, f_b_bytes: sizes of the regions. ctas: blocks, one warp each. stages: copies in flight of a block,
    of stage_bytes each. evict_first: whether lines are marked for early eviction from L2.
    """

    packed_bytes: int
    f_b_bytes: int
    ctas: int
    stages: int
    stage_bytes: int
    evict_first: bool
    pdl: bool

    @property
    def launch(self) -> Launch:
        return Launch(self.ctas, WARP, 1, self.pdl, smem=self.stages * (self.stage_bytes + BARRIER_BYTES))

    def validate(self, arch: Arch) -> ReadBulkConfig:
        """Return self.

        Raises:
            ValueError: the target lacks something, or the numbers do not divide.
        """
        # The copy's destination is in the shared::cluster state space: what has clusters has the copy.
        _require(arch.has_clusters, "target", "sm_90 or higher", arch, "it has no cp.async.bulk; use ReadLoadsConfig")
        lane_bytes = WARP * VECTOR_BYTES
        _require(self.stage_bytes >= lane_bytes and self.stage_bytes % lane_bytes == 0, "stage_bytes",
                f"a multiple of {lane_bytes}", self.stage_bytes, "every lane checks whole vectors")  # fmt: skip
        _validate_regions(self.packed_bytes, self.f_b_bytes, self.stage_bytes)
        _require(self.ctas >= 1, "ctas", "at least 1", self.ctas, "use the number of SMs")
        _require(self.stages >= 1, "stages", "at least 1", self.stages, "use a positive number")
        _require(self.launch.smem <= shared_bytes(arch), "shared memory of a block",
                f"at most {shared_bytes(arch)} bytes on {arch}", self.launch.smem, "lower stages")  # fmt: skip
        return self


@dataclass(frozen=True)
class StampConfig:
    """Write the time and the SM to memory, by one thread. See :mod:`kda_lib.kernels.stamp`."""

    @property
    def launch(self) -> Launch:
        return Launch(1, 1, 1, False)

    def validate(self, arch: Arch) -> StampConfig:
        """Return self: every target has the special registers."""
        return self


def _validate_regions(packed_bytes: int, f_b_bytes: int, unit: int) -> None:
    for name, size in (("packed_bytes", packed_bytes), ("f_b_bytes", f_b_bytes)):
        _require(size >= unit and size % unit == 0, name, f"a multiple of {unit}", size,
                "a copy must not cross the end of a region")  # fmt: skip
