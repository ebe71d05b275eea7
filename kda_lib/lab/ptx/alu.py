"""Arithmetic: what each opcode computes from its operands, over arrays with one element a thread.

:data:`OPERATIONS` lists every opcode in full, modifiers included: one that is not listed cannot run by accident.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kda_lib.reference import bf16_to_f32, f32_to_bf16

Array: TypeAlias = NDArray[Any]

#: NumPy's view of each PTX type. BF16 stays a bit pattern.
DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip

#: The canonical NaN of single precision (PTX ISA). Our kernels let no NaN payload out, so nothing rests on this choice.
_NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)


@dataclass(frozen=True)
class Operation:
    """``result`` and ``operands`` are PTX types; ``compute`` gets and gives arrays of their dtypes."""

    result: str
    operands: tuple[str, ...]
    compute: Callable[..., Array]


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` rounded once, for any FP32 operands.

    :func:`kda_lib.reference.fma_f32_bf16` needs BF16 factors; this does not, and shares nothing with it. The product is
    exact in FP64 (24 + 24 bits). The sum is rounded to FP64 *to odd*, using the exact error of the addition (Knuth's
    TwoSum): with 53 >= 24 + 2 bits, rounding that to FP32 gives what one rounding gives (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    # NaN (after Inf) compares false: such sums are final.
    inexact = np.abs(error) > 0
    if inexact.any():
        bits = total.view(np.int64)
        towards = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(inexact & (bits & 1 == 0), bits + towards, bits).view(np.float64)
    return _canonical(total.astype(np.float32))


def _canonical(values: Array) -> Array:
    nan = np.isnan(values)
    return np.where(nan, _NAN_F32, values) if nan.any() else values


def _float(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: _canonical(function(a, b))


def _shl(a: Array, b: Array) -> Array:
    bits = a.itemsize * 8
    shifted: Array = a << np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b < bits, shifted, a.dtype.type(0))


def _shr(a: Array, b: Array) -> Array:
    bits = a.itemsize * 8
    shifted: Array = a >> np.minimum(b, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(b < bits, shifted, a.dtype.type(0))


def _wide(double: type[np.generic]) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.multiply(a, b, dtype=double)


def _high(a: Array, b: Array) -> Array:
    bits, double = a.itemsize * 8, np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(double) * b.astype(double)) >> double(bits)).astype(a.dtype)


def _divide(a: Array, b: Array) -> Array:
    """Towards zero, as PTX and C do and NumPy's ``//`` does not."""
    return (a - np.fmod(a, b)) // b


def _bfe(a: Array, start: Array, length: Array) -> Array:
    """PTX ISA, "bfe": bits beyond the source are its sign (0 if unsigned), and so are those from ``length`` on."""
    double = np.int64 if a.dtype.kind == "i" else np.uint64
    start = np.minimum(start & np.uint32(0xFF), 32).astype(double)
    unused = (64 - np.minimum(length & np.uint32(0xFF), 32)).astype(double)
    field = (a.astype(double) >> start) << np.minimum(unused, 63) >> np.minimum(unused, 63)
    return np.where(unused == 64, double(0), field).astype(a.dtype)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    """PTX ISA, "prmt", default mode: nibbles choose bytes of {b, a}; bit 3 of a nibble copies the byte's sign."""
    source = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)).astype(np.uint64)
        byte = (source >> ((nibble & np.uint64(7)) * np.uint64(8))).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        result = result | byte << np.uint32(8 * i)
    return result


def _dot(widths: tuple[int, int], terms: int) -> Callable[[Array, Array, Array], Array]:
    """PTX ISA, "dp2a" (mode lo) and "dp4a": ``c`` plus the products of the lowest parts of ``a`` and ``b``."""

    def part(value: Array, width: int, i: int) -> Array:
        return value >> np.uint32(width * i) & np.uint32((1 << width) - 1)

    def compute(a: Array, b: Array, c: Array) -> Array:
        for i in range(terms):
            c = c + part(a, widths[0], i) * part(b, widths[1], i)
        return c

    return compute


def _select(yes: Array, no: Array, predicate: Array) -> Array:
    return np.where(predicate, yes, no)


def _same(a: Array) -> Array:
    return a


