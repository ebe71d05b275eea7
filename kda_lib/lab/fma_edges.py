"""Where the native and the portable FMA could differ: every operand pair whose product FP32 does not hold.

By definition there is no such pair. The PTX ISA ("Mixed Precision Floating Point Instructions: fma") has
``fma.rn.f32.bf16`` convert both factors to FP32, compute the product "to infinite precision", add c to it "again in
infinite precision" and round once, subnormal numbers supported; ``fma.rn.f32`` on converted factors is the same
words. BF16 to FP32 is exact, so both forms round the same real number once. What the ISA leaves open is the payload of
a NaN, and that stays inside: ``cvt.rn.bf16.f32`` makes every NaN 0x7FFF.

A pair matters all the same: a device or compiler that is *not* as defined (that rounds the product first, or flushes
subnormals) gives other bits for exactly the pairs counted here. The counts over all 2**32 pairs come from the form of
BF16 numbers (:func:`count_pairs`) and are checked against every pair of magnitudes (:func:`count_exhaustively`); the
definition is checked on samples of each class, both forms run as PTX, against exact integers (:func:`exact_fma`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab import records
from kda_lib.lab.golden import SEED, SHAPES, Words
from kda_lib.lab.ptx import Buffer, Machine
from kda_lib.lab.scripted import Row, zero_claim
from kda_lib.reference import Bits, bf16_to_f32, f32_to_bf16
from kda_lib.shapes import HIDDEN, MAX_TOKENS

#: BF16 and FP32 have 8 exponent bits; BF16 has 7 bits behind the point. A magnitude below INF is finite.
INF = 0x7F80
NANS = 2 * 0x7F
#: A finite BF16 magnitude is ``s * 2**(e - 134)`` with an exponent field e, at least 1, and s < 256; subnormals have
#: s < 128.
BIAS = 134
#: FP32: one more than the largest exponent, and that of the smallest subnormal.
OVERFLOW, TINY = 128, -149
#: FP32's smallest normal number is 2**NORMAL.
NORMAL = -126
PACKED_ROWS = SHAPES.packed_rows


class Pair(StrEnum):
    """What the product of two BF16 numbers is in FP32."""

    NAN = "NaN: a NaN factor, or infinity times zero"
    INFINITE = "infinity times a number"
    ZERO = "zero times a number"
    OVERFLOW = "finite, but too large for FP32"
    UNDERFLOW = "below FP32's last place: not exact"
    SUBNORMAL = "exact, but subnormal in FP32"
    EXACT = "exact and normal"


#: The pairs for which rounding the product before the addition would show.
EDGES = (Pair.OVERFLOW, Pair.UNDERFLOW)


def classify(a: Bits, b: Bits) -> NDArray[np.str_]:
    """The :class:`Pair` of each operand pair, from the FP64 product, which is exact."""
    mags = [(bits & np.uint16(0x7FFF)).astype(np.int64) for bits in (a, b)]
    big, small = np.maximum(*mags), np.minimum(*mags)
    with np.errstate(over="ignore", invalid="ignore"):
        values = [bf16_to_f32(bits).astype(np.float64) for bits in (a, b)]
        product = np.abs(values[0] * values[1])
        rounded = product.astype(np.float32).astype(np.float64)
    conditions = [
        (big > INF) | ((big == INF) & (small == 0)), big == INF, small == 0, product >= 2.0**OVERFLOW,
        rounded != product, product < 2.0**NORMAL,
    ]  # fmt: skip
    names = [Pair.NAN, Pair.INFINITE, Pair.ZERO, Pair.OVERFLOW, Pair.UNDERFLOW, Pair.SUBNORMAL]
    return np.select(conditions, [str(name) for name in names], str(Pair.EXACT))


def count_pairs() -> dict[Pair, int]:
    """How many of the 2**32 ordered operand pairs are of each kind, by reasoning.

    The product of ``s * 2**(e - 134)`` and ``t * 2**(f - 134)`` is ``s * t * 2**q`` with ``q = e + f - 268`` and
    ``s * t < 2**16``. It overflows if ``s * t >= 2**(128 - q)``, is subnormal if ``s * t < 2**(-126 - q)``, and is
    exact unless bits of ``s * t`` lie below 2**-149. So it is enough to count, for each q, the exponent pairs and the
    256 x 256 products. A subnormal number has e = 1 and s < 128.
    """
    counts: Counter[Pair] = Counter()
    normal, subnormal = np.arange(128, 256), np.arange(1, 128)
    every, one = np.ones(254, np.int64), np.eye(1, 254, dtype=np.int64)[0]
    for s, exponents in ((normal, every), (subnormal, one)):
        for t, others in ((normal, every), (subnormal, one)):
            products, repeats = np.unique(np.outer(s, t), return_counts=True)
            # Entry i: exponent pairs with e + f = i + 2.
            for i, pairs in enumerate(np.convolve(exponents, others)):
                q = i + 2 - 2 * BIAS
                over = products >= 2.0 ** (OVERFLOW - q)
                lost = products % (1 << min(max(TINY - q, 0), 17)) != 0
                tiny = products < 2.0 ** (NORMAL - q)
                for kind, found in (
                    (Pair.OVERFLOW, over),
                    (Pair.UNDERFLOW, lost),
                    (Pair.SUBNORMAL, tiny & ~lost),
                    (Pair.EXACT, ~(over | lost | tiny)),
                ):
                    counts[kind] += 4 * int(pairs) * int(repeats[found].sum())
    finite, total = 2 * INF, 1 << 16
    counts[Pair.NAN] = total**2 - (total - NANS) ** 2 + 2 * 2 * 2
    counts[Pair.INFINITE] = 2 * 2 * (finite - 2) + 2 * 2
    counts[Pair.ZERO] = 2 * 2 * (finite - 2) + 2 * 2
    return {kind: counts[kind] for kind in Pair}


def count_exhaustively(rows: Sequence[int] = range(1, INF)) -> Counter[Pair]:
    """The same for finite factors that are not 0, by forming every product of a magnitude in ``rows`` with every other.

    FP64 holds each product, so a cast to FP32 and back shows which FP32 does not.
    """
    counts: Counter[Pair] = Counter()
    values = bf16_to_f32(np.arange(1, INF, dtype=np.uint16)).astype(np.float64)
    chosen = values[np.array(rows) - 1]
    with np.errstate(over="ignore"):
        for chunk in np.array_split(chosen, max(1, len(chosen) // 64)):
            product = np.multiply.outer(chunk, values)
            rounded = product.astype(np.float32)
            over = int(np.isinf(rounded).sum())
            lost = int((rounded != product).sum()) - over
            tiny = int((product < 2.0**NORMAL).sum()) - lost
            exact = product.size - over - lost - tiny
            found = {Pair.OVERFLOW: over, Pair.UNDERFLOW: lost, Pair.SUBNORMAL: tiny, Pair.EXACT: exact}
            counts.update({kind: 4 * number for kind, number in found.items()})
    return counts


def exact_fma(a: int, b: int, c: int) -> int | None:
    """FP32 bits of ``a * b + c`` for BF16 bits a and b and FP32 bits c, in whole numbers; None for a NaN."""
    factors = [_decode(a << 16), _decode(b << 16)]
    (sign, product, exponent), (c_sign, c_value, c_exponent) = _multiply(*factors), _decode(c)
    if product is None or c_value is None:
        return None
    infinite = [s for s, v in ((sign, product), (c_sign, c_value)) if v < 0]
    if infinite:
        return None if len(set(infinite)) > 1 else _encode(infinite[0], -1, 0)
    low = min(exponent, c_exponent)
    total = (-1) ** sign * (product << (exponent - low)) + (-1) ** c_sign * (c_value << (c_exponent - low))
    if total == 0:
        return _encode(sign & c_sign if product == c_value == 0 else 0, 0, 0)
    return _encode(int(total < 0), abs(total), low)


#: Sign, value (None: NaN, -1: infinity), exponent of two.
_Number = tuple[int, int | None, int]


def _decode(bits: int) -> _Number:
    sign, field, fraction = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if field == 0xFF:
        return sign, (None if fraction else -1), 0
    return sign, fraction | (0x800000 if field else 0), max(field, 1) - 150


def _multiply(a: _Number, b: _Number) -> _Number:
    (s, x, e), (t, y, f) = a, b
    if x is None or y is None or (0 in (x, y) and -1 in (x, y)):
        return 0, None, 0
    return s ^ t, -1 if -1 in (x, y) else x * y, e + f


def _encode(sign: int, value: int, exponent: int) -> int:
    """Round ``value * 2**exponent`` to nearest even; -1 is infinity."""
    if value < 0:
        return sign << 31 | 0xFF << 23
    drop = max(value.bit_length() - 24, TINY - exponent, 0)
    kept, rest = value >> drop, value & (1 << drop) - 1
    half = 1 << drop >> 1
    kept += rest > half or (rest == half > 0 and kept & 1)
    if kept == 0:
        return sign << 31
    shift = 24 - kept.bit_length()
    field = exponent + drop + 150 - shift
    if field > 0:
        # A carry makes 25 bits: shift -1, and the bit that goes is 0.
        kept = kept << shift if shift >= 0 else kept >> -shift
        return sign << 31 | (0xFF << 23 if field >= 0xFF else field << 23 | kept & 0x7FFFFF)
    return sign << 31 | kept << (exponent + drop - TINY)


_FORMS = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry forms(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 native, .param .u64 portable)
{
    .reg .b16 %h<2>; .reg .b32 %r<8>; .reg .b64 %d<8>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 256, %r0;
    ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; ld.param.u64 %d2, [c];
    mad.wide.u32 %d0, %r0, 2, %d0; mad.wide.u32 %d1, %r0, 2, %d1; mad.wide.u32 %d2, %r0, 4, %d2;
    ld.global.b16 %h0, [%d0]; ld.global.b16 %h1, [%d1]; ld.global.b32 %r2, [%d2];
    fma.rn.f32.bf16 %r3, %h0, %h1, %r2;
    cvt.u32.u16 %r4, %h0; cvt.u32.u16 %r5, %h1; shl.b32 %r4, %r4, 16; shl.b32 %r5, %r5, 16;
    fma.rn.f32 %r6, %r4, %r5, %r2;
    ld.param.u64 %d3, [native]; ld.param.u64 %d4, [portable];
    mad.wide.u32 %d3, %r0, 4, %d3; mad.wide.u32 %d4, %r0, 4, %d4;
    st.global.b32 [%d3], %r3; st.global.b32 [%d4], %r6;
    ret;
}
"""
_BLOCK = 256


