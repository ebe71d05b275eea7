"""What the projections should compute: fp64 and fp32 references, and a host model that gives each kernel's bits.

NumPy only. A BF16 array is a ``uint16`` array of bit patterns; torch tensors go through :func:`bits_of_tensor` and
:func:`tensor_of_bits`.

The two answer different questions. A reference is the mathematical result, against which an error is measured. The
model is the kernel's own arithmetic (every FMA and addition in its order, one BF16 rounding at the end), so a kernel
that differs from it in one bit is wrong.

The model holds for every :class:`~kda_lib.kernels.fma.FmaForm`. The PTX ISA ("Mixed Precision Floating-Point
Instructions: fma") defines ``fma.rn.f32.bf16`` as a conversion of both factors to FP32, then a fused multiply-add
without loss in the product, subnormals supported; the portable forms are these two steps. The conversion is exact for
every BF16 number, and a fused product is never rounded, so it can neither overflow nor underflow before the addition:
the forms agree on all numbers, infinities and signed zeros. NaN payloads may differ but never leave the kernels, as
``cvt.rn.bf16.f32`` makes every NaN 0x7FFF. Not argued but to be measured: that a device follows its ISA (subnormal
factors of the native form above all), and that the assembler keeps the order of additions and does not turn the first
``fma(a, b, +0)`` of a sum into a product, which would return -0 for +0.

Limits: NumPy's floating point must be IEEE 754 with subnormals; ``torch.set_flush_denormal(True)`` breaks that in the
thread that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kda_lib.kernels.config import VECTOR, WARP, SkinnyKConfig, SkinnyNConfig
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = NDArray[np.uint16]
Float32s: TypeAlias = NDArray[np.float32]
Float64s: TypeAlias = NDArray[np.float64]

#: What ``cvt.rn.bf16.f32`` makes of every NaN (PTX ISA, "cvt").
BF16_NAN = 0x7FFF

#: +-0, smallest and largest subnormal, smallest normal, 1, largest finite, Inf, a quiet and a signalling NaN.
BF16_SPECIALS = np.array([sign | magnitude for magnitude in (0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81)
                          for sign in (0, 0x8000)], np.uint16)  # fmt: skip

#: Overflow and invalid operations are results here, not accidents.
_ieee = np.errstate(over="ignore", under="ignore", invalid="ignore")

#: Distance of a NaN from a number: more than any two numbers can be apart (2 x 0x7F80, from -Inf to +Inf).
NAN_DISTANCE = 1 << 16


def _check_bits(name: str, array: Any, shape: tuple[int | None, ...] | None = None) -> None:
    """``None`` in a shape stands for any length."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint16:
        got = f"{array.dtype} array" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: expected a uint16 array of BF16 bit patterns, got {got}; use bits_of_tensor or "
                        "f32_to_bf16")  # fmt: skip
    if shape is not None and (
        array.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True))
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(array.shape)}; check rows and row width")


def _check_float(name: str, array: Any, dtype: type[np.floating[Any]]) -> None:
    got = getattr(array, "dtype", None)
    if got != dtype:
        raise TypeError(f"{name}: expected {np.dtype(dtype)} values, got {got or type(array).__name__}; a hidden cast "
                        "would round twice")  # fmt: skip


def bf16_to_f32(bits: Bits) -> Float32s:
    """The FP32 value of each BF16 bit pattern: exact, NaN payloads kept."""
    _check_bits("bits", bits)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Float32s) -> Bits:
    """Round FP32 to BF16 as ``cvt.rn.bf16.f32`` does: to nearest, ties to even; overflow to Inf; NaN to 0x7FFF."""
    _check_float("values", values, np.float32)
    word = np.asarray(values).view(np.uint32)
    last = (word >> np.uint32(16)) & np.uint32(1)
    # A NaN may wrap around in this addition; it is replaced below.
    rounded = (word + (np.uint32(0x7FFF) + last)) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(BF16_NAN), rounded).astype(np.uint16)


@_ieee
def f64_to_bf16(values: Float64s) -> Bits:
    """Round FP64 to BF16 once: to nearest, ties to even; overflow to Inf; NaN to 0x7FFF.

    Going through a plain FP32 conversion would round twice. This one goes through FP32 *rounded to odd*: of the two
    FP32 neighbours of a value that FP32 lacks, the one whose last bit is 1. BF16 numbers and the midpoints between
    them have last bit 0 in FP32, so the odd neighbour is on the value's side of all of them, and rounds as the value.
    """
    _check_float("values", values, np.float64)
    nearest = np.asarray(values).astype(np.float32)
    back = np.abs(nearest.astype(np.float64))
    exact = np.abs(values)
    word = nearest.view(np.uint32)
    even = (word & np.uint32(1)) == 0
    # Sign and magnitude: one more is one step away from zero, whatever the sign. A NaN is neither below nor above.
    odd = word + (even & (back < exact)).astype(np.uint32) - (even & (back > exact)).astype(np.uint32)
    return f32_to_bf16(odd.view(np.float32))


