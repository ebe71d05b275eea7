"""Compiler failures made readable: which instruction, which target has it, which line emits it, what to use instead.

Where the assembler said what it rejects, its log is read. Where the compiler said nothing of use
(nvidia-cutlass-dsl 4.6.2: "NVVM backend compilation failed"; any version when libNVVM itself refuses to emit PTX),
every distinct instruction of the kernel is assembled alone, and the rejected ones are those that a later target takes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_lib.arch import TARGETS, Arch
from kda_lib.errors import CompileError, UnknownTarget, UnsupportedInstruction

_ONE_CTA = "use one CTA instead of a cluster (split=1)"
#: Part of a PTX instruction -> what this library does on targets that lack it.
ALTERNATIVES: dict[str, str] = {
    "fma.rn.f32.bf16": "convert both operands exactly and use fma.rn.f32 (fma=FmaForm.SHIFT)",
    "griddepcontrol": "launch without programmatic dependent launch (pdl=False)",
    "cluster": _ONE_CTA,
    "mbarrier.arrive.expect_tx": _ONE_CTA,
}

#: Targets from the lowest to the highest, the plain one of each capability before its ``a`` variant.
LADDER: tuple[Arch, ...] = tuple(
    sorted({Arch.parse(t) for t in TARGETS} | {Arch(*Arch.parse(t).capability) for t in TARGETS})
)

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The four wordings of ptxas; the DSL may have wrapped its lines.
_REJECTED = re.compile(
    r"line\s+(?P<line>\d+);\s+error\s*:\s+(?:Feature|Instruction|Modifier)\s+'(?P<name>[^']+)'(?:\s+on\s+'[^']+')?\s+"
    r"(?:requires\s+\.target\s+(?P<lowest>sm_\w+)\s+or\s+higher|not\s+supported\s+on\s+\.target)"
)
# In this order: the DSL, ptxas reading PTX, ptxas and libNVVM reading their options.
_UNKNOWN_TARGET = re.compile(
    r"Unsupported GPU architecture '\w+' with CUDA toolkit|Unsupported \.target '"
    r"|Value 'sm_\w+' is not defined for option 'gpu-name'|-arch=(?:compute|sm)_\w+ is an unsupported option"
)
_BACKEND = re.compile(r"NVVM_ERROR|PTXAS_ERROR|NVPTX compiler invocation failed|libNVVM failed")
_ASSEMBLER_ERROR = re.compile(r"(?:line \d+; )?(?:error|fatal)\s+: .*")

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]+)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_REGISTERS = re.compile(r"\.reg\s+(\.\w+)\s+(.+)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:[\w$]+:(?!:)\s*)?(?:@!?%?\w+\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>.*)", re.DOTALL)
# Not a register of the compiler or of the hardware (%r1, %tid.x), not part of a number (0x1F, 0f3F800000).
_NAME = re.compile(r"(?<![\w.%$])[A-Za-z_$][\w$]*")


@dataclass(frozen=True)
class Statement:
    """One instruction of a PTX text.

    operands: what follows the opcode, without the semicolon. registers: declarations of all registers in scope.
    source: ``"file.py:line"`` where the PTX has line information, else ``None``.
    """

    line: int
    opcode: str
    operands: str
    registers: str
    source: str | None


@dataclass(frozen=True)
class Rejection:
    """An instruction that the target lacks, and the lowest target that has it, ``None`` where nobody said."""

    instruction: str
    lowest_target: str | None


def statements(ptx: str) -> Iterator[Statement]:
    """The instructions of a PTX text in order; directives and labels are left out."""
    files = dict(_FILE.findall(ptx))
    declared: dict[str, str] = {}
    source = None
    for number, line in enumerate(ptx.splitlines(), 1):
        if loc := _LOC.match(line):
            source = f"{_relative(files[loc[1]])}:{loc[2]}" if loc[1] in files else None
            continue
        for piece in line.partition("//")[0].split(";")[:-1]:
            text = piece.strip().lstrip("{} \t")
            if declaration := _REGISTERS.match(text):
                declared |= {name.strip(): declaration[1] for name in declaration[2].split(",")}
            elif found := _INSTRUCTION.match(text):
                registers = " ".join(f".reg {kind} {name};" for name, kind in declared.items())
                yield Statement(number, found["opcode"], found["operands"], registers, source)


def read_log(log: str, ptx: str) -> list[Rejection]:
    """What an assembler's log says it rejected, each instruction once and as the PTX spells it, in order of the log."""
    by_line: dict[int, list[str]] = {}
    for statement in statements(ptx):
        by_line.setdefault(statement.line, []).append(statement.opcode)
    found: dict[str, Rejection] = {}
    for match in _REJECTED.finditer(log):
        words = set(match["name"].strip(".").split("."))
        spelled = (opcode for opcode in by_line.get(int(match["line"]), ()) if words <= set(opcode.split(".")))
        instruction = next(spelled, match["name"])
        found.setdefault(instruction, Rejection(instruction, match["lowest"]))
    return list(found.values())


def probe(ptx: str, target: str, accepts: Callable[[str, str], bool]) -> list[Rejection]:
    """Which instructions of a PTX text this target lacks, found by assembling each distinct one alone.

    An instruction that names a label, a parameter or a variable cannot be assembled alone and is left out, and so is
    one that no target of :data:`LADDER` accepts.

    Args:
        ptx: from any target; only its instructions matter.
        accepts: ``accepts(code, target)`` assembles a block of PTX that declares its own registers.
    """
    first: dict[str, str] = {}
    for statement in statements(ptx):
        if all(f" {name};" in statement.registers for name in _NAME.findall(statement.operands)):
            first.setdefault(statement.opcode, f"{{ {statement.registers} {statement.opcode}{statement.operands}; }}")
    rejected = []
    for opcode, code in first.items():
        if not accepts(code, target):
            lowest = next((arch.target for arch in LADDER if accepts(code, arch.target)), None)
            if lowest is not None:
                rejected.append(Rejection(opcode, lowest))
    return rejected


