"""The GPU tests as a result file, with tests that need no GPU in their place."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_lab import device, make_repo
from filelock import FileLock, Timeout
from typer.testing import CliRunner

from kda_lib.lab import __main__ as cli
from kda_lib.lab import device_tests, provenance, records, runner, scripted
from kda_lib.lab.profile import load_profile
from kda_lib.lab.sanitized import KERNELS
from kda_lib.lab.scripted import Row

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

TOOL_ROWS = [f"{name} {kernels}" for kernels, tools in KERNELS.items() for name in tools]

#: In the place of compute-sanitizer: clean with the skinny kernels, and with stream each tool ends in its own way. One
#: waits for a process that it started.
FAKE_TOOL = """#!/bin/sh
case "$*" in *"--num-cuda-barriers "[1-9]*) ;; *) echo "no room for barriers" >&2; exit 1;; esac
case "$*" in
*racecheck*skinny) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; exit 0;;
*skinny) echo "========= ERROR SUMMARY: 0 errors"; exit 0;;
esac
case "$*" in *stream_small) echo "RACECHECK SUMMARY: 10 hazards displayed (0 errors, 10 warnings)"; exit 0;; esac
case "$2" in
memcheck) printf "========= Invalid read error\\n========= of 4 bytes\\n========= ERROR SUMMARY: 3 errors\\n"; exit 86;;
racecheck) sleep 60; exit 0;;
synccheck) echo "no such device" >&2; exit 1;;
esac
"""


def clean(variant: str) -> Row:
    return {"variant": variant, "outcome": "clean", "detail": "", "seconds": 0.0}


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of GPU tests; compute-sanitizer finds nothing with any tool."""
    root = make_repo(tmp_path / "repo", monkeypatch)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs a device"]\n')
    (root / "tests" / "test_kernels_gpu.py").write_text(TESTS)
    monkeypatch.setattr(device_tests, "run_sanitizers", lambda root: map(clean, TOOL_ROWS))
    monkeypatch.setattr(scripted, "sample_state", dict)
    monkeypatch.setattr(provenance, "current_device", device)
    return root


def result_file(repo: Path) -> Path:
    return repo / "reports" / "h200" / "results" / "device_tests.json"


@pytest.mark.parametrize(
    ("source", "outcomes", "broken"),
    [
        (TESTS, {"test_good": "passed", "test_bad": "failed", "test_two": "skipped"}, ["tests"]),
        (TESTS.replace("1 == 2", "1 == 1"), {"test_good": "passed", "test_bad": "passed", "test_two": "skipped"}, []),
        ("", {}, ["ran"]),
    ],
)
def test_outcomes_become_rows_and_claims(repo: Path, source: str, outcomes: dict[str, str], broken: list[str]) -> None:
    (repo / "tests" / "test_kernels_gpu.py").write_text(source)
    result = device_tests.run_device_tests(repo, load_profile("h200"), device())
    tests = [row for row in result.rows if row["variant"] not in TOOL_ROWS]
    assert {str(row["variant"]).split("::")[1]: row["outcome"] for row in tests} == outcomes
    assert [claim.id for claim in result.claims] == ["tests", "ran", *(f"sanitizers-{kernels}" for kernels in KERNELS)]
    assert [claim.id for claim in result.claims if not claim.holds] == broken
    assert result.status == ("failed" if broken else "ok")
    assert (result.mode, result.parameters, result.seeds) == ("full", {"profile": "h200"}, {})
    assert result.gpu is not None
    assert result.gpu.name == "NVIDIA H200"
    assert records.read_result(result_file(repo)) == result
    assert records.stale_inputs(result, repo) == []
    details = {row["outcome"]: str(row["detail"]) for row in tests}
    assert "they differ" in details.get("failed", "they differ")
    assert "needs two devices" in details.get("skipped", "needs two devices")


def test_every_file_of_gpu_tests_is_run_and_decides(repo: Path) -> None:
    """A file that is new, or gone, is a change of the record's own files."""
    new = repo / "tests" / "test_new_gpu.py"
    new.write_text(TESTS.replace("test_good", "test_new"))
    result = device_tests.run_device_tests(repo, load_profile("h200"), device())
    assert {"test_good", "test_new"} <= {str(row["variant"]).split("::")[-1] for row in result.rows}
    assert records.stale_inputs(result, repo) == []
    new.unlink()
    assert records.stale_inputs(result, repo) == ["own files"]


