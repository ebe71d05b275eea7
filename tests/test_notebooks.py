"""The source notebooks: structure, stored outputs, and one run of each through the runner."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, NotebookMaker, quiet
from nbformat import NotebookNode

from kda_lib.lab import nbtools, runner
from kda_lib.lab.records import read_result

NOTEBOOKS = nbtools.source_notebooks(ROOT / "notebooks")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a notebook under nbval, comparing the stored outputs of the cells that are tagged for it."""
    options = ["-q", "-p", "nbval.plugin", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    options += ["--nbval-cell-timeout=300", "--rootdir", str(path.parent), "-c", "/dev/null"]
    # Its own pytest needs no other plugin, and coverage would count for nothing here.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each_notebook
def test_structure(path: Path) -> None:
    assert nbtools.check(path) == []


@each_notebook
def test_stored_outputs(path: Path) -> None:
    result = nbval(path)
    assert result.returncode == 0, result.stdout


@each_notebook
def test_run(path: Path, tmp_path: Path) -> None:
    for folder in ("docs", "kda_lib", "notebooks", "requirements"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with quiet() as progress:
        (outcome,) = runner.run_notebooks([path], tmp_path, "cpu", progress, limit_s=120)
    assert outcome.failure is None, outcome.failure
    result = read_result(tmp_path / "reports/cpu/results" / f"{path.stem}.json")
    assert result.mode == "compile-only"
    assert result.claims
    assert all(claim.holds for claim in result.claims if claim.required)


def test_nbval_notices_a_changed_output(make_notebook: NotebookMaker) -> None:
    path = make_notebook("01_checked", "print('forty', 6 * 7)", "dict(a=1)", checked=True)
    assert nbtools.retake(path)
    unchanged = nbval(path)
    assert unchanged.returncode == 0, unchanged.stdout
    good = path.read_text()
    for stored in ("forty 42", "{'a': 1}"):
        assert good.count(stored) == 1
    path.write_text(good.replace("forty 42", "forty 43").replace("{'a': 1}", "{'a': 2}"))
    changed = nbval(path)
    assert changed.returncode == 1
    assert "2 failed, 3 passed" in changed.stdout


Change = Callable[[NotebookNode], object]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source(number: int, text: str) -> Change:
    """A change of the source of one code cell."""
    return lambda notebook: code_cells(notebook)[number].update(source=text)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (source(0, 'profile = "h100"\nresults_dir = ""'), "profile is 'h100', expected 'cpu'"),
        (source(0, 'profile = "cpu"'), "results_dir is None, expected ''"),
        (source(0, 'profile = "cpu"\nresults_dir = str()'), "other than assignments of literals"),
        (source(0, 'import os\nprofile = "cpu"\nresults_dir = ""'), "other than assignments of literals"),
        (source(1, "x = 1"), r"second code cell begins \[\]"),
        (source(1, 'notebook.begin("02_other")'), r"second code cell begins \['02_other'\]"),
        (source(2, "!ls"), "cell 4: not plain Python"),
        (source(2, "%matplotlib inline"), "cell 4: not plain Python"),
        (source(2, "x = !ls"), "cell 4: not plain Python"),
        (source(2, "get_ipython().system('ls')"), "cell 4: calls get_ipython"),
        (source(2, "x = 1; y = 2;"), "cell 4: a line ends in ';'"),
        (source(2, "run.banner(); # quiet"), "cell 4: a line ends in ';'"),
        (source(2, "import sys\nsys.exit()"), r"cell 4: calls sys\.exit"),
        (source(2, "import os\nos._exit(0)"), r"cell 4: calls os\._exit"),
        (source(2, f"x = '{'x' * nbtools.MAX_BYTES}'"), "bytes, expected under 200000"),
        (source(-1, "1"), "does not call .finish"),
        (lambda n: code_cells(n)[0].metadata.clear(), r"has tags \[\]"),
        (lambda n: code_cells(n)[2].metadata.update(tags=["raises-exception"]), "tagged raises-exception"),
        (lambda n: code_cells(n)[2].update(execution_count=1), r"cells \[4\] hold outputs, counts"),
        (lambda n: code_cells(n)[2].outputs.append(nbformat.v4.new_output("stream", text="x")), r"cells \[4\] hold"),
        (lambda n: n.metadata.update(kernelspec={"name": "other", "display_name": "x"}), "kernelspec 'other'"),
        (lambda n: n.metadata.update(widgets={}), "not in its stored form"),
        (lambda n: n.cells.__delitem__(slice(2, None)), "1 code cells, expected at least 3"),
    ],
)
def test_structure_faults_are_found(make_notebook: NotebookMaker, change: Change, fault: str) -> None:
    path = make_notebook("01_good", "x = 1; y = 2  # inner semicolons are fine\ntext = '%not magic;'")
    assert nbtools.check(path) == []
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    path.write_text(nbtools.dumps(notebook))
    assert any(re.search(fault, found) for found in nbtools.check(path)), nbtools.check(path)


@pytest.mark.parametrize(("number", "new"), [(0, None), (0, "cell-1")])
def test_cell_ids_are_checked(make_notebook: NotebookMaker, number: int, new: str | None) -> None:
    path = make_notebook("01_good")
    notebook = json.loads(path.read_text())
    notebook["cells"][number].update(id=new) if new else notebook["cells"][number].pop("id")
    path.write_text(json.dumps(notebook))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert nbtools.check(path)[0].startswith("cells without an id or with the same id")


def test_name_and_json_faults_are_found(make_notebook: NotebookMaker) -> None:
    path = make_notebook("01_Good", "x = 1")
    assert nbtools.check(path) == ["name '01_Good.ipynb', expected NN_lower_case_name.ipynb"]
    path.write_text("{")
    assert nbtools.check(path)[0].startswith("not a valid notebook")


def test_strip_keeps_only_the_text_of_checked_cells(make_notebook: NotebookMaker) -> None:
    path = make_notebook("01_good", "1", checked=True)
    notebook = nbformat.read(path, as_version=4)
    checked, other = code_cells(notebook)[2], code_cells(notebook)[0]
    rich = {"text/plain": "1", "text/html": "<b>1</b>"}
    checked.outputs = [
        nbformat.v4.new_output("stream", text="kept"),
        nbformat.v4.new_output("execute_result", rich, execution_count=7, metadata={"x": 1}),
        nbformat.v4.new_output("display_data", {"image/png": "AA=="}),
    ]
    other.outputs = [nbformat.v4.new_output("stream", text="gone")]
    checked.metadata["collapsed"] = True
    path.write_text(nbtools.dumps(notebook))
    assert nbtools.strip(path)
    stored = nbformat.read(path, as_version=4)
    stream, result = code_cells(stored)[2].outputs
    assert stream.text == "kept"
    assert (result.data, result.metadata, result.execution_count) == ({"text/plain": "1"}, {}, 3)
    assert code_cells(stored)[0].outputs == []
    assert code_cells(stored)[2].metadata == {"tags": [nbtools.CHECKED_TAG]}
    text = path.read_text()
    assert not nbtools.strip(path)
    assert path.read_text() == text
