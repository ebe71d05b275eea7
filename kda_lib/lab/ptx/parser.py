"""PTX text to instructions: registers resolved through nested scopes, every instruction with its line.

Covers what kernels without calls, textures and local memory consist of; any other directive is an error. The PyPI
package ``ptx-parser`` (0.1.3) would have been the natural choice, but it rejects ``.target sm_90a`` and ``.param .u64
.ptr``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kda_lib.lab.ptx.errors import PtxError, UnsupportedPtx

#: Width in bits of each type that a register, parameter or shared variable may have.
BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Register:
    """``name`` is unique in the kernel: one declared by itself carries a number."""

    name: str
    bits: int


@dataclass(frozen=True)
class Symbol:
    """A label, a shared variable, a parameter or a special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """``bits`` holds integers as they are (perhaps negative) and floating-point constants as bit patterns."""

    bits: int


@dataclass(frozen=True)
class Not:
    """``!p``."""

    of: Register


@dataclass(frozen=True)
class Vector:
    """``{a, b}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """``[base + offset]``, offset in bytes."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Pair:
    """``d|p``; either may be the sink ``_``, a :class:`Symbol`."""

    first: Operand
    second: Operand


Operand: TypeAlias = Register | Symbol | Immediate | Not | Vector | Address | Pair


