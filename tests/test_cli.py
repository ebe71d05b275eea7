"""The command line and the Makefile: exit codes, one-line errors, what they print."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, NotebookMaker, entry, example_result, lab, reproduce, run

from kda_lib.lab import __main__ as cli
from kda_lib.lab import nbtools, runner
from kda_lib.lab.device import DeviceInfo
from kda_lib.lab.profile import profile_names
from kda_lib.lab.provenance import SCRIPTS, inputs_sha256
from kda_lib.lab.records import write_result

H200 = DeviceInfo(name="NVIDIA H200", index=0, capability="9.0", sms=132, memory_bytes=1, l2_bytes=1)
GPU = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "sms": 132,
    "memory_bytes": 1,
    "l2_bytes": 1,
    "power_limit_w": 700.0,
    "mig": False,
    "before": {},
    "after": {},
}
CLAIM = {"id": "c-1", "statement": "one is small", "value": 1, "unit": "us", "bound": "<= 2", "holds": True}
BROKEN = CLAIM | {"id": "c-2", "value": 3, "holds": False}


def put_result(root: Path, name: str, profile: str, **changes: object) -> Path:
    """Place a result file in the clone, made from its present inputs if they are there."""
    notebook = root / "notebooks" / f"{name}.ipynb"
    if notebook.is_file() or name in SCRIPTS:
        changes = {"inputs_sha256": inputs_sha256(notebook, profile, root)} | changes
    path = root / "reports" / profile / "results" / f"{name}.json"
    write_result(example_result(notebook=name, parameters={"profile": profile}, **changes), path)
    return path


def test_unknown_gpu_lists_all(here: Path) -> None:
    code, _, stderr = run("reproduce", "--gpu", "nope")
    assert code == 2
    assert all(name in stderr for name in profile_names())
    assert stderr.count("\n") == 1


def test_wrong_device_names_both_and_the_right_profile(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "current_device", lambda: H200)
    code, _, stderr = run("reproduce", "--gpu", "h100")
    assert code == 3
    assert "NVIDIA H200" in stderr
    assert "'h100'" in stderr
    assert "GPU=h200" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "found", "profile", "advice"),
    [
        ((), None, "cpu", "got none"),
        (("--gpu", "h200"), None, "h200", "got none"),
        (("--gpu", "cpu"), H200, "cpu", "got NVIDIA H200"),
        (("--gpu", "h100"), H200, "h100", "GPU=h200"),
    ],
)
def test_device_tests_refuse_without_their_device(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    found: DeviceInfo | None,
    profile: str,
    advice: str,
) -> None:
    monkeypatch.setattr(cli, "current_device", lambda: found)
    code, stdout, stderr = run("device-tests", *arguments)
    assert (code, stdout, stderr.count("\n")) == (3, "", 1)
    assert f"profile '{profile}'" in stderr
    assert advice in stderr
    assert not list((here / "reports").glob("*/results/device_tests.json"))


def test_unknown_notebook(here: Path, make_notebook: NotebookMaker) -> None:
    code, _, stderr = run("reproduce")
    assert code == 2
    assert "no notebook NN_name.ipynb" in stderr
    make_notebook("01_good")
    code, _, stderr = run("reproduce", "--only", "07")
    assert (code, stderr) == (2, "error: notebook: expected one of 01_good; got '07' (exit 2)\n")


def test_reproduce_selects_and_reports(here: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_good", "1 + 1")
    make_notebook("02_bad", "1 / 0")
    code, stdout, _ = run("reproduce", "--gpu", "h100", "--only", "01")
    assert code == 0
    assert stdout.startswith("h100: compile-only, for sm_90a; nothing runs on a GPU\n")
    assert entry(here, "01_good", "h100").state == "fresh"
    assert entry(here, "02_bad", "h100").state == "not run"
    code, stdout, _ = run("reproduce", "--only", "02_bad")
    assert code == 1
    assert "ZeroDivisionError: division by zero" in stdout


def test_second_process_is_told(here: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_good")
    with runner.exclusive(here, "cpu"):
        result = lab(here, "reproduce", "--gpu", "cpu")
    assert result.returncode == 1
    assert result.stderr == ("error: reports of profile 'cpu' are being made already; wait for that to end (exit 1)\n")


def test_unwritable_reports_and_full_disk_are_one_line(here: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_good")
    (here / "reports").write_text("in the way")
    code, _, stderr = run("reproduce")
    assert code == 1
    assert stderr.startswith(f"error: {here}/reports")
    assert stderr.count("\n") == 1
    (here / "reports").unlink()

    limited = subprocess.run(
        [sys.executable, "-m", "kda_lib.lab", "reproduce", "--gpu", "cpu"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert limited.returncode == 1
    assert limited.stderr.splitlines()[-1].startswith("error: ")
    assert "File too large" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert not list((here / "reports/cpu/executed").iterdir())
    assert not list((here / "reports/cpu").glob("*.html"))


def test_check_fresh_names_what_changed(here: Path, make_notebook: NotebookMaker) -> None:
    path = make_notebook("01_good", "1 + 1")
    assert run("check-fresh")[0] == 1
    reproduce(here)
    assert run("check-fresh") == (0, f"checked:\n  cpu        {'01_good':<28} fresh\n", "")

    def changed(file: Path, new: str) -> str:
        old = file.read_text()
        file.write_text(new)
        code, stdout, _ = run("check-fresh")
        file.write_text(old)
        assert code == 1
        return stdout.split("stale: ")[1].strip()

    kernel, profile = here / "kda_lib/shapes.py", here / "kda_lib/lab/profiles/cpu.yaml"
    assert changed(kernel, kernel.read_text() + "TOUCHED = 1\n") == "kda_lib changed"
    assert changed(profile, profile.read_text() + "# touched\n") == "profile changed"
    assert changed(path, path.read_text().replace("1 + 1", "1 + 2")) == "notebook changed"
    assert changed(here / "requirements/lock-cpu.txt", "other\n") == "lock changed"
    page = here / "reports/cpu/01_good.html"
    assert changed(page, "<body>") == "the page does not show the result file's run"
    assert run("check-fresh")[0] == 0

    page.unlink()
    assert "stale: the page is missing" in run("check-fresh")[1]
    result = here / "reports/cpu/results/01_good.json"
    result.write_text(result.read_text().replace('"cpu"', '"h100"'))
    assert "holds a result of 01_good for profile h100" in run("check-fresh")[1]
    result.write_text("{")
    code, stdout, _ = run("check-fresh")
    assert code == 1
    assert "invalid: reports/cpu/results/01_good.json: not a valid result" in stdout
    (here / "reports/index.html").unlink()
    assert "reports/index.html is missing" in run("check-fresh")[1]


def test_check_fresh_of_results_that_commands_make(here: Path) -> None:
    """They need neither a notebook nor a page, and each goes by its own files."""
    for name in ("compile_matrix", "dsl_matrix"):
        put_result(here, name, "cpu")
    run("index")
    assert not re.search(r"href=.cpu/(compile|dsl)_matrix.html", (here / "reports/index.html").read_text())

    def states() -> dict[str, str]:
        code, stdout, _ = run("check-fresh")
        found = dict(line.split(maxsplit=2)[1:] for line in stdout.splitlines()[1:])
        assert code == (set(found.values()) != {"fresh"})
        return found

    assert states() == {"compile_matrix": "fresh", "dsl_matrix": "fresh"}
    for name, changed in (
        ("report", {}),
        ("matrix", {"compile_matrix": "stale: own files changed"}),
        ("dsl_worker", {"dsl_matrix": "stale: own files changed"}),
    ):
        file = here / f"kda_lib/lab/{name}.py"
        old = file.read_text()
        file.write_text(old + "TOUCHED = 1\n")
        assert states() == {"compile_matrix": "fresh", "dsl_matrix": "fresh"} | changed
        file.write_text(old)


def test_check_fresh_keeps_other_hardware_apart(here: Path, make_notebook: NotebookMaker) -> None:
    make_notebook("01_good", "1 + 1")
    reproduce(here)
    put_result(here, "01_good", "h200", mode="full", gpu=GPU, inputs_sha256=example_result().inputs_sha256)
    put_result(here, "00_gone", "b200")
    code, stdout, _ = run("check-fresh")
    assert code == 0
    other, recorded = stdout.index("other profiles"), stdout.index("recorded on other hardware")
    assert other < stdout.index("b200       00_gone") < recorded < stdout.index("h200       01_good")
    assert "stale: notebook, kda_lib, profile, lock changed" in stdout[recorded:]
    assert "00_gone                      stale: notebook changed; the page is missing" in stdout
    for chosen in ("h200", "b200"):
        assert run("check-fresh", "--gpu", "cpu", "--gpu", chosen)[0] == 1
    assert run("index") == (0, "reports/index.html\n", "")
    index = (here / "reports/index.html").read_text()
    assert "<td>NVIDIA H200</td>" in index


def test_verify_claims(here: Path) -> None:
    code, _, stderr = run("verify-claims")
    assert (code, stderr) == (1, "error: no result file under reports/: run `make reproduce` first (exit 1)\n")
    put_result(here, "01_good", "cpu", claims=[CLAIM, BROKEN | {"required": False}])
    code, stdout, _ = run("verify-claims")
    assert code == 0
    assert stdout.splitlines() == [
        "cpu 01_good",
        "  holds c-1: one is small: 1 us, bound <= 2",
        "  fails (not required) c-2: one is small: 3 us, bound <= 2",
    ]
    path = put_result(here, "02_bad", "cpu", claims=[BROKEN], status="failed")
    code, stdout, _ = run("verify-claims")
    assert code == 1
    assert "  FAILS c-2" in stdout
    path.write_text("{}")
    code, stdout, _ = run("verify-claims")
    assert code == 1
    assert "  INVALID reports/cpu/results/02_bad.json" in stdout


def test_notebook_commands(here: Path, make_notebook: NotebookMaker) -> None:
    path = make_notebook("01_good", "print(6 * 7)", checked=True)
    assert "stores no output" in run("check-notebooks")[1]
    assert run("retake") == (0, "01_good.ipynb: outputs changed\n", "")
    assert run("retake")[1] == "01_good.ipynb: unchanged\n"
    assert run("check-notebooks") == (0, "", "")
    stored = path.read_text()
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].execution_count = 1
    nbformat.write(notebook, path)
    assert run("check-notebooks", str(path))[0] == 1
    assert run("strip") == (0, "01_good.ipynb: stripped\n", "")
    assert path.read_text() == stored
    assert run("strip", str(path))[1] == "01_good.ipynb: unchanged\n"

    make_notebook("01_good", "1 / 0")
    code, _, stderr = run("retake")
    assert (code, stderr) == (1, "error: 01_good.ipynb: ZeroDivisionError: division by zero (exit 1)\n")
    make_notebook("01_good", "from IPython.display import HTML\nHTML('x')", checked=True)
    code, _, stderr = run("retake")
    assert code == 1
    assert "text/html, text/plain, expected plain text only" in stderr


def test_profiles_marks_the_one_that_fits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "current_device", lambda: H200)
    lines = run("profiles")[1].splitlines()
    assert [line.split()[-0 if line[0] == " " else 1] for line in lines if line.startswith("*")] == ["h200"]
    assert len(lines) == len(profile_names())


def test_clean_keeps_the_reports(here: Path) -> None:
    for name in ("executed/a.ipynb", "failed/a.ipynb", "logs/a.log", "results/a.json", "a.html"):
        file = here / "reports/cpu" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert run("clean")[0] == 0
    left = {path.name for path in (here / "reports/cpu").iterdir()}
    assert left == {"results", "a.html"}


def test_command_line_starts_without_heavy_imports() -> None:
    code = "import sys, kda_lib.lab.__main__; print({'torch', 'cutlass', 'papermill', 'nbconvert'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "set()\n"


def make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make with the repository's Makefile in `root`."""
    command = ["make", "-f", str(ROOT / "Makefile"), *arguments]
    # `make test` tells the makes below it that they are nested, and they then say more.
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(command, cwd=root, env=environment, check=False, capture_output=True, text=True)


