"""Parameters of notebooks as the command line takes them."""

from pathlib import Path

import nbformat
import pytest
from conftest import NotebookMaker, run

from kda_lib.lab import runner

#: Texts that are no YAML, nothing that JSON has, or of another type.
NO_INTEGERS = (
    "2026-13-45",
    "2026-12-01",
    "9" * 5000,
    "[" * 3000,
    "!!set {a}",
    "&a [*a]",
    ".nan",
    "abc",
    "true",
    "1.5",
    "",
)


@pytest.fixture
def declaring(here: Path, make_notebook: NotebookMaker) -> Path:
    """The clone with 01_idle, which has the parameters idle_s and waits, and 02_plain, which has none of its own."""
    idle = make_notebook("01_idle")
    notebook = nbformat.read(idle, as_version=4)
    notebook.cells[1].source += "\nidle_s = 15\nwaits = [1]"
    nbformat.write(notebook, idle)
    make_notebook("02_plain")
    return here


def test_reproduce_reads_parameters_as_yaml(declaring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def spy(*args: object, parameters: object, **kwargs: object) -> list[object]:
        seen.append(parameters)
        return []

    monkeypatch.setattr(runner, "run_notebooks", spy)
    assert run("reproduce", "-p", "idle_s=600", "--parameter", "waits=[2.5, a=b]")[0] == 0
    assert run("reproduce")[0] == 0
    assert seen == [{"idle_s": 600, "waits": [2.5, "a=b"]}, {}]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("-p", "idle_s"), "expected NAME=VALUE; got 'idle_s'"),
        (("-p", "profile=h100"), "this command sets 'profile' itself"),
        (("-p", "results_dir=x"), "this command sets 'results_dir' itself"),
        (("-p", "idle_s=[1"), "expected a YAML value for 'idle_s' that JSON has too; got '[1'"),
        *((("-p", f"idle_s={text}"), "for 'idle_s'") for text in NO_INTEGERS),
        (("-p", "idle_s=1", "-p", "idle_s=2"), "expected one value for 'idle_s'; got two"),
        (("-p", "waits=600"), "expected list for 'waits', such as [1]; got '600'"),
        (("-p", "idle=1"), "has 'idle', expected one of theirs (01_idle: idle_s, waits; 02_plain: none)"),
        (("-p", "idle_s=1", "--only", "02"), "has 'idle_s', expected one of theirs (02_plain: none)"),
    ],
)
def test_reproduce_refuses_wrong_parameters(declaring: Path, arguments: tuple[str, ...], problem: str) -> None:
    code, _, stderr = run("reproduce", *arguments)
    assert code == 2
    assert "Invalid value for --parameter: " in stderr
    assert problem in stderr
    assert not (declaring / "reports").exists()
