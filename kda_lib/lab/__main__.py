"""The command line behind Make: `python -m kda_lib.lab --help`.

Exit codes: 0 all well, 1 something failed or is stale, 2 unknown name or wrong usage, 3 the device does not fit the
profile, 130 interrupted. (Make turns every failure into its own 2.)
"""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from kda_lib.errors import KdaError
from kda_lib.lab import nbtools, report
from kda_lib.lab.device import DeviceInfo, WrongDevice, current_device, default_profile, resolve_mode
from kda_lib.lab.profile import Profile, UnknownProfile, load_profile, profile_names
from kda_lib.lab.provenance import repo_root
from kda_lib.lab.records import Claim, Result, ResultReadError, read_result, stale_inputs

FAILED, USAGE, WRONG_DEVICE, INTERRUPTED = 1, 2, 3, 130

LOG_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""

console = Console() if Console().is_terminal else Console(width=LOG_WIDTH)


class _Commands(TyperGroup):
    """Turns the errors a user can cause into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with _exit_codes():
            return super().invoke(ctx)


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except (UnknownProfile, nbtools.UnknownNotebook) as error:
        _fail(str(error), USAGE)
    except WrongDevice as error:
        _fail(str(error), WRONG_DEVICE)
    except KdaError as error:
        _fail(str(error), FAILED)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}", FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message} (exit {code})", err=True)
    raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="Profile name; the device that is there decides, else cpu."),
]
Notebooks = Annotated[
    list[Path] | None,
    typer.Argument(help="Notebook files; all of notebooks/ if none is given."),
]


def _profile(name: str | None) -> Profile:
    return load_profile(name) if name else default_profile(current_device())


def _profile_on_device(name: str | None) -> tuple[Profile, DeviceInfo]:
    """The profile, and the device, which must fit it."""
    profile, device = _profile(name), current_device()
    if device is None or resolve_mode(profile, device) != "full":
        found = device.name if device else "none"
        _fail(f"profile {profile.name!r}: expected a device that fits it, got {found}; run this on one", WRONG_DEVICE)
    return profile, device


def _gpu_alone(device: DeviceInfo) -> AbstractContextManager[Any]:
    from kda_lib.lab import runner

    return runner.gpu_lock(device, lambda: print("waiting for the GPU"))


@contextmanager
def _alone(root: Path, profile: Profile, device: DeviceInfo) -> Iterator[None]:
    """The GPU and the reports of the profile, for this process alone."""
    from kda_lib.lab import runner

    with runner.exclusive(root, profile.name), _gpu_alone(device):
        yield


def _notebook_files(paths: list[Path] | None) -> list[Path]:
    return paths or nbtools.source_notebooks(repo_root() / "notebooks")


@app.command()
def reproduce(
    gpu: Gpu = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this notebook alone (01 or its name); repeatable."),
    ] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one notebook may take.")] = nbtools.TIME_LIMIT_S,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", help="NAME=VALUE (YAML) for the notebooks that declare NAME; repeatable."),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Compile the matrix first, unless this checkout made it and it is fresh.")
    ] = False,
) -> None:
    """Run the notebooks for a profile and regenerate its reports and the index. Exit 3: the device is another GPU."""
    from kda_lib.lab import runner
    from kda_lib.lab.progress import Progress, print_summary

    _end_when_told()
    root = repo_root()
    profile = _profile(gpu)
    device = current_device()
    mode = resolve_mode(profile, device)
    notebooks = nbtools.select(root, only or ())
    try:
        parameters = nbtools.read_parameters(parameter or (), notebooks)
    except nbtools.WrongParameter as error:
        raise typer.BadParameter(str(error), param_hint="--parameter") from None
    where = f"on {device.name}" if device and mode == "full" else f"for {profile.target}; nothing runs on a GPU"
    console.print(f"{profile.name}: {mode}, {where}", highlight=False)
    used = device if mode == "full" else None
    if matrix and not _matrix_made_here(root):
        _refresh_matrix(root)
    with runner.exclusive(root, profile.name), Progress(console) as progress:
        outcomes = runner.run_notebooks(
            notebooks, root, profile.name, progress, device=used, limit_s=limit, parameters=parameters
        )
    print_summary(outcomes, console)
    console.print("index: reports/index.html", highlight=False)
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(FAILED)


def _matrix_paths(root: Path) -> tuple[Path, Path]:
    """The matrix's result file, and the git-ignored note of the run that this checkout made."""
    folder = root / "reports" / "cpu"
    return folder / "results" / "compile_matrix.json", folder / "logs" / "compile_matrix.run"


def _matrix_made_here(root: Path) -> bool:
    """Whether the matrix is fresh and was compiled by this checkout: one that came with a clone is made anew."""
    output, note = _matrix_paths(root)
    if not output.is_file() or not note.is_file():
        return False
    result = read_result(output)
    return note.read_text(encoding="utf-8") == result.run_id and not stale_inputs(result, root)