@dataclass(frozen=True)
class Instruction:
    """``text`` is the statement as written, for messages; ``opcode`` includes the modifiers."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | Not | None
    line: int
    text: str


@dataclass(frozen=True)
class Variable:
    """A parameter (``offset`` meaningless) or a shared variable at ``offset`` bytes from the start of the window."""

    name: str
    bytes: int
    offset: int


@dataclass
class Kernel:
    """labels: name -> index of the instruction that follows it."""

    name: str
    parameters: list[Variable] = field(default_factory=list)
    block: tuple[int, ...] | None = None
    shared: dict[str, Variable] = field(default_factory=dict)
    shared_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/)"
    r'|(?P<word>[.%$A-Za-z_](?:[\w$.%]|::)*|"[^"]*")'
    r"|(?P<number>-?\d\w*(?:\.\d+)?)"
    r"|(?P<mark>[][{}()<>,;:@!|+=-])",
    re.DOTALL,
)
_FLOAT = re.compile(r"0[fFdD]([0-9a-fA-F]+)")
_LINE_DIRECTIVES = {".loc", ".file"}
_ENTRY_LIMITS = {".maxntid", ".minnctapersm", ".maxnreg", ".reqnctapercluster", ".explicitcluster"}


@dataclass(frozen=True)
class _Token:
    text: str
    start: int
    line: int


def _tokens(text: str) -> list[_Token]:
    line_starts = [0] + [m.end() for m in re.finditer("\n", text)]
    tokens, position, dropped_line = [], 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        line = bisect_right(line_starts, position)
        if match is None:
            raise PtxError(f"cannot read {text[position : position + 20]!r}", line)
        if match[0] in _LINE_DIRECTIVES:
            dropped_line = line
        if match.lastgroup != "skip" and line != dropped_line:
            tokens.append(_Token(match[0], position, line))
        position = match.end()
    return tokens


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX text by name.

    Raises:
        PtxError: the text cannot be read.
        UnsupportedPtx: it has functions, calls or another directive that is not known here.
    """
    if not isinstance(text, str):
        raise TypeError(f"ptx: expected the PTX text as a string, got {type(text).__name__}; decode it first")
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.at = 0
        self.scopes: list[dict[str, Register]] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        self.declared = 0

    def peek(self, ahead: int = 0) -> str:
        """A token to come; "" after the last one."""
        at = self.at + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1

    def take(self, *expected: str) -> str:
        word = self.peek()
        if not word or (expected and word not in expected):
            wanted = " or ".join(map(repr, expected)) or "more text"
            raise PtxError(f"expected {wanted}, got {word!r}", self.line())
        self.at += 1
        return word

    def accept(self, word: str) -> bool:
        if self.peek() == word:
            self.at += 1
            return True
        return False

    def integer(self) -> int:
        line, word = self.line(), self.take()
        value = _immediate(word)
        if value is None:
            raise PtxError(f"expected a number, got {word!r}", line)
        return value

    def module(self) -> dict[str, Kernel]:
        kernels: dict[str, Kernel] = {}
        shared = Kernel("")
        while self.at < len(self.tokens):
            line, word = self.line(), self.take()
            if word in (".version", ".address_size"):
                self.take()
            elif word == ".target":
                self.take()
                while self.accept(","):
                    self.take()
            elif word == ".shared":
                self.shared_variable(shared)
            elif word == ".entry":
                kernel = self.entry(shared)
                kernels[kernel.name] = kernel
            elif word not in (".visible", ".weak"):
                raise UnsupportedPtx(word, line)
        return kernels

    def entry(self, shared: Kernel) -> Kernel:
        kernel = Kernel(self.take(), shared=dict(shared.shared), shared_bytes=shared.shared_bytes)
        if self.accept("("):
            while not self.accept(")"):
                kernel.parameters.append(self.parameter())
                self.accept(",")
        while (word := self.peek()) != "{":
            line = self.line()
            self.take()
            if word == ".reqntid":
                kernel.block = self.extents()
            elif word in _ENTRY_LIMITS:
                while self.peek().isdigit() or self.peek() == ",":
                    self.take()
            else:
                raise UnsupportedPtx(word, line)
        self.ranges = {}
        self.body(kernel)
        return kernel

    def extents(self) -> tuple[int, ...]:
        values = [self.integer()]
        while self.accept(","):
            values.append(self.integer())
        return tuple(values)

    def parameter(self) -> Variable:
        self.take(".param")
        line, kind = self.line(), self.take()
        while (word := self.take()).startswith("."):
            if word == ".align":
                self.integer()
        if kind[1:] not in BITS or self.peek() == "[":
            raise UnsupportedPtx(f".param {kind} {word}{self.peek()}", line, "only scalar parameters are passed here")
        return Variable(word, BITS[kind[1:]] // 8, 0)

    def body(self, kernel: Kernel) -> None:
        """A scope; labels of an inner one are local to it, and so may appear again (inline assembly)."""
        self.take("{")
        self.scopes.append({})
        first = len(kernel.instructions)
        labels: dict[str, int] = {}
        while not self.accept("}"):
            word = self.peek()
            if word == "{":
                self.body(kernel)
            elif word == ".reg":
                self.registers()
            elif word == ".shared":
                self.take()
                self.shared_variable(kernel)
            elif word == ".pragma":
                while self.take() != ";":
                    pass
            elif word.startswith("."):
                raise UnsupportedPtx(word, self.line())
            elif self.peek(1) == ":":
                labels[self.take()] = len(kernel.instructions)
                self.take(":")
            else:
                kernel.instructions.append(self.instruction())
        self.scopes.pop()
        for label, target in labels.items():
            unique = label if not self.scopes else f"{label}@{target}"
            kernel.labels[unique] = target
            for i, instruction in enumerate(kernel.instructions[first:], first):
                if instruction.operands == (Symbol(label),):
                    kernel.instructions[i] = replace(instruction, operands=(Symbol(unique),))

    def registers(self) -> None:
        self.take(".reg")
        line, kind = self.line(), self.take()[1:]
        if kind not in BITS:
            raise UnsupportedPtx(f".reg .{kind}", line)
        while True:
            name = self.take()
            if self.accept("<"):
                if len(self.scopes) > 1:
                    raise UnsupportedPtx(f".reg {name}<>", line, "ranges are read in the outermost scope only")
                self.ranges[name] = (self.integer(), BITS[kind])
                self.take(">")
            else:
                self.declared += 1
                self.scopes[-1][name] = Register(f"{name}@{self.declared}", BITS[kind])
            if self.take(",", ";") == ";":
                return

    def shared_variable(self, kernel: Kernel) -> None:
        line, align = self.line(), 1
        while (word := self.take()).startswith(".") and word[1:] not in BITS:
            if word != ".align":
                raise UnsupportedPtx(f".shared {word}", line)
            align = self.integer()
        element = BITS[word[1:]] // 8
        name, count = self.take(), 1
        if self.accept("["):
            if self.peek() == "]":
                raise UnsupportedPtx(f".shared {name}[]", line, "dynamic shared memory is not provided here")
            count = self.integer()
            self.take("]")
        self.take(";")
        align = max(align, element)
        offset = -(-kernel.shared_bytes // align) * align
        kernel.shared[name] = Variable(name, element * count, offset)
        kernel.shared_bytes = offset + element * count

    def instruction(self) -> Instruction:
        start, line = self.tokens[self.at].start, self.line()
        guard: Register | Not | None = None
        if self.accept("@"):
            negated = self.accept("!")
            register = self.register(self.take(), line)
            guard = Not(register) if negated else register
        opcode, operands = self.take(), []
        while not self.accept(";"):
            operands.append(self.operand())
            if self.peek() != ";":
                self.take(",")
        text = " ".join(self.text[start : self.tokens[self.at - 1].start].split())
        return Instruction(opcode, tuple(operands), guard, line, text)

    def operand(self) -> Operand:
        if self.accept("{"):
            items = [self.operand()]
            while self.accept(","):
                items.append(self.operand())
            self.take("}")
            return Vector(tuple(items))
        if self.accept("["):
            base = self.simple()
            offset = self.integer() if self.accept("+") else 0
            self.take("]")
            if isinstance(base, Not):
                raise PtxError("a predicate is no address", self.line())
            return Address(base, offset)
        first = self.simple()
        return Pair(first, self.simple()) if self.accept("|") else first

    def simple(self) -> Register | Symbol | Immediate | Not:
        line = self.line()
        if self.accept("!"):
            return Not(self.register(self.take(), line))
        word = self.take()
        value = _immediate(word)
        if value is not None:
            return Immediate(value)
        return self.find(word) or Symbol(word)

    def register(self, word: str, line: int) -> Register:
        register = self.find(word)
        if register is None:
            raise PtxError(f"{word}: no such register is declared", line)
        return register

    def find(self, word: str) -> Register | None:
        for scope in reversed(self.scopes):
            if word in scope:
                return scope[word]
        prefix = word.rstrip("0123456789")
        count, bits = self.ranges.get(prefix, (0, 0))
        return Register(word, bits) if word != prefix and int(word[len(prefix) :]) < count else None


def _immediate(word: str) -> int | None:
    if not word.lstrip("-")[:1].isdigit():
        return None
    if match := _FLOAT.fullmatch(word):
        return int(match[1], 16)
    try:
        return int(word.rstrip("U"), 0)
    except ValueError:
        return None
