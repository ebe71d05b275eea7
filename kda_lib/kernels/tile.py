"""The inner product of a register tile: what both skinny kernels do between their loads and their sums."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Uint32

from kda_lib.kernels.config import VECTOR
from kda_lib.kernels.fma import FmaForm, fma, unpack_pair

#: One 16-byte vector: four registers of two BF16 numbers each.
Vector = tuple[Uint32, Uint32, Uint32, Uint32]
#: Vectors ``[step][row]`` or ``[step][token]``.
Tile = Sequence[Sequence[Vector]]


def multiply_tile(
    form: FmaForm, weights: Sequence[Sequence[Vector]], inputs: Sequence[Sequence[Vector]]
) -> list[Float32]:
    """Sums over this thread's part of K.

    Args:
        form: how an FMA is emitted.
        weights: vectors ``[step][row]``.
        inputs: vectors ``[step][token]``.

    Returns:
        One FP32 sum for each (token, row), row fastest; K runs upwards inside each sum.
    """
    rows, tokens = len(weights[0]), len(inputs[0])
    sums = [Float32(0.0)] * (rows * tokens)
    for weight_vectors, input_vectors in zip(weights, inputs, strict=True):
        for pair in range(VECTOR // 2):
            w = [unpack_pair(form, vector[pair]) for vector in weight_vectors]
            x = [unpack_pair(form, vector[pair]) for vector in input_vectors]
            for half in range(2):
                for token in range(tokens):
                    for row in range(rows):
                        i = token * rows + row
                        sums[i] = fma(form, w[row][half], x[token][half], sums[i])
    return sums
