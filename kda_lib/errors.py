"""The library's exceptions. Bad arguments raise plain TypeError or ValueError; these are for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KdaError(Exception):
    """Base of every error that this library defines."""


class CompileError(KdaError):
    """A kernel could not be compiled.

    Attributes:
        target: compile target, e.g. ``"sm_90a"``.
        log: what the compiler said, unedited; ``""`` where it said nothing.
    """

    def __init__(self, message: str, *, target: str, log: str = "") -> None:
        super().__init__(message)
        self.target = target
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not pickle by themselves, and this one crosses processes.
        return _rebuild, (type(self), str(self), self.__dict__)


def _rebuild(kind: type[CompileError], message: str, state: dict[str, Any]) -> CompileError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class UnknownTarget(CompileError):
    """The installed compiler does not know the target at all (as opposed to rejecting an instruction on it)."""


class CompilerCrashed(CompileError):
    """The compiler ended its process (signal, abort or time limit) instead of returning."""


class UnsupportedInstruction(CompileError):
    """The assembler rejected an instruction for this target.

    Attributes:
        instruction: PTX instruction, e.g. ``"fma.rn.f32.bf16"``.
        lowest_target: lowest target that has it, e.g. ``"sm_100"``; ``None`` when the compiler did not say.
        uses: how many places of the PTX use it.
        source: ``"file.py:line"`` of the kernel code that emits it; ``None`` when unknown.
        alternative: what to use instead; ``""`` where none is known.
        found_by: ``"log"`` (the assembler said it) or ``"probe"`` (found by assembling the instruction alone).
    """

    def __init__(
        self,
        *,
        instruction: str,
        target: str,
        lowest_target: str | None,
        uses: int,
        source: str | None,
        alternative: str,
        found_by: str,
        log: str,
    ) -> None:
        self.instruction = instruction
        self.lowest_target = lowest_target
        self.uses = uses
        self.source = source
        self.alternative = alternative
        self.found_by = found_by
        needs = f"it needs {lowest_target} or higher" if lowest_target else "no target that has it was found"
        places = f"{uses} place{'' if uses == 1 else 's'}" + (f", emitted at {source}" if source else "")
        super().__init__(
            f"{target} has no {instruction}: {needs}; used in {places}."
            + (f" Instead: {alternative}." if alternative else ""),
            target=target,
            log=log,
        )


class NotWarmedUp(KdaError):
    """A call under CUDA graph capture would have had to compile.

    Attributes:
        missing: what ``warmup`` was not asked to prepare.
    """

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        super().__init__(
            "a CUDA graph is being captured and nothing may be compiled now; not warmed up: "
            + ", ".join(self.missing)
            + "; call warmup() for these before capture"
        )
