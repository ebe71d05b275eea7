"""The GPU tests as a result file, with tests that need no GPU in their place."""

from pathlib import Path

import pytest
from fake_lab import device, make_repo

from kda_lib.lab import device_tests, provenance, records
from kda_lib.lab.profile import load_profile
from kda_lib.lab.sanitized import KERNELS

TESTS = """
import pytest

pytestmark = pytest.mark.gpu


def test_good():
    pass


def test_bad():
    assert 1 == 2, "they differ"


@pytest.mark.skip(reason="needs two devices")
def test_two():
    pass
"""

TOOL_ROWS = [f"{name} {kernels}" for kernels in KERNELS for name in device_tests.SANITIZERS]

#: In the place of compute-sanitizer: clean with the skinny kernels, and with stream each tool ends in its own way.
FAKE_TOOL = """#!/bin/sh
case "$*" in *skinny) echo "========= ERROR SUMMARY: 0 errors"; exit 0;; esac
case "$2" in
memcheck) echo "========= ERROR SUMMARY: 3 errors"; exit 86;;
racecheck) exec sleep 60;;
synccheck) echo "no such device" >&2; exit 1;;
esac
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of GPU tests; compute-sanitizer finds nothing with any tool."""
    root = make_repo(tmp_path / "repo", monkeypatch)
    for file in (root / "tests").glob("test_*_gpu.py"):
        file.write_text("")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a device"]\n')
    (root / "tests" / "test_kernels_gpu.py").write_text(TESTS)
    clean = [{"variant": name, "outcome": "clean", "detail": "", "seconds": 0.0} for name in TOOL_ROWS]
    monkeypatch.setattr(device_tests, "run_sanitizers", lambda root: iter(clean))
    monkeypatch.setattr(device_tests, "sample_state", dict)
    monkeypatch.setattr(provenance, "current_device", device)
    return root


@pytest.mark.parametrize(
    ("only", "outcomes", "broken"),
    [
        ("", {"test_good": "passed", "test_bad": "failed", "test_two": "skipped"}, ["tests"]),
        ("good", {"test_good": "passed"}, []),
        ("two", {"test_two": "skipped"}, ["ran"]),
        ("nothing", {}, ["ran"]),
    ],
)
def test_outcomes_become_rows_and_claims(repo: Path, only: str, outcomes: dict[str, str], broken: list[str]) -> None:
    result = device_tests.run_device_tests(repo, load_profile("h200"), device(), only)
    tests = [row for row in result.rows if row["variant"] not in TOOL_ROWS]
    assert {str(row["variant"]).split("::")[1]: row["outcome"] for row in tests} == outcomes
    assert [claim.id for claim in result.claims if not claim.holds] == broken
    assert result.status == ("failed" if broken else "ok")
    assert result.parameters == {"profile": "h200", "only": only}
    assert records.read_result(repo / "reports" / "h200" / "results" / "device_tests.json") == result
    assert records.stale_inputs(result, repo) == []
    details = {row["outcome"]: str(row["detail"]) for row in tests}
    assert "they differ" in details.get("failed", "they differ")
    assert "needs two devices" in details.get("skipped", "needs two devices")


def test_each_tool_judges_each_kind_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that never ends loses nothing of what the others found; one that says nothing is not clean."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device_tests, "TOOL_LIMIT", 0.5)
    rows = list(device_tests.run_sanitizers(tmp_path))
    assert [row["variant"] for row in rows] == TOOL_ROWS
    assert [row["outcome"] for row in rows] == ["clean"] * 4 + ["found", "timed out", "failed", "failed"]
    assert [row["detail"] for row in rows[4:]] == [
        "ERROR SUMMARY: 3 errors", "not done after 0.5 s", "no such device", "it said nothing",
    ]  # fmt: skip


def test_without_the_tool_nothing_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {row["outcome"] for row in device_tests.run_sanitizers(tmp_path)} == {"absent"}
