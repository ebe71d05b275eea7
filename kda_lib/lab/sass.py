"""What the assembler made of a kernel: resources from the cubin's ELF sections, instructions from nvdisasm.

Scope: cubins that hold one kernel, with every device function inlined. The dataflow of :func:`instruction_mix` follows
straight-line code only.
"""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kda_lib.arch import Arch
from kda_lib.errors import KdaError
from kda_lib.lab.tools import packaged

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

PACKAGE = "nvidia-cuda-nvdisasm"

#: Every instruction is 128 bits from sm_70 on (CUDA Binary Utilities, "Instruction Set Reference").
INSTRUCTION_BYTES = 16

#: Mixed-precision and plain scalar FMA. HFMA2 is not one: the assembler uses it to load constants.
FMA_OPCODES = ("FFMA", "FHFMA")

_BRANCHES = {"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "CALL", "RET"}
_LOADS = re.compile(r"U?LD\w*")
_WRITES_PREDICATES = re.compile(r"\w*SETP|PLOP3|FCHK|R2P")
_REGISTER = re.compile(r"\bU?R\d+\b")
_PREDICATE = re.compile(r"!?U?P[0-9T]")
_OPCODE = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Za-z0-9_]+)*")
_FIELDS = {"opcode", "operands", "predicate", "other-attributes"}

#: Attribute records of .nv.info: format byte, attribute byte, 16-bit value or, in format 4, byte count of what follows.
#: The numbers are those that nvdisasm prints beside the names EIATTR_REGCOUNT and EIATTR_FRAME_SIZE.
_SIZED_FORMAT = 4
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11


class DisassemblerMissing(KdaError):
    """The package nvidia-cuda-nvdisasm is not installed."""


@dataclass(frozen=True)
class Resources:
    """What one thread or CTA of the kernel takes.

    registers: per thread. stack_bytes: local memory per thread. smem_bytes: static shared memory per CTA; where a
    kernel has any, the system's 1024 bytes are in it from sm_90 on. code_bytes: instructions, padding included.
    """

    entry: str
    registers: int
    stack_bytes: int
    smem_bytes: int
    code_bytes: int


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction, e.g. ``Instruction(0x290, "@!P0", "LDG.E.128", ("R4", "desc[UR4][R4.64]"))``.

    offset: bytes from the start of the kernel. predicate: ``""`` where there is none.
    """

    offset: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    def __str__(self) -> str:
        text = f"{self.predicate} {self.opcode} {', '.join(self.operands)}".strip()
        return f"/*{self.offset:04x}*/ {text}"


@dataclass(frozen=True)
class Spills:
    """Local-memory instructions and the bytes they move, each executed once, per thread."""

    stores: int
    loads: int
    store_bytes: int
    load_bytes: int


@dataclass(frozen=True)
class InstructionMix:
    """How a kernel's FMAs are fed.

    fmas: FMA instructions of the kernel. region: opcode without modifiers -> count, from the first FMA to the last.
    conversions: opcode -> count, in the whole kernel: the instructions that compute an FMA's multiplicand from what was
    loaded. region_conversions: how many of these lie in the region; the assembler hoists others above the first FMA.
    """

    fmas: int
    region: dict[str, int]
    conversions: dict[str, int]
    region_conversions: int

    @property
    def conversions_per_fma(self) -> float:
        return sum(self.conversions.values()) / self.fmas


def read_resources(cubin: bytes) -> Resources:
    """Read a kernel's resources.

    Raises:
        ValueError: not a cubin with exactly one kernel.
    """
    elf = _elf(cubin)
    entry, code = _kernel(elf)
    info = _attributes(elf, entry)
    shared = elf.get_section_by_name(f".nv.shared.{entry}")
    return Resources(
        entry=entry,
        registers=info[_REGISTER_COUNT],
        stack_bytes=info[_FRAME_SIZE],
        smem_bytes=shared.data_size if shared else 0,
        code_bytes=code.data_size,
    )


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a kernel, in the order of their offsets.

    Raises:
        ValueError: not a cubin with exactly one kernel, or something in it is no instruction; the message says where.
        DisassemblerMissing: the package nvidia-cuda-nvdisasm is not installed.
    """
    _, code = _kernel(_elf(cubin))
    return _instructions(_nvdisasm(cubin, "--print-code"), code.data_size)


