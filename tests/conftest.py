"""A miniature clone of the repository, and notebooks to run in it."""

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kda_lib.lab import __main__ as cli
from kda_lib.lab import nbtools, report
from kda_lib.lab.progress import Outcome, Progress
from kda_lib.lab.provenance import LOCKS
from kda_lib.lab.records import Result
from kda_lib.lab.runner import exclusive, run_notebooks

ROOT = Path(__file__).resolve().parent.parent
NotebookMaker = Callable[..., Path]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library with an empty notebooks/ folder; kernels and subprocesses import the copy."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "kda_lib", root / "kda_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("notebooks", "requirements"):
        (root / folder).mkdir()
    for name in ("pyproject.toml", *LOCKS):
        (root / name).write_text(f"# {name} of a test\n")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def make_notebook(workspace: Path) -> NotebookMaker:
    """`make_notebook("01_good", "cell source", ...)`: a notebook of the right structure around some cells."""

    def make(name: str, *sources: str, tags: list[str] | None = None, checked: bool = False) -> Path:
        cells = [nbformat.v4.new_markdown_cell(f"# Test notebook {name}\n\nWritten by a test.")]
        cells.append(nbformat.v4.new_code_cell('profile = "cpu"\nresults_dir = ""', metadata={"tags": ["parameters"]}))
        begin = f"run = notebook.begin({name!r}, profile=profile, results_dir=results_dir)"
        cells.append(nbformat.v4.new_code_cell(f"from kda_lib.lab import notebook\n\n{begin}"))
        cell_tags = {"tags": [nbtools.CHECKED_TAG]} if checked else {}
        cells += [nbformat.v4.new_code_cell(source, metadata=cell_tags) for source in sources]
        cells.append(nbformat.v4.new_code_cell("run.finish()"))
        for number, cell in enumerate(cells):
            cell.id = f"cell-{number}"
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"tags": tags} if tags else {})
        path = workspace / "notebooks" / f"{name}.ipynb"
        path.write_text(nbtools.dumps(nbtools.stored_form(notebook)), encoding="utf-8")
        return path

    return make


def quiet() -> Progress:
    """Progress that nobody sees."""
    return Progress(Console(file=io.StringIO()))


def reproduce(root: Path, *only: str, limit_s: float = 60, console: Console | None = None) -> list[Outcome]:
    """Run the notebooks of the clone for profile cpu."""
    with exclusive(root, "cpu"), Progress(console) if console else quiet() as progress:
        return run_notebooks(nbtools.select(root, only), root, "cpu", progress, limit_s=limit_s)


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The clone, with the commands run in this process working on it and no device to be seen."""
    monkeypatch.setattr(cli, "repo_root", lambda: workspace)
    monkeypatch.setattr(cli, "current_device", lambda: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield workspace
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command run in this process."""
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def lab(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of the clone at `root`."""
    command = [sys.executable, "-m", "kda_lib.lab", *arguments]
    return subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=120)


def example_result(**changes: Any) -> Result:
    """A compile-only result for h100 that no run made; `changes` replace fields of its JSON."""
    fields = {
        "schema": "kda-lib/result/v1",
        "notebook": "01_example",
        "run_id": "example",
        "started": "2026-01-01T00:00:00Z",
        "ended": "2026-01-01T00:00:01Z",
        "status": "ok",
        "mode": "compile-only",
        "inputs_sha256": dict.fromkeys(("notebook", "kda_lib", "profile", "lock"), "0" * 64),
        "git": {"commit": "ab" * 20, "dirty": True},
        "parameters": {"profile": "h100"},
        "environment": {},
        "gpu": None,
        "seeds": {},
        "claims": [],
        "rows": [],
        **changes,
    }
    return Result.model_validate_json(json.dumps(fields))


def entry(root: Path, notebook: str, profile: str = "cpu") -> report.Entry:
    """Where a notebook of the clone stands."""
    return report.entry(report.Places(root, profile), notebook)


def running(pid: int) -> bool:
    """Whether a process is there and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")