@pytest.mark.parametrize(("done", "whole"), [(0, []), (5, [next(iter(KERNELS))])])
def test_what_was_found_stays_if_a_run_is_cut_short(
    repo: Path, monkeypatch: pytest.MonkeyPatch, done: int, whole: list[str]
) -> None:
    """The record is there after the tests and after each tool, and says that it is not all."""

    def cut_short(root: Path) -> Iterator[Row]:
        yield from map(clean, TOOL_ROWS[:done])
        raise KeyboardInterrupt

    monkeypatch.setattr(device_tests, "run_sanitizers", cut_short)
    with pytest.raises(KeyboardInterrupt):
        device_tests.run_device_tests(repo, load_profile("h200"), device())
    kept = records.read_result(result_file(repo))
    assert [row["variant"] for row in kept.rows if row["variant"] in TOOL_ROWS] == TOOL_ROWS[:done]
    assert len(kept.rows) == 3 + done
    assert kept.status == "failed"
    held = [claim.id.removeprefix("sanitizers-") for claim in kept.claims if claim.holds]
    assert [name for name in held if name in KERNELS] == whole


@pytest.mark.parametrize(
    ("only", "code", "said"),
    [
        ("good", 0, ["holds tests: no GPU test failed: 0 of 1 failed", "holds ran: GPU tests ran: 1 of 1 passed"]),
        ("bad", 1, ["FAILS tests: no GPU test failed: 1 of 1 failed", "FAILS ran: GPU tests ran: 0 of 1 passed"]),
        ("two", 1, ["holds tests: no GPU test failed: 0 of 1 failed", "FAILS ran: GPU tests ran: 0 of 1 passed"]),
        ("nothing", 1, ["holds tests: no GPU test failed: 0 of 0 failed", "FAILS ran: GPU tests ran: 0 of 0 passed"]),
    ],
)
def test_some_tests_alone_are_told_and_not_recorded(
    repo: Path, monkeypatch: pytest.MonkeyPatch, only: str, code: int, said: list[str]
) -> None:
    """The record of all tests stays as it is, and no tool is run."""
    result_file(repo).parent.mkdir(parents=True)
    result_file(repo).write_text("all of it")
    monkeypatch.setattr(cli, "repo_root", lambda: repo)
    monkeypatch.setattr(cli, "current_device", device)
    monkeypatch.setattr(cli, "_end_when_told", lambda: None)
    monkeypatch.setattr(device_tests, "run_sanitizers", lambda root: pytest.fail("a tool was run"))
    result = CliRunner().invoke(cli.app, ["device-tests", "--gpu", "h200", "--only", only])
    assert result.exit_code == code
    assert result.stdout.splitlines()[-2:] == said
    assert ("they differ" in result.stdout) == (only == "bad")
    assert [path.read_text() for path in result_file(repo).parent.iterdir()] == ["all of it"]


