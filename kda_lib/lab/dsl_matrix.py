"""The failure under several releases of nvidia-cutlass-dsl, each in an environment made for it and thrown away.

Every compile of the repro (`data/repro_fma.py`) is a process of its own, so that a compiler that crashes is recorded
like any other outcome. Needs a package index; kept out of CI, its result is committed.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

import kda_lib
from kda_lib.arch import TARGETS, Arch
from kda_lib.kernels.fma import FmaForm
from kda_lib.lab.profile import CPU
from kda_lib.lab.records import Claim, Result
from kda_lib.lab.scripted import Outcome, write_script_result

NAME = "dsl_matrix"

VERSIONS = ("4.6.2", "4.7.1", "4.8.1")

MATRIX_TARGETS = (*TARGETS, "sm_107a")
"""The project's targets, and one that only some releases have heard of."""

LIMIT_S = 120.0
"""Seconds after which a compile counts as crashed. One takes about 2 s, nearly all of it the import of the DSL."""

PACKAGE = Path(kda_lib.__file__).parent
REPRO = PACKAGE / "lab" / "data" / "repro_fma.py"


class InstallFailed(OSError):
    """A release could not be installed; the message is what pip said last."""


@dataclass(frozen=True)
class Environment:
    """A Python with one release of the DSL. `packages` is all that pip installed, as `name==version`."""

    version: str
    python: Path
    packages: tuple[str, ...]

    @classmethod
    def create(cls, version: str, folder: Path) -> Environment:
        """Make a virtual environment in `folder` with nothing but this release and what it depends on.

        Raises:
            InstallFailed: pip could not install the release.
        """
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        done = _run([*pip, "install", "--quiet", f"nvidia-cutlass-dsl=={version}"])
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise InstallFailed(f"nvidia-cutlass-dsl {version} could not be installed; pip said: {said[-1]}")
        return cls(version, python, tuple(_run([*pip, "freeze"]).stdout.split()))


def run_dsl_matrix(
    root: Path,
    versions: Sequence[str] = VERSIONS,
    targets: Sequence[str] = MATRIX_TARGETS,
    progress: bool = True,
) -> Result:
    """Compile the repro under each release, for each target, in each form; write
    ``reports/cpu/results/dsl_matrix.json``.

    Raises:
        ValueError: a name in `targets` is no target; nothing was installed.
        InstallFailed: a release could not be installed.
        records.ResultWriteError: the file system refused.
    """
    for target in targets:
        Arch.parse(target)
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        scratch = Path(folder)

        def show(items: Iterable[Any], what: str, total: int) -> list[Any]:
            return list(track(items, what, total, disable=not progress))

        made = pool.map(lambda version: Environment.create(version, scratch / version), versions)
        environments = show(made, "installing", len(versions))

        def make() -> Iterator[Outcome]:
            jobs = list(itertools.product(environments, targets, FmaForm, [scratch]))
            rows = show(pool.map(compile_one, *zip(*jobs, strict=True)), "compiling", len(jobs))
            yield rows, claims(rows)

        return write_script_result(
            NAME,
            make(),
            profile=CPU,
            root=root,
            parameters={"versions": list(versions), "targets": list(targets)},
            environment={"python": platform.python_version()} | {e.version: " ".join(e.packages) for e in environments},
            timing_method="time.perf_counter around cute.compile, one compile a process, as many processes as cores",
        )


def compile_one(environment: Environment, target: str, form: FmaForm, scratch: Path) -> dict[str, Any]:
    """One row of the matrix, whatever becomes of the process."""
    row: dict[str, Any] = {"dsl": environment.version, "target": target, "fma": form.value, "instruction": None}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        file = Path(folder) / "row.json"
        command = [str(environment.python), "-m", "kda_lib.lab.dsl_worker", target, form.value, str(file)]
        started = time.perf_counter()
        try:
            # The environment has the DSL and not this library, which is imported from its sources.
            done = _run(command, cwd=folder, timeout=LIMIT_S, env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)})
        except subprocess.TimeoutExpired:
            return row | {"outcome": "crashed", "seconds": LIMIT_S, "detail": f"no end after {LIMIT_S:g} s"}
        if done.returncode or not file.is_file():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return row | {
                "outcome": "crashed",
                "seconds": time.perf_counter() - started,
                "detail": f"exit code {done.returncode}: {last.replace(folder, '')}",
            }
        row.update(json.loads(file.read_text()))
        return row


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """What the matrix shows. None is required: a release that behaves otherwise is a finding, not a fault."""
    known = [row for row in rows if row["outcome"] != "target unknown"]
    native = [row for row in known if row["fma"] == FmaForm.NATIVE]
    portable = [row for row in known if row["fma"] != FmaForm.NATIVE]
    having = [row for row in native if Arch.parse(row["target"]).has_mixed_bf16_fma]
    lacking = [row for row in native if not Arch.parse(row["target"]).has_mixed_bf16_fma]
    failed = [row for row in native if row["outcome"] != "ok"]
    return [
        _count(
            "native-rejected", "the native form does not compile below sm_100", lacking, _is("outcome", "ok", False)
        ),
        _count("native-ok", "the native form compiles from sm_100 on", having, _is("outcome", "ok")),
        _count("portable-ok", "both portable forms compile for all known targets", portable, _is("outcome", "ok")),
        _count("named", "the diagnosis names the instruction", failed, _is("instruction", "fma.rn.f32.bf16")),
        _count("survived", "the compiler's process survived", rows, _is("outcome", "crashed", False)),
    ]


def _is(field: str, value: str, wanted: bool = True) -> Callable[[dict[str, Any]], bool]:
    return lambda row: (row[field] == value) == wanted


def _count(
    name: str, statement: str, rows: Sequence[dict[str, Any]], counts: Callable[[dict[str, Any]], bool]
) -> Claim:
    found, of = sum(map(counts, rows)), len(rows)
    return Claim(
        id=name,
        statement=statement,
        value=found,
        unit=f"of {of} compiles",
        bound=f"== {of}",
        holds=found == of,
        required=False,
    )


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **options)