def test_make_help_is_the_default_and_lists_every_target(tmp_path: Path) -> None:
    result = make(tmp_path)
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY"))
    listed = [line.split()[0] for line in result.stdout.splitlines()[1:]]
    assert sorted(listed) == sorted(phony.split()[1:])
    assert make(tmp_path, "help").stdout == result.stdout


def test_make_passes_the_gpu_and_not_the_environments(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU", "from-the-environment")
    monkeypatch.setenv("ONLY", "from-the-environment")
    for given, passed in (
        ((), "--matrix"),
        (("GPU=h100",), '--gpu "h100" --matrix'),
        (("ONLY=01",), '--only "01"'),
        (("GPU=h100", "ONLY=01"), '--gpu "h100" --only "01"'),
    ):
        last = make(here, "-n", "reproduce", *given).stdout.splitlines()[-1]
        assert last.split("kda_lib.lab reproduce", 1)[1].split() == passed.split()


@pytest.mark.parametrize(
    "command", ["notebooks", "check-fresh", "verify-claims", "compile-matrix", "dsl-matrix", "device-tests"]
)
def test_make_targets_call_commands_that_exist(here: Path, command: str) -> None:
    last = make(here, "-n", command).stdout.splitlines()[-1]
    called = last.split("kda_lib.lab ", 1)[1].split()[0]
    assert called == ("strip" if command == "notebooks" else command)
    assert called in {found.name or found.callback.__name__.replace("_", "-") for found in cli.app.registered_commands}


def test_make_setup_says_what_is_missing(here: Path) -> None:
    old = here / "old-python"
    for script, message in (
        ("exit 1", "is not Python 3.11 or newer"),
        ('case "$2" in *venv) exit 1;; esac', "lacks the venv module"),
    ):
        old.write_text(f"#!/bin/sh\n{script}\n")
        old.chmod(0o755)
        result = make(here, "setup", f"PYTHON={old}")
        assert result.returncode == 2
        assert f"error: '{old}' {message}" in result.stderr.splitlines()[0]
        assert not (here / ".venv").exists()


def test_make_setup_runs_once_and_again_after_a_failure(here: Path) -> None:
    python = here / "a-python"
    (here / "made-python").write_text("#!/bin/sh\necho pip >> pip.log\nexit $(cat pip.rc)\n")
    (here / "made-python").chmod(0o755)
    python.write_text("#!/bin/sh\ncase $1 in -m) mkdir -p .venv/bin; cp made-python .venv/bin/python;; esac\n")
    python.chmod(0o755)
    stamp, log = here / ".venv/.setup-done", here / "pip.log"

    def setup(pip_exit: int) -> int:
        (here / "pip.rc").write_text(str(pip_exit))
        log.write_text("")
        return make(here, "setup", f"PYTHON={python}").returncode

    assert setup(1) == 2
    assert not stamp.exists()
    assert setup(0) == 0
    assert stamp.exists()
    assert log.read_text() == "pip\n" * 2
    assert setup(1) == 0  # nothing to do
    future = time.time() + 10
    os.utime(here / "requirements/lock-cpu.txt", (future, future))
    assert setup(1) == 2
    assert not stamp.exists()


def test_source_notebooks_are_in_order(here: Path, make_notebook: NotebookMaker) -> None:
    for name in ("10_b", "02_a"):
        make_notebook(name)
    assert [path.stem for path in nbtools.select(here)] == ["02_a", "10_b"]
    assert [path.stem for path in nbtools.select(here, ["10", "10_b"])] == ["10_b"]


def test_the_matrix_is_compiled_once_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came with the clone, is stale or was replaced since is made anew."""
    from kda_lib.lab import __main__ as cli

    source = Path(__file__).parent.parent / "reports" / "cpu" / "results" / "compile_matrix.json"
    output, note = cli._matrix_paths(tmp_path)
    stale: list[str] = []
    monkeypatch.setattr(cli, "stale_inputs", lambda result, root: stale)
    assert not cli._matrix_made_here(tmp_path)
    for path in (output, note):
        path.parent.mkdir(parents=True)
    output.write_bytes(source.read_bytes())
    assert not cli._matrix_made_here(tmp_path), "it came with the clone"
    note.write_text(cli.read_result(output).run_id)
    assert cli._matrix_made_here(tmp_path)
    stale.append("kda_lib")
    assert not cli._matrix_made_here(tmp_path)
    stale.clear()
    note.write_text("20000101T000000Z-00000000")
    assert not cli._matrix_made_here(tmp_path)
