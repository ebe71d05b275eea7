"""Write the time (``%globaltimer``, ns) and the SM (``%smid``) into two 64-bit words: a mark between other kernels.

Scope: separate graphs that show what ran when. It is never part of a timed graph, as every kernel takes its time.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_ptr

from kda_lib.kernels.lab_config import StampConfig
from kda_lib.kernels.ptx import asm


class Stamp:
    """The kernel for the :class:`StampConfig`."""

    def __init__(self, config: StampConfig) -> None:
        self.config = config

    @staticmethod
    def trace_arguments() -> list[cute.Pointer]:
        """A null pointer for the two words."""
        return [make_ptr(Int64, 0, cute.AddressSpace.gmem, assumed_align=16)]

    @cute.jit
    def __call__(self, slot: cute.Pointer):
        launch = self.config.launch
        self.kernel(slot).launch(grid=[launch.grid, 1, 1], block=[launch.block, 1, 1])

    @cute.kernel
    def kernel(self, slot: cute.Pointer):
        code = (
            "{ .reg .b64 t; .reg .b64 s64; .reg .b32 s; mov.u64 t, %globaltimer; mov.u32 s, %smid; "
            "cvt.u64.u32 s64, s; st.global.v2.b64 [$0], {t, s64}; }"
        )
        asm(code, [], [slot.toint()], ordered=True)


# The name that profilers and PTX show.
Stamp.kernel.set_name_prefix("kda_stamp", remove_cutlass_symbol=True, keep_mangled_name=False)
