"""``python -m kda_lib.lab audit`` and ``ptx-table``, without the command line around them."""

from __future__ import annotations

import sys
from pathlib import Path

from kda_lib.kernels.fma import FmaForm
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.assembler import Assembler, installed
from kda_lib.lab.audit.build import all_probes, make_table, write
from kda_lib.lab.audit.check import Audit, audit, known_target
from kda_lib.lab.audit.sources import CONFIGS, SourceError, kernel_modules, kernel_source, read_file
from kda_lib.lab.audit.table import Table


def run_audit(
    source: str, target: str, *, form: str | None = None, tokens: int | None = None, compiled_for: str | None = None
) -> Audit:
    """Audit a PTX file, or a kernel: see :func:`sources.kernel_source`.

    Raises:
        TypeError, ValueError: there is no such file, kernel, form or target, or the file holds no PTX that can be read.
        CompileError: the kernel does not compile.
    """
    table = tables.load()
    known_target(target, table)
    if source in CONFIGS:
        if form is not None and form not in tuple(FmaForm):
            raise SourceError(f"fma: expected one of {', '.join(FmaForm)}, got {form!r}")
        text = kernel_source(
            source, target, form=FmaForm(form) if form else None, tokens=tokens or 8, compiled_for=compiled_for
        )
    elif form or tokens or compiled_for:
        raise SourceError(f"{source}: expected one of {', '.join(CONFIGS)} beside --fma, --tokens and --compiled-for")
    else:
        text = read_file(Path(source))
    return audit(text.read(), target, table, assembler=installed(), source=text.name)


def run_table(output: Path = tables.TABLE) -> Table:
    """Ask the assembler about the curated probes and the forms of our kernels for every target, and write the table.

    Raises:
        AssemblerMissing: no ptxas is installed.
    """
    assembler = Assembler.find()
    probes = all_probes(kernel_modules())
    print(f"asking ptxas {assembler.version} about {len(probes)} probes for", end=" ", file=sys.stderr)
    table = make_table(assembler, probes, report=lambda name: print(name, end=" ", flush=True, file=sys.stderr))
    print(file=sys.stderr)
    write(table, output)
    return table
