"""Programs of others that the lab runs: where they are, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def packaged(package: str, program: str) -> str | None:
    """Path of a program that an installed package brings, or None where there is none."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.stem == program), None)


def run_group(command: Sequence[str], *, cwd: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program that starts others, which end with it when it is too slow or this process is interrupted.

    What it says need not be UTF-8.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it was still busy after ``limit_s`` seconds; it and all that it started are dead.
            ``output`` is the text that it had written.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(end, subprocess.TimeoutExpired):
                # Bytes or None, even where text was asked for.
                end.output = (end.output or b"").decode(errors="replace")
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
