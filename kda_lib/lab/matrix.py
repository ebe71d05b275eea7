"""The compile matrix: every kernel, FMA form, target and M, compiled, and its SASS read, on all cores.

A row says whether the compiler took the kernel and, where it did, what it made of it. `sass` counts the opcodes from
the first FMA to the last; `cvt_per_fma` counts the conversions of the whole kernel: some lie above the first FMA.
The stream kernel has neither: one of it serves every M, on tensor cores, so its rows tell TP degrees apart instead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kda_lib.arch import TARGETS, Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import Artifact, KernelConfig, compile_isolated, compile_kernel, kernel_name
from kda_lib.errors import CompileError, CompilerCrashed, UnknownTarget, UnsupportedInstruction
from kda_lib.kernels.config import skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm, portable_form, supports
from kda_lib.kernels.stream_config import StreamConfig, stream_config
from kda_lib.lab import provenance, records, sass
from kda_lib.lab.profile import CPU
from kda_lib.lab.scripted import Outcome, Row, write_script_result
from kda_lib.lab.workers import worker_pool
from kda_lib.shapes import MAX_TOKENS, KdaShapes

Compiler = Callable[..., Artifact]

NAME = "compile_matrix"
GEMMS: dict[str, Callable[..., KernelConfig]] = {"skinny_n": skinny_n_config, "skinny_k": skinny_k_config}
STREAM = "stream"
KERNELS = (*GEMMS, STREAM)
FORMS = tuple(FmaForm)
M_VALUES = range(1, MAX_TOKENS + 1)
SHAPES = KdaShapes(tp=8)
#: What the stream kernel is compiled for: TP degrees, and the SMs of an H200, whatever the target.
DEGREES = (4, 8, 16)
SMS = 132

#: Exception -> how a row calls it; the first that fits counts.
OUTCOMES: dict[type[CompileError], str] = {
    UnsupportedInstruction: "instruction rejected",
    UnknownTarget: "target unknown",
    CompilerCrashed: "crashed",
    CompileError: "failed",
}
OK = "ok"


@dataclass(frozen=True)
class Job:
    """One kernel to compile for one target."""

    config: KernelConfig | StreamConfig
    arch: Arch


#: Kernels of one target that one process compiles and disassembles together.
Unit = tuple[Job, ...]


def plan(
    kernels: Sequence[str], targets: Sequence[str], m_values: Sequence[int], forms: Sequence[FmaForm]
) -> list[Unit]:
    """What is to be compiled, as units. The cvt form is left out where the target has no ``cvt.f32.bf16``, the stream
    kernel where it has no clusters.

    Raises:
        TypeError, ValueError: an unknown kernel or target, or an M that no kernel takes; nothing was compiled.
    """
    if unknown := [name for name in kernels if name not in KERNELS]:
        raise ValueError(f"kernels: expected some of {', '.join(KERNELS)}, got {', '.join(unknown)}")
    archs = [Arch.parse(target) for target in targets]
    units: list[Unit] = []
    for kernel, form, arch in product([name for name in kernels if name in GEMMS], forms, archs):
        if form is not FmaForm.CVT or supports(arch, form):
            units.append(tuple(Job(GEMMS[kernel](arch, m, SHAPES, form=form), arch) for m in m_values))
    for arch in archs if STREAM in kernels else []:
        if arch.has_clusters:
            units.append(tuple(Job(stream_config(arch, KdaShapes(tp), SMS, pdl=True), arch) for tp in DEGREES))
    return units


def compile_matrix(
    *,
    kernels: Sequence[str] = KERNELS,
    targets: Sequence[str] = TARGETS,
    m_values: Sequence[int] = M_VALUES,
    forms: Sequence[FmaForm] = FORMS,
    workers: int | None = None,
    cache: ArtifactCache | None = None,
    progress: bool = True,
) -> list[Row]:
    """Compile everything asked for and give one row a kernel, in the order of the arguments, the stream kernel last.

    Args:
        m_values, forms: of the skinny kernels, which have TP8 shapes.
        workers: processes; the CPUs that this process may use by default.
        progress: a bar on a terminal, plain lines elsewhere, on standard error.

    Raises:
        TypeError, ValueError: bad arguments; nothing was compiled.
        sass.DisassemblerMissing: the package nvidia-cuda-nvdisasm is not installed.
    """
    units = plan(kernels, targets, m_values, forms)
    sass.find_nvdisasm()
    workers = workers or len(os.sched_getaffinity(0))
    rows: dict[Unit, list[Row]] = {}
    waiting = list(reversed(units))
    with _reporter(sum(map(len, units)), progress) as report:
        while waiting:
            suspects: list[Unit] = []
            with worker_pool(workers) as pool:
                for unit, result in _drain(pool, waiting, workers, cache):
                    if result is None:
                        suspects.append(unit)
                    else:
                        rows[unit] = result
                        report(len(unit))
            for unit in suspects:
                rows[unit] = _run(unit, compile_isolated, cache)
                report(len(unit))
    return [row for unit in units for row in rows[unit]]


def run_matrix(root: Path, **selection: Any) -> records.Result:
    """Run :func:`compile_matrix`, whose arguments `selection` gives; write ``reports/cpu/results/compile_matrix.json``.

    Raises:
        As :func:`compile_matrix`, and records.ResultWriteError: the file system refused; nothing is half-written.
    """

    def make() -> Iterator[Outcome]:
        rows = compile_matrix(**selection)
        yield rows, matrix_claims(rows)

    return write_script_result(NAME, make(), profile=CPU, root=root, parameters={"tp": SHAPES.tp})


def matrix_claims(rows: Sequence[Row]) -> list[records.Claim]:
    """What the rows show; a claim about rows that are not there is left out."""
    ok = [row for row in rows if row["outcome"] == OK]
    gemms = [row for row in rows if row["kernel"] != STREAM]
    native = [row for row in gemms if row["fma"] == FmaForm.NATIVE]
    has = [row for row in native if supports(Arch.parse(row["target"]), FmaForm.NATIVE)]
    lacks = [row for row in native if row not in has]
    portable = [row for row in gemms if row["fma"] == portable_form(Arch.parse(row["target"]))]
    stream = [row for row in rows if row["kernel"] == STREAM]
    named = {"outcome": OUTCOMES[UnsupportedInstruction], "instruction": "fma.rn.f32.bf16", "lowest_target": "sm_100"}
    unexplained = [row for row in rows if row["outcome"] in ("crashed", "failed")]
    costs = {
        (row["kernel"], row["target"], row["M"], row["fma"]): row["cvt_per_fma"]
        for row in gemms
        if row["outcome"] == OK
    }
    forms = [
        (costs[key], costs[(*key[:3], FmaForm.CVT)])
        for key in costs
        if key[3] == FmaForm.SHIFT and (*key[:3], FmaForm.CVT) in costs
    ]
    facts: list[tuple[str, str, str, Sequence[Any], float]] = [
        ("native-accepted", f"native compiles on {_targets(has)}", "kernels that do not", has, _not_ok(has)),
        ("native-rejected", f"native is rejected on {_targets(lacks)}, naming the instruction and where it begins",
         "kernels that are not", lacks, sum(any(row.get(k) != v for k, v in named.items()) for row in lacks)),
        ("portable-accepted", f"portable compiles on {_targets(portable)}", "kernels that do not", portable,
         _not_ok(portable)),
        ("stream-accepted", f"the stream kernel compiles on {_targets(stream)}", "kernels that do not", stream,
         _not_ok(stream)),
        ("no-crash", "no compile crashed or failed for another reason", "kernels", rows, len(unexplained)),
        ("no-spills", "no kernel spills registers", "bytes at most", ok, max((r["spills"] for r in ok), default=0)),
        ("no-stack", "no kernel has a stack frame", "bytes at most", ok,
         max((row["stack_bytes"] for row in ok), default=0)),
        ("native-no-conversion", "native converts no operand", "conversions per FMA at most", has,
         max((row["cvt_per_fma"] for row in has if row["outcome"] == OK), default=0.0)),
        ("shift-not-dearer", "bit moves never take more SASS conversions per FMA than cvt.f32.bf16",
         "more at most", forms, max((max(0.0, shift - cvt) for shift, cvt in forms), default=0.0)),
    ]  # fmt: skip
    return [
        records.Claim(id=name, statement=statement, value=value, unit=unit, bound="== 0", holds=value == 0)
        for name, statement, unit, about, value in facts
        if about
    ]


def _targets(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row["target"] for row in rows))


def _not_ok(rows: Sequence[Row]) -> int:
    return sum(row["outcome"] != OK for row in rows)


def _drain(
    pool: ProcessPoolExecutor, waiting: list[Unit], workers: int, cache: ArtifactCache | None
) -> Iterator[tuple[Unit, list[Row] | None]]:
    """Take units from the end of `waiting` and give each with its rows, until none is left or a process has died.

    Units that were under way when a process died come with None. There are at most `workers` of them, since no more
    are handed out at a time.
    """
    running: dict[Future[list[Row]], Unit] = {}
    while waiting or running:
        try:
            while waiting and len(running) < workers:
                running[pool.submit(_run, waiting[-1], compile_kernel, cache)] = waiting[-1]
                waiting.pop()
        except BrokenProcessPool:
            if not running:
                return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        died = {future for future in done if isinstance(future.exception(), BrokenProcessPool)}
        for future in done - died:
            yield running.pop(future), future.result()
        if died:
            yield from ((unit, None) for unit in running.values())
            return


def _run(unit: Unit, compiler: Compiler, cache: ArtifactCache | None) -> list[Row]:
    """Compile and disassemble the kernels of a unit, one row each."""
    compiled = [_attempt(job, compiler, cache) for job in unit]
    artifacts = [result for result, _ in compiled if isinstance(result, Artifact)]
    listings = iter(sass.disassemble_all([artifact.cubin for artifact in artifacts], unit[0].arch))
    return [_row(job, result, seconds, listings) for job, (result, seconds) in zip(unit, compiled, strict=True)]


def _attempt(job: Job, compiler: Compiler, cache: ArtifactCache | None) -> tuple[Artifact | CompileError, float]:
    """The kernel or why there is none, and the seconds that it took to know."""
    started = time.perf_counter()
    try:
        artifact = compiler(job.config, job.arch, cache=cache)
    except CompileError as error:
        return error, time.perf_counter() - started
    return artifact, artifact.seconds


def _row(job: Job, result: Artifact | CompileError, seconds: float, listings: Iterator[list[sass.Instruction]]) -> Row:
    config = job.config
    row: Row = {"kernel": kernel_name(config), "target": job.arch.target, "outcome": OK, "seconds": round(seconds, 3)}
    row |= {"tp": config.tp} if isinstance(config, StreamConfig) else {"fma": str(config.fma), "M": config.m}
    if isinstance(result, CompileError):
        return row | _refusal(result)
    instructions, resources = next(listings), sass.read_resources(result.cubin)
    if not isinstance(config, StreamConfig):
        mix = sass.instruction_mix(instructions)
        row |= {"sass": mix.region, "cvt_per_fma": mix.conversions_per_fma}
    return row | {
        "registers": resources.registers,
        "spills": sass.spills(instructions).store_bytes,
        "stack_bytes": resources.stack_bytes,
        "smem_bytes": resources.smem_bytes + result.launch.smem,
        "code_bytes": resources.code_bytes,
        "cubin_sha256": result.cubin_sha256,
    }


def _refusal(error: CompileError) -> Row:
    outcome = next(name for kind, name in OUTCOMES.items() if isinstance(error, kind))
    if isinstance(error, UnsupportedInstruction):
        return {
            "outcome": outcome,
            "instruction": error.instruction,
            "lowest_target": error.lowest_target,
            "uses": error.uses,
            "source": error.source,
            "found_by": error.found_by,
        }
    first_line = (str(error).splitlines() or [""])[0].replace(f"{provenance.repo_root()}/", "")
    return {"outcome": outcome, "error": type(error).__name__, "detail": first_line}


@contextmanager
def _reporter(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Call what this gives with the number of kernels just done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if shown and console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            yield partial(bar.advance, bar.add_task("compile matrix", total=total))
        return
    started, done = time.monotonic(), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        tenth = 10 * done // total > 10 * (done - count) // total
        if shown and tenth:
            print(f"compile matrix: {done}/{total} kernels, {time.monotonic() - started:.0f} s", file=sys.stderr)

    yield report
