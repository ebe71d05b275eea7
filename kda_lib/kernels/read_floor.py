"""Read the packed weight and F_B once and do nothing else: how fast the memory can be read at all.

``ReadLoads`` reads by 16-byte loads, ``ReadBulk`` by ``cp.async.bulk`` into a ring in shared memory, one warp a block.

What is read is also XORed into ``out``, if ``out`` is not null. The timed launch passes null and the check passes an
address, so it is the timed machine code itself that is shown to read every byte. The XOR keeps the loads alive; bulk
copies need no such care, and their data is looked at only when ``out`` is given.

With programmatic dependent launch the next launch may start reading at once, as nobody writes weights. The dependency
wait is at the end: a launch is not complete before the one in front of it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr

from kda_lib.kernels.config import WARP
from kda_lib.kernels.lab_config import BARRIER_BYTES, VECTOR_BYTES, ReadBulkConfig, ReadLoadsConfig
from kda_lib.kernels.ptx import asm, expect_bytes
from kda_lib.kernels.ring import (
    copy_bulk,
    evict_first,
    fence_async_proxy,
    init_barrier,
    load_shared_vector,
    publish_barriers,
    wait_parity,
)


class _Reader:
    """What both kernels share: the arguments and the launch."""

    def __init__(self, config) -> None:
        self.config = config

    @staticmethod
    def trace_arguments() -> list[cute.Pointer]:
        """Null pointers for the packed weight, F_B and out (one 32-bit word, or null)."""
        return [make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)] * 3

    def finish(self, sum: Uint32, out: cute.Pointer) -> None:
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
        xor_if_given(out.toint(), sum)


class ReadLoads(_Reader):
    """The kernel for one :class:`ReadLoadsConfig`.

    A thread keeps ``loads`` loads in flight, ``threads`` vectors apart, and the grid strides over the packed weight.
    What does not fill a round of the grid, and F_B, are spread over all threads, so that none has more than one load
    more than another.
    """

    config: ReadLoadsConfig

    @cute.jit
    def __call__(self, packed: cute.Pointer, f_b: cute.Pointer, out: cute.Pointer):
        launch = self.config.launch
        self.kernel(packed, f_b, out).launch(grid=[launch.grid, 1, 1], block=[launch.block, 1, 1], use_pdl=launch.pdl)

    @cute.kernel
    def kernel(self, packed: cute.Pointer, f_b: cute.Pointer, out: cute.Pointer):
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        policy = evict_first() if cutlass.const_expr(c.evict_first) else None
        sum = Uint32(0)
        everybody = c.ctas * c.threads
        vectors = c.packed_bytes // VECTOR_BYTES
        rounds = vectors // (everybody * c.loads)
        start = packed.toint() + Int64((block * c.threads * c.loads + thread) * VECTOR_BYTES)
        for i in cutlass.range(rounds, unroll=1):
            address = start + Int64(i) * (everybody * c.loads * VECTOR_BYTES)
            words = [load(address + Int64(j * c.threads * VECTOR_BYTES), policy) for j in range(c.loads)]
            sum = xor(sum, words)

        me = block * c.threads + thread
        words = self.remainder(packed, rounds * everybody * c.loads, vectors, me, policy)
        words += self.remainder(f_b, 0, c.f_b_bytes // VECTOR_BYTES, me, policy)
        self.finish(xor(sum, words), out)

    def remainder(self, region: cute.Pointer, done: int, end: int, me: Int32, policy: Int64 | None) -> list[tuple]:
        """This thread's share of the vectors from ``done`` to ``end``, all loads in flight together."""
        everybody = self.config.ctas * self.config.threads
        words = []
        for first in range(done, end, everybody):
            address = region.toint() + Int64(first + me) * VECTOR_BYTES
            whole = first + everybody <= end
            words.append(load(address, policy) if whole else load_if(me < end - first, address, policy))
        return words


