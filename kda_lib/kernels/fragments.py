"""Operands and sums of ``mma.sync.m16n8k16`` as the stream kernel uses them.

A lane's 16-byte vector gives its first two registers to one ``mma`` and the others to the next, for weights as for x.
That permutes K inside 32 columns, and needs no shuffle.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32

from kda_lib.kernels.config import BF16_BYTES
from kda_lib.kernels.ring import load_shared_vector
from kda_lib.kernels.stream_config import CONSUMERS, STEP_COLUMNS, STEPS, SUM_BYTES
from kda_lib.kernels.stream_ptx import Sums, load_shared_sums, mma

#: Bytes of a step of a warp.
STEP_BYTES = STEP_COLUMNS * BF16_BYTES

#: A 16-byte vector, and the registers of one ``mma`` operand.
Vector = tuple[Uint32, ...]


def operands(low: Vector, high: Vector) -> list[Vector]:
    """Tokens ``lane / 4`` and 8 more: the operands of two ``mma``, see "Matrix Fragments for mma.m16n8k16"."""
    return [(low[i], high[i], low[i + 1], high[i + 1]) for i in (0, 2)]


def load_block(start: Int32) -> list[Vector]:
    """This lane's vectors of one weight row of a block."""
    return [load_shared_vector(start + step * STEP_BYTES) for step in range(STEPS)]


def multiply(inputs: list[list[Vector]], weights: list[Vector]) -> Sums:
    """The sums of one block over this warp's part of K: four chains, so that an ``mma`` need not wait for the last."""
    chains: list[Sums] = [(Float32(0.0),) * 4 for _ in range(4)]
    for step, (x, w) in enumerate(zip(inputs, weights, strict=True)):
        for i in range(2):
            chain = step % 2 * 2 + i
            chains[chain] = mma(x[i], w[2 * i : 2 * i + 2], chains[chain])
    return add(add(chains[0], chains[1]), add(chains[2], chains[3]))


def add(a: Sums, b: Sums) -> Sums:
    return tuple(one + other for one, other in zip(a, b, strict=True))


def add_warps(start: Int32) -> Sums:
    """What all consumers left for this lane, added two by two."""
    sums = [load_shared_sums(start + warp * SUM_BYTES) for warp in range(CONSUMERS)]
    while len(sums) > 1:
        sums = [add(one, other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
