"""Fixed-order sum of per-lane values over the lanes of a warp.

The order of additions is a butterfly: every value is added to its copy in the lane ``offset`` away, for offset = 16, 8,
4, 2, 1 (from ``width / 2`` down). Where a lane holds an even number of values it hands half of them to its partner
instead of both adding all, so that n values cost about n shuffles rather than 5 n. FP32 addition is commutative, so
both ways give the same bits, and the bits do not depend on how many values there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32
from cutlass.cute.arch import shuffle_sync_bfly

from kda_lib.kernels.ptx import asm


def _select(condition: Int32, yes: Float32, no: Float32) -> Float32:
    """``yes`` where ``condition`` is not 0, else ``no``."""
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.f32 $0, $2, $3, p; }"
    return asm(code, [Float32], [condition, yes, no])


def arrange(lane: Int32, count: int, width: int = 32) -> tuple[Int32, int]:
    """Order the ``count`` tokens of a lane so that :func:`butterfly_sum` hands halves over without selecting them.

    Slot ``s`` should hold token ``s ^ flip``, and the token should be the slowest index of the values. Eight
    neighbouring lanes keep the same flip, so that they still read one 128-byte line.

    Returns:
        The flip, and for how many levels (``arranged``) that serves; a count that is no power of two has none.
    """
    if count & (count - 1):
        return Int32(0), 0
    levels = max(1, min(count, width // 8)).bit_length() - 1
    return lane // (width >> levels) * (count >> levels), levels


def butterfly_sum(
    values: Sequence[Float32], lane: Int32, width: int = 32, arranged: int = 0
) -> tuple[list[Float32], Int32, int]:
    """Sum each value over ``width`` neighbouring lanes.

    Args:
        values: n values of this lane.
        lane: this thread's lane; only its lowest ``log2(width)`` bits matter.
        width: lanes that share a sum, a power of two up to 32.
        arranged: for this many levels the caller has already put into the first half of the (remaining) values those
            that this lane keeps, see :func:`arrange`; no selection is needed there.

    Returns:
        The sums this lane ends with, the index (into ``values``) of the first of them, and a mask of lane bits:
        lanes that differ only in these bits hold the same sums, so the one where they are all 0 should write.
    """
    mine = list(values)
    first = Int32(0)
    replicas = 0
    offset = width // 2
    while offset:
        bit = lane & Int32(offset)
        half = len(mine) // 2
        if len(mine) % 2:
            kept = sent = mine
            replicas |= offset
        elif arranged > 0:
            kept, sent = mine[:half], mine[half:]
        else:
            kept = [_select(bit, high, low) for low, high in zip(mine[:half], mine[half:], strict=True)]
            sent = [_select(bit, low, high) for low, high in zip(mine[:half], mine[half:], strict=True)]
        if len(mine) % 2 == 0:
            first = first + bit // Int32(offset) * Int32(half)
        mine = [keep + shuffle_sync_bfly(send, offset=offset) for keep, send in zip(kept, sent, strict=True)]
        arranged -= 1
        offset //= 2
    return mine, first, replicas
