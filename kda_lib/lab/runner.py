"""Runs the source notebooks for a profile and puts what they make into reports/, whole or not at all.

A notebook runs in a temporary folder under `reports/<profile>/executed/`. Only when it has ended well, its result file
is valid and its page renders do the result, figures, page and executed copy take their places, each by a rename.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

import nbformat
from filelock import FileLock, Timeout
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillException, PapermillExecutionError

from kda_lib.errors import KdaError
from kda_lib.lab.nbtools import (
    TIME_LIMIT_S,
    InvalidNotebook,
    declared_parameters,
    kernel_manager,
    kill_kernel,
    read,
    replace_text,
)
from kda_lib.lab.progress import Outcome, Progress
from kda_lib.lab.records import ResultReadError
from kda_lib.lab.report import (
    Failure,
    Places,
    ReportError,
    load_result,
    mark_stale,
    render_page,
    smaller_png,
    write_index,
)

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

    from kda_lib.lab.device import DeviceInfo

GPU_TIMING_TAG = "gpu-timing"
"""Notebook-level tag: on a GPU, no other notebook with this tag runs at the same time on this machine."""

_ENGINE = "kda-lab"
_WORK = ".run-"


class AlreadyRunning(KdaError):
    """Another process is making reports of the same profile in the same checkout."""


class OverTimeLimit(Exception):
    """A notebook was ended because it took longer than its limit."""


class _Client(PapermillNotebookClient):  # type: ignore[misc]
    """Papermill's client with a limit on the whole notebook, which leaves no process behind however it ends."""

    def __init__(
        self,
        nb_man: Any,
        *,
        limit_s: float,
        on_cell: Callable[[str], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(nb_man, **kwargs)
        self._manager: AsyncKernelManager = kernel_manager()
        self._on_cell = on_cell
        self._limit_s = limit_s
        self._timer = threading.Timer(limit_s, self._expire)
        self._timer.daemon = True
        self._expired = False

    def create_kernel_manager(self) -> "AsyncKernelManager":
        self.km = self._manager
        return self._manager

    def execute(self, **kwargs: Any) -> nbformat.NotebookNode:
        try:
            return super().execute(**kwargs)
        except DeadKernelError:
            if self._expired:
                raise OverTimeLimit(f"took longer than its limit of {self._limit_s:g} s") from None
            raise
        finally:
            self._timer.cancel()
            kill_kernel(self._manager)

    def papermill_execute_cells(self) -> None:
        self._timer.start()
        super().papermill_execute_cells()

    def execute_cell(self, cell: nbformat.NotebookNode, cell_index: int, **kwargs: Any) -> nbformat.NotebookNode:
        self._on_cell(cell.id)
        try:
            return super().execute_cell(cell, cell_index, **kwargs)
        except KeyboardInterrupt:
            # Before nbclient's polite shutdown, which would wait for the cell and log how that ended.
            kill_kernel(self._manager)
            raise

    def _expire(self) -> None:
        self._expired = True
        kill_kernel(self._manager)


class _Engine(NBClientEngine):  # type: ignore[misc]
    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        limit_s: float,
        on_cell: Callable[[str], None],
        kernel_output: TextIO,
        start_timeout: int,
        **kwargs: Any,
    ) -> nbformat.NotebookNode:
        client = _Client(
            nb_man,
            limit_s=limit_s,
            on_cell=on_cell,
            kernel_name=kernel_name,
            startup_timeout=start_timeout,
            log=logging.getLogger("papermill"),
            log_output=True,
        )
        return client.execute(stdout=kernel_output, stderr=kernel_output)


papermill_engines.register(_ENGINE, _Engine)


@contextmanager
def exclusive(root: Path, profile: str) -> Iterator[None]:
    """Keep other processes from running notebooks for the profile in this checkout.

    Raises:
        AlreadyRunning: one does already.
        OSError: reports/ cannot be written.
    """
    folder = Places(root, profile).folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(folder / "reproduce.lock").acquire(timeout=0)
    except Timeout:
        raise AlreadyRunning(f"reports of profile {profile!r} are being made already; wait for that to end") from None
    with held:
        yield


@contextmanager
def gpu_lock(device: "DeviceInfo", on_wait: Callable[[], None]) -> Iterator[None]:
    """Wait until no other timing notebook runs on the GPU; `on_wait` is called if one does."""
    lock = FileLock(Path(tempfile.gettempdir()) / f"kda-lab-gpu-{device.index}.lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        held = lock.acquire()
    with held:
        yield


def run_notebooks(
    notebooks: Iterable[Path],
    root: Path,
    profile: str,
    progress: Progress,
    *,
    device: "DeviceInfo | None" = None,
    limit_s: float = TIME_LIMIT_S,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> list[Outcome]:
    """Run notebooks one after the other, whatever becomes of each, and keep the index in step.

    To be called from the main thread, within `exclusive`. `device` is the GPU that timing notebooks have to themselves.
    Each notebook gets those of `parameters` (name to JSON value) that are among its `nbtools.declared_parameters`.

    Raises:
        OSError: reports/ cannot be written (permission, full disk); what was there before is left as it was.
        KeyboardInterrupt: interrupted; the kernel and its processes are gone, and no half-written file is left.
    """
    places = Places(root, profile)
    for file in (
        places.result(""),
        places.executed(""),
        places.marker(""),
        places.log(""),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
    for leftover in places.executed("").parent.glob(f"{_WORK}*"):  # of a process that was killed
        shutil.rmtree(leftover)
    outcomes = []
    for path in notebooks:
        given = {name: value for name, value in parameters.items() if name in declared_parameters(path)}
        outcomes.append(_run(path, places, progress, device, limit_s, given))
        write_index(root)
    return outcomes


def _run(
    path: Path,
    places: Places,
    progress: Progress,
    device: "DeviceInfo | None",
    limit_s: float,
    parameters: Mapping[str, Any],
) -> Outcome:
    name = path.stem
    begun = time.monotonic()
    progress.start(name)
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=places.executed(name).parent) as folder:
        work = Path(folder)
        failure = _execute(path, places, work, progress, device, limit_s, parameters)
        with _uninterrupted():
            if failure is None:
                _publish(places, name, work)
            else:
                _keep_failure(places, name, work, failure)
    outcome = Outcome(name, time.monotonic() - begun, failure)
    progress.end(outcome)
    return outcome


def _execute(
    path: Path,
    places: Places,
    work: Path,
    progress: Progress,
    device: "DeviceInfo | None",
    limit_s: float,
    parameters: Mapping[str, Any],
) -> Failure | None:
    """Run the notebook and render its page, all into `work`; what went wrong, if anything did."""
    name = path.stem
    cell: int | None = None

    def fail(error: str) -> Failure:
        lines = error.replace(f"{work}{os.sep}", "").strip().splitlines()
        return Failure(
            notebook=name,
            cell=cell,
            error=lines[0] if lines else "",
            ended=datetime.now(UTC),
        )

    def on_cell(cell_id: str) -> None:
        nonlocal cell
        if cell_id in ids:  # the cell that papermill adds, with the parameters, is not in the source
            cell = ids.index(cell_id) + 1
            progress.cell(cell, len(ids))

    try:
        source = read(path)
    except InvalidNotebook as error:
        return fail(str(error))
    ids = [item.get("id") for item in source.cells]
    with ExitStack() as stack:
        log = stack.enter_context(places.log(name).open("w", encoding="utf-8"))
        stack.enter_context(_papermill_log(log))
        if device and GPU_TIMING_TAG in source.metadata.get("tags", []):
            stack.enter_context(gpu_lock(device, lambda: progress.note("waiting for the GPU")))
        try:
            executed = execute_notebook(
                path,
                work / "executed.ipynb",
                parameters={
                    "profile": places.profile,
                    "results_dir": str(work / "results"),
                    **parameters,
                },
                engine_name=_ENGINE,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                cwd=path.parent,
                limit_s=limit_s,
                on_cell=on_cell,
                kernel_output=log,
            )
        except PapermillExecutionError as error:
            return fail(f"{error.ename}: {error.evalue}")
        except DeadKernelError:
            return fail("the kernel died")
        except (
            OverTimeLimit,
            CellTimeoutError,
            PapermillException,
            RuntimeError,
        ) as error:
            return fail(str(error))
    cell = None
    try:
        result = load_result(work / "results" / f"{name}.json", name, places.profile)
        page = render_page(executed, result)
    except (ResultReadError, ReportError) as error:
        return fail(str(error))
    if result.status != "ok":
        return fail("a required claim does not hold, yet the notebook ended without an error")
    (work / "page.html").write_text(page, encoding="utf-8")
    return None


class _LogHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Let a full disk end the run instead of printing a traceback for every record."""
        error = sys.exception()
        if error:
            raise error


@contextmanager
def _papermill_log(file: TextIO) -> Iterator[None]:
    logger = logging.getLogger("papermill")
    handler = _LogHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off SIGINT and SIGTERM, so that the files of one run take their places together."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def _publish(places: Places, name: str, work: Path) -> None:
    new = {
        work / "page.html": places.page(name),
        work / "executed.ipynb": places.executed(name),
    }
    for figure in sorted((work / "figures").glob("*.png")):
        prefix = "" if figure.name.startswith(f"{name[:2]}_") else f"{name[:2]}_"
        new[figure] = places.folder / "figures" / f"{prefix}{figure.name}"
        new[figure].parent.mkdir(exist_ok=True)
        figure.write_bytes(smaller_png(figure.read_bytes()))
    old = set(places.figures(name)) - set(new.values())
    # The result goes last: until it is there, the page's run id tells that the two do not belong together.
    new[work / "results" / f"{name}.json"] = places.result(name)
    for source, target in new.items():
        os.replace(source, target)
    for file in (*old, places.marker(name), places.failed(name)):
        file.unlink(missing_ok=True)


def _keep_failure(places: Places, name: str, work: Path, failure: Failure) -> None:
    replace_text(places.marker(name), failure.model_dump_json(indent=1) + "\n")
    mark_stale(places.page(name), failure)
    if (work / "executed.ipynb").is_file():
        os.replace(work / "executed.ipynb", places.failed(name))
