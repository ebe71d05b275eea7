"""The skinny kernels thread by thread, with the kernels' own index arithmetic, for comparison with the host model.

What the model leaves out is here: groups, passes and tokens, lanes that hold their tokens in another order, the
butterfly that hands halves over, the shared-memory layout, which thread stores what.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np

from kda_lib import reference as ref
from kda_lib.kernels.config import VECTOR, WARP, SkinnyKConfig, SkinnyNConfig


def random_bits(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> ref.Bits:
    """BF16 bit patterns of normally distributed values."""
    return ref.f32_to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))


def special_bits(rng: np.random.Generator, *shape: int, share: float = 1e-3) -> ref.Bits:
    """Normally distributed values with a ``share`` of specials among them."""
    return np.where(rng.random(shape) < share, rng.choice(ref.BF16_SPECIALS, shape), random_bits(rng, *shape))


def butterfly_sum(
    values: list[ref.Float32s], width: int, arranged: int, write: Callable[[int, int, np.float32], None]
) -> None:
    """``kernels.reduce.butterfly_sum`` over one warp, then ``write(lane, value index, sum)`` from the writing lanes.

    ``values[i]`` holds the i-th value of all 32 lanes.
    """
    lane = np.arange(WARP)
    mine, first, replicas = list(values), np.zeros(WARP, int), 0
    offset = width // 2
    while offset:
        bit = (lane & offset) != 0
        half = len(mine) // 2
        if len(mine) % 2:
            kept = sent = mine
            replicas |= offset
        else:
            kept, sent = mine[:half], mine[half:]
            if arranged <= 0:
                kept, sent = ([np.where(bit, b, a) for a, b in zip(kept, sent, strict=True)],
                              [np.where(bit, a, b) for a, b in zip(kept, sent, strict=True)])  # fmt: skip
            first = first + np.where(bit, half, 0)
        mine = [keep + send[lane ^ offset] for keep, send in zip(kept, sent, strict=True)]
        arranged -= 1
        offset //= 2
    for thread in np.flatnonzero((lane & replicas) == 0).tolist():
        for i, value in enumerate(mine):
            write(thread, int(first[thread]) + i, value[thread])


def arrange(count: int, width: int) -> tuple[np.ndarray, int]:
    """``kernels.reduce.arrange`` for all lanes of a warp."""
    if count & (count - 1):
        return np.zeros(WARP, int), 0
    levels = max(1, min(count, width // 8)).bit_length() - 1
    return np.arange(WARP) % width // (width >> levels) * (count >> levels), levels


def store(memory: np.ndarray, written: np.ndarray, place: tuple[int, ...], value: object) -> None:
    assert not written[place], f"{place} is stored twice"
    memory[place], written[place] = value, True


@np.errstate(over="ignore", invalid="ignore")
def skinny_n(c: SkinnyNConfig, x: ref.Bits, w: ref.Bits) -> ref.Bits:
    """``kernels.skinny_n``; raises ``AssertionError`` if an output or partial sum is stored twice or not at all."""
    out, stored = np.zeros((c.m, c.n), np.uint16), np.zeros((c.m, c.n), bool)
    values = c.rows * c.tokens * c.groups * c.passes
    flip, arranged = arrange(c.tokens, WARP)
    for first_row in range(0, c.n, c.rows):
        partial = np.zeros((c.split, c.warps, values), np.float32)
        filled = np.zeros(partial.shape, bool)
        work = itertools.product(range(c.split), range(c.groups), range(c.warps), range(c.passes))
        for rank, group, warp, p in work:
            share = p * c.groups + group
            tokens = [np.minimum(share * c.tokens + (flip ^ s), c.m - 1) for s in range(c.tokens)]
            sums = [np.zeros(WARP, np.float32) for _ in range(c.rows * c.tokens)]
            k_thread = warp * WARP + np.arange(WARP)
            k_first = (rank * c.k_threads * c.steps + k_thread) * VECTOR
            for step, element in itertools.product(range(c.steps), range(VECTOR)):
                k = k_first + step * c.k_threads * VECTOR + element
                for i, (token, row) in enumerate(itertools.product(range(c.tokens), range(c.rows))):
                    sums[i] = ref.fma_f32_bf16(w[first_row + row, k], x[tokens[token], k], sums[i])
            address = share * (c.rows * c.tokens)

            def write(lane: int, i: int, value: np.float32) -> None:
                store(partial, filled, (rank, warp, address + i), value)  # noqa: B023 - called before the loop goes on

            butterfly_sum(sums, WARP, arranged, write)
        assert filled.all()
        for value in range(c.rows * c.m):
            total = functools.reduce(np.add, (functools.reduce(np.add, cta[:, value]) for cta in partial))
            place = (value // c.rows, first_row + value % c.rows)
            store(out, stored, place, ref.f32_to_bf16(np.array(total)))
    assert stored.all()
    return out


@np.errstate(over="ignore", invalid="ignore")
def skinny_k(c: SkinnyKConfig, x: ref.Bits, w: ref.Bits) -> ref.Bits:
    """``kernels.skinny_k``; x has the kernel's row stride. Raises as :func:`skinny_n`."""
    out, stored = np.zeros((c.m, c.n), np.uint16), np.zeros((c.m, c.n), bool)
    for block, first_thread in itertools.product(range(c.launch.grid), range(0, c.launch.block, WARP)):
        thread = first_thread + np.arange(WARP)
        first_row = block * c.rows + thread // c.lanes % (c.rows // c.row_tile) * c.row_tile
        first_token = thread // (c.lanes * c.rows // c.row_tile) * c.tokens
        flip, arranged = arrange(c.tokens, c.lanes)
        sums = [np.zeros(WARP, np.float32) for _ in range(c.row_tile * c.tokens)]
        for element, token, row in itertools.product(range(VECTOR), range(c.tokens), range(c.row_tile)):
            k = thread % c.lanes * VECTOR + element
            i = token * c.row_tile + row
            weight, value = w[first_row + row, k], x[np.minimum(first_token + (flip ^ token), c.m - 1), k]
            sums[i] = ref.fma_f32_bf16(weight, value, sums[i])

        def write(lane: int, i: int, value: np.float32) -> None:
            token = int(first_token[lane]) + i // c.row_tile  # noqa: B023 - called before the loop goes on
            if token < c.m:
                row = int(first_row[lane]) + i % c.row_tile  # noqa: B023
                store(out, stored, (token, row), ref.f32_to_bf16(np.array(value)))

        butterfly_sum(sums, c.lanes, arranged, write)
    assert stored.all()
    return out
