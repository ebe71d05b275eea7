"""Formal checks: synchronisation and race freedom of a kernel in every schedule, and equality with a torch reference.

Only what the prover (:mod:`kda_lib.lab.prover`) reports as passed is called :data:`PROVED`. Everything else is
:data:`NOT_PROVED` with its own word for why, which may be a fault found, something it does not support, or a limit.
The stream kernel's checks are those of :mod:`kda_lib.lab.formal_stream`.

What it takes for granted is in the result file, as rows with outcome :data:`ASSUMED`: its own list, and
:data:`LIMITS`, from its documentation. Above all it does not model fences and PTX's memory order in full, or memory
outside the launch: that x is read only after ``griddepcontrol.wait`` is checked by running the PTX
(:mod:`kda_lib.lab.emulation`), as are bounds and alignment. The two do not rest on each other.

The grid may be cut to its first CTAs (row key ``ctas``), as the time grows with them; a CTA's code depends on the grid
by its own number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import compile_kernel
from kda_lib.lab import formal_stream, golden, records
from kda_lib.lab.golden import KERNELS, M_VALUES, SHAPES, Case
from kda_lib.lab.profile import CPU
from kda_lib.lab.prover import CHECKS, NOT_PROVED, PROVED, SAFETY, TARGETS, Proof, find_verifier, prove
from kda_lib.lab.ptx.mutations import MUTATIONS, Mutation
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim
from kda_lib.lab.workers import worker_pool

NAME = "formal"
#: Clusters (CTAs, where a kernel has none) at the start of the grid that are looked at for every M; for M = 1 the whole
#: grid is. A cluster of the largest kernel takes a quarter of a minute.
CLUSTERS = 1
#: Kernels and M for which equality with the reference is tried: one where it is proved, and one of each kind where the
#: prover gives up (more rows a thread; partial sums that go to another CTA).
EQUALITY = (("skinny_k", 1), ("skinny_k", 2), ("skinny_k", 8), ("skinny_n", 1))
#: Outcome of a row that proves nothing.
ASSUMED = "assumed"
PROCESSES = 2

#: README of sentryward 0.1.1, "Limitations".
LIMITS = {
    "launch": "the size of the problem and the launch are fixed; the kernel is alone on the device",
    "memory model": "fences and the full PTX memory model are not modelled",
    "pointers": "arguments point to distinct objects without end: no bounds are checked",
    "real numbers": "equality is that of real arithmetic: rounding and the order of additions do not count",
    "rewriting": "dp2a, dp4a and prmt, which form addresses, are written out in simpler instructions first",
    "documentation": "the hardware is as its author reads the PTX documentation",
}


@dataclass(frozen=True)
class Task:
    """One run of the prover: a kernel and M for a target, whole or its first clusters, perhaps with a fault."""

    kernel: str
    target: str
    m: int
    clusters: int | None = CLUSTERS
    equality: bool = False
    fault: Mutation | None = None


def tasks() -> list[Task]:
    """Every M on :data:`CLUSTERS`, one M on the whole grid, equality, and the faults that a prover can see."""
    every = [Task(kernel, target, m) for kernel, target, m in product(KERNELS, TARGETS, M_VALUES)]
    whole = [Task(kernel, target, 1, clusters=None) for kernel, target in product(KERNELS, TARGETS)]
    equal = [Task(kernel, target, m, 1, equality=True) for (kernel, m), target in product(EQUALITY, TARGETS)]
    faults = [
        Task(fault.kernel, target, fault.m, 1, fault=fault)
        for fault in MUTATIONS
        if fault.verifiable
        for target in TARGETS
        if target in fault.targets
    ]
    return [*every, *whole, *equal, *faults]


def rows_of(task: Task, *, cache: ArtifactCache | None = None) -> list[Row]:
    """Run one task; a row for each check, or one for a fault.

    Raises:
        VerifierMissing: sentryward is not installed.
    """
    arch = Arch.parse(task.target)
    config = Case(task.kernel, task.m, "ordinary").config(arch)
    artifact = compile_kernel(config, arch, cache=cache)
    launch = artifact.launch
    ctas = launch.grid if task.clusters is None else min(task.clusters * launch.cluster, launch.grid)
    text = task.fault.apply(artifact.ptx) if task.fault else None
    proof = prove(artifact, ctas=ctas, ptx=text, equality=task.equality)
    base: Row = {"kernel": task.kernel, "fma": str(config.fma), "target": task.target, "M": task.m, "tp": SHAPES.tp,
                 "ctas": ctas, "grid": launch.grid}  # fmt: skip
    if task.fault:
        found = {"variant": f"fault: {task.fault.name}", "outcome": PROVED if proof.safe else NOT_PROVED}
        return [base | found | {"detail": proof.said}]
    checks = CHECKS.keys() - SAFETY if task.equality else SAFETY
    return [base | proof.row_of(check) for check in checks]


def assumption_rows(proof: Proof) -> list[Row]:
    """One row for each thing that a proof takes for granted."""
    both = {**LIMITS, **proof.assumptions}
    return [{"variant": f"assumption: {key}", "outcome": ASSUMED, "detail": text} for key, text in both.items()]


def claims_of(rows: Sequence[Row]) -> list[records.Claim]:
    """What was proved. Equality is no required claim: the prover is incomplete by its own account."""

    def about(*variants: str) -> list[Row]:
        return [row for row in rows if row["variant"] in variants]

    def left(chosen: Sequence[Row]) -> int:
        return sum(row["outcome"] != PROVED for row in chosen)

    safe, equal = about(*SAFETY), about(*CHECKS.keys() - SAFETY)
    faults = [row for row in rows if row["variant"].startswith("fault: ")]
    passed = sum(row["outcome"] == PROVED for row in faults)
    return [
        zero_claim("safe", "both skinny kernels are proved synchronised and free of races", left(safe),
                   f"of {len(safe)} not"),
        zero_claim("faults", "no kernel with a fault in its synchronisation is proved safe", passed,
                   f"of {len(faults)} proved"),
        zero_claim("equal", "outputs are proved equal to the torch reference in real arithmetic", left(equal),
                   f"of {len(equal)} not proved", required=False),
    ]  # fmt: skip


def run(root: Path, *, cache: ArtifactCache | None = None) -> records.Result:
    """Every task, written to ``reports/cpu/results/formal.json``.

    Raises:
        VerifierMissing: sentryward is not installed.
        records.ResultWriteError: the file system refused.
    """
    version = find_verifier()

    def make() -> Iterator[Outcome]:
        with worker_pool(PROCESSES) as pool:
            found = pool.map(partial(rows_of, cache=cache), tasks())
            stream = pool.map(partial(formal_stream.rows_of, cache=cache), formal_stream.tasks())
            rows, stream_rows = list(chain.from_iterable(found)), list(chain.from_iterable(stream))
        first = Task(next(iter(KERNELS)), TARGETS[0], 1)
        arch = Arch.parse(first.target)
        artifact = compile_kernel(golden.KERNELS[first.kernel].config(arch, first.m, SHAPES), arch, cache=cache)
        proof = prove(artifact, ctas=artifact.launch.cluster)
        claims = [*claims_of(rows), *formal_stream.claims_of(stream_rows)]
        yield [*rows, *stream_rows, *assumption_rows(proof)], claims

    parameters = {"tp": SHAPES.tp, "sentryward": version}
    return write_script_result(NAME, make(), profile=CPU, root=root, parameters=parameters)
