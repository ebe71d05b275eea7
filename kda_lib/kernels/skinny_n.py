"""Skinny GEMM with few output columns: ``out[M, N] = x[M, K] @ w[N, K].T`` for M up to 16 and long K (F_A/beta).

Work split: a CTA owns ``rows`` weight rows; ``split`` CTAs of one cluster share those rows and divide K. A thread owns
``steps`` 16-byte vectors of K for all its rows and up to ``tokens`` tokens, so each converted operand is used
``tokens`` or ``rows`` times. Sums are added up over the lanes of a warp, the warps of a CTA, and the CTAs of the
cluster, which send them to its first CTA.

Bits: the order of additions depends on K, ``split`` and ``steps`` only, never on M or on the other rows.
With programmatic dependent launch the weights are loaded before the dependency wait and x after it.

Scope: BF16 in, BF16 out, FP32 accumulation, contiguous rows. Not here: bias, scaling, M above 16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from kda_lib.kernels import ptx
from kda_lib.kernels.config import BF16_BYTES, VECTOR, WARP, SkinnyNConfig
from kda_lib.kernels.reduce import arrange, butterfly_sum
from kda_lib.kernels.tile import multiply_tile


class SkinnyN:
    """The kernel for one :class:`SkinnyNConfig`."""

    def __init__(self, config: SkinnyNConfig) -> None:
        self.config = config

    @staticmethod
    def trace_arguments() -> list[cute.Pointer]:
        """Null pointers for x, w and out: all that tracing needs."""
        return [make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=16)] * 3

    @cute.jit
    def __call__(self, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer):
        launch = self.config.launch
        self.kernel(x, w, out).launch(
            grid=[launch.grid, 1, 1],
            block=[launch.block, 1, 1],
            cluster=[launch.cluster, 1, 1],
            use_pdl=launch.pdl,
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer):
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = block % c.split
        first_row = block // c.split * c.rows
        group = thread // c.k_threads
        k_thread = thread % c.k_threads
        lane = thread % WARP
        values = c.rows * c.tokens * c.groups * c.passes
        partial = cute.arch.alloc_smem(Float32, c.warps * values, alignment=16).toint()

        k_first = (rank * c.k_threads * c.steps + k_thread) * VECTOR
        weights = self.load_tile(ptx.load_weights, w, [first_row + s for s in range(c.rows)], k_first)
        if cutlass.const_expr(c.split > 1):
            gathered = cute.arch.alloc_smem(Float32, c.split * values, alignment=16).toint()
            arrived = cute.arch.alloc_smem(Int64, 1).toint()
            if rank == 0 and thread == 0:
                ptx.init_barrier(arrived)
            # Nobody may send before the barrier exists.
            cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        flip, arranged = arrange(lane, c.tokens)
        for p in cutlass.range(c.passes, unroll=1):
            share = p * c.groups + group
            # A group past M repeats the last token; its sums are not stored.
            tokens = [cutlass.min(share * c.tokens + (flip ^ s), c.m - 1) for s in range(c.tokens)]
            inputs = self.load_tile(ptx.load_inputs, x, tokens, k_first)
            mine, first, replicas = butterfly_sum(multiply_tile(c.fma, weights, inputs), lane, arranged=arranged)
            address = partial + (k_thread // WARP * values + share * (c.rows * c.tokens) + first) * 4
            if (lane & replicas) == 0:
                for i in cutlass.range_constexpr(len(mine)):
                    ptx.store_shared(address + i * 4, mine[i])
        cute.arch.sync_threads()

        if cutlass.const_expr(c.split > 1):
            cute.arch.cluster_wait()
            # One value a lane and neighbouring addresses: the network between SMs carries whole warps of values.
            outbox = ptx.cluster_address(gathered + rank * (values * 4), Int32(0))
            remote_arrived = ptx.cluster_address(arrived, Int32(0))
            for value in cutlass.range(thread, values, c.launch.block, unroll=1):
                ptx.store_async(outbox + value * 4, self.total(partial, value, c.warps, values), remote_arrived)
            if rank == 0:
                # Only now: the phase stays open until this arrival, and racecheck takes an arrival right after the
                # barrier's initialisation for a race.
                if thread == 0:
                    ptx.expect_bytes(arrived, c.split * values * 4)
                ptx.wait_bytes(arrived)
                self.store(out, gathered, c.split, values, first_row, thread)
        else:
            self.store(out, partial, c.warps, values, first_row, thread)

    @cute.jit
    def store(self, out: cute.Pointer, sums: Int32, count: cutlass.Constexpr, values: cutlass.Constexpr,
              first_row: Int32, thread: Int32):  # fmt: skip
        """Add up ``count`` arrays of ``values`` sums in shared memory and store the CTA's outputs."""
        c = self.config
        for output in cutlass.range(thread, c.rows * c.m, c.launch.block, unroll=1):
            token = output // c.rows
            row = output % c.rows
            address = out.toint() + Int64((token * c.n + first_row + row) * BF16_BYTES)
            ptx.store_bf16(address, self.total(sums, output, count, values))

    def total(self, sums: Int32, value: Int32, count: int, values: int) -> Float32:
        """Value ``value`` of ``count`` arrays of ``values`` numbers, added up in their order."""
        total = ptx.load_shared(sums + value * 4)
        for i in range(1, count):
            total = total + ptx.load_shared(sums + (i * values + value) * 4)
        return total

    def load_tile(self, load, matrix: cute.Pointer, rows: list[Int32], k_first: Int32) -> list[list[tuple]]:
        """This thread's vectors of some rows of ``x`` or ``w``: ``[step][row]``, four registers each."""
        c = self.config
        base = matrix.toint()
        starts = [base + Int64(row) * (c.k * BF16_BYTES) + Int64(k_first) * BF16_BYTES for row in rows]
        stride = c.k_threads * (VECTOR * BF16_BYTES)
        return [[load(start + Int64(step * stride)) for start in starts] for step in range(c.steps)]


# The name that profilers and PTX show.
SkinnyN.kernel.set_name_prefix("kda_skinny_n", remove_cutlass_symbol=True, keep_mangled_name=False)
