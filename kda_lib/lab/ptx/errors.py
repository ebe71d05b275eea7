"""Why a PTX text cannot be run at all. What goes wrong in a run is a :class:`~kda_lib.lab.ptx.report.Violation`."""

from __future__ import annotations

from kda_lib.errors import KdaError


class PtxError(KdaError):
    """The PTX text is malformed, or an instruction or directive in it is unknown here.

    Attributes:
        line: line of the PTX text, counted from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


class UnsupportedPtx(PtxError):
    """Legal PTX, perhaps, that this machine does not run.

    Attributes:
        name: the instruction with its modifiers, or the directive.
    """

    def __init__(self, name: str, line: int, reason: str = "this machine does not run it") -> None:
        super().__init__(f"{name}: {reason}", line)
        self.name = name