@pytest.mark.parametrize("only", ["", " ", "-x"])
def test_an_unset_choice_of_tests_is_not_all_of_them(repo: Path, monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    monkeypatch.setattr(cli, "repo_root", lambda: repo)
    monkeypatch.setattr(cli, "current_device", device)
    monkeypatch.setattr(device_tests, "run_tests", lambda *args: pytest.fail("tests were run"))
    assert CliRunner().invoke(cli.app, ["device-tests", "--gpu", "h200", f"--only={only}"]).exit_code == cli.USAGE


def test_one_process_at_a_time_and_told_to_end(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, notebooks of the profile wait, the GPU is locked and SIGTERM ends it in order."""
    seen: list[object] = []

    def look(*args: object) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))
        with pytest.raises(runner.AlreadyRunning), runner.exclusive(repo, "h200"):
            pass
        with pytest.raises(Timeout):
            FileLock(Path(tempfile.gettempdir()) / f"kda-lab-gpu-{device().index}.lock").acquire(timeout=0)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "repo_root", lambda: repo)
    monkeypatch.setattr(cli, "current_device", device)
    monkeypatch.setattr(device_tests, "run_device_tests", look)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert CliRunner().invoke(cli.app, ["device-tests", "--gpu", "h200"]).exit_code == cli.INTERRUPTED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert seen == [signal.default_int_handler]
    with runner.exclusive(repo, "h200"):
        pass


def test_each_tool_judges_each_kind_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that never ends loses nothing of what the others found; one that says nothing is not clean."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device_tests, "TOOL_LIMIT", 0.5)
    rows = list(device_tests.run_sanitizers(tmp_path))
    assert [row["variant"] for row in rows] == TOOL_ROWS
    said = {
        "memcheck": ("found", "Invalid read error; ERROR SUMMARY: 3 errors"),
        "racecheck": ("timed out", "not done after 0.5 s"),
        "synccheck": ("failed", "no such device"),
        "initcheck": ("failed", "it said nothing"),
    }
    assert {row["outcome"] for row in rows if row["variant"].endswith(" skinny")} == {"clean"}
    # The tool's exit code is 0, but it has counted something.
    assert {row["outcome"] for row in rows if row["variant"].endswith(" stream_small")} == {"found"}
    others = [row for row in rows if row["variant"].split()[1] not in ("skinny", "stream_small")]
    assert [(row["outcome"], row["detail"]) for row in others] == [said[row["variant"].split()[0]] for row in others]


NO_ERRORS, NO_HAZARDS = "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"


@pytest.mark.parametrize(
    ("tool", "lines", "code", "outcome"),
    [
        ("memcheck", [NO_ERRORS], 0, "clean"),
        ("racecheck", [NO_HAZARDS], 0, "clean"),
        ("racecheck", [NO_ERRORS, NO_HAZARDS], 0, "clean"),
        ("racecheck", [NO_ERRORS], 0, "failed"),
        ("racecheck", ["RACECHECK SUMMARY: 0 hazards displayed (3 errors, 2 warnings)"], 0, "found"),
        ("memcheck", [NO_HAZARDS], 0, "failed"),
        ("memcheck", ["ERROR SUMMARY: 3 errors"], 0, "found"),
        ("memcheck", ["ERROR SUMMARY: 3 errors", NO_ERRORS], 0, "found"),
        ("memcheck", [NO_ERRORS], 1, "failed"),
        ("memcheck", [NO_ERRORS], device_tests.FOUND, "found"),
    ],
)
def test_clean_is_what_the_tool_says_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, lines: list[str], code: int, outcome: str
) -> None:
    said = "".join(f"echo '========= {line}'\n" for line in lines)
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{said}exit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device_tests, "KERNELS", {"skinny": (tool,)})
    (row,) = device_tests.run_sanitizers(tmp_path)
    assert (row["outcome"], row["detail"]) == (outcome, lines[-1])


def test_a_tool_that_cannot_be_started_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/no/such/shell\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = list(device_tests.run_sanitizers(tmp_path))
    assert {(row["outcome"], row["detail"]) for row in rows} == {
        ("failed", "compute-sanitizer: No such file or directory")
    }


def test_claims_say_which_tools_they_are_about() -> None:
    said = {claim.id: claim.statement for claim in device_tests.claims_of([], [])}
    for kernels, tools in KERNELS.items():
        statement = said[f"sanitizers-{kernels}"]
        assert all(
            (tool in statement) == (tool in tools) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
        )


ODD = """
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.xfail
def test_expected():
    assert False


def test_silent():
    raise ValueError
"""


def test_outcomes_without_a_message(repo: Path) -> None:
    (repo / "tests" / "test_kernels_gpu.py").write_text(ODD)
    rows = {str(row["variant"]).split("::")[1]: row for row in device_tests.run_tests(repo)}
    assert {name: row["outcome"] for name, row in rows.items()} == {"test_expected": "skipped", "test_silent": "failed"}


HANGS = TESTS.replace("assert 1 == 2", "__import__('time').sleep(60)").replace("test_bad", "test_hangs")
#: The report is written, and the process does not end.
HANGS_AFTERWARDS = "import atexit, time\n\natexit.register(time.sleep, 60)\n" + TESTS.replace("1 == 2", "1 == 1")


@pytest.mark.parametrize(
    ("source", "limit_s", "detail"),
    [
        ("import os\n\nos._exit(7)\n", 900.0, "collecting ..."),
        (HANGS, 5.0, "not done after 5 s; tests/test_kernels_gpu.py::test_hangs"),
        (HANGS_AFTERWARDS, 8.0, "not done after 8 s; ==="),
    ],
)
def test_a_run_without_a_report_is_one_failure(
    repo: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit_s: float, detail: str
) -> None:
    monkeypatch.setattr(device_tests, "TESTS_LIMIT", limit_s)
    (repo / "tests" / "test_kernels_gpu.py").write_text(source)
    (row,) = device_tests.run_tests(repo)
    assert (row["variant"], row["outcome"]) == ("pytest", "failed")
    assert str(row["detail"]).startswith(detail)
    assert [claim.holds for claim in device_tests.claims_of_tests([row])] == [False, False]


def test_paths_of_the_machine_do_not_end_the_record(repo: Path) -> None:
    """A failure may name a file in its message."""
    source = TESTS.replace("assert 1 == 2", f"open({str(repo / 'nothing')!r}); assert 1 == 2")
    (repo / "tests" / "test_kernels_gpu.py").write_text(source)
    result = device_tests.run_device_tests(repo, load_profile("h200"), device())
    (failed,) = (row for row in result.rows if row["outcome"] == "failed")
    assert "'./nothing'" in str(failed["detail"])


def test_an_expression_is_no_option(repo: Path) -> None:
    assert list(device_tests.run_tests(repo, "--maxfail=1")) == [], "no test has this name"


def test_without_the_tool_nothing_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {row["outcome"] for row in device_tests.run_sanitizers(tmp_path)} == {"absent"}
