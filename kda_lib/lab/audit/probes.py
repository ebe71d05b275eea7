"""Tiny PTX texts, one for each instruction form or directive, written short.

A probe such as ``fma.rn.f32.bf16 f1, h2, h3, f1`` is one instruction whose registers tell their types by their first
letter; statements that it needs may stand before it. In :data:`PROBES`, ``<a|b>`` stands for one probe with each of
the alternatives, and ``{4r}`` for ``{r1, r2, r3, r4}``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kda_lib.lab.audit.reader import PtxReadError, read

#: First letter of a register's name in a probe -> its type.
REGISTER_TYPES = {
    "p": "pred", "c": "b8", "h": "b16", "r": "b32", "f": "f32", "l": "b64", "d": "f64", "q": "b128",
}  # fmt: skip

#: What the names S, G, C and F in a probe are: a variable of each state space and a function. A is local, P is a
#: parameter, L a label, X a name that is not declared yet.
PROLOGUE = (
    ".shared .align 128 .b8 S[1024]; .global .align 128 .b8 G[1024]; .const .align 128 .b8 C[1024]; .func F { ret; }"
)
LOCAL = ".local .align 16 .b8 A[1024];"
PARAMETER = ".param .align 16 .b8 P[256]"
FIRST_LINE = 2

#: Directives that stand between a kernel's parameters and its body.
ENTRY_DIRECTIVES = frozenset(
    {
        ".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".maxclusterrank", ".reqnctapercluster",
        ".explicitcluster", ".blocksareclusters", ".noreturn", ".abi_preserve", ".abi_preserve_control",
    }
)  # fmt: skip

#: Directives that stand outside of every function.
MODULE_DIRECTIVES = frozenset({".global", ".const"})

#: The curated probes, one pattern a line; ``#`` begins a comment.
PROBES = Path(__file__).parents[1] / "data" / "ptx_table_probes.txt"

_REGISTER = re.compile(r"(?<![\w.$%])([pchrfldq])(\d+)(?![\w.])")
_FRESH = re.compile(r"(?<![\w.$%])X(?![\w.])")
_LABEL = re.compile(r"^\w+:\s*")
_CHOICE = re.compile(r"<([^<>]*)>")
_VECTOR = re.compile(r"\{(\d+)([chrfldq])\}")


def expand(pattern: str) -> Iterator[str]:
    """The probes that a pattern stands for."""
    pieces = _CHOICE.split(pattern)
    for choice in itertools.product(*(piece.split("|") if i % 2 else [piece] for i, piece in enumerate(pieces))):
        yield _VECTOR.sub(_registers, "".join(choice))


def curated(path: Path = PROBES) -> list[str]:
    """Every probe of the curated list, in its order, each once."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return list(dict.fromkeys(probe for line in lines if line for probe in expand(line)))


def kernel(probe: str, name: str = "kernel") -> str:
    """A kernel on one line of PTX that holds one probe; :data:`PROLOGUE` goes before it."""
    word = probe.split()[0]
    probe = _FRESH.sub(f"X_{name}", probe)
    if word in MODULE_DIRECTIVES:
        return f"{probe};"
    highest: dict[str, int] = {}
    for letter, number in _REGISTER.findall(probe):
        highest[letter] = max(highest.get(letter, 0), int(number))
    body = [f".reg .{REGISTER_TYPES[letter]} {letter}<{top + 1}>;" for letter, top in sorted(highest.items())]
    head = f".visible .entry {name}({PARAMETER if _uses(probe, 'P') else ''})"
    if word in ENTRY_DIRECTIVES:
        head = f"{head} {probe}"
    else:
        body.append(f"{probe};")
    if _uses(probe, "A"):
        body.insert(0, LOCAL)
    if _uses(probe, "L"):
        body.append("L:")
    return " ".join([head, "{", *body, "ret; }"])


def module(probes: Sequence[str], version: str, target: str) -> str:
    """The PTX text of several probes for these ``.version`` and ``.target``, the probe with index i alone on line
    ``FIRST_LINE + i``.
    """
    head = f".version {version} .target {target} .address_size 64 {PROLOGUE}"
    return "\n".join([head, *(kernel(probe, f"k{index}") for index, probe in enumerate(probes)), ""])


def form_of(probe: str) -> str:
    """The form that a probe stands for: of the last statement in it.

    Raises:
        PtxReadError: it is no instruction or directive.
    """
    text = read(module([probe], "1.0", "any"))
    statement = _FRESH.sub("X_k0", " ".join(_LABEL.sub("", probe.rpartition(";")[2].strip()).split()))
    forms = [
        use.form for use in text.uses.values() if any(statement.endswith(place.text) for place in text.places(use))
    ]
    if not forms:
        raise PtxReadError(f"probe: expected an instruction or a directive, got {probe!r}")
    return forms[-1]


def _uses(probe: str, name: str) -> bool:
    return re.search(rf"(?<![\w.$%]){name}(?![\w.:])", probe) is not None


def _registers(match: re.Match[str]) -> str:
    return "{" + ", ".join(f"{match[2]}{i}" for i in range(1, int(match[1]) + 1)) + "}"
