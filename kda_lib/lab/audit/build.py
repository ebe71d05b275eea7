"""``make ptx-table``: ask the installed assembler about every probe and write the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from kda_lib.arch import TARGETS
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.assembler import PACKAGE, Assembler
from kda_lib.lab.audit.probes import curated, form_of
from kda_lib.lab.audit.probing import probe_all, runs_on, versions
from kda_lib.lab.audit.reader import Module
from kda_lib.lab.audit.table import Table

#: Names in ``.target`` of modules that may be around, beside those that the assembler compiles for: what older
#: assemblers list (ptxas 12.9), sm_101 being the former name of sm_110.
OLDER_NAMES = (
    "sm_50", "sm_52", "sm_53", "sm_60", "sm_61", "sm_62", "sm_70", "sm_72", "sm_101", "sm_101f", "sm_101a",
)  # fmt: skip

#: Targets that the table says something about even if the assembler does not know them: this project's, and what the
#: DSL lists besides.
EXPECTED = (*TARGETS, "sm_101a", "sm_107a")


class AmbiguousForm(ValueError):
    """Two probes of one form are taken by different targets: a form leaves out something that matters."""


def make_table(
    assembler: Assembler,
    probes: Iterable[str],
    workers: int | None = None,
    report: Callable[[str], None] = lambda name: None,
) -> Table:
    """Ask about every probe.

    Raises:
        PtxReadError: a probe is no instruction or directive; nothing was asked.
        AmbiguousForm: see there.
    """
    workers = workers or len(os.sched_getaffinity(0))
    form = {probe: form_of(probe) for probe in probes}
    names = runs_on(assembler, [*OLDER_NAMES, *assembler.targets], workers)
    ptx_versions = versions(assembler, OLDER_NAMES[0])
    places = {name: name if name in targets else targets[0] for name, targets in names.items()}
    taken, refused = probe_all(assembler, list(form), places, ptx_versions, workers, report)
    first: dict[str, str] = {}
    for probe in taken:
        other = first.setdefault(form[probe], probe)
        if taken[other] != taken[probe]:
            raise AmbiguousForm(
                f"form {form[probe]!r}: {other!r} is taken by {taken[other]}, {probe!r} by {taken[probe]}"
            )
    return Table(
        assembler={"package": PACKAGE, "version": assembler.version, "build": assembler.build},
        made=f"{datetime.now(UTC):%Y-%m-%d}",
        targets=assembler.targets,
        versions=tuple(ptx_versions),
        unknown=tuple(name for name in EXPECTED if name not in assembler.targets),
        runs_on=names,
        forms={name: taken[probe] for name, probe in sorted(first.items())},
        probes=first,
        refused=dict(sorted(refused.items())),
    )


def all_probes(modules: Iterable[Module]) -> list[str]:
    """The curated probes, and one for each form of these modules that they lack."""
    probes = curated()
    known = set(map(form_of, probes))
    more = (use for module in modules for use in module.uses.values())
    return [*probes, *{use.form: use.probe for use in more if use.form not in known}.values()]


def write(table: Table, path: Path = tables.TABLE) -> None:
    path.write_text(tables.dumps(table), encoding="utf-8")
