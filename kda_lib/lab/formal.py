"""Formal checks: synchronisation and race freedom of a kernel in every schedule, and equality with a torch reference.

The prover is the PyPI package ``sentryward``, an optional extra (``pip install "kda_lib[verify]"``). It works on the
PTX and on the launch; data are symbols. Only what it reports as passed is called :data:`PROVED`. Everything else is
:data:`NOT_PROVED` with its own word for why, which may be a fault found, something it does not support, or a limit.

What it takes for granted is in the result file, as rows with outcome :data:`ASSUMED`: its own list, and
:data:`LIMITS`, from its documentation. Above all it does not model fences and PTX's memory order in full, or memory
outside the launch: that x is read only after ``griddepcontrol.wait`` is checked by running the PTX
(:mod:`kda_lib.lab.emulation`), as are bounds and alignment. The two do not rest on each other.

The PTX that is proved is the compiler's own but for ``dp2a``, ``dp4a`` and ``prmt``, which the prover does not know
(:func:`written_out`). The grid may be cut to its first CTAs (row key ``ctas``), as the time
grows with them; a CTA's code depends on the grid by its own number alone.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import Artifact, compile_kernel
from kda_lib.errors import KdaError
from kda_lib.kernels.config import BF16_BYTES
from kda_lib.lab import golden, records
from kda_lib.lab.golden import KERNELS, M_VALUES, SHAPES, Case
from kda_lib.lab.matrix import _pool
from kda_lib.lab.profile import CPU
from kda_lib.lab.ptx.mutations import MUTATIONS, Mutation
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim

NAME = "formal"
TARGETS = ("sm_90a", "sm_100a")
#: Clusters (CTAs, where a kernel has none) at the start of the grid that are looked at for every M; for M = 1 the whole
#: grid is. A cluster of the largest kernel takes a quarter of a minute.
CLUSTERS = 1
#: Kernels and M for which equality with the reference is tried: one where it is proved, and one of each kind where the
#: prover gives up (more rows a thread; partial sums that go to another CTA).
EQUALITY = (("skinny_k", 1), ("skinny_k", 2), ("skinny_k", 8), ("skinny_n", 1))
PROVED, NOT_PROVED, ASSUMED = "proved", "not proved", "assumed"
#: Seconds that one proof may take.
TIMEOUT_S = 300.0
PROCESSES = 2

#: The prover's three checks: row key ``variant`` -> its name for it.
CHECKS = {"synchronisation": "synchronization", "race freedom": "memory", "equality": "equivalence"}

#: README of sentryward 0.1.1, "Limitations".
LIMITS = {
    "launch": "the size of the problem and the launch are fixed; the kernel is alone on the device",
    "memory model": "fences and the full PTX memory model are not modelled",
    "pointers": "arguments point to distinct objects without end: no bounds are checked",
    "real numbers": "equality is that of real arithmetic: rounding and the order of additions do not count",
    "rewriting": "dp2a, dp4a and prmt, which form addresses, are written out in simpler instructions first",
    "documentation": "the hardware is as its author reads the PTX documentation",
}


class VerifierMissing(KdaError):
    """The package sentryward is not installed."""


def find_verifier() -> str:
    """The version of sentryward.

    Raises:
        VerifierMissing: it is not installed.
    """
    from importlib.metadata import version

    if importlib.util.find_spec("sentryward") is None:
        raise VerifierMissing('sentryward: expected version 0.1.1, got none; pip install "kda_lib[verify]"')
    return version("sentryward")


@dataclass(frozen=True)
class Proof:
    """What the prover said. checks: its check -> "passed" or another word. result: its verdict. why: its diagnostics.

    assumptions: what it took for granted and may have used, key -> words. seconds: what it took.
    """

    checks: dict[str, str]
    result: str
    why: str
    assumptions: dict[str, str]
    seconds: float

    def proved(self, check: str) -> bool:
        """Whether a check of :data:`CHECKS` passed."""
        return self.checks.get(CHECKS[check]) == "passed"


def prove(
    artifact: Artifact[Any],
    *,
    ctas: int | None = None,
    ptx: str | None = None,
    equality: bool = False,
    scalars: Mapping[int, int] | None = None,
) -> Proof:
    """Check a kernel; with ``equality``, also that a GEMM's outputs are those of torch, in real arithmetic.

    Args:
        ctas: how many CTAs of the grid, from the first; all by default.
        ptx: what to check instead of the artifact's own text, with the same launch.
        scalars: values of the 64-bit parameters that are numbers, by position.

    Raises:
        VerifierMissing: sentryward is not installed.
        ValueError: ``ctas`` is no whole number of clusters.
    """
    find_verifier()
    from sentryward import verify

    launch = artifact.launch
    ctas = ctas or launch.grid
    if not 0 < ctas <= launch.grid or ctas % launch.cluster:
        raise ValueError(f"ctas: expected a multiple of {launch.cluster} up to {launch.grid}, got {ctas}")
    dimensions = {"grid_dim": ctas, "block_dim": launch.block, "cluster_dim": launch.cluster}
    given: dict[str, Any] = {
        "schema": "spverify.kernel-input/v1",
        "launch": {name: [value, 1, 1] for name, value in dimensions.items()}
        | ({"dynamic_shared_bytes": launch.smem} if launch.smem else {}),
    }
    if scalars:
        given["arguments"] = [{"parameter": i, "type": "u64", "value": value} for i, value in scalars.items()]
    with tempfile.TemporaryDirectory(prefix="kda_lib-") as folder:
        # torch.export imports the reference by the name that sentryward gives it, so the file must bear that name.
        files = {"kernel.ptx": written_out(ptx or artifact.ptx), "input.json": json.dumps(given)}
        if equality:
            files |= _reference(artifact, ctas)
        for name, text in files.items():
            Path(folder, name).write_text(text)
        paths = {"reference": Path(folder, _REFERENCE), "reference_binding": Path(folder, _BINDING)}
        report = verify(
            Path(folder, "kernel.ptx"), input=Path(folder, "input.json"), timeout_seconds=TIMEOUT_S,
            **(paths if equality else {}),
        )  # fmt: skip
    why = "; ".join([*map(_words, report["diagnostics"]), *map(_race, report.get("races", ()))])
    enabled = {a["key"]: a["text"] for a in report.get("assumptions", ()) if a["enabled"]}
    return Proof(report["checks"], report["result"], why.replace(folder, ""), enabled, report.get("elapsed_seconds", 0))


_DOT = re.compile(r"dp([24])a\.(?:lo\.)?u32\.u32\s+(%\w+), (%?\w+), (%?\w+), (%?\w+);")
_PERMUTE = re.compile(r"prmt\.b32\s+(%\w+), (%?\w+), (%?\w+), 0x([0-7]{4})U?;")


def written_out(ptx: str) -> str:
    """The PTX with ``dp2a.lo.u32.u32``, ``dp4a.u32.u32`` and ``prmt.b32`` in simpler words, each on its line.

    PTX ISA, "dp4a" and "dp2a": c plus the products of the bytes of a and b (dp4a), or of the halves of a and the two
    lowest bytes of b (dp2a.lo). "prmt": each nibble of the selector names a byte of {b, a}. The result comes last, so
    that it may be a source too. The prover mistakes a move to a register without % for something else.
    """

    def scope(parts: Iterable[str], to: str) -> str:
        return f"{{ .reg .b32 %sum, %left, %right; mov.b32 %sum, 0; {' '.join(parts)} mov.b32 {to}, %sum; }}"

    def part(to: str, source: str, first: int, width: int) -> str:
        return f"shr.u32 {to}, {source}, {first}; and.b32 {to}, {to}, {(1 << width) - 1};"

    def dot(match: re.Match[str]) -> str:
        terms, to, a, b, c = int(match[1]), *match.groups()[1:]
        width = 32 // terms
        products = [
            f"{part('%left', a, width * i, width)} {part('%right', b, 8 * i, 8)} mad.lo.s32 %sum, %left, %right, %sum;"
            for i in range(terms)
        ]
        return scope([*products, f"add.s32 %sum, %sum, {c};"], to)

    def permute(match: re.Match[str]) -> str:
        to, a, b, selector = match.groups()
        chosen = enumerate(int(nibble) for nibble in reversed(selector))
        moved = [
            f"{part('%left', a if n < 4 else b, n % 4 * 8, 8)} shl.b32 %left, %left, {8 * i}; or.b32 %sum, %sum, %left;"
            for i, n in chosen
        ]
        return scope(moved, to)

    return _PERMUTE.sub(permute, _DOT.sub(dot, ptx))


_REFERENCE, _BINDING = "example_reference.py", "reference_binding.json"


def _words(diagnostic: dict[str, Any]) -> str:
    return f"{diagnostic['code']}: {diagnostic['message']}" if diagnostic.get("message") else str(diagnostic["code"])


def _race(race: dict[str, Any]) -> str:
    """The two accesses of a race, as sentryward reports them."""
    ends = [race[end] for end in ("first", "second")]
    return " against ".join(f"{end['mode']} at PTX line {end['location']['line']}" for end in ends)


def _reference(artifact: Artifact[Any], ctas: int) -> dict[str, str]:
    """Two files: the GEMM of the first CTAs in torch, and which argument of the kernel each of its tensors is.

    The prover names pointer argument i as below. ``left`` is the reference, ``right`` the kernel. x keeps its row
    stride in both, as the prover wants dense inputs. BF16 outputs are compared as numbers ("ideal_real").
    """
    c = artifact.config
    rows = ctas // artifact.launch.cluster * c.rows
    x, w, out = (f"6:global12:input.arg{i}.0" for i in range(3))
    stride = getattr(c, "x_stride", c.k)

    def dense(height: int, width: int) -> dict[str, Any]:
        strides = [width * BF16_BYTES, BF16_BYTES]
        offsets = {"source_offset": 0, "target_offset": 0}
        return {"shape": [height, width], "element_bytes": BF16_BYTES, **offsets,
                "source_strides_bytes": strides, "target_strides_bytes": strides}  # fmt: skip

    layouts = {"layouts": {x: dense(c.m, stride), w: dense(rows, c.k)}}
    shapes = {"x": (x, [c.m, stride]), "w": (w, [rows, c.k])}
    binding = {
        "reference": {
            "arguments": [{"name": name, "allocation": place, "shape": shape, "dtype": "bfloat16"}
                          for name, (place, shape) in shapes.items()],
            "outputs": [{"allocation": out, "shape": [c.m, rows]}],
        },
        "outputs": {
            "kind": "dense_tensor", "left_allocation": out, "right_allocation": out, "shape": [c.m, rows],
            "element_bytes": BF16_BYTES, "left_offset": 0, "right_offset": 0,
            "left_strides_bytes": [rows * BF16_BYTES, BF16_BYTES],
            "right_strides_bytes": [c.n * BF16_BYTES, BF16_BYTES],
        },
        "left_inputs": layouts,
        "right_inputs": layouts,
        "output_value_semantics": "ideal_real",
    }  # fmt: skip
    source = (
        "import torch\n\n\ndef reference(x, w):\n"
        f"    return (x[:, :{c.k}].float() @ w.float().t()).to(torch.bfloat16)\n"
    )
    return {_REFERENCE: source, _BINDING: json.dumps(binding)}


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
    said = f"{proof.result}: {proof.why}" if proof.why else proof.result
    if task.fault:
        whole = proof.proved("synchronisation") and proof.proved("race freedom")
        found = {"variant": f"fault: {task.fault.name}", "outcome": PROVED if whole else NOT_PROVED}
        return [base | found | {"detail": said}]
    wanted = ["equality"] if task.equality else ["synchronisation", "race freedom"]
    return [
        base | {"variant": check, "outcome": PROVED if proof.proved(check) else NOT_PROVED,
                "detail": "" if proof.proved(check) else said}
        for check in wanted
    ]  # fmt: skip


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

    safe, equal = about("synchronisation", "race freedom"), about("equality")
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

    def make() -> Outcome:
        # Imported here, as it builds on this module.
        from kda_lib.lab import formal_stream

        with _pool(PROCESSES) as pool:
            found = pool.map(partial(rows_of, cache=cache), tasks())
            stream = pool.map(partial(formal_stream.rows_of, cache=cache), formal_stream.tasks())
            rows, stream_rows = list(chain.from_iterable(found)), list(chain.from_iterable(stream))
        first = Task(next(iter(KERNELS)), TARGETS[0], 1)
        arch = Arch.parse(first.target)
        artifact = compile_kernel(golden.KERNELS[first.kernel].config(arch, first.m, SHAPES), arch, cache=cache)
        proof = prove(artifact, ctas=artifact.launch.cluster)
        claims = [*claims_of(rows), *formal_stream.claims_of(stream_rows)]
        return [*rows, *stream_rows, *assumption_rows(proof)], claims

    parameters = {"tp": SHAPES.tp, "sentryward": version}
    return write_script_result(NAME, make, profile=CPU, root=root, parameters=parameters)
