"""A repository and devices that do not exist, for the tests of kda_lib.lab."""

import json
import shutil
from pathlib import Path

import pytest

from kda_lib.lab import provenance
from kda_lib.lab.device import Clocks, DeviceInfo

PROFILES = Path(provenance.__file__).parent / "profiles"


def make_repo(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one notebook, 02_demo, in place of the real one."""
    (root / "notebooks").mkdir(parents=True)
    (root / "requirements").mkdir()
    shutil.copytree(PROFILES, root / "kda_lib" / "lab" / "profiles")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "kda_lib" / "kernel.py").write_text("ANSWER = 42\n")
    (root / "kda_lib" / "lab" / "report.py").write_text("TITLE = 'report'\n")
    for name in (name.replace("*", "kernels") for script in provenance.SCRIPTS.values() for name in script.files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    for lock in provenance.LOCKS:
        (root / lock).write_text(f"# {lock}\n")
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Demo"]},
        {"cell_type": "code", "metadata": {}, "source": ["x = 1\n", "x"], "outputs": [], "execution_count": None},
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (root / "notebooks" / "02_demo.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setattr(provenance, "repo_root", lambda: root)
    return root


def device(name: str = "NVIDIA H200", sms: int = 132, mig: bool = False) -> DeviceInfo:
    """What an H200 reports, under any name."""
    return DeviceInfo(
        name=name,
        index=0,
        capability="9.0",
        sms=sms,
        memory_bytes=150_000_000_000,
        l2_bytes=62_914_560,
        power_limit_w=700.0,
        mig=mig,
        driver="580.95.05",
        clocks=Clocks(sm_mhz=1980, mem_mhz=3201),
        throttle_reasons=["gpu_idle"],
    )