def ulp_distance_bf16(a: Bits, b: Bits) -> NDArray[np.int32]:
    """Steps from ``a`` to ``b`` along the BF16 numbers in order.

    -0 and +0 are the same place, Inf is one step beyond the largest finite number, two NaNs are 0 apart, and a NaN is
    :data:`NAN_DISTANCE` away from every number.
    """
    _check_bits("a", a)
    _check_bits("b", b)

    def position(bits: Bits) -> NDArray[np.int32]:
        magnitude = (bits & np.uint16(0x7FFF)).astype(np.int32)
        return np.where(bits >> np.uint16(15), -magnitude, magnitude)

    def is_nan(bits: Bits) -> NDArray[np.bool_]:
        return (bits & np.uint16(0x7FFF)) > 0x7F80

    distance = np.where(is_nan(a) | is_nan(b), NAN_DISTANCE, np.abs(position(a) - position(b)))
    return np.where(is_nan(a) & is_nan(b), 0, distance).astype(np.int32)


def bits_of_tensor(tensor: torch.Tensor) -> Bits:
    """Bit patterns of a BF16 torch tensor, on any device and with any strides.

    Raises:
        TypeError: the tensor is not BF16.
    """
    import torch

    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"tensor: expected torch.bfloat16, got {tensor.dtype}; convert it first")
    return tensor.detach().cpu().view(torch.int16).numpy().view(np.uint16)


