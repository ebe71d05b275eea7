"""The audit tried on PTX that others publish: what wheels on PyPI carry, and what Triton makes of public kernels.

Downloads about 0.7 GB into a folder that is thrown away; kept out of CI, its result is committed. No PTX is kept.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kda_lib.arch import TARGETS
from kda_lib.lab import records
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.assembler import Assembler
from kda_lib.lab.audit.check import Audit, Kind, audit
from kda_lib.lab.audit.reader import Module
from kda_lib.lab.audit.sources import SourceError, read_file
from kda_lib.lab.audit.table import Table
from kda_lib.lab.profile import CPU
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim

NAME = "public_ptx_audit"

CUOBJDUMP = "nvidia-cuda-cuobjdump==13.5.37"

#: What cuobjdump says of a library without kernels.
NO_CODE = "does not contain device code"

#: Wheels whose libraries carry PTX for GPUs newer than those they carry code for.
WHEELS = ("xformers==0.0.35", "jax-cuda12-plugin==0.10.2", "nvidia-nccl-cu12==2.32.3")

#: A script that compiles public kernels, run where Triton is installed.
TRITON_KERNELS = Path(__file__).parents[1] / "data" / "triton_kernels.py"

#: What compiles its kernels, and where they are.
TRITON = ("triton==3.9.0", "liger-kernel==0.8.5")


#: The family of the instruction that this project began with.
MIXED = re.compile(r"(fma|add|sub)\.\S*f32\.b?f16 ")


class SurveyFailed(OSError):
    """A package could not be installed or a tool failed; the message is what it said last."""


@dataclass(frozen=True)
class Text:
    """One PTX text. package: with its version. origin: library or kernel it is from."""

    package: str
    origin: str
    module: Module


def run_public_audit(root: Path) -> records.Result:
    """Audit all texts for every target of this project, hold the audits against the assembler, write the result.

    Raises:
        AssemblerMissing: no ptxas is installed.
        SurveyFailed: see there.
        records.ResultWriteError: the file system refused.
    """
    assembler, table = Assembler.find(), tables.load()
    parameters = {
        "packages": [*WHEELS, *TRITON], "targets": list(TARGETS), "assembler": assembler.version, "table": table.name,
    }  # fmt: skip

    def make() -> Iterator[Outcome]:
        with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
            files = [*wheel_texts(Path(folder)), *triton_texts(Path(folder))]
            yield survey(files, table, assembler)

    return write_script_result(NAME, make(), profile=CPU, root=root, parameters=parameters)


def wheel_texts(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Package, library and PTX file of every PTX text in :data:`WHEELS`."""
    (tool,) = _install([CUOBJDUMP], folder / "cuobjdump").rglob("bin/cuobjdump")
    for wheel in WHEELS:
        installed = _install([wheel], folder / wheel)
        for library in sorted(installed.rglob("*.so*")):
            out = folder / "ptx" / wheel / library.name
            out.mkdir(parents=True)
            _run([str(tool), "--extract-ptx", "all", str(library)], cwd=out, harmless=NO_CODE)
            for file in sorted(out.glob("*.ptx")):
                yield wheel.replace("==", " "), library.relative_to(installed).as_posix(), file


