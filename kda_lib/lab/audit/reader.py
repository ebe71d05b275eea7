"""Any PTX text to the instruction forms and directives it uses, each with its places.

A form is the opcode with its modifiers and the kinds of the operands: ``ld.global.v4.b32 {4},[a]``. It leaves out what
does not decide whether a target has an instruction: names and types of registers, register or immediate, addresses. So
the audit says what is *available*; that operands are of the right type is for the assembler to say.

Unlike :mod:`kda_lib.lab.ptx.parser`, which resolves everything for execution and therefore reads only what can be
executed, this reads every statement of every dialect and understands none. The PyPI package ``ptx-parser`` (0.1.3)
gives nothing at all for the PTX of nvidia-cutlass-dsl.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

#: What the scalar operands of a form are called: register, immediate or symbol; and predicates.
SCALAR, PREDICATE = "r", "p"

#: Type of a declared register -> first letter of its name in a probe (see :mod:`kda_lib.lab.audit.probes`).
REGISTER_LETTERS: Mapping[str, str] = {
    "pred": "p", "b8": "c", "u8": "c", "s8": "c", "b16": "h", "u16": "h", "s16": "h", "f16": "h", "bf16": "h",
    "b32": "r", "u32": "r", "s32": "r", "f16x2": "r", "bf16x2": "r", "f32": "f", "b64": "l", "u64": "l", "s64": "l",
    "f64": "d", "b128": "q",
}  # fmt: skip

#: State space of a variable -> its name in a probe.
SPACE_NAMES: Mapping[str, str] = {"shared": "S", "global": "G", "const": "C", "local": "A", "param": "P"}

_COMMENT_OR_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STEP = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<line>\.(?:loc|file)\b[^\n]*)"
    r"|\.version\s+(?P<version>\d+\.\d+)"
    r"|\.target\s+(?P<target>\w+(?:\s*,\s*\w+)*)"
    r"|\.address_size\s+(?P<address_size>\d+)"
    r"|(?P<section>\.section\b[^{;]*\{[^}]*\})"
    r"|(?P<label>[\w$%]+\s*:(?!:))"
    r"|(?P<scope>[{}])"
    r"|(?P<function>(?:\.(?:visible|extern|weak|common)\s+)*\.(?:entry|func)\b[^{;]*;?)"
    r"|(?P<directive>\.\w+[^;{}=]*(?:=\s*(?P<initializer>\{)|=[^;{}]*)?)"
    r"|(?P<instruction>[@a-z][^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)"
)
_INSTRUCTION = re.compile(
    r"(?:@\s*!?\s*[\w$%]+\s+)?(?P<opcode>[a-z]\w*(?:\s*\.\w+(?:::\w+)*)*)\s*(?P<operands>.*)", re.DOTALL
)
_NUMBER = re.compile(r"(?<![A-Za-z])0[xfFdD][0-9a-fA-F]+|\d+")
_NAME = re.compile(r"(?<![\w.$%])%?[A-Za-z_$][\w$]*")
_TWO_WORDS = re.compile(r"[\w\])]\s+[\w%$]")
_REGISTERS = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.+)", re.DOTALL)
_RANGE = re.compile(r"([%\w$]+?)\s*<\s*\d+\s*>")
_PARAMETER = re.compile(r"\.param\b[^,()]*?([\w$%]+)\s*(?:\[\s*\d*\s*\])?\s*(?=[,)])")
_VARIABLE = re.compile(r"\.(shared|global|const|local|param)\b(?:::\w+)?(?:.*\s)([\w$%]+)\s*(?:\[|=|$)", re.DOTALL)
_ATTRIBUTE = re.compile(r"\.attribute\s*\(\s*(\.\w+)")
_LINKAGE = re.compile(r"(?:\.(?:visible|extern|weak|common)\s+)+(?=\.)")
_PARENTHESES = re.compile(r"\([^()]*(?:\([^()]*\)[^()]*)*\)")
_OPEN, _CLOSE = "{[(", "}])"


class PtxReadError(ValueError):
    """The text is not PTX, or is broken; the message says where."""


@dataclass(frozen=True, slots=True)
class Place:
    """line: from 1. text: the statement as written, on one line."""

    line: int
    text: str


@dataclass
class Use:
    """A form in a PTX text. probe: its first place as a probe, see :mod:`kda_lib.lab.audit.probes`."""

    form: str
    probe: str
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Module:
    """A PTX text, read.

    version: of ``.version``. target: first word of ``.target``. uses: by form, in the order of their first places.
    """

    text: str
    version: str
    target: str
    target_line: int
    uses: dict[str, Use]
    line_starts: list[int]

    def places(self, use: Use) -> list[Place]:
        return [
            Place(bisect_right(self.line_starts, start), " ".join(self.text[start:end].split()))
            for start, end in use.spans
        ]


def read(text: str) -> Module:
    """Read a PTX text.

    Raises:
        TypeError: not a string.
        PtxReadError: the text is empty, has no ``.version`` or ``.target``, holds two modules, or a statement of it
            does not end.
    """
    if not isinstance(text, str):
        raise TypeError(f"ptx: expected the PTX text as a string, got {type(text).__name__}; decode it first")
    return _Reader(text).module()


def split_operands(text: str) -> list[str]:
    """Operands at the outermost level; braces, brackets and parentheses hold together."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


