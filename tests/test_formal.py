"""Formal checks: what is proved, and that nothing else is called so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from compiled import compiled

from kda_lib.arch import Arch
from kda_lib.compile import Artifact
from kda_lib.lab import formal, golden, prover, records
from kda_lib.lab.formal import Task
from kda_lib.lab.golden import Case
from kda_lib.lab.prover import NOT_PROVED, PROVED
from kda_lib.lab.ptx import Buffer, Machine
from kda_lib.lab.ptx.emulate import launch
from kda_lib.lab.ptx.mutations import MUTATIONS
from kda_lib.lab.scripted import Row

FAULTS = {fault.name: fault for fault in MUTATIONS}

needs_verifier = pytest.mark.skipif(
    importlib.util.find_spec("sentryward") is None, reason='needs the extra: pip install "kda_lib[verify]"'
)


def artifact(kernel: str, target: str, m: int) -> Artifact:
    arch = Arch.parse(target)
    return compiled(Case(kernel, m, "ordinary").config(arch), arch)


@needs_verifier
@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
@pytest.mark.parametrize("target", prover.TARGETS)
def test_kernels_are_proved_safe(kernel: str, target: str) -> None:
    rows = formal.rows_of(Task(kernel, target, 1, clusters=1))
    for row in rows:
        records.ROW.validate_python(row)
    assert [(row["variant"], row["outcome"], row["detail"]) for row in rows] == [
        ("synchronisation", PROVED, ""),
        ("race freedom", PROVED, ""),
    ]
    assert rows[0]["ctas"] == artifact(kernel, target, 1).launch.cluster < rows[0]["grid"]


@needs_verifier
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("removed barrier", "potential_race: "),
        ("mbarrier that awaits two arrivals", "not_wellsynced"),
        ("swapped cluster rank", "missing-barrier-initialization"),
    ],
)
def test_a_fault_is_never_proved(fault: str, words: str) -> None:
    """Whether the prover finds the fault or gives up: it does not say proved, and says why."""
    (row,) = formal.rows_of(Task("skinny_n", "sm_90a", FAULTS[fault].m, 1, fault=FAULTS[fault]))
    assert row["outcome"] == NOT_PROVED
    assert words in row["detail"]
    if "race" in words:
        assert "PTX line " in row["detail"]


@pytest.mark.parametrize(("target", "m"), [("sm_90a", 9), ("sm_100a", 13)])
def test_what_is_written_out_for_the_prover_gives_the_same_bits(target: str, m: int) -> None:
    """Run on the PTX machine: the addresses are those of the compiler's own text."""
    kernel = artifact("skinny_n", target, m)
    text = prover.written_out(kernel.ptx)
    assert [word for word in ("dp2a", "dp4a", "prmt") if word in text] == []
    assert len(text.splitlines()) == len(kernel.ptx.splitlines())
    case = Case("skinny_n", m, "ordinary")
    inputs = case.inputs(kernel.config)
    outputs = [list(case.outputs(kernel.config)) for _ in range(2)]
    reports = [
        launch(kernel, inputs, out, ptx=ptx, ctas=[0]) for out, ptx in zip(outputs, (kernel.ptx, text), strict=True)
    ]
    assert [report.violations for report in reports] == [[], []]
    assert reports[0].executed["dp4a.u32.u32"] > 0
    assert golden.differing(*outputs) == 0
    assert golden.differing(outputs[0], case.outputs(kernel.config)) > 0


