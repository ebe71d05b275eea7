"""The proof by execution: PTX of several targets, run on the CPU, gives the bits of the host model.

One row a kernel, M, kind of values and target. Where two targets have the same code but for the ``.target`` line, it
runs once and its row says so. Further rows: the operand pairs at the edges (:mod:`kda_lib.lab.fma_edges`) and the
planted faults (:mod:`kda_lib.lab.ptx.mutations`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import Artifact, compile_kernel
from kda_lib.lab import fma_edges, golden, records
from kda_lib.lab.golden import KERNELS, M_VALUES, SEED, SHAPES, VALUES, Case
from kda_lib.lab.profile import CPU
from kda_lib.lab.ptx import RunReport
from kda_lib.lab.ptx.emulate import launch
from kda_lib.lab.ptx.mutations import MUTATIONS, Mutation
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim
from kda_lib.lab.workers import worker_pool
from kda_lib.reference import Bits

NAME = "emulation"
#: A portable target and two native ones, of which the first two are on this project's list of GPUs to be proved.
TARGETS = ("sm_90a", "sm_100a", "sm_120a")
#: Outcomes of a row.
BIT_EXACT, DIFFERS, VIOLATION, NO_MODEL = "bit-exact", "differs", "violation", "no model"
PROCESSES = 2


def code_of(artifact: Artifact) -> str:
    """The PTX without what does not run: comments and the name of the target."""
    return re.sub(r"(?m)^\.target .*$|//.*$", "", artifact.ptx)


def emulate_unit(
    kernel: str,
    m: int,
    *,
    targets: Sequence[str] = TARGETS,
    values: Sequence[str] = tuple(VALUES),
    cache: ArtifactCache | None = None,
) -> list[Row]:
    """Rows of one kernel and M: each target, each kind of values."""
    rows: list[Row] = []
    ran: dict[tuple[str, str], tuple[str, list[Bits], RunReport]] = {}
    for target, kind in product(targets, values):
        case, arch = Case(kernel, m, kind), Arch.parse(target)
        config = case.config(arch)
        artifact = compile_kernel(config, arch, cache=cache)
        inputs = case.inputs(config)
        key = (kind, code_of(artifact))
        if key not in ran:
            outputs = list(case.outputs(config))
            ran[key] = (target, outputs, launch(artifact, inputs, outputs))
        first, outputs, report = ran[key]
        rows.append(_row(case, artifact, inputs, outputs, report, first))
    return rows


def _row(
    case: Case, artifact: Artifact, inputs: Sequence[Bits], outputs: Sequence[Bits], report: RunReport, first: str
) -> Row:
    row = golden.row_of(case, artifact.config, artifact.target, inputs, outputs)
    differing = row["differing"]
    outcome = NO_MODEL if differing is None else DIFFERS if differing else BIT_EXACT
    same = "" if first == artifact.target else f"same code as {first}, which ran"
    return row | {
        "outcome": outcome if report.ok else VIOLATION,
        "detail": same if report.ok else str(report.violations[0]),
        "ptx_sha256": hashlib.sha256(artifact.ptx.encode()).hexdigest(),
        "instructions": report.executed.total(),
        "executed": {opcode: count for opcode, count in report.executed.items() if opcode.startswith(("fma", "mma"))},
        "checks": report.checks.total(),
        "violations": len(report.violations),
    }


def plant(mutation: Mutation, target: str, *, cache: ArtifactCache | None = None) -> Row:
    """Run one planted fault on the first CTAs, and say what found it."""
    case, arch = Case(mutation.kernel, mutation.m, "ordinary"), Arch.parse(target)
    config = case.config(arch)
    artifact = compile_kernel(config, arch, cache=cache)
    inputs, outputs = case.inputs(config), list(case.outputs(config))
    report = launch(artifact, inputs, outputs, ptx=mutation.apply(artifact.ptx), ctas=[0])
    (expected,) = case.expected(config, inputs) or (outputs[0],)
    written = slice(getattr(config, "rows", None))
    wrong = golden.differing([outputs[0][:, written]], [expected[:, written]])
    found = "reported" if report.violations else "bits differ" if wrong else "missed"
    return {
        "kernel": mutation.kernel,
        "target": target,
        "fma": str(config.fma),
        "M": mutation.m,
        "variant": f"fault: {mutation.name}",
        "outcome": found,
        "detail": "; ".join(map(str, report.violations)),
        "violations": len(report.violations),
        "differing": wrong,
    }


def emulate_all(
    *,
    kernels: Sequence[str] = tuple(KERNELS),
    m_values: Sequence[int] = M_VALUES,
    targets: Sequence[str] = TARGETS,
    values: Sequence[str] = tuple(VALUES),
    processes: int = PROCESSES,
    cache: ArtifactCache | None = None,
) -> list[Row]:
    """Every launch asked for, in the order of the arguments, on several processes.

    Raises:
        ValueError: an unknown kernel.
    """
    units = list(dict.fromkeys((case.kernel, case.m) for case in golden.cases(kernels, m_values)))
    work = partial(_emulate_pair, targets=targets, values=values, cache=cache)
    with worker_pool(processes) as pool:
        return [row for rows in pool.map(work, units) for row in rows]


def _emulate_pair(
    unit: tuple[str, int], *, targets: Sequence[str], values: Sequence[str], cache: ArtifactCache | None
) -> list[Row]:
    return emulate_unit(*unit, targets=targets, values=values, cache=cache)


def claims_of(rows: Sequence[Row], golden_rows: dict[str, list[Row]] | None = None) -> list[records.Claim]:
    """What the launches show. golden_rows: profile -> what a device of it gave."""
    hashes: dict[golden.Key, set[str]] = {}
    for row in rows:
        hashes.setdefault(golden.key_of(row), set()).add(row["outputs_sha256"])
    modelled = [row for row in rows if row["differing"] is not None]
    differing = sum(row["differing"] > 0 for row in modelled)
    split = sum(len(found) > 1 for found in hashes.values())
    forms = {"native": "fma.rn.f32.bf16"}
    other = sum(set(row["executed"]) != {forms.get(row["fma"], "fma.rn.f32")} for row in modelled)
    targets = ", ".join(dict.fromkeys(row["target"] for row in rows))
    claims = [
        zero_claim("model", f"PTX of {targets} gives the bits of the host model", differing, f"of {len(modelled)}"),
        zero_claim("targets", f"{targets} give the same bits", split, f"of {len(hashes)} inputs"),
        zero_claim("checks", "no access is out of bounds, misaligned, uninitialised, unordered or too early",
                   sum(row["violations"] for row in rows), f"in {sum(row['checks'] for row in rows)} checks"),
        zero_claim("forms", "portable PTX ran fma.rn.f32 alone, native PTX fma.rn.f32.bf16 alone", other,
                   f"of {len(modelled)}"),
    ]  # fmt: skip
    for profile, recorded in (golden_rows or {}).items():
        targets_there = {row["target"] for row in recorded}
        mine = [row for row in rows if row["target"] in targets_there]
        if mine:
            statement = f"emulated {', '.join(sorted(targets_there))} gives the bits recorded on {profile}"
            claims.append(zero_claim(f"recorded-{profile}", statement, len(golden.disagreements(mine, recorded)),
                                     f"of {len(mine)}"))  # fmt: skip
    return claims


def fault_claim(rows: Sequence[Row]) -> records.Claim:
    missed = sum(row["outcome"] == "missed" for row in rows)
    return zero_claim("faults", "every planted fault is reported or changes bits", missed, f"of {len(rows)} missed")


def run(root: Path, *, cache: ArtifactCache | None = None) -> records.Result:
    """Everything, written to ``reports/cpu/results/emulation.json``.

    Raises:
        records.ResultReadError: a recorded golden file is not valid.
        records.ResultWriteError: the file system refused.
    """

    def make() -> Iterator[Outcome]:
        launches = emulate_all(cache=cache)
        planted = [plant(fault, target, cache=cache) for fault in MUTATIONS for target in fault.targets]
        edge_rows, edge_claims = fma_edges.prove()
        claims = [*claims_of(launches, golden.recorded(root)), fault_claim(planted), *edge_claims]
        yield [*launches, *planted, *edge_rows], claims

    return write_script_result(
        NAME, make(), profile=CPU, root=root, parameters={"tp": SHAPES.tp}, seeds={"inputs": SEED}
    )
