"""Our kernels on the PTX machine: bit for bit as the host model says, and with faults planted in their PTX."""

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


# Planted faults. Each is a regular expression on the PTX text and what takes its place.

FIRST_X_LOAD = r"(ld\.global)(\.v4\.b32 \{[^}]*\}, \[%rd\d+)\]"
EXPECT = r"(mbarrier\.arrive\.expect_tx[^;]*, )(%r\d+);"
CLUSTER = {
    "no dependency wait": (r"griddepcontrol\.wait;", "", {Check.DEPENDENT}),
    "x by the non-coherent path": (FIRST_X_LOAD, r"\1.nc\2]", {Check.COHERENT}),
    "a load 16 bytes too far": (FIRST_X_LOAD, r"\1\2+100352]", {Check.BOUNDS}),
    "a load before the buffer": (FIRST_X_LOAD, r"\1\2+-16]", {Check.BOUNDS}),
    "a load off by one element": (FIRST_X_LOAD, r"\1\2+2]", {Check.ALIGNMENT}),
    "no cluster barrier": (r"barrier\.cluster\.(arrive\.relaxed|wait);", "", {Check.PEER_ALIVE, Check.RACE}),
    "no cluster arrive": (r"barrier\.cluster\.arrive\.relaxed;", "", {Check.CLUSTER_BARRIER}),
    "a cluster wait that the sending warp does not make": (
        r"barrier\.cluster\.wait;",
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p barrier.cluster.wait; }",
        {Check.PEER_ALIVE},
    ),
    "no mbarrier fence": (r"fence\.mbarrier_init\.release\.cluster;", "", {Check.RACE}),
    "no mbarrier": (r"mbarrier\.init\.shared::cta\.b64 [^;]*;", "", {Check.INITIALISED}),
    "no wait for the partial sums": (r"again: mbarrier.*bra again;", "", {Check.RACE, Check.PEER_ALIVE}),
    "too few bytes expected": (EXPECT, r"{ .reg .b32 n; sub.u32 n, \2, 4; \1n; }", {Check.BARRIER}),
    "too many bytes expected": (EXPECT, r"{ .reg .b32 n; add.u32 n, \2, 4; \1n; }", {Check.BARRIER}),
    "a warp that does not send": (
        r"(st\.async[^;]*;)",
        r"{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p \1 }",
        {Check.BARRIER},
    ),
    "partial sums on top of each other": (
        r"(st\.async[^[]*\[)(%r\d+)(\][^;]*;)",
        r"{ .reg .b32 a; and.b32 a, \2, -128; \1a\3 }",
        {Check.RACE},
    ),
    "shuffle among half a warp": (r"(shfl\.sync\.bfly\.b32[^;]*), -1;", r"\1, 65535;", {Check.SHUFFLE}),
    "output into the weights": (
        r"st\.global\.b16 \[%rd\d+\]",
        "{ .reg .b64 a; ld.param.u64 a, [kda_skinny_n_0_param_1]; } st.global.b16 [%rd1]",
        {Check.READ_ONLY},
    ),
}
SHARED = {
    "no barrier": (r"bar\.sync \t?0;", "", {Check.RACE}),
    "a barrier for half a warp": (
        r"bar\.sync \t?0;",
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.lt.u32 p, t, 16; @p bar.sync 0; }",
        {Check.BARRIER},
    ),
    "a barrier that a warp misses": (
        r"bar\.sync \t?0;",
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; @p bar.sync 0; @!p bar.sync 1; }",
        {Check.BARRIER},
    ),
    "a warp that leaves its partial sums out": (
        r"(st\.shared\.f32[^;]*;)",
        r"{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p \1 }",
        {Check.INITIALISED},
    ),
}


def mutated(artifact: Artifact, pattern: str, replacement: str, count: int = 0) -> str:
    """The PTX with a change, which keeps its line numbers."""
    text, changes = re.subn(pattern, replacement, artifact.ptx, count=count)
    assert changes, f"{pattern} is not in the PTX; adapt the test to the kernel"
    return text


@pytest.mark.parametrize(
    ("target", "fault"), [("sm_90a", f) for f in CLUSTER] + [("sm_80", f) for f in SHARED], ids=lambda v: str(v)
)
def test_planted_fault_is_reported(target: str, fault: str) -> None:
    pattern, replacement, expected = (CLUSTER if target == "sm_90a" else SHARED)[fault]
    artifact = artifact_of("skinny_n", target, 8)
    text = mutated(artifact, pattern, replacement)
    x, w = inputs("skinny_n", 8, ANY_BITS)
    # A fault at the end of x shows in the last CTA of a cluster only.
    _, report = emulate(artifact, x, w, ptx=text, ctas=[0])
    assert {v.check for v in report.violations} >= expected, str(report)
    lines = text.splitlines()
    for violation in report.violations:
        assert violation.text.split()[0] in lines[violation.line - 1]
        assert f"PTX line {violation.line}: " in str(violation)
        assert violation.block in range(artifact.launch.cluster)
        assert violation.thread in range(artifact.launch.block)
        assert violation.count > 0


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"fma\.rn\.f32 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"fma.rn.f32 \1, \2, \4, \3;"),
        (r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*), 8,", r"\1, 4,"),
        (r"add\.f32", "sub.f32"),
        (r"and\.b32 (.*), -65536;", r"and.b32 \1, -131072;"),
        (r"cvt\.rn\.bf16\.f32 (%rs\d+), (%r\d+);", r"{ .reg .b16 t; mov.b32 {t, \1}, \2; }"),
    ],
    ids=["fma operand order", "shuffle distance", "subtraction", "lost mantissa bit", "truncation"],
)
def test_planted_fault_changes_bits(pattern: str, replacement: str) -> None:
    """Faults that are no violation of any rule."""
    artifact = artifact_of("skinny_n", "sm_90a", 8)
    x, w = inputs("skinny_n", 8, ANY_BITS)
    text = mutated(artifact, pattern, replacement)
    out, report = emulate(artifact, x, w, ptx=text, ctas=[0])
    assert report.ok, str(report)
    rows = slice(artifact.config.rows)
    assert (out[:, rows] != model(artifact, x, w)[:, rows]).any()


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
