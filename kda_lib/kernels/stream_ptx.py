"""PTX instructions of the stream kernel: predicated where only some lanes act, so that a warp stays together.

Each function emits exactly the instructions its docstring names. Where a condition is given, lanes for which it does
not hold do nothing, and loads give zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kda_lib.kernels.ptx import asm

#: Four FP32 of a lane: an accumulator fragment of ``mma.m16n8k16``, rows ``lane / 4`` and ``lane / 4 + 8``, columns
#: ``lane % 4 * 2`` and the next.
Sums = tuple[Float32, Float32, Float32, Float32]


def load_input_if(condition: Boolean, address: Int64) -> tuple[Uint32, ...]:
    """16 bytes that another kernel or CTA may have written: ``ld.global.v4.b32``, never the non-coherent path."""
    code = (
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    return asm(code, [Uint32] * 4, [address, Int32(condition)], ordered=True)


def mma(a: Sequence[Uint32], b: Sequence[Uint32], sums: Sums) -> Sums:
    """``mma.sync.m16n8k16``, BF16 in and FP32 out: sums + a x b."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm(code, [Float32] * 4, [*a, *b, *sums])


def store_pair_if(condition: Boolean, address: Int64, low: Float32, high: Float32) -> None:
    """Round two neighbours to nearest even and store them: ``cvt.rn.bf16x2.f32``, ``st.global.b32``."""
    code = (
        "{ .reg .pred p; .reg .b32 pair; setp.ne.b32 p, $1, 0; cvt.rn.bf16x2.f32 pair, $3, $2; "
        "@p st.global.b32 [$0], pair; }"
    )
    asm(code, [], [address, Int32(condition), low, high], ordered=True)


def store_bf16_if(condition: Boolean, address: Int64, value: Float32) -> None:
    """Round to nearest even and store: ``cvt.rn.bf16.f32``, ``st.global.b16``."""
    code = (
        "{ .reg .pred p; .reg .b16 half; setp.ne.b32 p, $1, 0; cvt.rn.bf16.f32 half, $2; @p st.global.b16 [$0], half; }"
    )
    asm(code, [], [address, Int32(condition), value], ordered=True)


def store_shared_sums(address: Int32, sums: Sums) -> None:
    """``st.shared.v4.f32``."""
    asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", [], [address, *sums], ordered=True)


def load_shared_sums(address: Int32) -> Sums:
    """``ld.shared.v4.f32``."""
    return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address], ordered=True)


def send_sums(address: Int32, sums: Sums, barrier: Int32) -> None:
    """Store into a CTA of the cluster and count the 16 bytes on its mbarrier (both addresses from ``mapa``):
    ``st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32``. The sender need not stay alive.
    """
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1, $2, $3, $4}, [$5];"
    asm(code, [], [address, *[value.bitcast(Uint32) for value in sums], barrier], ordered=True)


def count_if(condition: Boolean, counter: Int64) -> None:
    """Add 1 after everything that this warp stored before (after a warp barrier): ``red.release.gpu.global.add``."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p red.release.gpu.global.add.u32 [$0], 1; }"
    asm(code, [], [counter, Int32(condition)], ordered=True)


def wait_count(counter: Int64, count: int) -> None:
    """Wait until a counter has reached a number: ``ld.acquire.gpu.global`` in a loop with ``nanosleep``."""
    code = (
        "{ .reg .pred less; .reg .b32 seen; again: ld.acquire.gpu.global.u32 seen, [$0]; "
        "setp.lt.u32 less, seen, $1; @less nanosleep.u32 200; @less bra again; }"
    )
    asm(code, [], [counter, Int32(count)], ordered=True)


def leave(counters: Int64, others: int) -> None:
    """Count in the second counter; who finds that all others have done so sets both counters to 0:
    ``atom.acq_rel.gpu.global.add``, ``st.global.v2.b32``.
    """
    code = (
        "{ .reg .pred last; .reg .b32 gone; atom.acq_rel.gpu.global.add.u32 gone, [$0+4], 1; "
        "setp.eq.u32 last, gone, $1; @last st.global.v2.b32 [$0], {0, 0}; }"
    )
    asm(code, [], [counters, Int32(others)], ordered=True)
