"""BF16 x BF16 + FP32 fused multiply-add: one PTX instruction where the target has it, three where it does not.

All three forms give the same bits: BF16 to FP32 is exact, and a fused operation rounds once, after the addition (PTX
ISA, mixed precision arithmetic: convert, then operate). None flushes denormals (no ``.ftz``).

Scope: scalar FMA for skinny GEMMs. Not here: tensor-core MMA, packed ``f32x2`` arithmetic.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

from kda_lib.arch import Arch


class FmaForm(StrEnum):
    """How the FMA is emitted.

    - ``NATIVE``: ``fma.rn.f32.bf16``; needs :attr:`Arch.has_mixed_bf16_fma`.
    - ``CVT``: ``cvt.f32.bf16`` on each operand, then ``fma.rn.f32``; needs :attr:`Arch.has_cvt_f32_bf16`.
    - ``SHIFT``: BF16 is the upper half of FP32, so a 16-bit shift or a mask converts exactly; then ``fma.rn.f32``.
    """

    NATIVE = "native"
    CVT = "portable-cvt"
    SHIFT = "portable-shift"


def supports(arch: Arch, form: FmaForm) -> bool:
    """Whether the assembler accepts this form for this target."""
    if form is FmaForm.NATIVE:
        return arch.has_mixed_bf16_fma
    if form is FmaForm.CVT:
        return arch.has_cvt_f32_bf16
    return True


def portable_form(arch: Arch) -> FmaForm:
    """The portable form for this target: bit moves everywhere.

    Notebook 02 counts both in SASS: ``cvt.f32.bf16`` becomes the same shifts on sm_90a or costs more, and never less.
    """
    return FmaForm.SHIFT


def default_form(arch: Arch) -> FmaForm:
    """The form the kernels use on this target: native where the assembler has it, else portable."""
    return FmaForm.NATIVE if arch.has_mixed_bf16_fma else portable_form(arch)


#: A value of the traced program. The device functions below load CuTe DSL only when a kernel is being traced.
Traced: TypeAlias = Any


def unpack_pair(form: FmaForm, pair: Traced) -> tuple[Traced, Traced]:
    """Split a 32-bit register holding two BF16 numbers into two FMA operands, low half (lower address) first."""
    from cutlass import Float32, Int16, Uint32

    from kda_lib.kernels.ptx import asm

    if form is FmaForm.SHIFT:
        return (pair << Uint32(16)).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)
    low, high = asm("mov.b32 {$0, $1}, $2;", [Int16, Int16], [pair])
    if form is FmaForm.NATIVE:
        return low, high
    return asm("cvt.f32.bf16 $0, $1;", [Float32], [low]), asm("cvt.f32.bf16 $0, $1;", [Float32], [high])


def fma(form: FmaForm, a: Traced, b: Traced, c: Traced) -> Traced:
    """``a * b + c`` rounded once to FP32; ``a`` and ``b`` come from :func:`unpack_pair` with the same form."""
    from cutlass import Float32

    from kda_lib.kernels.ptx import asm

    suffix = "f32.bf16" if form is FmaForm.NATIVE else "f32"
    return asm(f"fma.rn.{suffix} $0, $1, $2, $3;", [Float32], [a, b, c])
