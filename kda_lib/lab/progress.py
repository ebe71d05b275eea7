"""What a run of notebooks shows on a terminal or in a log."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import rich.progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kda_lib.lab.report import Failure


@dataclass(frozen=True)
class Outcome:
    """How one notebook ended. `failure` is None when all went well; `seconds` include the start of the kernel."""

    notebook: str
    seconds: float
    failure: Failure | None = None


class Progress:
    """One line per notebook: kept up to date on a terminal, written at its start and at its end anywhere else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = rich.progress.Progress(
            rich.progress.SpinnerColumn(finished_text=" "),
            rich.progress.TextColumn("{task.fields[name]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: rich.progress.TaskID | None = None
        self._name = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def start(self, name: str) -> None:
        """A notebook begins."""
        self._name = name
        self._task = self._live.add_task("starting", name=name, total=1)
        self._print("started")

    def cell(self, number: int, of: int) -> None:
        """Its cell `number` begins; shown on a terminal only."""
        self._update(f"cell {number} of {of}")

    def note(self, text: str) -> None:
        """Something worth a line in a log, too."""
        self._update(text)
        self._print(text)

    def end(self, outcome: Outcome) -> None:
        """The notebook has ended."""
        text = f"failed: {outcome.failure}" if outcome.failure else "ok"
        self._update(text, completed=1)
        self._print(f"{text}, {outcome.seconds:.1f} s")

    def _update(self, text: str, completed: int = 0) -> None:
        if self._task is not None:
            self._live.update(self._task, description=text, completed=completed)

    def _print(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._name}: {text}", markup=False, highlight=False, soft_wrap=True)


def print_summary(outcomes: Sequence[Outcome], console: Console) -> None:
    """A table with one line per notebook: outcome, seconds, cell and error."""
    table = Table(
        "notebook",
        "outcome",
        Column("seconds", justify="right"),
        Column("cell", justify="right"),
    )
    table.add_column("error", no_wrap=True, overflow="ellipsis")
    for outcome in outcomes:
        failure = outcome.failure
        cell = str(failure.cell or "") if failure else ""
        error = Text(failure.error) if failure else ""
        table.add_row(
            outcome.notebook,
            "failed" if failure else "ok",
            f"{outcome.seconds:.1f}",
            cell,
            error,
        )
    console.print(table)