def compiler_errors() -> tuple[type[Exception], ...]:
    """What the DSL raises when a compile fails. Imports cutlass."""
    from cutlass._mlir.ir import MLIRError
    from cutlass.base_dsl.common import DSLBaseError

    # The DSL wraps only the failures that it recognises.
    return DSLBaseError, MLIRError


def gpu_arch(arch: Arch) -> Any:
    """CuTe DSL's compile option for this target. Imports cutlass.

    Raises:
        UnknownTarget: the DSL has no such target.
    """
    from cutlass import cute

    try:
        return cute.GPUArch(arch.target)
    except KeyError as error:
        raise _unknown_target(arch, compiler_log(error)) from error


def trace_ptx(kernel: Any, arguments: Sequence[Any], target: str) -> str:
    """PTX of a kernel with line information, also where the assembler rejects it; ``""`` where there is none."""
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir

    # A failure is why we are here: what counts is the PTX that was written before it.
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as dump:
        with suppress(*compiler_errors(), UnknownTarget):
            options = (gpu_arch(Arch.parse(target)), cute.KeepPTX(), cute.GenerateLineInfo(True), DumpDir(dump))
            cute.compile[options](kernel, *arguments)
        return read_dump(dump)


def read_dump(folder: str) -> str:
    """The PTX that the DSL left in its dump folder."""
    return "".join(path.read_text() for path in sorted(Path(folder).glob("*.ptx")))


def assembler_accepts(code: str, target: str) -> bool:
    """Whether the DSL's own assembler takes this block of PTX for this target. Imports cutlass."""
    from cutlass import cute

    from kda_lib.kernels.probe import Probe

    with suppress(*compiler_errors(), UnknownTarget):
        cute.compile[gpu_arch(Arch.parse(target))](Probe(code.replace("$", "$$")))
        return True
    return False


def explain_failure(error: Exception, arch: Arch, ptx: str, trace: Callable[[str], str]) -> CompileError:
    """The library's exception for an exception of the DSL.

    Args:
        ptx: what the failed compile emitted, ``""`` if nothing; the log's line numbers refer to it.
        trace: ``trace(target)`` gives the kernel's PTX with line information (:func:`trace_ptx`); called only where
            the back end failed.
    """
    log = compiler_log(error)
    if _UNKNOWN_TARGET.search(log):
        return _unknown_target(arch, log)
    rejected, lines, found_by = read_log(log, ptx), "", "log"
    if rejected:
        lines = trace(arch.target)
    elif _BACKEND.search(log) and not _ASSEMBLER_ERROR.search(log):
        # libNVVM may have stopped before it emitted PTX. The nearest target that has some differs least.
        origins = [arch] if ptx else [a for a in LADDER if a > arch]
        lines = next(filter(None, (trace(origin.target) for origin in origins)), "")
        rejected, found_by = probe(lines, arch.target, assembler_accepts), "probe"
    if not rejected:
        said = _ASSEMBLER_ERROR.search(log) or re.search(r"\S.*", log)
        message = f"{arch}: the compiler failed and named no instruction; it said: {said[0] if said else 'nothing'}"
        return CompileError(message, target=arch.target, log=log)
    return _unsupported(rejected, arch, ptx or lines, lines, found_by, log)


def compiler_log(error: Exception) -> str:
    """What the compiler said, in the form nearest to its own that the exception holds, without ANSI colours."""
    said = getattr(error, "raw_error", "") or f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return _ANSI.sub("", said)


def _unsupported(
    rejected: list[Rejection], arch: Arch, ptx: str, lines: str, found_by: str, log: str
) -> UnsupportedInstruction:
    # The one that needs the most decides where the kernel can run; the others are noted.
    worst = max(rejected, key=lambda r: Arch.parse(r.lowest_target) if r.lowest_target else LADDER[-1])
    sources = (s.source for s in statements(lines) if s.opcode == worst.instruction and s.source)
    error = UnsupportedInstruction(
        instruction=worst.instruction,
        target=arch.target,
        lowest_target=worst.lowest_target,
        uses=sum(s.opcode == worst.instruction for s in statements(ptx)),
        source=next(sources, None),
        alternative=_alternative(worst.instruction),
        found_by=found_by,
        log=log,
    )
    for other in rejected:
        if other is not worst:
            advice = _alternative(other.instruction)
            error.add_note(
                f"also rejected: {other.instruction}, lowest target {other.lowest_target or 'unknown'}"
                + (f"; {advice}" if advice else "")
            )
    return error


def _alternative(instruction: str) -> str:
    return next((advice for part, advice in ALTERNATIVES.items() if part in instruction), "")


def _unknown_target(arch: Arch, log: str) -> UnknownTarget:
    return UnknownTarget(
        f"nvidia-cutlass-dsl {metadata.version('nvidia-cutlass-dsl')} does not know the target {arch}; "
        f"name one of {', '.join(TARGETS)}, or install a release that knows the chip",
        target=arch.target,
        log=log,
    )


def _relative(path: str) -> str:
    """A source path as it is inside this package (``kda_lib/kernels/fma.py``), or the bare file name outside it."""
    package = Path(__file__).parent
    file = Path(path)
    return file.relative_to(package.parent).as_posix() if file.is_relative_to(package) else file.name