@pytest.mark.parametrize(
    "code",
    [
        *(f"prmt.b32 %r3, %r1, %r2, 0x{selector}U;" for selector in ("3340", "5410", "7531", "0000", "7264")),
        "dp4a.u32.u32 %r3, %r1, %r2, %r1;",
        "dp2a.lo.u32.u32 %r3, %r1, %r2, 77;",
        "mov.b32 %r3, %r1; dp4a.u32.u32 %r3, %r3, %r3, %r3;",
    ],
)
def test_an_instruction_is_written_out_as_defined(code: str) -> None:
    """On arbitrary words, against the instruction itself, whose tests are those of the PTX machine."""
    words = np.random.default_rng(2).integers(0, 1 << 32, 64, dtype=np.uint32)
    text = (
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 o)\n"
        "{ .reg .b32 %r<8>; .reg .b64 %d<4>; mov.u32 %r0, %tid.x; ld.param.u64 %d0, [a]; ld.param.u64 %d1, [o];"
        "mad.wide.u32 %d0, %r0, 8, %d0; mad.wide.u32 %d1, %r0, 4, %d1; ld.global.b32 %r1, [%d0];"
        f"ld.global.b32 %r2, [%d0+4];\n{code}\nst.global.b32 [%d1], %r3; ret; }}"
    )
    found = []
    for ptx in (text, prover.written_out(text)):
        out = np.zeros(32, np.uint32)
        Machine(ptx).run(params=[Buffer(words, "a"), Buffer(out, "o", readonly=False)], grid=1, block=32)
        found.append(out.tolist())
    assert not {"prmt", "dp2a", "dp4a"} & set(prover.written_out(text).replace(".", " ").split())
    assert found[0] == found[1]


@needs_verifier
def test_equality_is_proved_and_not_for_another_function() -> None:
    kernel = artifact("skinny_k", "sm_100a", 1)
    assert prover.prove(kernel, ctas=1, equality=True).proved("equality")
    wrong = prover.prove(kernel, ctas=1, ptx=FAULTS["shuffle distance"].apply(kernel.ptx), equality=True)
    assert wrong.proved("synchronisation")
    assert not wrong.proved("equality")
    assert wrong.why


@needs_verifier
def test_an_unsupported_kernel_is_not_proved() -> None:
    """Partial sums that go to another CTA are beyond the prover's values, not beyond its races."""
    (row,) = formal.rows_of(Task("skinny_n", "sm_100a", 1, 1, equality=True))
    assert (row["variant"], row["outcome"]) == ("equality", NOT_PROVED)
    assert "unsupported" in row["detail"]


@needs_verifier
def test_assumptions_are_recorded() -> None:
    proof = prover.prove(artifact("skinny_k", "sm_90a", 1), ctas=1)
    rows = formal.assumption_rows(proof)
    for row in rows:
        records.ROW.validate_python(row)
    assert {row["variant"] for row in rows} >= {
        "assumption: memory model", "assumption: pointers", "assumption: representative_election",
    }  # fmt: skip
    assert {row["outcome"] for row in rows} == {formal.ASSUMED}
    assert "representative_branches" not in proof.assumptions


@needs_verifier
@pytest.mark.parametrize("ctas", [3, 7 * 37, -7])
def test_bad_ctas(ctas: int) -> None:
    with pytest.raises(ValueError, match="ctas: expected a multiple of 7"):
        prover.prove(artifact("skinny_n", "sm_90a", 1), ctas=ctas)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(prover.VerifierMissing, match=r"kda_lib\[verify\]"):
        prover.prove(artifact("skinny_k", "sm_90a", 1))
    with pytest.raises(prover.VerifierMissing):
        formal.run(Path())


def made(variant: str, outcome: str) -> Row:
    return {"variant": variant, "outcome": outcome}


def test_claims() -> None:
    good = [made("synchronisation", PROVED), made("race freedom", PROVED), made("fault: x", NOT_PROVED)]
    assert {c.id: c.holds for c in formal.claims_of(good)} == {"safe": True, "faults": True, "equal": True}
    bad = [*good, made("race freedom", NOT_PROVED), made("fault: y", PROVED), made("equality", NOT_PROVED)]
    claims = formal.claims_of(bad)
    assert {c.id: (c.value, c.holds) for c in claims} == {"safe": (1, False), "faults": (1, False), "equal": (1, False)}
    assert [c.id for c in claims if not c.required] == ["equal"]


def test_tasks_name_every_kernel_target_and_m() -> None:
    tasks = formal.tasks()
    plain = {(t.kernel, t.target, t.m) for t in tasks if not t.fault and not t.equality}
    assert len(plain) == 2 * len(prover.TARGETS) * 16
    assert {t.fault.name for t in tasks if t.fault} == {fault.name for fault in MUTATIONS if fault.verifiable}
    assert any(t.clusters is None for t in tasks)
