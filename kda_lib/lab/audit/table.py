"""The committed answers of the assembler: which target takes which instruction form, from which ``.version`` on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kda_lib.lab.audit.probing import Takes

SCHEMA = "kda-lib/ptx-table/v1"

#: The committed table.
TABLE = Path(__file__).parents[1] / "data" / "ptx_table.json"


class TableReadError(ValueError):
    """The table is missing or not one; the message says how to make it."""


@dataclass(frozen=True)
class Table:
    """What one assembler said.

    assembler: package, version and build of the ptxas. made: date (UTC). targets: every target it compiles for, from
    the lowest to the highest. versions: PTX ISA versions, in order; lower ones were not tried. unknown: targets of this
    project or of its DSL that the assembler does not compile for. runs_on: name in ``.target`` (older ones too) ->
    targets that such a module runs on. forms: form -> name in ``.target`` -> lowest ``.version``; a name that lacks
    the form is not in it. probes: form -> the probe that was asked about. refused: probe that no target takes -> what
    the assembler said.
    """

    assembler: Mapping[str, str]
    made: str
    targets: tuple[str, ...]
    versions: tuple[str, ...]
    unknown: tuple[str, ...]
    runs_on: Mapping[str, Sequence[str]]
    forms: Mapping[str, Takes]
    probes: Mapping[str, str]
    refused: Mapping[str, str]

    @property
    def name(self) -> str:
        """The assembler in words, such as ``"ptxas 13.5.37"``."""
        return f"ptxas {self.assembler['version']}"

    @property
    def names(self) -> dict[str, str]:
        """Name in ``.target`` -> a target to assemble such modules for: the same, else the lowest."""
        return {name: name if name in targets else targets[0] for name, targets in self.runs_on.items()}


def dumps(table: Table) -> str:
    """JSON with one form a line, forms of the same availability together, so that a change shows as a small diff."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for form, takes in table.forms.items():
        groups.setdefault(tuple(takes.items()), {})[form] = table.probes[form]
    said: dict[str, list[str]] = {}
    for probe, complaint in table.refused.items():
        said.setdefault(complaint, []).append(probe)
    head = {
        "schema": SCHEMA,
        "made": table.made,
        "assembler": dict(table.assembler),
        "targets": list(table.targets),
        "versions": list(table.versions),
        "unknown": list(table.unknown),
    }
    parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    parts.append('"runs_on": ' + _block("{}", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table.runs_on.items())))
    parts.append('"groups": ' + _block("[]", (_group(dict(takes), probes) for takes, probes in groups.items())))
    parts.append('"refused": ' + _block("{}", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in said.items())))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def loads(text: str) -> Table:
    """The table that :func:`dumps` wrote.

    Raises:
        TableReadError: it is not one.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        if data["schema"] != SCHEMA:
            raise TableReadError(f"expected schema {SCHEMA}, got {data['schema']}; run: make ptx-table")
        return Table(
            assembler=data["assembler"],
            made=data["made"],
            targets=tuple(data["targets"]),
            versions=tuple(data["versions"]),
            unknown=tuple(data["unknown"]),
            runs_on=data["runs_on"],
            forms={form: group["takes"] for group in data["groups"] for form in group["probes"]},
            probes={form: probe for group in data["groups"] for form, probe in group["probes"].items()},
            refused={probe: complaint for complaint, probes in data["refused"].items() for probe in probes},
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TableReadError(f"not a table of instruction forms ({error!r}); run: make ptx-table") from error


@cache
def load(path: Path = TABLE) -> Table:
    """Read a table.

    Raises:
        TableReadError: it is missing or not valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableReadError(f"{path.name}: {error}; run: make ptx-table") from error
    return loads(text)


def _group(takes: Takes, probes: Mapping[str, str]) -> str:
    lines = (f"{json.dumps(form)}: {json.dumps(probe)}" for form, probe in probes.items())
    return f'{{"takes": {json.dumps(takes)}, "probes": {_block("{}", lines)}}}'


def _block(marks: str, lines: Iterator[str]) -> str:
    return f"{marks[0]}\n" + ",\n".join(lines) + f"\n{marks[1]}"
