"""Programs of others: found in their packages, and ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kda_lib.lab import tools

#: Starts a child that sleeps, writes down its process, and waits for it, as compute-sanitizer does with Python.
SLOW = """#!/bin/sh
sleep 60 &
echo $! > child.pid
wait
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    tool = tmp_path / "slow"
    tool.write_text(SLOW)
    tool.chmod(0o755)
    return str(tool)


def gone(pid: int) -> bool:
    """Whether it ends within some seconds; one that nobody has reaped yet has ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def child_of(folder: Path) -> int:
    """The process of the child, once it is there."""
    deadline = time.monotonic() + 10
    file = folder / "child.pid"
    while time.monotonic() < deadline:
        if file.is_file() and (text := file.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("the tool has not started its child")


def test_a_program_that_is_too_slow_ends_with_its_children(slow: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        tools.run_group([slow], cwd=tmp_path, limit_s=1)
    assert time.monotonic() - started < 30
    assert gone(child_of(tmp_path))


def test_what_a_program_that_is_too_slow_has_said(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as slow:
        tools.run_group(["sh", "-c", r"printf 'caf\351\n'; sleep 60"], cwd=tmp_path, limit_s=1)
    assert slow.value.output == "caf\N{REPLACEMENT CHARACTER}\n"


def test_a_program_may_have_ended_when_it_is_to_end(tmp_path: Path) -> None:
    """It left a process in a group of its own, which keeps its output open; then comes an interrupt."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            tools.run_group(["sh", "-c", "setsid sleep 3 &"], cwd=tmp_path, limit_s=30)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_program_ends_with_its_children(slow: str, tmp_path: Path) -> None:
    """Its group is not that of the terminal, which Ctrl-C reaches."""
    code = (
        "import signal, sys; from pathlib import Path; from kda_lib.lab.tools import run_group; "
        "signal.signal(signal.SIGTERM, signal.default_int_handler); "
        "run_group([sys.argv[1]], cwd=Path(sys.argv[2]), limit_s=60)"
    )
    command = [sys.executable, "-c", code, slow, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1]) as process:
        child = child_of(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in said
    assert gone(child)


def test_what_a_program_says_and_how_it_ends(tmp_path: Path) -> None:
    done = tools.run_group(["sh", "-c", "pwd; echo no >&2; exit 86"], cwd=tmp_path, limit_s=30)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (86, str(tmp_path), "no\n")


def test_a_program_need_not_speak_utf_8(tmp_path: Path) -> None:
    done = tools.run_group(["printf", r"caf\351\n"], cwd=tmp_path, limit_s=30)
    assert done.stdout == "caf\N{REPLACEMENT CHARACTER}\n"


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for name, error in (("text", PermissionError), ("nothing", FileNotFoundError)):
        with pytest.raises(error):
            tools.run_group([str(tmp_path / name)], cwd=tmp_path, limit_s=30)


def test_programs_of_packages() -> None:
    found = tools.packaged("nvidia-cuda-nvdisasm", "nvdisasm")
    assert found is not None
    assert Path(found).is_file()
    assert tools.packaged("nvidia-cuda-nvdisasm", "cuobjdump") is None
    assert tools.packaged("no-such-package", "nvdisasm") is None
