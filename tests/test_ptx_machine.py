"""Our kernels on the PTX machine: bit for bit as the host model says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from compiled import compiled

from kda_lib.arch import TARGETS, Arch
from kda_lib.compile import Artifact
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm
from kda_lib.lab.ptx import Check, RunReport, emulate
from kda_lib.reference import Bits, f32_to_bf16, model_skinny_k, model_skinny_n
from kda_lib.shapes import KdaShapes

CONFIGS: dict[str, Callable[..., SkinnyNConfig | SkinnyKConfig]] = {
    "skinny_n": skinny_n_config,
    "skinny_k": skinny_k_config,
}
ANY_BITS, SPECIALS = "any bits", "specials"


@cache
def artifact_of(kernel: str, target: str, m: int, form: FmaForm | None = None) -> Artifact:
    arch = Arch.parse(target)
    return compiled(CONFIGS[kernel](arch, m, KdaShapes(8), form), arch)


@cache
def inputs(kernel: str, m: int, values: str) -> tuple[Bits, Bits]:
    """x and w; any bits: ordinary numbers with a few of every other kind; specials: little else."""
    c = CONFIGS[kernel](Arch.parse("sm_90a"), m, KdaShapes(8))
    rng = np.random.default_rng(m)
    odd = np.array(
        [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x5F80, 0x7F80, 0xFF80, 0x7FC1, 0xFF81], np.uint16
    )
    made = []
    shapes: list[tuple[int, int]] = [(m, getattr(c, "x_stride", c.k)), (c.n, c.k)]
    for shape in shapes:
        bits = f32_to_bf16(rng.standard_normal(shape, dtype=np.float32))
        chosen = rng.random(shape) < (0.5 if values == SPECIALS else 2e-5)
        # Rows of w take turns with the kinds, so that Inf and NaN do not drown all outputs.
        kinds = rng.integers(0, 1 + np.arange(shape[0])[:, None] % len(odd), shape)
        made.append(np.where(chosen, odd[kinds], bits))
    return made[0], made[1]


def model(artifact: Artifact, x: Bits, w: Bits) -> Bits:
    c = artifact.config
    if isinstance(c, SkinnyNConfig):
        return model_skinny_n(c, x, w)
    return model_skinny_k(c, np.ascontiguousarray(x[:, : c.k]), w)


@cache
def launched(artifact: Artifact, kernel: str, m: int, values: str) -> tuple[Bits, RunReport]:
    return emulate(artifact, *inputs(kernel, m, values))


def run_whole(kernel: str, target: str, m: int, form: FmaForm | None, values: str) -> tuple[Bits, RunReport]:
    """A whole launch. The machine does not look at the target, so targets with the same code share one."""
    artifact = artifact_of(kernel, target, m, form)
    code = re.sub(r"(?m)^\.target .*$", ".target sm_90a", artifact.ptx)
    return launched(replace(artifact, target="sm_90a", ptx=code, cubin=b"", seconds=0.0), kernel, m, values)


CASES: list[tuple[str, str, int, FmaForm | None]] = [
    (kernel, "sm_90a", m, None) for kernel in CONFIGS for m in (1, 2, 5, 8, 13, 16)
]
CASES += [(kernel, target, 8, None) for kernel in CONFIGS for target in TARGETS if target != "sm_90a"]
CASES += [(kernel, "sm_90a", 8, FmaForm.CVT) for kernel in CONFIGS]


@pytest.mark.parametrize(("kernel", "target", "m", "form"), CASES)
def test_kernels_give_the_bits_of_the_model(kernel: str, target: str, m: int, form: FmaForm | None) -> None:
    artifact = artifact_of(kernel, target, m, form)
    x, w = inputs(kernel, m, ANY_BITS)
    out, report = run_whole(kernel, target, m, form, ANY_BITS)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, model(artifact, x, w))
    launch = artifact.launch
    assert (report.blocks, report.threads) == (launch.grid, launch.grid * launch.block)
    for check in (Check.BOUNDS, Check.ALIGNMENT, Check.READ_ONLY, Check.SHUFFLE):
        assert report.checks[check] > 0
    assert (report.checks[Check.DEPENDENT] > 0) == launch.pdl
    assert report.executed["fma.rn.f32.bf16" if artifact.config.fma is FmaForm.NATIVE else "fma.rn.f32"] >= (
        artifact.config.m * artifact.config.n * artifact.config.k
    )


@pytest.mark.parametrize("kernel", CONFIGS)
def test_portable_and_native_agree_on_specials(kernel: str) -> None:
    x, w = inputs(kernel, 8, SPECIALS)
    outs = {target: run_whole(kernel, target, 8, None, SPECIALS)[0] for target in ("sm_90a", "sm_100a", "sm_120a")}
    expected = model(artifact_of(kernel, "sm_90a", 8), x, w)
    for out in outs.values():
        np.testing.assert_array_equal(out, expected)
    exponents = expected & 0x7F80
    assert set(exponents.ravel().tolist()) > {0x7F80}


def test_some_ctas() -> None:
    """One CTA of the second cluster named: the whole cluster runs, other rows keep their poison."""
    artifact = artifact_of("skinny_n", "sm_90a", 2)
    x, w = inputs("skinny_n", 2, ANY_BITS)
    cluster, rows = artifact.launch.cluster, artifact.config.rows
    out, report = emulate(artifact, x, w, ctas=[2 * cluster - 1])
    assert report.blocks == cluster > 1
    assert report.ok
    ours = slice(rows, 2 * rows)
    np.testing.assert_array_equal(out[:, ours], model(artifact, x, w)[:, ours])
    assert (np.delete(out, ours, axis=1) == 0xFFFF).all()


def every_opcode_of(artifacts: Iterable[Artifact]) -> set[str]:
    code = (re.sub(r"//.*", "", artifact.ptx) for artifact in artifacts)
    return {
        word
        for text in code
        for word in re.findall(r"(?:^|[;{:])\s*(?:@!?\S+\s+)?([a-z]+\.[\w.:]+|bra)", text, re.MULTILINE)
    }


def test_counts_are_by_opcode() -> None:
    artifact = artifact_of("skinny_k", "sm_90a", 8)
    _, report = emulate(artifact, *inputs("skinny_k", 8, ANY_BITS), ctas=[0])
    assert set(report.executed) - {"ret"} == every_opcode_of([artifact])
    assert report.executed["griddepcontrol.wait"] == artifact.launch.block