def _refresh_matrix(root: Path) -> Result:
    from kda_lib.cache import ArtifactCache
    from kda_lib.lab import matrix

    _, note = _matrix_paths(root)
    result = matrix.run_matrix(root, cache=ArtifactCache.default())
    note.parent.mkdir(parents=True, exist_ok=True)
    nbtools.replace_text(note, result.run_id)
    outcomes = Counter(row["outcome"] for row in result.rows)
    spent = (result.ended - result.started).total_seconds()
    words = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    console.print(f"compile matrix: {len(result.rows)} kernels in {spent:.0f} s: {words}", highlight=False)
    return result


@app.command()
def compile_matrix() -> None:
    """Compile every kernel for every target and M, and record the outcomes; exit 1 if a claim fails."""
    _print_result(_refresh_matrix(repo_root()))


@app.command()
def dsl_matrix() -> None:
    """Compile the repro under several DSL releases, each in a throw-away environment, and record what each said."""
    from kda_lib.lab.dsl_matrix import run_dsl_matrix

    result = run_dsl_matrix(repo_root())
    for row in result.rows:
        print(f"{row['dsl']:8}{row['target']:9}{row['fma']:16}{row['outcome']}")
    report.write_index(repo_root())


@app.command()
def audit(
    source: Annotated[str, typer.Argument(help="A PTX file, or the name of a kernel of this library.")],
    target: Annotated[str, typer.Option(help="What it should run on, such as sm_90a.")],
    fma: Annotated[
        str | None, typer.Option(help="Form of a kernel's FMA: native, portable-cvt, portable-shift.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="M of a kernel; 8 if not given.")] = None,
    compiled_for: Annotated[str | None, typer.Option(help="Target that a kernel is compiled for first.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Places of a form that are listed.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Say which instructions of a PTX text a target lacks; exit 1 unless there are none and all are known."""
    from kda_lib.lab.audit.command import run_audit
    from kda_lib.lab.audit.report import render

    try:
        found = run_audit(source, target, form=fma, tokens=tokens, compiled_for=compiled_for)
    except ValueError as error:
        _fail(str(error), USAGE)
    print(json.dumps(found.as_json(), indent=1) if as_json else render(found, show))
    if not found.clean:
        raise typer.Exit(FAILED)


@app.command()
def ptx_table() -> None:
    """Ask the installed assembler which target takes which instruction form, and write the table of the audit."""
    from kda_lib.lab.audit.command import run_table

    table = run_table()
    refused = f"{len(table.refused)} probes that no target takes"
    print(f"{len(table.forms)} forms on {len(table.targets)} targets, by {table.name}; {refused}")


@app.command()
def public_audit() -> None:
    """Try the audit on PTX from PyPI (downloads 0.7 GB) and record what it found; exit 1 if a claim fails."""
    from kda_lib.lab.audit.public import run_public_audit

    _print_result(run_public_audit(repo_root()))


@app.command()
def device_tests(
    gpu: Gpu = None,
    only: Annotated[str | None, typer.Option(help="As pytest's -k: run these tests alone, record nothing.")] = None,
) -> None:
    """Run the tests that need a GPU and compute-sanitizer, and record them; exit 1 if any failed or found something."""
    from kda_lib.lab import device_tests

    root = repo_root()
    profile, device = _profile_on_device(gpu)
    if only is not None and (not only.strip() or only.startswith("-")):
        raise typer.BadParameter(f"expected an expression of pytest's -k; got {only!r}", param_hint="--only")
    _end_when_told()
    if only is None:
        with _alone(root, profile, device):
            result = device_tests.run_device_tests(root, profile, device)
        rows, claims = result.rows, result.claims
        report.write_index(root)
    else:
        with _gpu_alone(device):
            rows = list(device_tests.run_tests(root, only))
        claims = device_tests.claims_of_tests(rows)
    for row in rows:
        if row["outcome"] != "passed":
            print(f"{row['outcome']:8} {row['variant']}: {row['detail']}")
    _print_claims(claims)


def _end_when_told() -> None:
    """End in order when asked to, so that locks go and what has a process group of its own ends too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _print_result(result: Result) -> None:
    """Bring the index up to date and print the claims; exit 1 if a required one fails."""
    report.write_index(repo_root())
    _print_claims(result.claims)


def _sentence(claim: Claim) -> str:
    verdict = "holds" if claim.holds else "FAILS" if claim.required else "fails (not required)"
    return f"{verdict} {claim.id}: {claim.statement}: {claim.value} {claim.unit}".rstrip()


def _print_claims(claims: Sequence[Claim]) -> None:
    """One line each; exit 1 if a required one fails."""
    for claim in claims:
        print(_sentence(claim))
    if any(claim.required and not claim.holds for claim in claims):
        raise typer.Exit(FAILED)


@app.command()
def emulate() -> None:
    """Run the PTX of three targets on the CPU against the host model, with planted faults; exit 1 if a claim fails."""
    from kda_lib.cache import ArtifactCache
    from kda_lib.lab import emulation

    _print_result(emulation.run(repo_root(), cache=ArtifactCache.default()))


@app.command()
def formal() -> None:
    """Prove synchronisation and race freedom with sentryward, and record it; exit 1 if a claim fails."""
    from kda_lib.cache import ArtifactCache
    from kda_lib.lab import formal

    _print_result(formal.run(repo_root(), cache=ArtifactCache.default()))


@app.command()
def golden(gpu: Gpu = None) -> None:
    """Launch every kernel on fixed inputs on the profile's GPU, and record the hashes of its outputs."""
    from kda_lib.lab import golden

    profile, device = _profile_on_device(gpu)
    with _alone(repo_root(), profile, device):
        result = golden.record(repo_root(), profile, device)
    _print_result(result)


@app.command()
def sweep(gpu: Gpu = None) -> None:
    """Time launch configurations of F_A/beta and F_B against each other on the profile's GPU, and record the times."""
    from kda_lib.lab import sweep

    profile, device = _profile_on_device(gpu)
    _end_when_told()
    with _alone(repo_root(), profile, device):
        result = sweep.run_sweep(repo_root(), profile, device)
    _print_result(result)


@app.command()
def check_fresh(
    gpu: Annotated[list[str] | None, typer.Option(help="Profile that must be fresh; repeatable.")] = None,
) -> None:
    """Compare the reports with the repository; exit 1 unless the chosen profiles (default: the device's) are fresh."""
    root = repo_root()
    chosen = [_profile(name).name for name in gpu or (None,)]
    others = [name for name in report.reported_profiles(root) if name not in chosen]
    entries = {name: report.entries(root, name) for name in chosen + others}
    recorded = [name for name in others if any(entry.result and entry.result.gpu for entry in entries[name])]
    compiled = [name for name in others if name not in recorded]
    behind = False
    for heading, names in (
        ("checked", chosen),
        ("other profiles (not checked; make reproduce GPU=<name> refreshes them here)", compiled),
        ("recorded on other hardware (not checked; only such a device can refresh them)", recorded),
    ):
        if names:
            print(f"{heading}:")
        for entry in (entry for name in names for entry in entries[name]):
            reasons = f": {'; '.join(entry.why)}" if entry.why else ""
            print(f"  {entry.profile:<10} {entry.notebook:<28} {entry.state}{reasons}")
            behind = behind or (entry.profile in chosen and entry.state != "fresh")
    if not (root / "reports" / "index.html").is_file():
        print("  reports/index.html is missing")
        behind = True
    if behind:
        raise typer.Exit(FAILED)


@app.command()
def verify_claims() -> None:
    """Print every claim of every result file; exit 1 if a required one does not hold or a file is not valid."""
    root = repo_root()
    broken = False
    files = sorted((root / "reports").glob("*/results/*.json"))
    for path in files:
        profile = path.parent.parent.name
        print(f"{profile} {path.stem}")
        try:
            result = report.load_result(path, path.stem, profile)
        except ResultReadError as error:
            print(f"  INVALID {str(error).replace(f'{root}/', '')}")
            broken = True
            continue
        for claim in result.claims:
            bound = "" if claim.bound is None else f", bound {claim.bound}"
            print(f"  {_sentence(claim)}{bound}")
            broken = broken or (claim.required and not claim.holds)
    if not files:
        _fail("no result file under reports/: run `make reproduce` first", FAILED)
    if broken:
        raise typer.Exit(FAILED)


@app.command()
def index() -> None:
    """Write reports/index.html anew from the result files."""
    root = repo_root()
    print(report.write_index(root).relative_to(root).as_posix())


@app.command()
def strip(notebooks: Notebooks = None) -> None:
    """Bring notebooks into their stored form: no outputs but those that nbval checks."""
    for path in _notebook_files(notebooks):
        print(f"{path.name}: {'stripped' if nbtools.strip(path) else 'unchanged'}")


@app.command()
def retake(notebooks: Notebooks = None) -> None:
    """Run notebooks as they are and store the outputs that nbval checks."""
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    for path in _notebook_files(notebooks):
        try:
            changed = nbtools.retake(path)
        except CellExecutionError as error:
            _fail(f"{path.name}: {error.ename}: {error.evalue}".splitlines()[0], FAILED)
        except (DeadKernelError, ValueError) as error:
            _fail(f"{path.name}: {error}", FAILED)
        print(f"{path.name}: {'outputs changed' if changed else 'unchanged'}")


@app.command()
def check_notebooks(notebooks: Notebooks = None) -> None:
    """Check the structure of notebooks; exit 1 and one line for each fault."""
    faults = [f"{path.name}: {fault}" for path in _notebook_files(notebooks) for fault in nbtools.check(path)]
    for fault in faults:
        print(fault)
    if faults:
        raise typer.Exit(FAILED)


@app.command()
def profiles() -> None:
    """List the profiles, with a mark at the one that fits this machine."""
    here = default_profile(current_device()).name
    for name in profile_names():
        profile = load_profile(name)
        print(f"{'*' if name == here else ' '} {name:<10} {profile.target:<8} {profile.title}")


@app.command()
def clean() -> None:
    """Remove what runs leave beside the reports: executed and failed copies, and logs."""
    for folder in (repo_root() / "reports").glob("*/"):
        for name in ("executed", "failed", "logs"):
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)


if __name__ == "__main__":
    app()