_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _operations() -> dict[str, Operation]:
    table: dict[str, Operation] = {}

    def put(opcode: str, kind: str, operands: int, compute: Callable[..., Array]) -> None:
        table[opcode] = Operation(kind, (kind,) * operands, compute)

    for bits in (16, 32, 64):
        for kind in (f"u{bits}", f"s{bits}"):
            put(f"add.{kind}", kind, 2, operator.add)
            put(f"sub.{kind}", kind, 2, operator.sub)
            put(f"mul.lo.{kind}", kind, 2, operator.mul)
            put(f"mad.lo.{kind}", kind, 3, lambda a, b, c: a * b + c)
            put(f"div.{kind}", kind, 2, _divide)
            put(f"rem.{kind}", kind, 2, np.fmod)
            put(f"min.{kind}", kind, 2, np.minimum)
            put(f"max.{kind}", kind, 2, np.maximum)
            table[f"shr.{kind}"] = Operation(kind, (kind, "u32"), _shr)
            for name, compare in _COMPARE.items():
                table[f"setp.{name}.{kind}"] = Operation("pred", (kind, kind), compare)
        for name, alias in _ALIASES.items():
            table[f"setp.{name}.u{bits}"] = table[f"setp.{alias}.u{bits}"]
        bit = f"b{bits}"
        put(f"neg.s{bits}", f"s{bits}", 1, operator.neg)
        table[f"shl.{bit}"] = Operation(bit, (bit, "u32"), _shl)
        table[f"shr.{bit}"] = Operation(bit, (bit, "u32"), _shr)
        for name in ("eq", "ne"):
            table[f"setp.{name}.{bit}"] = Operation("pred", (bit, bit), _COMPARE[name])
    for kind in ("pred", "b16", "b32", "b64"):
        put(f"and.{kind}", kind, 2, operator.and_)
        put(f"or.{kind}", kind, 2, operator.or_)
        put(f"xor.{kind}", kind, 2, operator.xor)
        put(f"not.{kind}", kind, 1, operator.invert)
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64"):
        table[f"selp.{kind}"] = Operation(kind, (kind, kind, "pred"), _select)
        put(f"mov.{kind}", kind, 1, _same)
    put("mov.pred", "pred", 1, _same)
    for sign in "us":
        for narrow, wide in ((16, 32), (32, 64)):
            kind, double = f"{sign}{narrow}", f"{sign}{wide}"
            product = _wide(DTYPES[double])
            table[f"mul.wide.{kind}"] = Operation(double, (kind, kind), product)
            table[f"mad.wide.{kind}"] = Operation(double, (kind, kind, double), _multiply_add(product))
            put(f"mul.hi.{kind}", kind, 2, _high)
        table[f"bfe.{sign}32"] = Operation(f"{sign}32", (f"{sign}32", "u32", "u32"), _bfe)
    put("prmt.b32", "b32", 3, _prmt)
    put("dp2a.lo.u32.u32", "u32", 3, _dot((16, 8), 2))
    put("dp4a.u32.u32", "u32", 3, _dot((8, 8), 4))

    for rounding in ("", ".rn"):
        put(f"add{rounding}.f32", "f32", 2, _float(operator.add))
        put(f"sub{rounding}.f32", "f32", 2, _float(operator.sub))
    # mul.f32 without .rn is left out: the assembler may fuse it with an addition, so its bits are not defined.
    put("mul.rn.f32", "f32", 2, _float(operator.mul))
    put("fma.rn.f32", "f32", 3, fma_f32)
    table["fma.rn.f32.bf16"] = Operation(
        "f32", ("bf16", "bf16", "f32"), lambda a, b, c: fma_f32(bf16_to_f32(a), bf16_to_f32(b), c)
    )
    for name, compare in _COMPARE.items():
        # NumPy's != is true on NaN where PTX's ordered ne is false.
        table[f"setp.{name}.f32"] = Operation("pred", ("f32", "f32"), _ordered(compare))
    integers = [f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)]
    for to in integers:
        for source in integers:
            table[f"cvt.{to}.{source}"] = Operation(to, (source,), _convert(DTYPES[to]))
    table["cvt.f32.bf16"] = Operation("f32", ("bf16",), bf16_to_f32)
    table["cvt.rn.bf16.f32"] = Operation("bf16", ("f32",), f32_to_bf16)
    for opcode in ("cvta.to.global.u64", "cvta.global.u64"):
        put(opcode, "u64", 1, _same)
    return table


def _multiply_add(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    return lambda a, b, c: product(a, b) + c


def _ordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))


def _convert(to: type[np.generic]) -> Callable[[Array], Array]:
    return lambda a: a.astype(to)


OPERATIONS = _operations()
