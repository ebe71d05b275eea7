"""The tests that need a GPU, and compute-sanitizer over the kernels, recorded as a result file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4
from xml.etree import ElementTree

from kda_lib.lab import provenance, records
from kda_lib.lab.device import DeviceInfo, DeviceState, sample_state
from kda_lib.lab.profile import Profile
from kda_lib.lab.sanitized import KERNELS

NAME = "device_tests"
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Exit code that compute-sanitizer is asked to give when it finds something.
FOUND = 86
#: Seconds that one tool may take over one kind of kernels: a tool that is too slow must not lose what others found.
TOOL_LIMIT = 90.0


def run_tests(root: Path, only: str) -> Iterator[dict[str, Any]]:
    """One row a test: variant, outcome (passed, failed, skipped), detail, seconds. only: pytest's ``-k``, or ""."""
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", only, "-p", "no:cacheprovider"]
        files = sorted(str(path.relative_to(root)) for path in (root / "tests").glob("test_*_gpu.py"))
        subprocess.run([*command, f"--junitxml={report}", *files], cwd=root, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
            message = "" if problem is None else (problem.get("message") or "").splitlines()[0][:200]
            name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
            yield {"variant": name, "outcome": outcome, "detail": message, "seconds": float(case.get("time", 0))}


def run_sanitizers(root: Path) -> Iterator[dict[str, Any]]:
    """One row a tool and kind of kernels: clean, found something, failed, timed out, or absent."""
    tool = shutil.which("compute-sanitizer")
    for kernels in KERNELS:
        for name in SANITIZERS:
            row = {"variant": f"{name} {kernels}", "outcome": "absent", "seconds": 0.0}
            yield row | ({"detail": "compute-sanitizer is not on the path"} if tool is None else
                         _sanitize(root, tool, name, kernels))  # fmt: skip


def _sanitize(root: Path, tool: str, name: str, kernels: str) -> dict[str, Any]:
    """outcome, detail and seconds of one run."""
    command = [tool, "--tool", name, "--error-exitcode", str(FOUND), sys.executable, "-m", "kda_lib.lab.sanitized"]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, kernels], cwd=root, capture_output=True, text=True, check=False, timeout=TOOL_LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "timed out", "detail": f"not done after {TOOL_LIMIT:g} s", "seconds": TOOL_LIMIT}
    summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    outcome = "clean" if done.returncode == 0 and summary else "found" if done.returncode == FOUND else "failed"
    last = summary or (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    detail = last[-1].strip("= ")[:200] if last else "it said nothing"
    return {"outcome": outcome, "detail": detail, "seconds": time.perf_counter() - started}


def run_device_tests(root: Path, profile: Profile, device: DeviceInfo, only: str = "") -> records.Result:
    """Run both and write ``reports/<profile>/results/device_tests.json``.

    Raises:
        records.ResultWriteError: the file system refused.
    """
    started = datetime.now(UTC)
    inputs = provenance.inputs_sha256(Path(f"{NAME}.ipynb"), profile.name, root)
    tests, tools = list(run_tests(root, only)), list(run_sanitizers(root))
    failed, passed = (sum(row["outcome"] == outcome for row in tests) for outcome in ("failed", "passed"))
    claims = [
        records.Claim(id="tests", statement="no GPU test failed", value=failed, unit=f"of {len(tests)} failed",
                      bound="== 0", holds=failed == 0),
        records.Claim(id="ran", statement="GPU tests ran", value=passed, unit=f"of {len(tests)} passed", bound=">= 1",
                      holds=passed >= 1),
        *(_sanitizer_claim(kernels, tools) for kernels in KERNELS),
    ]  # fmt: skip
    kept = device.model_dump(include=set(records.Gpu.model_fields))
    before = DeviceState(clocks=device.clocks, throttle_reasons=device.throttle_reasons)
    result = records.Result(
        notebook=NAME,
        run_id=f"{started:%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}",
        started=started,
        ended=datetime.now(UTC),
        status="ok" if all(claim.holds for claim in claims) else "failed",
        mode="full",
        inputs_sha256=inputs,
        git=records.Git(**provenance.git_state(root)),
        parameters={"profile": profile.name, "only": only},
        environment=provenance.environment(),
        gpu=records.Gpu(**kept, before=before, after=DeviceState(**sample_state())),
        seeds={},
        timing_method=None,
        claims=claims,
        rows=[*tests, *tools],
    )
    records.write_result(result, root / "reports" / profile.name / "results" / f"{NAME}.json")
    return result


def _sanitizer_claim(kernels: str, tools: list[dict[str, Any]]) -> records.Claim:
    rows = [row for row in tools if row["variant"].endswith(f" {kernels}")]
    clean = sum(row["outcome"] == "clean" for row in rows)
    return records.Claim(
        id=f"sanitizers-{kernels}",
        statement=f"compute-sanitizer finds nothing in {kernels} kernels",
        value=clean,
        unit=f"of {len(rows)} tools clean",
        bound=f"== {len(rows)}",
        holds=clean == len(rows),
    )
