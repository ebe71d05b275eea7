"""The audit: what of a PTX text a target lacks, line by line.

It answers two questions at once. Does the text as it stands assemble for the target? And which of its instructions
stand in the way of compiling it anew for the target? A text for ``sm_100a`` never runs on sm_90a as it stands; whether
it could be had for sm_90a is up to its instructions.

Scope: instructions, directives, ``.target`` and ``.version``. Not looked at: whether operands have the right types and
immediates legal values, and what a kernel takes (registers, shared memory, cluster size).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kda_lib.arch import Arch
from kda_lib.lab.audit.advice import replacement
from kda_lib.lab.audit.assembler import Assembler, target_key, version_key
from kda_lib.lab.audit.probing import Takes, probe_all
from kda_lib.lab.audit.reader import Module, Use
from kda_lib.lab.audit.table import Table

SCHEMA = "kda-lib/ptx-audit/v1"


class Kind(StrEnum):
    """What a violation is about."""

    MODULE_TARGET = "module target"
    """A text with this ``.target`` does not run on the target, whatever is in it."""
    MODULE_VERSION = "module version"
    """The ``.target``, or the one asked for, needs a higher ``.version``."""
    INSTRUCTION = "instruction"
    """The target lacks it."""
    OWN_TARGET = "own target"
    """The target has it, the text's own ``.target`` lacks it."""
    VERSION = "version"
    """It needs a higher ``.version``."""


@dataclass(frozen=True)
class Violation:
    """One place of the text.

    form: ``""`` where the module is meant. lowest_target: the lowest that takes the form, None if none does. targets:
    all that take it. needs_version: lowest ``.version``, None where that is not what is wrong. replacement: what does
    the same elsewhere, in words, ``""`` where nothing is known.
    """

    kind: Kind
    line: int
    text: str
    form: str = ""
    lowest_target: str | None = None
    targets: tuple[str, ...] = ()
    needs_version: str | None = None
    replacement: str = ""


@dataclass(frozen=True)
class Unknown:
    """A place that the audit cannot judge, and why."""

    line: int
    text: str
    form: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """What the audit of one text found.

    version, module_target: of the text. target: asked for. assembler: whose answers the table holds. made: their date.
    targets: all that the table knows, from the lowest to the highest. forms, places: how many distinct forms and places
    the text has. probed: forms that the table lacked and that were asked on the spot. instructions_fit: whether the
    target has every instruction, whatever ``.target`` and ``.version`` of the text say.
    """

    source: str
    version: str
    module_target: str
    target: str
    assembler: str
    made: str
    targets: tuple[str, ...]
    forms: int
    places: int
    probed: tuple[str, ...]
    instructions_fit: bool
    violations: tuple[Violation, ...]
    unknown: tuple[Unknown, ...]

    @property
    def clean(self) -> bool:
        """Whether the text assembles for the target as it stands, as far as its instructions decide."""
        return not self.violations and not self.unknown

    def as_json(self) -> dict[str, Any]:
        """JSON; which targets take a form is in it once a form, not with every place."""
        data = {"schema": SCHEMA, **asdict(self), "clean": self.clean}
        data["taken_by"] = {violation["form"]: violation.pop("targets") for violation in data["violations"]}
        return data


def audit(
    module: Module, target: str | Arch, table: Table, *, assembler: Assembler | None = None, source: str = "PTX text"
) -> Audit:
    """Compare a PTX text, read by :func:`reader.read`, with what the table says about a target.

    Args:
        assembler: asked about forms that the table lacks; without one they are reported as unknown.
        source: how the report calls the text.

    Raises:
        TypeError, ValueError: the target is none that the table knows.
    """
    name = known_target(target, table)
    new = {form: use for form, use in module.uses.items() if form not in table.forms}
    probed, reasons = _probe(list(new.values()), module, name, table, assembler)
    judge = _Judge(module, name, table)
    violations = judge.module_violations()
    unknown_places: list[Unknown] = []
    fit = True
    for form, use in module.uses.items():
        takes = table.forms.get(form) or probed.get(form)
        fit = fit and takes is not None and name in takes
        if takes:
            violations += judge.violations(use, takes)
        else:
            unknown_places += [Unknown(p.line, p.text, form, reasons[form]) for p in module.places(use)]
    return Audit(
        source=source,
        version=module.version,
        module_target=module.target,
        target=name,
        assembler=table.name,
        made=table.made,
        targets=table.targets,
        forms=len(module.uses),
        places=sum(len(use.spans) for use in module.uses.values()),
        probed=tuple(probed),
        instructions_fit=fit,
        violations=tuple(sorted(violations, key=lambda v: v.line)),
        unknown=tuple(sorted(unknown_places, key=lambda u: u.line)),
    )