class ReadBulk(_Reader):
    """The kernel for one :class:`ReadBulkConfig`.

    The regions are cut into chunks of ``stage_bytes``; block b reads chunks b, b + ctas, and so on. Its i-th chunk goes
    through stage ``i % stages``, whose barrier is then in phase ``i // stages``: lane 0 arms the barrier and issues the
    copy, all lanes wait for the parity of that phase, and only when all have seen it end may lane 0 arm it again.
    """

    config: ReadBulkConfig

    @cute.jit
    def __call__(self, packed: cute.Pointer, f_b: cute.Pointer, out: cute.Pointer):
        launch = self.config.launch
        self.kernel(packed, f_b, out).launch(
            grid=[launch.grid, 1, 1], block=[launch.block, 1, 1], smem=launch.smem, use_pdl=launch.pdl
        )

    @cute.kernel
    def kernel(self, packed: cute.Pointer, f_b: cute.Pointer, out: cute.Pointer):
        c = self.config
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ring = cute.arch.get_dyn_smem(Int32, alignment=128).toint()
        barriers = ring + c.stages * c.stage_bytes
        mine = ((c.packed_bytes + c.f_b_bytes) // c.stage_bytes - block + c.ctas - 1) // c.ctas
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        policy = evict_first() if cutlass.const_expr(c.evict_first) else None
        if lane == 0:
            for s in cutlass.range(c.stages, unroll=1):
                init_barrier(barriers + s * BARRIER_BYTES, 1)
            publish_barriers()
            for i in cutlass.range(cutlass.min(mine, c.stages), unroll=1):
                self.issue(i, block, packed, f_b, ring, barriers, policy)
        cute.arch.sync_warp()

        checked = out.toint() != 0
        sum = Uint32(0)
        for i in cutlass.range(mine, unroll=1):
            stage = i % c.stages
            wait_parity(barriers + stage * BARRIER_BYTES, i // c.stages % 2)
            if checked:
                for v in cutlass.range(lane, c.stage_bytes // VECTOR_BYTES, WARP, unroll=1):
                    sum = xor(sum, [load_shared_vector(ring + stage * c.stage_bytes + v * VECTOR_BYTES)])
                # The next copy into this stage is made by the asynchronous proxy, after these reads.
                fence_async_proxy()
            cute.arch.sync_warp()
            if lane == 0 and i + c.stages < mine:
                self.issue(i + c.stages, block, packed, f_b, ring, barriers, policy)
        self.finish(sum, out)

    def issue(self, i: Int32, block: Int32, packed, f_b, ring: Int32, barriers: Int32, policy: Int64 | None) -> None:
        """Arm the barrier of this block's i-th chunk and start its copy."""
        c = self.config
        chunk = block + i * c.ctas
        in_packed = c.packed_bytes // c.stage_bytes
        f_b_start = f_b.toint() - Int64(c.packed_bytes)
        source = select(chunk < in_packed, packed.toint(), f_b_start) + Int64(chunk) * c.stage_bytes
        stage = i % c.stages
        barrier = barriers + stage * BARRIER_BYTES
        expect_bytes(barrier, c.stage_bytes)
        copy_bulk(ring + stage * c.stage_bytes, source, c.stage_bytes, barrier, policy)


def xor(sum: Uint32, vectors: list[tuple]) -> Uint32:
    for vector in vectors:
        for word in vector:
            sum = sum ^ word
    return sum


def load(address: Int64, policy: Int64 | None) -> tuple[Uint32, ...]:
    """16 bytes: ``ld.global.nc.L1::no_allocate.v4.b32``, with ``L2::cache_hint`` if there is a policy."""
    if policy is None:
        return asm("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [address], ordered=True)
    code = "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $5;"
    return asm(code, [Uint32] * 4, [address, policy], ordered=True)


def load_if(condition: cutlass.Boolean, address: Int64, policy: Int64 | None) -> tuple[Uint32, ...]:
    """As :func:`load` where the condition holds, else four zeros: a predicated load, which does not break the batch."""
    hint, argument = ("", "") if policy is None else (".L2::cache_hint", ", $6")
    code = (
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@p ld.global.nc.L1::no_allocate{hint}.v4.b32 {{$0, $1, $2, $3}}, [$4]{argument}; }}"
    )
    operands = [address, Int32(condition)] + ([] if policy is None else [policy])
    return asm(code, [Uint32] * 4, operands, ordered=True)


def select(condition: cutlass.Boolean, yes: Int64, no: Int64) -> Int64:
    """``yes`` where the condition holds, else ``no``: ``selp.b64``."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.b64 $0, $2, $3, p; }"
    return asm(code, [Int64], [Int32(condition), yes, no])


def xor_if_given(address: Int64, value: Uint32) -> None:
    """``red.global.xor.b32`` unless the address is null."""
    code = "{ .reg .pred p; setp.ne.b64 p, $0, 0; @p red.global.xor.b32 [$0], $1; }"
    asm(code, [], [address, value], ordered=True)


# The names that profilers and PTX show.
ReadLoads.kernel.set_name_prefix("kda_read_loads", remove_cutlass_symbol=True, keep_mangled_name=False)
ReadBulk.kernel.set_name_prefix("kda_read_bulk", remove_cutlass_symbol=True, keep_mangled_name=False)
