"""The runner: what a notebook can do to it, and what is left under reports/ afterwards."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from conftest import NotebookMaker, entry, reproduce, running
from filelock import FileLock
from rich.console import Console

from kda_lib.lab import runner
from kda_lib.lab.device import DeviceInfo
from kda_lib.lab.nbtools import declared_parameters
from kda_lib.lab.progress import Progress, print_summary
from kda_lib.lab.records import read_result

FIGURE = """import matplotlib.pyplot as plt
figure, axes = plt.subplots()
run.figure(figure, "line", alt="A line")
plt.close(figure)"""
#: JSON with the frame of a notebook around something else.
CELL_OF_1 = b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}'

CHILD = """import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.txt").write_text(f"{os.getpid()} {child.pid} .")
time.sleep(600)"""
SWALLOW = """run.claim("c", "s", value=1, bound="== 2", holds=False)
try:
    run.finish()
except AssertionError:
    pass"""
DEVICE = DeviceInfo(name="NVIDIA H200", index=977, capability="9.0", sms=132, memory_bytes=1, l2_bytes=1)


def files(root: Path) -> set[str]:
    """The files under reports/cpu, lock and logs aside."""
    folder = root / "reports" / "cpu"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("logs/")}


def pids(root: Path) -> list[int]:
    """Processes of the notebook CHILD: its kernel and the kernel's child, once both are there."""
    file = root / "notebooks" / "pids.txt"
    deadline = time.monotonic() + 60
    while not (file.is_file() and (text := file.read_text()).endswith(".")):
        assert time.monotonic() < deadline, "the notebook did not start"
        time.sleep(0.05)
    return [int(word) for word in text.split()[:2]]


