"""The prover: the PyPI package ``sentryward``, an optional extra (``pip install "kda_lib[verify]"``).

It works on the PTX and on the launch; data are symbols. The PTX that is proved is the compiler's own but for ``dp2a``,
``dp4a`` and ``prmt``, which the prover does not know (:func:`written_out`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_lib.compile import Artifact
from kda_lib.errors import KdaError
from kda_lib.kernels.config import BF16_BYTES

#: Targets that kernels are proved for.
TARGETS = ("sm_90a", "sm_100a")
#: What a row calls a check that passed, and any other.
PROVED, NOT_PROVED = "proved", "not proved"
#: Seconds that one proof may take.
TIMEOUT_S = 300.0

#: What shows that a kernel is safe, and all three checks: row key ``variant`` -> the prover's name for it.
SAFETY = {"synchronisation": "synchronization", "race freedom": "memory"}
CHECKS = SAFETY | {"equality": "equivalence"}


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

    @property
    def safe(self) -> bool:
        """Whether synchronisation and race freedom are proved."""
        return all(map(self.proved, SAFETY))

    def row_of(self, check: str) -> dict[str, str]:
        """variant, outcome and detail of a check."""
        proved = self.proved(check)
        return {"variant": check, "outcome": PROVED if proved else NOT_PROVED, "detail": "" if proved else self.said}

    @property
    def said(self) -> str:
        """Verdict and diagnostics in one line."""
        return f"{self.result}: {self.why}" if self.why else self.result


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
