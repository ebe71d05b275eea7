"""What decides a result and when it is stale, the git state, the environment."""

import ast
import hashlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from fake_lab import device, make_repo
from test_records import result

from kda_lib.lab import provenance, records
from kda_lib.lab.records import Result, stale_inputs


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_repo(tmp_path / "repo", monkeypatch)


def _fresh(repo: Path) -> Result:
    notebook = repo / "notebooks" / "02_demo.ipynb"
    return result(inputs_sha256=provenance.inputs_sha256(notebook, "cpu"))


def _touch(file: Path) -> None:
    """Change what the file says to a machine."""
    file.write_text(file.read_text() + "touched: 1\n")


def _edit_notebook(repo: Path, cell: int = 1, **changes: Any) -> None:
    path = repo / "notebooks" / "02_demo.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][cell].update(changes)
    path.write_text(json.dumps(notebook, indent=3))


@pytest.mark.usefixtures("repo")
def test_inputs_have_the_kinds_of_the_design(repo: Path) -> None:
    assert tuple(_fresh(repo).inputs_sha256) == records.INPUTS
    assert stale_inputs(_fresh(repo), repo) == []


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("kda_lib/kernel.py", ["kda_lib"]),
        ("kda_lib/lab/profiles/cpu.yaml", ["profile"]),
        ("kda_lib/lab/profiles/h100.yaml", []),
        ("kda_lib/lab/report.py", []),
        ("requirements/lock-cpu.txt", ["lock"]),
        ("requirements/lock-cuda.txt", ["lock"]),
        ("pyproject.toml", []),
    ],
)
def test_a_touched_file_makes_its_kind_stale(repo: Path, name: str, stale: list[str]) -> None:
    made = _fresh(repo)
    _touch(repo / name)
    assert stale_inputs(made, repo) == stale