def known_target(target: str | Arch, table: Table) -> str:
    """The name of a target that the table knows.

    Raises:
        TypeError, ValueError: it is none.
    """
    name = Arch.parse(target).target
    if name not in table.targets:
        raise ValueError(f"target: expected one of {', '.join(table.targets)}, got {name!r}, which {table.name} lacks")
    return name


class _Judge:
    def __init__(self, module: Module, target: str, table: Table) -> None:
        self.module = module
        self.target = target
        self.table = table
        self.loads = target in table.runs_on.get(module.target, ())
        #: The ``.target`` that the text has, or would have to be given.
        self.under = module.target if self.loads else target

    def module_violations(self) -> list[Violation]:
        module, needed = self.module, self.table.forms["ret"][self.under]
        text = f".target {module.target}"
        found = []
        if not self.loads:
            fitting = tuple(self.table.runs_on.get(module.target, ()))
            found.append(
                Violation(
                    Kind.MODULE_TARGET, module.target_line, text, targets=fitting,
                    lowest_target=min(fitting, key=target_key, default=None),
                    replacement=f"compile it for {self.target}",
                )
            )  # fmt: skip
        if version_key(module.version) > version_key(self.table.versions[-1]):
            newest = f"{self.table.name} takes up to {self.table.versions[-1]}"
            found.append(
                Violation(Kind.MODULE_VERSION, module.target_line, f".version {module.version}", replacement=newest)
            )
        elif self._too_old(needed):
            text = f".version {module.version}"
            found.append(Violation(Kind.MODULE_VERSION, module.target_line, text, needs_version=needed))
        return found

    def violations(self, use: Use, takes: Takes) -> list[Violation]:
        real = tuple(target for target in self.table.targets if target in takes)
        needs_version = None
        # The assembler goes by the text's own .target, if such a text runs on the target at all.
        if self.under not in takes:
            kind = Kind.OWN_TARGET if self.target in takes else Kind.INSTRUCTION
        elif self._too_old(takes[self.under]) and takes[self.under] != self.table.forms["ret"][self.under]:
            kind, needs_version = Kind.VERSION, takes[self.under]
        else:
            return []
        lowest, words = min(real, key=target_key, default=None), replacement(use.form)
        return [
            Violation(kind, place.line, place.text, use.form, lowest, real, needs_version, words)
            for place in self.module.places(use)
        ]

    def _too_old(self, needed: str) -> bool:
        return version_key(self.module.version) < version_key(needed)


def _probe(
    uses: Sequence[Use], module: Module, target: str, table: Table, assembler: Assembler | None
) -> tuple[dict[str, Takes], dict[str, str]]:
    """Ask about forms that the table lacks: form -> takes, and why each other is unknown."""
    if assembler is None:
        why = "not in the table, and no assembler is installed to ask (pip install nvidia-cuda-nvcc)"
        return {}, {use.form: why for use in uses}
    if not uses:
        return {}, {}
    # The complaint that is kept is the one of the target asked for.
    names = {name: name for name in table.targets if name != target}
    names |= {module.target: table.names[module.target]} if module.target in table.names else {}
    names |= {target: names.pop(target, target)}
    versions = [*(v for v in table.versions[:-1] if v == module.version), table.versions[-1]]
    probes = {use.form: use.probe for use in uses}
    taken, complaints = probe_all(
        assembler, list(dict.fromkeys(probes.values())), names, versions, len(os.sched_getaffinity(0))
    )
    found = {form: taken[probe] for form, probe in probes.items() if probe in taken}
    said = {form: complaints[probe] for form, probe in probes.items() if probe in complaints}
    return found, {form: f"ptxas {assembler.version} takes it alone for no target: {why}" for form, why in said.items()}
