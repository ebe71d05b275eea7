"""Which instructions of a PTX text a target lacks, by what the assembler itself said about each form: see `audit`."""

from kda_lib.lab.audit.assembler import Assembler, AssemblerMissing, installed
from kda_lib.lab.audit.check import Audit, Kind, Unknown, Violation, audit
from kda_lib.lab.audit.reader import Module, PtxReadError, read
from kda_lib.lab.audit.report import render
from kda_lib.lab.audit.table import Table, TableReadError, load

__all__ = [
    "Assembler", "AssemblerMissing", "Audit", "Kind", "Module", "PtxReadError", "Table", "TableReadError", "Unknown",
    "Violation", "audit", "installed", "load", "read", "render",
]  # fmt: skip