def run_forms(a: Bits, b: Bits, c: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """FP32 bits of both forms of the FMA, run as PTX; the length must be a multiple of 256."""
    native, portable = np.zeros_like(c), np.zeros_like(c)
    inputs = [Buffer(array, name) for array, name in ((a, "a"), (b, "b"), (c, "c"))]
    outputs = [Buffer(array, name, readonly=False) for array, name in ((native, "native"), (portable, "portable"))]
    Machine(_FORMS).run("forms", [*inputs, *outputs], grid=len(c) // _BLOCK, block=_BLOCK)
    return native, portable


def samples(kind: Pair, count: int) -> tuple[Bits, Bits]:
    """Operand pairs of a kind, drawn until there are enough."""
    words, a, b = Words(SEED, list(Pair).index(kind)), np.zeros(0, np.uint16), np.zeros(0, np.uint16)
    special = np.array([0, 0x8000, INF, INF | 0x8000, 0x7FC1, 0xFF81, 1, 0x7F, 0x80, 0x7F7F], np.uint16)
    while len(a) < count:
        drawn = [words.bits16(1 << 16), words.bits16(1 << 16)]
        # Rare kinds need a special factor.
        for factor in drawn:
            chosen = words.bits16(len(factor)) % 8 == 0
            factor[chosen] = special[words.bits16(int(chosen.sum())) % len(special)]
        found = classify(*drawn) == kind
        a, b = np.append(a, drawn[0][found]), np.append(b, drawn[1][found])
    return a[:count], b[:count]


def addends(a: Bits, b: Bits) -> NDArray[np.uint32]:
    """FP32 bits for c, in turn: +0, -0, any bits, the smallest subnormals, the largest number, nearly minus a * b."""
    words = Words(SEED, len(a))
    anything = words.bits16(len(a)).astype(np.uint32) << np.uint32(16) | words.bits16(len(a))
    with np.errstate(all="ignore"):
        near = (-(bf16_to_f32(a).astype(np.float64) * bf16_to_f32(b))).astype(np.float32).view(np.uint32)
    turn = np.arange(len(a)) % 6
    sign = anything & np.uint32(0x80000000)
    choices = [np.zeros_like(sign), np.full_like(sign, 0x80000000), anything, sign | anything & np.uint32(3),
               sign | np.uint32(0x7F7FFFFF), near ^ anything & np.uint32(1)]  # fmt: skip
    return np.choose(turn, choices)


def compare(kind: Pair, count: int) -> tuple[int, str]:
    """How many of ``count`` samples have forms that differ from each other or from whole numbers, and an example."""
    a, b = samples(kind, count)
    c = addends(a, b)
    native, portable = run_forms(a, b, c)
    exact = [exact_fma(*triple) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    wrong = 0
    for got, other, want in zip(native.tolist(), portable.tolist(), exact, strict=True):
        both_nan = want is None and all(bits & 0x7FFFFFFF > INF << 16 for bits in (got, other))
        wrong += not (both_nan or got == other == want)
    return wrong, f"{a[0]:#06x} x {b[0]:#06x} + {c[0]:#010x} = {native[0]:#010x}"


def margins(x: Bits, w: Bits) -> tuple[float, float]:
    """Smallest and largest magnitude that a product of the two can have, zeros left out; -inf and inf if none."""
    found = []
    for bits in (x, w):
        magnitude = np.abs(bf16_to_f32(bits).astype(np.float64))
        found.append(magnitude[magnitude > 0])
    return float(found[0].min() * found[1].min()), float(found[0].max() * found[1].max())


def model_data(rows: int = PACKED_ROWS) -> Iterator[tuple[str, Bits, Bits]]:
    """Name, x and w [rows, 7168], drawn as in notebooks; then x a million times larger, and smaller."""
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((MAX_TOKENS, HIDDEN), np.float32)
    w = rng.standard_normal((rows, HIDDEN), np.float32) / np.float32(np.sqrt(HIDDEN))
    for name, scale in (("normal", 1.0), ("normal, 1e6 times larger", 1e6), ("normal, 1e6 times smaller", 1e-6)):
        yield name, f32_to_bf16(x * np.float32(scale)), f32_to_bf16(w)


def prove(
    count: int = 6 * _BLOCK * 4, *, exhaustive: bool = True, weight_rows: int = PACKED_ROWS
) -> tuple[list[Row], list[records.Claim]]:
    """Rows and claims for a result file.

    Args:
        count: samples of each kind, a multiple of 256.
        exhaustive: also form all products; some seconds.
        weight_rows: rows of the weight whose range is looked at.
    """
    counted = count_pairs()
    rows: list[Row] = []
    wrong = 0
    for kind in Pair:
        differing, example = compare(kind, count)
        wrong += differing
        rows.append({"variant": f"pairs: {kind}", "pairs": counted[kind], "samples": count, "differing": differing,
                     "detail": example})  # fmt: skip
    claims = [
        zero_claim("pairs-total", "every operand pair has one class", sum(counted.values()) - (1 << 32), "pairs left"),
        zero_claim("pairs-equal", "native and portable FMA give the bits of exact arithmetic for every class of pairs",
                   wrong, f"of {count * len(Pair)} samples differ"),
    ]  # fmt: skip
    if exhaustive:
        formed = count_exhaustively()
        off = sum(abs(formed[kind] - counted[kind]) for kind in formed)
        claims.append(zero_claim("pairs-counted", "the counts by reasoning are those of forming every product", off,
                                 "pairs"))  # fmt: skip
    at_edge = 0
    for name, x, w in model_data(weight_rows):
        low, high = margins(x, w)
        inside = low >= 2.0**NORMAL and high < 2.0**OVERFLOW
        at_edge += not inside
        rows.append({"variant": f"data: {name}", "differing": int(not inside),
                     "detail": f"products from {low:.1e} to {high:.1e}; FP32 is normal from {2.0**NORMAL:.1e} to "
                               f"{2.0**OVERFLOW:.1e}"})  # fmt: skip
    claims.append(zero_claim("pairs-data", "no product of model data over- or underflows FP32", at_edge, "data sets"))
    return rows, claims