def triton_texts(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Package, kernel and PTX file of every kernel of :data:`TRITON_KERNELS` for each of its targets."""
    installed, out = _install(TRITON, folder / "triton"), folder / "ptx" / "triton"
    out.mkdir(parents=True)
    environment = {"PYTHONPATH": str(installed), "TRITON_CACHE_DIR": str(folder / "cache")}
    _run([sys.executable, str(TRITON_KERNELS), str(out)], cwd=out, environment=environment)
    for file in sorted(out.glob("*.ptx")):
        yield " by ".join(reversed(TRITON)).replace("==", " "), file.name.partition(".")[0], file


def survey(
    files: Sequence[tuple[str, str, Path]], table: Table, assembler: Assembler
) -> tuple[list[Row], list[records.Claim]]:
    """One row for each library or kernel, its ``.target`` and the target asked for."""
    texts, unread = [], []
    for package, origin, file in files:
        try:
            texts.append(Text(package, origin, read_file(file).read()))
        except SourceError as error:
            unread.append(str(error))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        judged = list(pool.map(lambda text: _judge(text, table, assembler), texts))
    rows = []
    pairs = sorted(zip(texts, judged, strict=True), key=lambda pair: _group(pair[0]))
    for (package, origin, own), members in groupby(pairs, key=lambda pair: _group(pair[0])):
        group = list(members)
        for index, target in enumerate(TARGETS):
            row = _row([answers[index][0] for _, answers in group])
            rows.append({"source": package, "kernel": origin, "target": target, **row})
            rows[-1]["detail"] = f".target {own}: {rows[-1]['detail']}"
    differing = sum(found.instructions_fit != taken for answers in judged for found, taken in answers)
    new = {form for text in texts for form in text.module.uses if form not in table.forms}
    mixed = sum(any(map(MIXED.match, text.module.uses)) for text in texts)
    count = len(texts) * len(TARGETS)
    return rows, [
        zero_claim("all-read", f"all of {len(files)} PTX texts are read", len(unread), "texts that are not"),
        zero_claim("agrees", f"audit and ptxas agree on {count} pairs of text and target", differing, "differ"),
        records.Claim(
            id="mixed", statement="texts with FP32 instructions that take BF16 or FP16 operands, which need sm_100",
            value=mixed, unit=f"of {len(texts)}", holds=True, required=False,
        ),
        zero_claim("covered", "the table has every form in them", len(new), "forms that it lacks", required=False),
    ]  # fmt: skip


def retarget(module: Module, target: str, version: str) -> str:
    """The text with another ``.target`` and ``.version``."""
    text = re.sub(r"^(\s*)\.version\s+[\d.]+", rf"\1.version {version}", module.text, count=1, flags=re.MULTILINE)
    return re.sub(r"^(\s*)\.target\s+\w+", rf"\1.target {target}", text, count=1, flags=re.MULTILINE)


def _judge(text: Text, table: Table, assembler: Assembler) -> list[tuple[Audit, bool]]:
    """For each target, the audit, and whether ptxas takes the text with that ``.target`` (without making code)."""
    found = []
    for target in TARGETS:
        ptx = retarget(text.module, target, assembler.newest_ptx)
        taken = assembler.log(ptx, target.replace("sm_", "compute_")) is None
        found.append((audit(text.module, target, table, assembler=assembler, source=text.origin), taken))
    return found


def _row(audits: Sequence[Audit]) -> dict[str, Any]:
    lacking = Counter(v.form for audit in audits for v in audit.violations if v.kind is Kind.INSTRUCTION)
    lowest = {v.form: v.lowest_target for audit in audits for v in audit.violations}
    worst = max(lacking, key=lambda form: lacking[form], default=None)
    if any(audit.unknown for audit in audits):
        outcome = "unknown"
    elif lacking:
        outcome = "instructions lacking"
    else:
        outcome = "clean" if all(audit.clean for audit in audits) else "instructions fit"
    places = sum(audit.places for audit in audits)
    detail = f"{len(audits)} texts, {places} places; {len(lacking)} forms that the target lacks"
    return {
        "outcome": outcome, "uses": sum(lacking.values()), "instruction": worst,
        "lowest_target": lowest[worst] if worst else None, "detail": detail,
    }  # fmt: skip


def _group(text: Text) -> tuple[str, str, str]:
    return text.package, text.origin, text.module.target


def _install(specifications: Sequence[str], folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    _run([*pip, "--only-binary", ":all:", "--target", str(folder), *specifications], cwd=Path.cwd())
    return folder


def _run(
    command: Sequence[str], *, cwd: Path, environment: dict[str, str] | None = None, harmless: str | None = None
) -> None:
    """Run a tool, which may fail if it says what is ``harmless``."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=cwd, env=os.environ | (environment or {})
    )
    if done.returncode and (harmless is None or harmless not in done.stderr):
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise SurveyFailed(f"{Path(command[0]).name} {command[1]} failed; it said last: {said[-1]}")