def tensor_of_bits(bits: Bits, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new contiguous BF16 torch tensor with these bit patterns."""
    import torch

    _check_bits("bits", bits)
    words = np.array(bits, order="C").view(np.int16)
    return torch.from_numpy(words).view(torch.bfloat16).to(device)


@_ieee
def fma_f32_bf16(a: Bits, b: Bits, c: Float32s) -> Float32s:
    """``a * b + c`` rounded once to FP32, for BF16 ``a``, ``b`` and FP32 ``c``; shapes broadcast.

    Computed as an FP64 product and sum, then rounded to FP32. That gives the bits of a single rounding:

    Two factors of 8 significant bits make a product ``p`` of at most 16, a multiple of 2**-266 and below 2**256: FP64
    holds it. If FP64 holds ``z = p + c`` too, only the last rounding is one. Otherwise write ``p = P * 2**i`` and
    ``c = C * 2**j`` with integers ``|P| < 2**16``, ``|C| < 2**24``. As ``z`` is a multiple of ``2**min(i, j)``,
    ``|z| > 2**(53 + min(i, j))``. Hence i != j, and

    - for i < j: ``|z - c| = |p| < 2**(16 + i) < 2**-37 * |z|``; take f = c;
    - for j < i: ``|z - p| = |c| < 2**(24 + j) < 2**-29 * |z|``; take f = p. c is FP32, so j >= -149, ``|z| > 2**-96``
      and ``|p| > 2**-97``: 16 bits of that size are an FP32 number, unless ``|p| >= 2**128``, where both roundings give
      the same Inf.

    So z, and its FP64 rounding, lie within ``2**-28 * |f|`` of an FP32 number f, while the nearest point where FP32
    rounding changes its mind is at least ``2**-25 * |f|`` from f. Both round to f.
    """
    _check_float("c", c, np.float32)
    return _fma(bf16_to_f32(a).astype(np.float64), bf16_to_f32(b).astype(np.float64), c)


def _fma(a: Float64s, b: Float64s, c: Float32s) -> Float32s:
    """:func:`fma_f32_bf16` for factors already converted to FP64, which must hold BF16 values."""
    return (a * b + c).astype(np.float32)


def model_skinny_n(config: SkinnyNConfig, x: Bits, w: Bits) -> Bits:
    """Output bits [m, n] of :mod:`kda_lib.kernels.skinny_n` for x [m, k] and w [n, k].

    Raises:
        TypeError: x or w does not hold bit patterns.
        ValueError: a shape differs from the config's.
    """
    _check_bits("x", x, (config.m, config.k))
    _check_bits("w", w, (config.n, config.k))
    return _model(x, w, config.split, config.steps, config.k_threads, WARP)


def model_skinny_k(config: SkinnyKConfig, x: Bits, w: Bits) -> Bits:
    """Output bits [m, n] of :mod:`kda_lib.kernels.skinny_k` for x [m, k] and w [n, k].

    x is what the kernel reads, without the rest of its row stride: pass ``fa_beta[:, :k]``. Errors as in
    :func:`model_skinny_n`.
    """
    _check_bits("x", x, (config.m, config.k))
    _check_bits("w", w, (config.n, config.k))
    return _model(x, w, 1, 1, config.lanes, config.lanes)


@_ieee
def _model(x: Bits, w: Bits, split: int, steps: int, k_threads: int, width: int) -> Bits:
    """K is divided as [split, steps, k_threads, VECTOR]; ``width`` neighbouring threads add up by butterfly."""

    def by_thread(bits: Bits) -> Float64s:
        """[steps * VECTOR, rows, threads]: what each thread multiplies, in its order."""
        rows = len(bits)
        values = bf16_to_f32(bits).astype(np.float64).reshape(rows, split, steps, k_threads, VECTOR)
        return values.transpose(2, 4, 0, 1, 3).reshape(steps * VECTOR, rows, split * k_threads)

    inputs, weights = by_thread(x), by_thread(w)
    out = np.empty((len(x), len(w)), np.uint16)
    # Tokens are independent; one at a time keeps the arrays in cache.
    for token in range(len(x)):
        sums = np.zeros(weights.shape[1:], np.float32)
        for a, b in zip(weights, inputs[:, token], strict=True):
            sums = _fma(a, b, sums)
        warps = _butterfly(sums.reshape(len(w), split, -1, width))
        out[token] = f32_to_bf16(_in_order(_in_order(warps)))
    return out


def _in_order(values: Float32s) -> Float32s:
    """Sum over the last axis, first to last."""
    total = values[..., 0]
    for i in range(1, values.shape[-1]):
        total = total + values[..., i]
    return total


def _butterfly(lanes: Float32s) -> Float32s:
    """Sum over the last axis as :func:`kda_lib.kernels.reduce.butterfly_sum` does.

    Partners compute own + theirs and theirs + own: the same bits, so the upper half of the lanes need not be kept.
    """
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def cancelling_inputs(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[Bits, Bits]:
    """Normally distributed x [m, k] and w [n, k] in which each product of a sum has its negative somewhere (k even).

    Every output is 0 but for rounding, so its bits show the order of the additions. In the sum of unrelated products
    the BF16 rounding hides all but about one difference in a thousand.
    """
    x = f32_to_bf16(rng.standard_normal((m, k), np.float32))
    w = f32_to_bf16(rng.standard_normal((n, k), np.float32))
    plus, minus = rng.permutation(k).reshape(2, -1)
    x[:, minus], w[:, minus] = x[:, plus], w[:, plus] ^ np.uint16(0x8000)
    return x, w


def project_fp64(x: Bits, w: Bits) -> Float64s:
    """``x @ w.T`` in FP64 for BF16 x [M, K] and w [N, K].

    Every product is exact; K additions leave an error of at most ``K * 2**-53 * sum(|x * w|)``. Nothing overflows, so a
    kernel's FP32 sum may be Inf where this is finite.
    """
    return _project(x, w, np.float64)


def project_fp32(x: Bits, w: Bits) -> Float32s:
    """``x @ w.T`` in FP32, in the order of NumPy's BLAS: what plain FP32 accumulation loses. Not a bit-exact model."""
    return _project(x, w, np.float32)


@_ieee
def _project(x: Bits, w: Bits, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    _check_bits("x", x, (None, None))
    _check_bits("w", w, (None, x.shape[1]))
    return bf16_to_f32(x).astype(dtype) @ bf16_to_f32(w).astype(dtype).T


class KdaReference(NamedTuple):
    """Unrounded outputs: qkvg [M, 4*128*H], f_a [M, 128], beta [M, H], g1 [M, 128*H].

    ``f64_to_bf16(field)`` is the result rounded once (``f32_to_bf16`` for the fp32 variant).
    """

    qkvg: NDArray[Any]
    f_a: NDArray[Any]
    beta: NDArray[Any]
    g1: NDArray[Any]


def kda_reference(
    hidden: Bits,
    packed_weight: Bits,
    f_b_weight: Bits,
    shapes: KdaShapes,
    *,
    project: Callable[[Bits, Bits], NDArray[Any]] = project_fp64,
    f_a: Bits | None = None,
) -> KdaReference:
    """The three projections of hidden [M, 7168] with packed_weight [packed_rows, 7168] and f_b_weight [128*H, 128].

    Args:
        project: :func:`project_fp64`, or :func:`project_fp32` for the fp32 variant.
        f_a: BF16 [M, 128] that F_B takes: by default this reference's own f_a rounded once. Pass a kernel's f_a to
            judge its F_B alone, as an f_a one ulp off moves g1 by more than F_B's own error.

    Raises:
        TypeError: an array does not hold bit patterns.
        ValueError: a shape does not fit ``shapes``.
    """
    _check_bits("hidden", hidden, (None, HIDDEN))
    _check_bits("packed_weight", packed_weight, (shapes.packed_rows, HIDDEN))
    _check_bits("f_b_weight", f_b_weight, (shapes.f_b_rows, F_A_ROWS))
    packed = project(hidden, packed_weight)
    fa_beta = packed[:, shapes.fa_beta_slice]
    exact_f_a, beta = fa_beta[:, :F_A_ROWS], fa_beta[:, F_A_ROWS : F_A_ROWS + shapes.heads]
    if f_a is None:
        # From FP32 the way through FP64 is exact.
        f_a = f64_to_bf16(exact_f_a.astype(np.float64))
    _check_bits("f_a", f_a, (len(hidden), F_A_ROWS))
    return KdaReference(packed[:, shapes.qkvg_slice], exact_f_a, beta, project(f_a, f_b_weight))