def test_success_takes_its_place_and_replaces_the_last(
    workspace: Path, make_notebook: NotebookMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["false"], "display_name": "Wrong interpreter", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    make_notebook("01_good", f"import sys\nassert sys.executable == {sys.executable!r}", FIGURE)
    (outcome,) = reproduce(workspace)
    assert outcome.failure is None
    good = {"01_good.html", "results/01_good.json", "executed/01_good.ipynb"}
    assert files(workspace) == good | {"figures/01_line.png"}
    assert entry(workspace, "01_good").state == "fresh"
    assert (workspace / "reports" / "index.html").is_file()
    first = read_result(workspace / "reports/cpu/results/01_good.json")

    make_notebook("01_good", "1 + 1")
    assert entry(workspace, "01_good").why == ("notebook changed",)
    of_a_killed_run = workspace / "reports/cpu/executed/.run-old"
    of_a_killed_run.mkdir()
    screen = io.StringIO()
    reproduce(workspace, console=Console(file=screen, force_terminal=True, width=100))
    assert files(workspace) == good
    assert not of_a_killed_run.exists()
    assert "started" not in screen.getvalue()
    assert re.search(r"01_good .*0:00:0\d.* cell \d of 5\r", screen.getvalue())
    assert read_result(workspace / "reports/cpu/results/01_good.json").run_id != first.run_id
    assert entry(workspace, "01_good").state == "fresh"


def test_parameters_reach_the_notebooks_that_declare_them(workspace: Path, make_notebook: NotebookMaker) -> None:
    idle = make_notebook("01_idle")
    notebook = nbformat.read(idle, as_version=4)
    notebook.cells[1].source += "\nidle_s: float = 15\nwaits = [1]  # seconds"
    notebook.cells[2].source = notebook.cells[2].source.replace("profile=", "idle_s=idle_s, waits=waits, profile=")
    nbformat.write(notebook, idle)
    make_notebook("02_plain", "assert 'idle_s' not in globals()")
    (workspace / "notebooks" / "03_broken.ipynb").write_text("{")
    notebooks = sorted((workspace / "notebooks").glob("*.ipynb"))
    assert [declared_parameters(path) for path in notebooks] == [{"idle_s": 15, "waits": [1]}, {}, {}]

    given = {"idle_s": 600, "waits": [1, 2.5], "profile": "h100", "results_dir": "elsewhere", "other": 1}
    with Progress(Console(file=io.StringIO())) as progress:
        outcomes = runner.run_notebooks(notebooks, workspace, "cpu", progress, parameters=given)
    (failed,) = (outcome for outcome in outcomes if outcome.failure)
    assert failed.notebook == "03_broken"
    recorded = [read_result(workspace / f"reports/cpu/results/{path.stem}.json").parameters for path in notebooks[:2]]
    plain = {"profile": "cpu", "seed": 0}
    assert recorded == [plain | {"idle_s": 600, "waits": [1, 2.5]}, plain]


@pytest.mark.parametrize("content", [b"{", b"[]", b"1", b'{"nbformat": 9}', b"\xff", b"", CELL_OF_1])
def test_a_file_that_is_no_notebook_fails_alone(workspace: Path, make_notebook: NotebookMaker, content: bytes) -> None:
    make_notebook("01_good")
    broken = workspace / "notebooks" / "02_broken.ipynb"
    broken.write_bytes(content)
    assert declared_parameters(broken) == {}
    outcomes = reproduce(workspace)
    assert [outcome.failure is None for outcome in outcomes] == [True, False]
    assert outcomes[1].failure
    assert outcomes[1].failure.error.startswith("not a valid notebook: ")


def test_failures_are_told_apart_and_the_others_run(workspace: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_raises", "x = 1", "raise ValueError('first line\\nsecond line [bold]')")
    make_notebook("02_hangs", CHILD)
    make_notebook("03_dies", "import os\nos.kill(os.getpid(), 9)")
    make_notebook("04_silent", "run.finish = lambda: None")
    make_notebook("05_swallows", SWALLOW, "run.finish = lambda: None")
    (workspace / "notebooks" / "06_broken.ipynb").write_text("{")
    make_notebook("07_good", "1 + 1")
    log = io.StringIO()
    console = Console(file=log, width=160)
    outcomes = reproduce(workspace, limit_s=4, console=console)
    found = {o.notebook: (o.failure.cell, o.failure.error) for o in outcomes if o.failure}
    assert found.pop("06_broken")[1].startswith("not a valid notebook")
    assert found == {
        "01_raises": (5, "ValueError: first line"),
        "02_hangs": (4, "took longer than its limit of 4 s"),
        "03_dies": (4, "the kernel died"),
        "04_silent": (None, "results/04_silent.json: No such file or directory"),
        "05_swallows": (None, "a required claim does not hold, yet the notebook ended without an error"),
    }
    assert not any(running(pid) for pid in pids(workspace))
    assert [o.notebook for o in outcomes if not o.failure] == ["07_good"]
    failed = {f"failed/{name}.json" for name in (*found, "06_broken")} | {f"failed/{name}.ipynb" for name in found}
    assert files(workspace) == failed | {"07_good.html", "results/07_good.json", "executed/07_good.ipynb"}
    assert "02_hangs: failed: cell 4, took longer" in log.getvalue()

    print_summary(outcomes, console)
    line = next(line for line in log.getvalue().splitlines() if line.startswith("│ 01_raises"))
    assert [word.strip() for word in line.split("│")[2:6:2]] == ["failed", "5"]
    assert "ValueError: first line" in line


def test_failed_run_leaves_the_old_report_and_marks_it(workspace: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_good", "1 + 1", FIGURE)
    reproduce(workspace)
    result = workspace / "reports/cpu/results/01_good.json"
    page = workspace / "reports/cpu/01_good.html"
    old_result, old_page = result.read_bytes(), page.read_text()
    for error in ("'<first>'", "'second'"):
        make_notebook("01_good", f"raise ValueError({error})")
        reproduce(workspace)
    assert result.read_bytes() == old_result
    assert (workspace / "reports/cpu/figures/01_line.png").is_file()
    assert page.read_text().count("This page is stale") == 1
    assert "ValueError: second" in page.read_text()
    stale = entry(workspace, "01_good")
    assert stale.state == "failed"
    assert "last run failed" in (workspace / "reports/index.html").read_text()

    # Without the marker, which git does not keep, the page still tells.
    (workspace / "reports/cpu/failed/01_good.json").unlink()
    make_notebook("01_good", "1 + 1", FIGURE)
    assert entry(workspace, "01_good").why == ("the page does not show the result file's run",)
    reproduce(workspace)
    assert entry(workspace, "01_good").state == "fresh"
    assert "failed/01_good.ipynb" not in files(workspace)
    assert len(page.read_text()) == len(old_page)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_process_and_no_half_file(
    workspace: Path, make_notebook: NotebookMaker, number: signal.Signals
) -> None:
    make_notebook("01_hangs", CHILD)
    command = [sys.executable, "-m", "kda_lib.lab", "reproduce", "--gpu", "cpu"]
    with subprocess.Popen(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        children = pids(workspace)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "error: interrupted (exit 130)\n"
    assert not any(running(pid) for pid in children)
    assert files(workspace) == set()
    assert not list((workspace / "reports/cpu/executed").iterdir())


def test_interrupt_while_files_take_their_places_waits_for_all_of_them(
    workspace: Path, make_notebook: NotebookMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_notebook("01_good", "1 + 1")
    replace = os.replace

    def interrupted_replace(source: Path, target: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        replace(source, target)

    monkeypatch.setattr("kda_lib.lab.runner.os.replace", interrupted_replace)
    with pytest.raises(KeyboardInterrupt):
        reproduce(workspace)
    assert entry(workspace, "01_good").state == "fresh"


def test_full_disk_leaves_what_was_there(
    workspace: Path, make_notebook: NotebookMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_notebook("01_good", "1 + 1")
    reproduce(workspace)
    before = {name: (workspace / "reports/cpu" / name).read_bytes() for name in files(workspace)}

    def full(self: Path, *args: object, **kwargs: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        reproduce(workspace)
    assert {name: (workspace / "reports/cpu" / name).read_bytes() for name in files(workspace)} == before


def test_one_run_at_a_time(workspace: Path) -> None:
    with runner.exclusive(workspace, "cpu"):
        with pytest.raises(runner.AlreadyRunning, match="'cpu'"), runner.exclusive(workspace, "cpu"):
            pass
        with runner.exclusive(workspace, "h100"):
            pass
    with runner.exclusive(workspace, "cpu"):
        pass


def test_timing_notebook_waits_for_the_gpu(workspace: Path, make_notebook: NotebookMaker) -> None:
    timing = make_notebook("01_timing", "1 + 1", tags=[runner.GPU_TIMING_TAG])
    plain = make_notebook("02_plain", "1 + 1")
    log = io.StringIO()
    held, release = threading.Event(), threading.Event()

    def other_process() -> None:
        with runner.gpu_lock(DEVICE, lambda: None):
            held.set()
            release.wait(60)

    thread = threading.Thread(target=other_process)
    thread.start()
    assert held.wait(10)
    with Progress(Console(file=log, width=160)) as progress:
        runner.run_notebooks([plain], workspace, "cpu", progress, device=DEVICE)
        assert "waiting" not in log.getvalue()
        threading.Timer(1, release.set).start()
        (outcome,) = runner.run_notebooks([timing], workspace, "cpu", progress, device=DEVICE)
    thread.join()
    assert outcome.failure is None
    assert "01_timing: waiting for the GPU" in log.getvalue()


def test_gpu_lock_is_per_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_lib.lab.runner.tempfile.gettempdir", lambda: str(tmp_path))
    waited: list[int] = []
    with FileLock(tmp_path / "kda-lab-gpu-0.lock"), runner.gpu_lock(DEVICE, lambda: waited.append(1)):
        assert waited == []
