"""What is known of each kernel on each target, and which result file says so.

Five kinds of evidence, :data:`COLUMNS`. A cell says for which numbers of tokens M there is evidence, and links to it.
What nobody looked at is :attr:`Standing.NONE`: no target has another's evidence. All of it is for TP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from html import escape
from itertools import product
from pathlib import Path

from kda_lib.arch import TARGETS, Arch
from kda_lib.kernels.fma import default_form
from kda_lib.lab import emulation, formal, formal_stream, golden, matrix, records
from kda_lib.lab.audit.check import Audit
from kda_lib.lab.notebook import Display
from kda_lib.lab.profile import CPU, load_profile, profile_names
from kda_lib.lab.prover import PROVED
from kda_lib.lab.scripted import Row
from kda_lib.shapes import MAX_TOKENS

NAME = "07_unseen_architectures"
COLUMNS = ("compiles", "audited", "executed", "race-free", "on hardware")
EVERY_M = frozenset(range(1, MAX_TOKENS + 1))
TP = golden.SHAPES.tp

#: The notebook that holds every strategy against FP64, and the kernel that has no bit-exact model.
VALIDATION, STREAM = "03_numerical_validation", matrix.STREAM
#: The checks of :mod:`kda_lib.lab.formal` that together say that nothing races.
SAFE = ("synchronisation", "race freedom")


class Standing(StrEnum):
    """How much evidence there is."""

    WHOLE = "for every M"
    PART = "in part, or stale"
    NONE = "none"
    ABSENT = "no such kernel"
    REFUTED = "refuted"


@dataclass(frozen=True)
class Cell:
    """text: for people, "-" where there is nothing. link: result file, relative to a page in ``reports/<profile>/``."""

    standing: Standing
    text: str = "-"
    link: str = ""


NOTHING, NO_KERNEL = Cell(Standing.NONE), Cell(Standing.ABSENT, "no kernel")
HERE = f"results/{NAME}.json"

Key = tuple[str, str]
"""Kernel and target."""

Table = dict[Key, dict[str, Cell]]
"""Kernel and target -> column -> cell."""


@dataclass(frozen=True)
class Record:
    """A committed result. stale: inputs that have changed since, see :func:`records.stale_inputs`."""

    result: records.Result
    link: str
    stale: tuple[str, ...]

    def about(self, kernel: str, target: str) -> list[Row]:
        """The rows of a kernel and target."""
        return [row for row in self.result.rows if (row.get("kernel"), row.get("target")) == (kernel, target)]


def record(root: Path, name: str, profile: str = CPU) -> Record | None:
    """The result ``name`` of a profile, or None where there is none.

    Raises:
        records.ResultReadError: the file is there and is not valid.
    """
    path = root / "reports" / profile / "results" / f"{name}.json"
    if not path.is_file():
        return None
    result = records.read_result(path)
    return Record(result, f"../{profile}/results/{name}.json", tuple(records.stale_inputs(result, root)))


def measured(root: Path, name: str) -> dict[str, Record]:
    """Profile -> its result ``name``, of those that were made on a GPU.

    Raises:
        records.ResultReadError: a file is not a valid result.
    """
    found = {profile: record(root, name, profile) for profile in profile_names()}
    return {profile: known for profile, known in found.items() if known and known.result.gpu}


def table(root: Path, audits: Mapping[Key, Audit | None], launches: Sequence[Row]) -> Table:
    """What is known of every kernel on every target.

    Args:
        root: of the repository, whose ``reports/`` hold the records.
        audits: made just now, for M = 8 where a kernel has one; None where the target has no such kernel.
        launches: rows of launches emulated just now (:func:`emulation.emulate_unit`).

    Raises:
        KeyError: no audit of a kernel and target.
        records.ResultReadError: a record is not valid.
    """
    compiled, emulated, proved = (record(root, name) for name in (matrix.NAME, emulation.NAME, formal.NAME))
    devices, validated = measured(root, golden.NAME), measured(root, VALIDATION)
    found: Table = {}
    for kernel, target in product(matrix.KERNELS, TARGETS):
        audit = audits[kernel, target]
        if audit is None:
            found[kernel, target] = dict.fromkeys(COLUMNS, NO_KERNEL)
            continue
        cells = (
            _compiles(kernel, target, compiled),
            _audited(kernel, audit),
            _executed(kernel, target, emulated, launches),
            _race_free(kernel, target, proved),
            _on_hardware(kernel, target, validated if kernel == STREAM else devices),
        )
        found[kernel, target] = dict(zip(COLUMNS, cells, strict=True))
    return found


def _compiles(kernel: str, target: str, known: Record | None) -> Cell:
    """In the form of the FMA that the library uses there. The stream kernel is one for every M."""
    form = str(default_form(Arch.parse(target)))
    rows = [row for row in (known.about(kernel, target) if known else []) if row.get("fma", form) == form]
    rows = [row for row in rows if row.get("tp", TP) == TP]
    every = EVERY_M if kernel == STREAM else ()
    verdicts = {m: row["outcome"] == matrix.OK for row in rows for m in every or [row["M"]]}
    return _cell(verdicts, known)


def _audited(kernel: str, audit: Audit) -> Cell:
    return _cell(dict.fromkeys(EVERY_M if kernel == STREAM else [8], audit.clean), None)


def _executed(kernel: str, target: str, known: Record | None, launches: Sequence[Row]) -> Cell:
    def exact(row: Row) -> bool:
        return bool(row["outcome"] == emulation.BIT_EXACT)

    here = [row for row in launches if (row["kernel"], row["target"]) == (kernel, target)]
    now = _cell(_by_m(here, exact), None)
    recorded = [row for row in (known.about(kernel, target) if known else []) if row["variant"] in golden.VALUES]
    return now if not recorded or now.standing is Standing.REFUTED else _cell(_by_m(recorded, exact), known)


def _race_free(kernel: str, target: str, known: Record | None) -> Cell:
    """Proved only where both checks passed. A proof of the first CTAs of the grid alone is a part."""
    left_out = formal_stream.LEFT_OUT if kernel == STREAM else ""
    checks = {check + left_out for check in SAFE}
    rows = [row for row in (known.about(kernel, target) if known else []) if row["variant"] in checks]
    if known is None or not rows:
        return NOTHING
    passed = _by_m(rows, lambda row: row["outcome"] == PROVED)
    seen = {(row["M"], row["variant"]) for row in rows}
    proved = {m: True for m, good in passed.items() if good and all((m, check) in seen for check in checks)}
    if not proved:
        return Cell(Standing.NONE, "not proved", known.link)
    cell = _cell(proved, known)
    whole = {row["M"] for row in rows if row["ctas"] == row["grid"]}
    if whole >= set(proved):
        return cell
    return replace(cell, standing=Standing.PART, text=f"{cell.text}, first CTAs{left_out}")


def _on_hardware(kernel: str, target: str, devices: Mapping[str, Record]) -> Cell:
    """Bit for bit where there is a model; the stream kernel within its bound of FP64."""
    for profile, known in devices.items():
        if load_profile(profile).target != target:
            continue
        if kernel == STREAM:
            rows = [row for row in known.result.rows if row.get("variant") == STREAM and row["tp"] == TP]
            verdicts = _by_m([row for row in rows if row["M"] in EVERY_M], lambda row: row["beyond_bound"] == 0)
        else:
            verdicts = _by_m(known.about(kernel, target), lambda row: row["differing"] == 0)
        if verdicts:
            cell = _cell(verdicts, known)
            return replace(cell, text=f"{cell.text}, {profile}")
    return NOTHING


def _by_m(rows: Iterable[Row], good: Callable[[Row], bool]) -> dict[int, bool]:
    """M -> whether all of its rows are good."""
    found: dict[int, bool] = {}
    for row in rows:
        found[row["M"]] = found.get(row["M"], True) and good(row)
    return found


def _cell(verdicts: Mapping[int, bool], known: Record | None) -> Cell:
    """known: what the verdicts are from; None is this notebook's own run."""
    if not verdicts:
        return NOTHING
    link = known.link if known else HERE
    if bad := [m for m, good in sorted(verdicts.items()) if not good]:
        return Cell(Standing.REFUTED, f"fails at M = {', '.join(map(str, bad))}", link)
    if set(verdicts) == EVERY_M:
        text = "every M"
    else:
        text = f"M = {next(iter(verdicts))}" if len(verdicts) == 1 else f"{len(verdicts)} of {MAX_TOKENS} M"
    if known and known.stale:
        return Cell(Standing.PART, f"{text}, stale", link)
    return Cell(Standing.WHOLE if set(verdicts) == EVERY_M else Standing.PART, text, link)


def rows_of(found: Table) -> list[Row]:
    """A row for a result file for each cell."""
    return [
        {"kernel": kernel, "target": target, "variant": f"evidence: {column}", "outcome": str(cell.standing),
         "detail": cell.text}
        for (kernel, target), cells in found.items()
        for column, cell in cells.items()
    ]  # fmt: skip


def shown(found: Table) -> Display:
    """The table for people, each cell a link to its result file."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("kernel", "target", *COLUMNS))
    lines, body = [], []
    for (kernel, target), cells in found.items():
        texts = [cell.text for cell in cells.values()]
        lines.append(f"{kernel:9} {target:8} {' | '.join(texts)}")
        linked = "".join(f"<td>{_linked(cell)}</td>" for cell in cells.values())
        body.append(f'<tr><th scope="row">{kernel}</th><th scope="row">{target}</th>{linked}</tr>')
    html = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return Display("\n".join(lines), html)


def _linked(cell: Cell) -> str:
    return f'<a href="{escape(cell.link)}">{escape(cell.text)}</a>' if cell.link else escape(cell.text)
