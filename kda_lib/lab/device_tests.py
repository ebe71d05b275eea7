"""The tests that need a GPU, and compute-sanitizer over the kernels, recorded as a result file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from kda_lib.lab import provenance, records
from kda_lib.lab.device import DeviceInfo
from kda_lib.lab.profile import Profile
from kda_lib.lab.sanitized import KERNELS, SANITIZERS
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim
from kda_lib.lab.tools import run_group

NAME = "device_tests"
#: Exit code that compute-sanitizer is asked to give when it finds something.
FOUND = 86
#: mbarriers of a CTA that racecheck and synccheck make room for, and the others ignore. Of themselves they count those
#: that are declared as symbols, and ours lie in dynamic shared memory; the stream kernel has at most 18.
BARRIERS = 64
#: Seconds that one tool may take over one kind of kernels: a tool that is too slow must not lose what others found.
TOOL_LIMIT = 90.0
#: Seconds that the tests may take. The recorded run on an H200 took 85 s; with an empty cache all kernels are compiled
#: as well, and a kernel that never ends must not keep the device.
TESTS_LIMIT = 900.0
#: How each tool says that it found nothing. Its exit code alone does not say that it looked.
_NOTHING = dict.fromkeys(SANITIZERS, "ERROR SUMMARY: 0 errors") | {
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
}


def run_tests(root: Path, only: str = "") -> Iterator[Row]:
    """One row a test: variant, outcome (passed, failed, skipped), detail, seconds. only: pytest's ``-k``.

    A run that ends without a report, or is ended by the limit, is one failed row with the last line that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", f"-k={only}", "-p", "no:cacheprovider"]
        files = provenance.matching(root, provenance.GPU_TESTS)
        ended = _ended([*command, f"--junitxml={report}", *files], root, TESTS_LIMIT)
        print(ended.said, end="")
        if ended.code is None or not report.is_file():
            yield {"variant": "pytest", "outcome": "failed", "detail": ended.last, "seconds": ended.seconds}
            return
        for case in ElementTree.parse(report).iter("testcase"):
            problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
            message = "" if problem is None else _detail(problem.get("message", "").partition("\n")[0], root)
            name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
            yield {"variant": name, "outcome": outcome, "detail": message, "seconds": float(case.get("time", 0))}


def run_sanitizers(root: Path) -> Iterator[Row]:
    """One row a tool and kind of kernels: clean, found something, failed, timed out, or absent."""
    tool = shutil.which("compute-sanitizer")
    for kernels, tools in KERNELS.items():
        for name in tools:
            row = {"variant": f"{name} {kernels}", "outcome": "absent", "seconds": 0.0}
            yield row | ({"detail": "compute-sanitizer is not on the path"} if tool is None else
                         _sanitize(root, tool, name, kernels))  # fmt: skip


def _sanitize(root: Path, tool: str, name: str, kernels: str) -> Row:
    """outcome, detail and seconds of one run."""
    options = ["--tool", name, "--num-cuda-barriers", str(BARRIERS), "--error-exitcode", str(FOUND)]
    ended = _ended([tool, *options, sys.executable, "-m", "kda_lib.lab.sanitized", kernels], root, TOOL_LIMIT)
    summary = [line.strip("= ") for line in ended.said.splitlines() if "SUMMARY" in line]
    counted = set(summary) - set(_NOTHING.values())
    if ended.code is None:
        outcome = "timed out" if ended.seconds >= TOOL_LIMIT else "failed"
    elif ended.code == 0 and _NOTHING[name] in summary and not counted:
        outcome = "clean"
    else:
        outcome = "found" if ended.code == FOUND or counted else "failed"
    first = [line for line in ended.said.splitlines() if "rror" in line and "SUMMARY" not in line][:1]
    detail = "; ".join(line.strip("= ") for line in (*first, *(summary[-1:] or [ended.last])))
    return {"outcome": outcome, "detail": _detail(detail, root), "seconds": ended.seconds}


class _Ended(NamedTuple):
    """How a program ended: exit code (``None``: not by itself), what it said, why or the last line of that."""

    code: int | None
    said: str
    last: str
    seconds: float


def _ended(command: Sequence[str], root: Path, limit_s: float) -> _Ended:
    started = time.perf_counter()
    try:
        done = run_group(command, cwd=root, limit_s=limit_s)
    except subprocess.TimeoutExpired as slow:
        last = "; ".join([f"not done after {limit_s:g} s", *slow.output.strip().splitlines()[-1:]])
        return _Ended(None, slow.output, _detail(last, root), limit_s)
    except OSError as error:
        return _Ended(None, "", f"{Path(command[0]).name}: {error.strerror}", 0.0)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
    return _Ended(done.returncode, done.stdout, _detail(lines[-1], root), time.perf_counter() - started)


def _detail(text: str, root: Path) -> str:
    """Short, and without the paths of this machine with which no record can be written."""
    for path, name in ((root, "."), (Path.home(), "~")):
        text = re.sub(rf"{re.escape(str(path))}(?![\w-])", name, text)
    return text[:300]


def run_device_tests(root: Path, profile: Profile, device: DeviceInfo) -> records.Result:
    """Run both and write ``reports/<profile>/results/device_tests.json``, after the tests and after each tool.

    Raises:
        records.ResultWriteError: the file system refused.
    """

    def outcomes() -> Iterator[Outcome]:
        tests, tools = list(run_tests(root)), list[Row]()
        yield tests, claims_of(tests, tools)
        for row in run_sanitizers(root):
            tools.append(row)
            yield [*tests, *tools], claims_of(tests, tools)

    return write_script_result(NAME, outcomes(), profile=profile.name, root=root, device=device)


def claims_of(tests: Sequence[Row], tools: Sequence[Row]) -> list[records.Claim]:
    """What the rows show; a tool that has no row yet is not clean."""
    return [*claims_of_tests(tests), *(_sanitizer_claim(kernels, tools) for kernels in KERNELS)]


def claims_of_tests(tests: Sequence[Row]) -> list[records.Claim]:
    """What the rows of tests show."""
    failed, passed = (sum(row["outcome"] == outcome for row in tests) for outcome in ("failed", "passed"))
    return [
        zero_claim("tests", "no GPU test failed", failed, f"of {len(tests)} failed"),
        records.Claim(id="ran", statement="GPU tests ran", value=passed, unit=f"of {len(tests)} passed", bound=">= 1",
                      holds=passed >= 1),
    ]  # fmt: skip


def _sanitizer_claim(kernels: str, tools: Sequence[Row]) -> records.Claim:
    wanted = len(KERNELS[kernels])
    clean = sum(row["outcome"] == "clean" for row in tools if row["variant"].endswith(f" {kernels}"))
    return records.Claim(
        id=f"sanitizers-{kernels}",
        statement=f"compute-sanitizer finds nothing in {kernels} kernels ({', '.join(KERNELS[kernels])})",
        value=clean,
        unit=f"of {wanted} tools clean",
        bound=f"== {wanted}",
        holds=clean == wanted,
    )
