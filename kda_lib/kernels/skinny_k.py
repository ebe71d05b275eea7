"""Skinny GEMM with short K: ``out[M, N] = x[M, K] @ w[N, K].T`` for M up to 16 and K up to 256 (F_B, K = 128).

Work split: K / 8 neighbouring lanes share one weight row, one 16-byte vector each, and add up by butterfly; a CTA owns
``rows`` rows, a thread ``row_tile`` of them. x is read with its own row stride, so that f_a is used where F_A/beta
left it.

Bits: the order of additions depends on K only. With programmatic dependent launch the weights are loaded before the
dependency wait and x after it.

Scope: BF16 in, BF16 out, FP32 accumulation. Not here: bias, activation, M above 16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.runtime import make_ptr

from kda_lib.kernels import ptx
from kda_lib.kernels.config import BF16_BYTES, VECTOR, SkinnyKConfig
from kda_lib.kernels.reduce import arrange, butterfly_sum
from kda_lib.kernels.tile import multiply_tile


class SkinnyK:
    """The kernel for one :class:`SkinnyKConfig`."""

    def __init__(self, config: SkinnyKConfig) -> None:
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
        lane = thread % c.lanes
        first_row = block * c.rows + thread // c.lanes % (c.rows // c.row_tile) * c.row_tile
        first_token = thread // (c.lanes * c.rows // c.row_tile) * c.tokens

        weights = self.load_tile(ptx.load_weights, w, [first_row + s for s in range(c.row_tile)], c.k, lane)
        flip, arranged = arrange(lane, c.tokens, c.lanes)
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # A group past M repeats the last token; its sums are not stored.
        tokens = [cutlass.min(first_token + (flip ^ s), c.m - 1) for s in range(c.tokens)]
        inputs = self.load_tile(ptx.load_inputs, x, tokens, c.x_stride, lane)
        sums = multiply_tile(c.fma, [weights], [inputs])
        mine, first, replicas = butterfly_sum(sums, lane, c.lanes, arranged)
        if (lane & replicas) == 0:
            for i in cutlass.range_constexpr(len(mine)):
                row = first_row + (first + i) % c.row_tile
                token = first_token + (first + i) // c.row_tile
                if token < c.m:
                    ptx.store_bf16(out.toint() + Int64((token * c.n + row) * BF16_BYTES), mine[i])

    def load_tile(self, load, matrix: cute.Pointer, rows: list[Int32], stride: int, lane: Int32) -> list[tuple]:
        """This lane's vector of some rows of ``x`` or ``w``, four registers each."""
        start = matrix.toint() + Int64(lane * (VECTOR * BF16_BYTES))
        return [load(start + Int64(row) * (stride * BF16_BYTES)) for row in rows]


# The name that profilers and PTX show.
SkinnyK.kernel.set_name_prefix("kda_skinny_k", remove_cutlass_symbol=True, keep_mangled_name=False)
