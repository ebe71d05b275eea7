"""A kernel that is nothing but one piece of PTX, to ask the compiler's own assembler whether a target has it.

Scope: diagnosis of a failed compile, see :mod:`kda_lib.diagnosis`. It is compiled and never launched.
"""

from __future__ import annotations

import cutlass.cute as cute

from kda_lib.kernels.ptx import asm


class Probe:
    """The kernel for one piece of PTX, which declares the registers that it names."""

    def __init__(self, code: str) -> None:
        self.code = code

    @cute.jit
    def __call__(self):
        self.kernel().launch(grid=[1, 1, 1], block=[1, 1, 1])

    @cute.kernel
    def kernel(self):
        # Ordered, because nothing uses its results and it would be removed as dead.
        asm(self.code, [], [], ordered=True)
