"""The GPU tests as a result file, with tests that need no GPU in their place."""

from pathlib import Path

import pytest
from fake_lab import device, make_repo

from kda_lib.lab import device_tests, provenance, records
from kda_lib.lab.profile import load_profile

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


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of GPU tests; compute-sanitizer finds nothing with any tool."""
    root = make_repo(tmp_path / "repo", monkeypatch)
    for file in (root / "tests").glob("test_*_gpu.py"):
        file.write_text("")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a device"]\n')
    (root / "tests" / "test_kernels_gpu.py").write_text(TESTS)
    clean = [{"variant": name, "outcome": "clean", "detail": "", "seconds": 0.0} for name in device_tests.SANITIZERS]
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
    tests = [row for row in result.rows if row["variant"] not in device_tests.SANITIZERS]
    assert {str(row["variant"]).split("::")[1]: row["outcome"] for row in tests} == outcomes
    assert [claim.id for claim in result.claims if not claim.holds] == broken
    assert result.status == ("failed" if broken else "ok")
    assert result.parameters == {"profile": "h200", "only": only}
    assert records.read_result(repo / "reports" / "h200" / "results" / "device_tests.json") == result
    assert records.stale_inputs(result, repo) == []
    details = {row["outcome"]: str(row["detail"]) for row in tests}
    assert "they differ" in details.get("failed", "they differ")
    assert "needs two devices" in details.get("skipped", "needs two devices")
