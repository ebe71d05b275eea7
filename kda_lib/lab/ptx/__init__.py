"""Run PTX on the CPU and check every access: see :class:`Machine`, and :func:`emulate` for this library's kernels."""

from kda_lib.lab.ptx.emulate import emulate
from kda_lib.lab.ptx.errors import PtxError, UnsupportedPtx
from kda_lib.lab.ptx.machine import Machine
from kda_lib.lab.ptx.memory import Buffer
from kda_lib.lab.ptx.report import Check, RunReport, Violation

__all__ = ["Buffer", "Check", "Machine", "PtxError", "RunReport", "UnsupportedPtx", "Violation", "emulate"]
