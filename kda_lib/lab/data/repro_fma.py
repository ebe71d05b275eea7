"""One BF16 x BF16 + FP32 multiply-add in CuTe DSL, compiled for a named target. Needs nvidia-cutlass-dsl, no GPU.

    python repro_fma.py sm_90a native            # fma.rn.f32.bf16
    python repro_fma.py sm_90a portable-cvt      # cvt.f32.bf16 on both operands, then fma.rn.f32
    python repro_fma.py sm_90a portable-shift    # bit moves on both operands, then fma.rn.f32

Prints "ok", or ends with the compiler's exception and exit code 1.
"""

import sys
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_ptr
from cutlass.cutlass_dsl import dsl_user_op

# $1 holds two BF16 numbers. They are multiplied, $2 is added.
CODE = {
    "native": "{.reg .b16 a, b; mov.b32 {a, b}, $1; fma.rn.f32.bf16 $0, a, b, $2;}",
    "portable-cvt": "{.reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, $1; "
    "cvt.f32.bf16 x, a; cvt.f32.bf16 y, b; fma.rn.f32 $0, x, y, $2;}",
    "portable-shift": "{.reg .b32 x, y; shl.b32 x, $1, 16; and.b32 y, $1, 0xFFFF0000; fma.rn.f32 $0, x, y, $2;}",
}


@dsl_user_op
def fma(form: str, pair: Uint32, acc: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    operands = [pair.ir_value(loc=loc, ip=ip), acc.ir_value(loc=loc, ip=ip)]
    return Float32(llvm.inline_asm(Float32.mlir_type, operands, CODE[form], "=f,r,f", loc=loc, ip=ip))


class Fma:
    """``out[0] = low(pair) * high(pair) + out[0]``"""

    def __init__(self, form: str) -> None:
        self.form = form

    @cute.jit
    def __call__(self, pair: Uint32, out: cute.Pointer):
        self.kernel(pair, out).launch(grid=[1, 1, 1], block=[1, 1, 1])

    @cute.kernel
    def kernel(self, pair: Uint32, out: cute.Pointer):
        acc = cute.make_tensor(out, (1,))
        acc[0] = fma(self.form, pair, acc[0])


def arguments() -> tuple[Uint32, cute.Pointer]:
    return Uint32(0), make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)


if __name__ == "__main__":
    target, form = sys.argv[1:]
    cute.compile[cute.GPUArch(target)](Fma(form), *arguments())
    print("ok")