def disassemble_all(cubins: Sequence[bytes], target: str | Arch) -> list[list[Instruction]]:
    """As :func:`disassemble` for many cubins of one target at once.

    nvdisasm takes about 0.3 s to start, whatever it then does. Branch targets count from the first cubin's start.
    """
    if not cubins:
        return []
    codes = [_kernel(_elf(cubin))[1].data() for cubin in cubins]
    target = Arch.parse(target).target.replace("sm_", "SM")
    everything = _instructions(_nvdisasm(b"".join(codes), "--binary", target), sum(map(len, codes)))
    ends = [0]
    for code in codes:
        ends.append(ends[-1] + len(code) // INSTRUCTION_BYTES)
    return [
        [Instruction(i * INSTRUCTION_BYTES, x.predicate, x.opcode, x.operands) for i, x in enumerate(everything[a:b])]
        for a, b in pairwise(ends)
    ]


def spills(instructions: Sequence[Instruction]) -> Spills:
    """Count local-memory stores (STL) and loads (LDL); arrays that the program indexes lie there too."""
    stores = [_width(i) for i in instructions if i.base == "STL"]
    loads = [_width(i) for i in instructions if i.base == "LDL"]
    return Spills(len(stores), len(loads), 4 * sum(stores), 4 * sum(loads))


def instruction_mix(instructions: Sequence[Instruction]) -> InstructionMix:
    """Count what surrounds and what feeds the FMAs.

    Raises:
        ValueError: there is no FMA, or the code branches between the first and the last one.
    """
    fmas = [index for index, x in enumerate(instructions) if x.base in FMA_OPCODES]
    if not fmas:
        raise ValueError(f"instructions: expected one of {', '.join(FMA_OPCODES)}, got none in {len(instructions)}")
    region = range(fmas[0], fmas[-1] + 1)
    if branch := next((instructions[i] for i in region if instructions[i].base in _BRANCHES), None):
        raise ValueError(f"instructions: expected straight-line code between the FMAs, got {branch}")
    feeding = _conversions(instructions)
    return InstructionMix(
        fmas=len(fmas),
        region=dict(Counter(instructions[i].base for i in region).most_common()),
        conversions=dict(Counter(instructions[i].base for i in sorted(feeding)).most_common()),
        region_conversions=sum(i in region for i in feeding),
    )


def _conversions(instructions: Sequence[Instruction]) -> set[int]:
    """Indices of the instructions that compute the FMAs' multiplicands from what was loaded."""
    nothing: frozenset[int] = frozenset()
    #: Register -> the instructions that made its present value, back to the loads.
    made_by: dict[str, frozenset[int]] = {}
    found: set[int] = set()
    for index, instruction in enumerate(instructions):
        written, read = _registers(instruction)
        made = nothing
        if instruction.base in FMA_OPCODES:
            # The third source is the addend, a sum and not a converted value.
            multiplicands = _REGISTER.findall(" ".join(instruction.operands[1:3]))
            found |= nothing.union(*(made_by.get(register, nothing) for register in multiplicands))
        elif not _LOADS.fullmatch(instruction.base):
            made = nothing.union({index}, *(made_by.get(register, nothing) for register in read))
        made_by.update(dict.fromkeys(written, made))
    return found


def _registers(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Registers that an instruction writes and reads."""
    operands = list(instruction.operands)
    while operands and _PREDICATE.fullmatch(operands[0]):
        operands.pop(0)
    result = _REGISTER.fullmatch(operands[0]) if operands else None
    written: list[str] = []
    if result and not _WRITES_PREDICATES.fullmatch(instruction.base):
        kind, number = operands.pop(0).split("R")
        written = [f"{kind}R{int(number) + i}" for i in range(_width(instruction))]
    if instruction.base == "PRMT":
        # Taking the upper half of one register, it fills up from another, any one, whose bits are then shifted out.
        del operands[1:]
    return written, _REGISTER.findall(" ".join(operands))


def _width(instruction: Instruction) -> int:
    """32-bit registers that the result or the memory operand takes."""
    modifiers = instruction.opcode.split(".")
    return 4 if "128" in modifiers else 2 if {"64", "WIDE"} & set(modifiers) else 1


def _elf(cubin: bytes) -> ELFFile:
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        return ELFFile(io.BytesIO(cubin))
    except ELFError as error:
        raise ValueError(f"cubin: expected an ELF file, got {len(cubin)} bytes that are none ({error})") from error


def _kernel(elf: ELFFile) -> tuple[str, Section]:
    """Name and code section of the only kernel."""
    code = {s.name.removeprefix(".text."): s for s in elf.iter_sections() if s.name.startswith(".text.")}
    if len(code) != 1:
        raise ValueError(f"cubin: expected one kernel, got {', '.join(code) or 'none'}; compile kernels one by one")
    return code.popitem()


def _attributes(elf: ELFFile, entry: str) -> dict[int, int]:
    """Attribute -> value of the kernel, from the records of .nv.info that name a symbol."""
    from elftools.elf.sections import SymbolTableSection

    symbols, section = elf.get_section_by_name(".symtab"), elf.get_section_by_name(".nv.info")
    if not isinstance(symbols, SymbolTableSection) or section is None:
        raise ValueError("cubin: expected the sections .symtab and .nv.info, got an ELF file without; is it a cubin?")
    info = section.data()
    found: dict[int, int] = {}
    position = 0
    while position < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _SIZED_FORMAT:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, position)
                if symbols.get_symbol(symbol).name == entry:
                    found[attribute] = value
            position += size
    return found


@cache
def find_nvdisasm() -> str:
    """Path of the disassembler inside its installed package.

    Raises:
        DisassemblerMissing: the package nvidia-cuda-nvdisasm is not installed.
    """
    path = packaged(PACKAGE, "nvdisasm")
    if path is None:
        raise DisassemblerMissing(
            f"nvdisasm: expected the package {PACKAGE} to be installed; run: pip install {PACKAGE}"
        )
    return path


def _nvdisasm(data: bytes, *options: str) -> list[dict[str, Any]]:
    """What nvdisasm says about a file, as its JSON has it: one dictionary a function."""
    with tempfile.NamedTemporaryFile(prefix="kda_lib-", suffix=".cubin") as file:
        file.write(data)
        file.flush()
        # It warns on standard error about the older ELF layout of targets below sm_100 and decodes it all the same.
        command = [find_nvdisasm(), "--emit-json", *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"cubin: nvdisasm cannot read it: {'; '.join(done.stderr.split(chr(10))).strip('; ')}")
    _, functions = json.loads(done.stdout)
    return list(functions)


def _instructions(functions: list[dict[str, Any]], code_bytes: int) -> list[Instruction]:
    """The instructions of nvdisasm's only function, every one accounted for."""
    (function,) = functions
    listed = function["sass-instructions"]
    if len(listed) * INSTRUCTION_BYTES != code_bytes:
        raise ValueError(
            f"cubin: expected {code_bytes // INSTRUCTION_BYTES} instructions, nvdisasm lists {len(listed)}"
        )
    return [_instruction(index * INSTRUCTION_BYTES, fields) for index, fields in enumerate(listed)]


def _instruction(offset: int, fields: dict[str, Any]) -> Instruction:
    opcode = fields.get("opcode", "")
    if not _OPCODE.fullmatch(opcode) or fields.keys() - _FIELDS:
        raise ValueError(f"cubin: nvdisasm lists no readable instruction at offset {offset:#x}: {fields}")
    operands = fields.get("operands", "")
    return Instruction(offset, fields.get("predicate", ""), opcode, tuple(operands.split(",")) if operands else ())