KERNEL = '''"""Adds."""

SCALE = 2
"""Of the sum."""


def add(a, b):
    """The sum."""
    # Scaled.
    return f"{SCALE * (a + b):>{SCALE}}"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Scaled.", "# Scaled by SCALE."),
        ("    # Scaled.\n", ""),
        ('"""Adds."""', '"""Adds two\nnumbers."""'),
        ('    """The sum."""\n', ""),
        ('"""Of the sum."""\n', ""),
        ("\n\n\ndef", "\n\ndef"),
        ("(a, b)", "(\n    a,\n    b,\n)"),
    ],
)
def test_words_and_layout_make_nothing_stale(repo: Path, old: str, new: str) -> None:
    file = repo / "kda_lib" / "kernel.py"
    file.write_text(KERNEL)
    made = _fresh(repo)
    assert old in KERNEL
    file.write_text(KERNEL.replace(old, new))
    assert stale_inputs(made, repo) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 2", "SCALE = 3"),
        ("SCALE = 2", 'SCALE = "2"'),
        ("(a + b)", "(b + a)"),
        (":>{SCALE}", ":<{SCALE}"),
        (":>{SCALE}", ""),
        ('f"', 'f" '),
        ("def add", "async def add"),
        ("b):", "b=None):"),
        ("    return f", "    f"),
        ("    return", "    return return"),
    ],
)
def test_code_makes_a_result_stale(repo: Path, old: str, new: str) -> None:
    """What is no Python any more counts as well."""
    file = repo / "kda_lib" / "kernel.py"
    file.write_text(KERNEL)
    made = _fresh(repo)
    assert old in KERNEL
    file.write_text(KERNEL.replace(old, new))
    assert stale_inputs(made, repo) == ["kda_lib"]


def test_an_empty_string_that_is_passed_on_counts(repo: Path) -> None:
    file = repo / "kda_lib" / "kernel.py"
    file.write_text('print("")\n')
    made = _fresh(repo)
    file.write_text("print()\n")
    assert stale_inputs(made, repo) == ["kda_lib"]


def test_the_hash_is_one_for_all_versions_of_python() -> None:
    """Results are made under one version and checked under another: 3.11, 3.12 and 3.13 all gave this hash.

    The source has what they differ in: nested format specifications (with an empty string in 3.12), functions and
    classes (with type parameters from 3.12 on), and characters that are printable: always, and from Unicode 15 on.
    """
    source = (
        KERNEL + f'\n\nclass A:\n    text = f"{{1:{{2}}.{{3}}}}" "" f"{{4!r:>{{5}}}}" + "{chr(0xE9)}{chr(0x1FAE8)}"\n'
    )
    found = hashlib.sha256(provenance._code(source.encode())).hexdigest()
    assert found == "db929cba1e9dbf3c9bdf5575b34f13761b865348cd32bcc61fd3b40a777dfa3d"
    width = ast.FormattedValue(ast.Name("width", ast.Load()), -1)
    as_in_3_12 = ast.JoinedStr([width, ast.Constant("")])
    assert provenance._syntax(as_in_3_12) == provenance._syntax(ast.JoinedStr([width]))


@pytest.mark.parametrize(
    ("script", "name", "stale"),
    [
        ("compile_matrix", "kda_lib/lab/matrix.py", ["own files"]),
        ("compile_matrix", "kda_lib/lab/sass.py", ["own files"]),
        ("compile_matrix", "kda_lib/arch.py", ["kda_lib"]),
        ("compile_matrix", "kda_lib/kernel.py", []),
        ("compile_matrix", "requirements/lock-cpu.txt", ["lock"]),
        ("compile_matrix", "kda_lib/lab/profiles/cpu.yaml", ["profile"]),
        ("device_tests", "tests/test_kernels_gpu.py", ["own files"]),
        ("device_tests", "kda_lib/lab/sanitized.py", ["own files", "kda_lib"]),
        ("device_tests", "kda_lib/kernel.py", ["kda_lib"]),
        ("device_tests", "kda_lib/lab/report.py", []),
        ("dsl_matrix", "kda_lib/lab/dsl_worker.py", ["own files"]),
        ("formal", "kda_lib/lab/profiles/h200.yaml", ["own files"]),
        ("dsl_matrix", "kda_lib/arch.py", ["kda_lib"]),
        ("dsl_matrix", "requirements/lock-cpu.txt", []),
        *((script, "notebooks/02_demo.ipynb", []) for script in provenance.SCRIPTS),
    ],
)
def test_a_result_of_a_command_depends_on_its_own_files(repo: Path, script: str, name: str, stale: list[str]) -> None:
    (repo / "kda_lib" / "arch.py").write_text("TARGETS = ()\n")
    inputs = provenance.inputs_sha256(repo / "notebooks" / f"{script}.ipynb", "cpu")
    made = result(notebook=script, inputs_sha256=inputs)
    assert stale_inputs(made, repo) == []
    _touch(repo / name)
    assert stale_inputs(made, repo) == stale
    if stale == ["own files"]:
        (repo / name).unlink()
        assert stale_inputs(made, repo) == stale


def test_a_file_that_a_notebook_shows_decides_its_result(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repo / "docs").mkdir()
    (repo / "docs" / "notes.json").write_text("{}")
    monkeypatch.setitem(provenance.SHOWN, "02_demo", ("docs/notes.json",))
    made = _fresh(repo)
    assert stale_inputs(made, repo) == []
    _touch(repo / "docs" / "notes.json")
    assert stale_inputs(made, repo) == ["notebook"]
    (repo / "docs" / "notes.json").unlink()
    assert stale_inputs(made, repo) == ["notebook"]


def test_every_file_that_a_notebook_opens_in_docs_is_named() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        code = "".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
        opened = {f"docs/{name}" for name in re.findall(r'"docs" / "([^"]+)"', code)}
        assert opened == set(provenance.SHOWN.get(path.stem, ())), path.stem


def test_gpu_tests_lie_where_they_are_recorded_from() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run([*command, "tests"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert files == set(provenance.matching(ROOT, provenance.GPU_TESTS))


def _imported(file: Path) -> set[str]:
    """Files of this repository that a Python file imports, at its top or anywhere else."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [f"{name.replace('.', '/')}.py" for name in names]
    return {place for name in places for place in (name, f"tests/{name}") if (ROOT / place).is_file()}


def test_what_the_gpu_tests_import_decides_their_record() -> None:
    script = provenance.SCRIPTS["device_tests"]
    own = script.own_files(ROOT)
    reached, left = set(own), [name for name in own if name.startswith("tests/")]
    while left:
        new = _imported(ROOT / left.pop()) - reached
        reached |= new
        left += [name for name in new if name.startswith("tests/")]
    hashed = {name for name in reached if name in own or name.startswith(script.library)}
    assert reached - hashed == set()
    assert {name for name in reached if name.startswith(provenance.ELSEWHERE)} <= set(own)
    assert "kda_lib/lab/golden.py" in reached
    assert "tests/conftest.py" in own, "pytest imports it, no test needs to name it"


def test_a_new_or_renamed_source_is_a_change(repo: Path) -> None:
    made = _fresh(repo)
    (repo / "kda_lib" / "kernel.py").rename(repo / "kda_lib" / "kernels.py")
    assert stale_inputs(made, repo) == ["kda_lib"]


def test_notebook_outputs_and_prose_do_not_count_and_code_does(repo: Path) -> None:
    made = _fresh(repo)
    _edit_notebook(repo, outputs=[{"output_type": "stream", "name": "stdout", "text": ["1\n"]}], execution_count=7)
    _edit_notebook(repo, source="x = 1  # one\nx", metadata={"tags": ["nbval-check-output"]})
    _edit_notebook(repo, cell=0, source="# A demo")
    assert stale_inputs(made, repo) == []
    _edit_notebook(repo, source="x = 2\nx")
    assert stale_inputs(made, repo) == ["notebook"]


def test_a_tag_that_decides_what_runs_is_a_change(repo: Path) -> None:
    made = _fresh(repo)
    _edit_notebook(repo, metadata={"tags": ["parameters"]})
    assert stale_inputs(made, repo) == ["notebook"]


def test_a_cell_that_is_no_python_counts_by_its_text(repo: Path) -> None:
    _edit_notebook(repo, source="%time 1")
    made = _fresh(repo)
    assert stale_inputs(made, repo) == []
    _edit_notebook(repo, source="%time 2")
    assert stale_inputs(made, repo) == ["notebook"]


def test_a_cell_that_changes_its_type_is_a_change(repo: Path) -> None:
    made = _fresh(repo)
    _edit_notebook(repo, cell_type="raw")
    assert stale_inputs(made, repo) == ["notebook"]


@pytest.mark.parametrize(
    ("name", "stale"), [("notebooks/02_demo.ipynb", ["notebook"]), ("kda_lib/lab/profiles/cpu.yaml", ["profile"])]
)
def test_a_deleted_input_is_stale(repo: Path, name: str, stale: list[str]) -> None:
    made = _fresh(repo)
    (repo / name).unlink()
    assert stale_inputs(made, repo) == stale


def _git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-C", str(repo), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_git_state(repo: Path) -> None:
    nothing = {"commit": None, "dirty": None}
    assert provenance.git_state() == nothing
    _git(repo, "init", "-q")
    assert provenance.git_state() == nothing
    _git(repo, "add", ".")
    _git(repo, "commit", "-q", "-m", "start")
    commit = _git(repo, "rev-parse", "HEAD")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (repo / "reports").mkdir()
    (repo / "reports" / "index.html").write_text("new")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (repo / "kda_lib" / "new.py").write_text("")
    assert provenance.git_state() == {"commit": commit, "dirty": True}


def test_git_state_of_another_repository_does_not_count(repo: Path) -> None:
    outer = repo.parent
    _git(outer, "init", "-q")
    _git(outer, "commit", "-q", "--allow-empty", "-m", "outer")
    assert provenance.git_state() == {"commit": None, "dirty": None}


def test_git_state_without_git(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repo))
    assert provenance.git_state() == {"commit": None, "dirty": None}


@pytest.mark.usefixtures("repo")
def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0", "nvidia-cuda-runtime-cu12": "12.9.79", "nvidia-cutlass-dsl": "4.8.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(provenance, "current_device", device)
    found = provenance.environment()
    assert {key: found[key] for key in ("torch", "cuda", "nvidia-cutlass-dsl", "flashinfer", "driver")} == {
        "torch": "2.13.0",
        "cuda": "12.9.79",
        "nvidia-cutlass-dsl": "4.8.1",
        "flashinfer": None,
        "driver": "580.95.05",
    }
    assert set(found) - {"torch", "cuda", "nvidia-cutlass-dsl", "flashinfer", "driver"} == {"python", "lock"}


def test_repo_root_is_found_from_the_package() -> None:
    assert (provenance.repo_root() / "kda_lib" / "lab" / "provenance.py").samefile(provenance.__file__)


def test_repo_root_falls_back_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "site-packages" / "provenance.py"))
    clone = tmp_path / "clone"
    (clone / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(clone / "notebooks")
    with pytest.raises(FileNotFoundError, match="run from inside the repository"):
        provenance.repo_root()
    (clone / "pyproject.toml").write_text("")
    assert provenance.repo_root().samefile(clone)