class _NoAddress(Exception):
    """A pair of brackets with nothing in it, or one that does not close."""


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        # Blanks of the same length keep every position. In strings, only what would end a statement has to go.
        self.bare = _COMMENT_OR_STRING.sub(_blank, text)
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.uses: dict[str, Use] = {}
        self.scopes: list[dict[str, str]] = [{}]
        #: Opcode and operands without numbers -> form; only as long as no name means two things in the text.
        self.forms: dict[tuple[str, str], str] = {}
        self.letters: dict[str, str] = {}
        self.ambiguous = False

    def line(self, position: int) -> int:
        return bisect_right(self.line_starts, position)

    def module(self) -> Module:
        version = target = ""
        target_line = position = 0
        end = len(self.bare)
        while position < end:
            match = _STEP.match(self.bare, position)
            if match is None:
                raise self.broken(position)
            kind, position = match.lastgroup, match.end()
            if kind in ("version", "target"):
                if target or (version and kind == "version"):
                    raise PtxReadError(f"line {self.line(match.start())}: a second module begins; audit one at a time")
                if kind == "version":
                    version = match[kind]
                else:
                    target, target_line = match[kind].split(",")[0].strip(), self.line(match.start())
            elif kind == "scope":
                self.scope(match)
            elif kind == "function":
                self.function(match)
            elif kind == "directive":
                position = self.directive(match)
            elif kind == "instruction":
                self.instruction(match.start(), position - 1)
        if not version or not target:
            raise PtxReadError("expected a PTX text, which names .version and .target, got one without; is it PTX?")
        if len(self.scopes) > 1:
            raise PtxReadError(f"line {self.line(end)}: the text ends inside {{ }}; is it cut off?")
        return Module(self.text, version, target, target_line, self.uses, self.line_starts)

    def broken(self, position: int) -> PtxReadError:
        seen = self.bare[position : position + 40].split("\n")[0]
        return PtxReadError(f"line {self.line(position)}: expected a statement that ends with ';', got {seen!r}")

    def scope(self, match: re.Match[str]) -> None:
        if match[0] == "{":
            self.scopes.append({})
            return
        if len(self.scopes) == 1:
            raise PtxReadError(f"line {self.line(match.start())}: '}}' without '{{'")
        self.scopes.pop()

    def function(self, match: re.Match[str]) -> None:
        """Parameters and performance directives of a function's head."""
        head = match[0]
        # They belong to the body; what a later function redeclares overwrites them.
        self.scopes[0].update(dict.fromkeys(_PARAMETER.findall(head), SPACE_NAMES["param"]))
        rest = _PARENTHESES.sub(lambda m: " " * len(m[0]), head)
        words = list(re.finditer(r"\.[a-z_]\w*", rest))
        for word, following in zip(words, [*words[1:], None], strict=True):
            if word[0] not in (".visible", ".extern", ".entry", ".func"):
                last = following.start() if following else len(rest.rstrip(" ;\n\t"))
                start = match.start() + word.start()
                self.add(word[0], f"{word[0]} {rest[word.end() : last].strip()}".strip(), start, match.start() + last)

    def directive(self, match: re.Match[str]) -> int:
        """Register ranges, variables and whatever else begins with a dot; returns where it ends."""
        start, end = match.span()
        if match["initializer"]:
            depth = 1
            while depth and end < len(self.bare):
                depth += {"{": 1, "}": -1}.get(self.bare[end], 0)
                end += 1
        while end < len(self.bare) and self.bare[end].isspace():
            end += 1
        if self.bare[end : end + 1] != ";":
            raise self.broken(start)
        text = _LINKAGE.sub("", " ".join(match[0].split()))
        name = text.split()[0]
        if declared := _REGISTERS.fullmatch(text):
            self.registers(declared[1], declared[2])
            name = f".reg .{declared[1]}"
        elif name == ".pragma":
            name = _NUMBER.sub("0", text)
        elif variable := _VARIABLE.match(text.partition("=")[0].strip()):
            self.scopes[-1][variable[2]] = SPACE_NAMES[variable[1]]
        self.add(name, text, start, end)
        if attribute := _ATTRIBUTE.search(text):
            self.add(f".attribute({attribute[1]})", text, start, end)
        return end + 1

    def registers(self, kind: str, names: str) -> None:
        letter = REGISTER_LETTERS.get(kind, "r")
        for name in names.split(","):
            spanned = _RANGE.fullmatch(name.strip())
            known = f"{spanned[1]}<>" if spanned else name.strip()
            self.scopes[-1][known] = letter
            if self.letters.setdefault(known, letter) != letter:
                self.ambiguous = True
                self.forms.clear()

    def instruction(self, start: int, end: int) -> None:
        match = _INSTRUCTION.fullmatch(self.bare, start, end)
        if match is None:
            raise self.broken(start)
        opcode, written = "".join(match["opcode"].split()), match["operands"]
        shape = opcode, _NUMBER.sub("", written)
        form = self.forms.get(shape)
        if form is not None:
            self.uses[form].spans.append((start, end))
            return
        operands = split_operands(" ".join(written.split()))
        if any(map(_TWO_WORDS.search, operands)):
            raise self.broken(start)
        try:
            form = self.form(opcode, operands)
        except _NoAddress:
            raise self.broken(start) from None
        if not self.ambiguous:
            self.forms[shape] = form
        self.add(form, self.probe(opcode, operands), start, end)

    def add(self, form: str, probe: str, start: int, end: int) -> None:
        use = self.uses.setdefault(form, Use(form, probe))
        use.spans.append((start, end))

    def form(self, opcode: str, operands: list[str]) -> str:
        if opcode.split(".")[0] == "call":
            # Any number of arguments; what counts is whether the function is named or in a register.
            callee = next((o for o in operands if not o.startswith("(")), "")
            return f"{opcode} {'pointer' if callee.startswith('%') else 'function'}"
        return f"{opcode} {','.join(map(self.kind, operands))}".rstrip()

    def kind(self, operand: str) -> str:
        if operand.startswith("{"):
            items = split_operands(operand[1:-1])
            return f"{{{len(items)}{'_' if '_' in items else ''}}}"
        if operand.startswith("["):
            address = split_operands(operand[1:-1])
            if not address:
                raise _NoAddress
            return f"[{','.join(['a', *map(self.kind, address[1:])])}]"
        if "|" in operand:
            return "|".join(self.kind(part.strip()) for part in operand.split("|"))
        if operand == "_":
            return "_"
        name = operand.lstrip("! ").partition(".")[0]
        letter = self.letter(name)
        if letter is None:
            return name if name.startswith("%") else SCALAR
        return PREDICATE if letter == PREDICATE else SCALAR

    def letter(self, name: str) -> str | None:
        """How a probe calls the register or variable; None for what is not declared."""
        prefix = f"{name.rstrip('0123456789')}<>"
        for scope in reversed(self.scopes):
            found = scope.get(name, scope.get(prefix))
            if found is not None:
                return found
        return None

    def probe(self, opcode: str, operands: list[str]) -> str:
        """The instruction with names that a probe declares by itself."""
        numbers: dict[str, int] = {}

        def rename(match: re.Match[str]) -> str:
            letter = self.letter(match[0])
            if letter is None:
                return match[0] if match[0].startswith("%") or match[0] in ("_", "WARP_SZ") else "L"
            if letter in SPACE_NAMES.values():
                return letter
            return f"{letter}{numbers.setdefault(match[0], len(numbers) + 1)}"

        return f"{opcode} {_NAME.sub(rename, ', '.join(operands))}".strip()


def _blank(match: re.Match[str]) -> str:
    found = match[0]
    return re.sub(r"[;{}/]", " ", found) if found.startswith('"') else re.sub(r"[^\n]", " ", found)
