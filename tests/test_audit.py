"""The audit: the original failure from PTX alone, agreement with the assembler, what it cannot know, the command."""

import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compiled import compiled
from conftest import ROOT
from typer.testing import CliRunner

from kda_lib.arch import TARGETS, Arch
from kda_lib.compile import KERNELS, compiler_errors, trace_ptx
from kda_lib.diagnosis import assembler_accepts
from kda_lib.kernels.fma import FmaForm, supports
from kda_lib.kernels.skinny_n import SkinnyN
from kda_lib.lab import __main__ as cli
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.advice import REPLACEMENTS, replacement
from kda_lib.lab.audit.assembler import Assembler, installed, target_key
from kda_lib.lab.audit.check import Audit, Kind, audit
from kda_lib.lab.audit.public import retarget
from kda_lib.lab.audit.reader import read
from kda_lib.lab.audit.report import render
from kda_lib.lab.audit.sources import CONFIGS, SourceError, kernel_config, kernel_source
from kda_lib.lab.records import read_result

TABLE = tables.load()
LOGS = ROOT / "tests" / "data" / "dsl_logs"
NATIVE = "fma.rn.f32.bf16 r,r,r,r"
OLD = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
ptxas = installed()
needs_ptxas = pytest.mark.skipif(ptxas is None, reason="nvidia-cuda-nvcc is not installed")


def look(ptx: str, target: str, assembler: Assembler | None = None) -> Audit:
    return audit(read(ptx), target, TABLE, assembler=assembler)


def text(*lines: str, target: str = "sm_90a", version: str = "8.8", head: str = "") -> str:
    registers = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %l<9>;"
    start = [f".version {version}", f".target {target}", ".address_size 64", f".visible .entry k() {head}", "{"]
    return "\n".join([*start, registers, *lines, "ret;", "}", ""])


def kernel_ptx(kernel: str, target: str, form: FmaForm, tokens: int = 3) -> str:
    return compiled(kernel_config(kernel, Arch.parse(target), form, tokens), target).ptx


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["audit", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("target", OLD)
@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
def test_the_original_failure_is_found_from_ptx_alone(kernel: str, target: str) -> None:
    found = look(kernel_ptx(kernel, "sm_100a", FmaForm.NATIVE), target)
    fma = [violation for violation in found.violations if violation.form == NATIVE]
    assert len(fma) == kernel_ptx(kernel, "sm_100a", FmaForm.NATIVE).count("fma.rn.f32.bf16") > 0
    assert {(v.kind, v.lowest_target) for v in fma} == {(Kind.INSTRUCTION, "sm_100")}
    assert "`shl.b32`" in fma[0].replacement
    assert not found.clean
    assert not found.instructions_fit
    lines = kernel_ptx(kernel, "sm_100a", FmaForm.NATIVE).splitlines()
    assert all("fma.rn.f32.bf16" in lines[violation.line - 1] for violation in fma)


def test_the_ptx_that_the_compiler_choked_on() -> None:
    """What the DSL emits for sm_90a itself, before its assembler rejects it."""
    config = kernel_config("skinny_n", Arch.parse("sm_100a"), FmaForm.NATIVE, 2)
    kernel = SkinnyN(config)
    ptx = trace_ptx(kernel, kernel.trace_arguments(), "sm_90a")
    found = look(ptx, "sm_90a")
    assert found.module_target == "sm_90a"
    assert {violation.form for violation in found.violations} == {NATIVE}


@pytest.mark.parametrize("log", sorted(path.name for path in LOGS.glob("*.ptx")))
def test_ptx_left_by_failed_compiles_of_other_releases(log: str) -> None:
    target = "sm_90a" if "sm_90a" in log else "sm_80"
    found = look((LOGS / log).read_text(), target)
    wanted = "fma.rn.f32.bf16" if "native" in log else "griddepcontrol"
    assert any(violation.form.startswith(wanted) for violation in found.violations)


@pytest.mark.parametrize("target", OLD)
@pytest.mark.parametrize("form", [FmaForm.CVT, FmaForm.SHIFT])
@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
def test_portable_kernels_are_clean_for_their_target(kernel: str, form: FmaForm, target: str) -> None:
    assert look(kernel_ptx(kernel, target, form), target).clean


@needs_ptxas
@pytest.mark.parametrize("origin", ["sm_80", "sm_90a", "sm_100a", "sm_110a"])
@pytest.mark.parametrize("kernel", ["skinny_n", "skinny_k"])
def test_agrees_with_really_assembling(kernel: str, origin: str) -> None:
    """PTX compiled for one target and audited for another, as it stands and with the other target written into it."""
    assert ptxas is not None
    forms = [form for form in FmaForm if supports(Arch.parse(origin), form)]
    for form, target in product(forms, TARGETS):
        ptx = kernel_ptx(kernel, origin, form)
        found = look(ptx, target)
        assert found.clean == (ptxas.complaint(ptx, target) is None), (form, target)
        moved = retarget(read(ptx), target, ptxas.newest_ptx)
        assert found.instructions_fit == (ptxas.complaint(moved, target) is None), (form, target)


@needs_ptxas
@pytest.mark.parametrize("origin", ["sm_90a", "sm_120a"])
def test_agrees_with_really_assembling_the_stream_kernel(origin: str) -> None:
    """Which has bulk copies, mbarriers and tensor-core instructions: it cannot be moved below sm_90."""
    assert ptxas is not None
    ptx = kernel_ptx("stream", origin, FmaForm.SHIFT)
    fits = {}
    for target in TARGETS:
        found = look(ptx, target)
        assert found.clean == (ptxas.complaint(ptx, target) is None), target
        moved = retarget(read(ptx), target, ptxas.newest_ptx)
        fits[target] = found.instructions_fit
        assert fits[target] == (ptxas.complaint(moved, target) is None), target
    assert fits[origin]
    assert not fits["sm_80"]


def test_agrees_with_the_compile_matrix() -> None:
    """The outcomes that the DSL's own assembler gave, for every kernel, form and target, at one M."""
    rows = read_result(ROOT / "reports" / "cpu" / "results" / "compile_matrix.json").rows
    chosen = [row for row in rows if row.get("M", 8) == 8 and row.get("tp", 8) == 8]
    assert len({(row["kernel"], row.get("fma"), row["target"]) for row in chosen}) == len(chosen) == 67
    assert {row["target"] for row in chosen if row["kernel"] == "stream"} == set(TARGETS) - {"sm_80", "sm_86", "sm_89"}
    for row in chosen:
        kernel, target, form = str(row["kernel"]), str(row["target"]), FmaForm(str(row.get("fma", FmaForm.SHIFT)))
        rejected = row["outcome"] != "ok"
        found = look(kernel_ptx(kernel, "sm_100a" if rejected else target, form, 8), target)
        lowest = {v.lowest_target for v in found.violations if v.form == NATIVE}
        assert lowest == ({row["lowest_target"]} if rejected else set()), row
        assert found.instructions_fit != rejected, row


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_agrees_with_the_assembler_inside_the_dsl(target: str) -> None:
    """Another release of the assembler than the table's."""
    blocks = {
        "fma.rn.f32.bf16 r,r,r,r": "{ .reg .b16 a; .reg .f32 b; fma.rn.f32.bf16 b, a, a, b; }",
        "cvt.f32.bf16 r,r": "{ .reg .b16 a; .reg .f32 b; cvt.f32.bf16 b, a; }",
        "griddepcontrol.wait": "{ griddepcontrol.wait; }",
        "elect.sync r|p,r": "{ .reg .b32 a; .reg .pred p; elect.sync a|p, -1; }",
        "add.rn.f32x2 r,r,r": "{ .reg .b64 a; add.rn.f32x2 a, a, a; }",
        "wgmma.fence.sync.aligned": "{ wgmma.fence.sync.aligned; }",
        "mov.u32 r,%cluster_ctarank": "{ .reg .b32 a; mov.u32 a, %cluster_ctarank; }",
        "redux.sync.min.f32 r,r,r": "{ .reg .f32 a; redux.sync.min.f32 a, a, -1; }",
    }
    assert compiler_errors()
    for form, block in blocks.items():
        assert (target in TABLE.forms[form]) == assembler_accepts(block, target), form


def test_every_form_of_every_kernel_is_in_the_table() -> None:
    for kernel, target in product(CONFIGS, ("sm_80", "sm_90a", "sm_100a", "sm_121a")):
        try:
            config = kernel_config(kernel, Arch.parse(target))
        except ValueError:
            assert kernel in ("stream", "read_bulk")
            assert target == "sm_80"
            continue
        assert set(read(compiled(config, target).ptx).uses) <= set(TABLE.forms), (kernel, target)


@pytest.mark.parametrize(
    ("own", "version", "target", "kinds"),
    [
        ("sm_90", "8.8", "sm_90a", set()),
        ("sm_80", "7.0", "sm_121a", set()),
        ("sm_90a", "8.8", "sm_90", {Kind.MODULE_TARGET}),
        ("sm_90a", "8.8", "sm_100a", {Kind.MODULE_TARGET}),
        ("sm_100a", "8.8", "sm_103a", {Kind.MODULE_TARGET}),
        ("sm_100f", "8.8", "sm_103a", set()),
        ("sm_100f", "8.8", "sm_120a", {Kind.MODULE_TARGET}),
        ("sm_101a", "8.8", "sm_110a", set()),
        ("sm_90a", "7.8", "sm_90a", {Kind.MODULE_VERSION}),
        ("sm_80", "7.0", "sm_75", {Kind.MODULE_TARGET}),
        ("sm_90", "8.0", "sm_80", {Kind.MODULE_TARGET}),
        ("sm_90a", "8.0", "sm_100a", {Kind.MODULE_TARGET, Kind.MODULE_VERSION}),
        ("sm_90a", "99.0", "sm_90a", {Kind.MODULE_VERSION}),
        ("sm_999", "8.8", "sm_90a", {Kind.MODULE_TARGET}),
    ],
)  # fmt: skip
def test_target_and_version_of_the_module(own: str, version: str, target: str, kinds: set[Kind]) -> None:
    ptx = text("add.s32 %r1, %r2, %r3;", target=own, version=version)
    found = look(ptx, target)
    assert {violation.kind for violation in found.violations} == kinds
    assert found.instructions_fit
    if ptxas is not None:
        assert found.clean == (ptxas.complaint(ptx, target) is None)


@needs_ptxas
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize(
    ("statement", "head", "own", "version"),
    [
        ("", ".reqnctapercluster 2, 1, 1", "sm_90", "8.8"),
        ("", ".maxclusterrank 8", "sm_80", "8.8"),
        ('.pragma "nounroll";', "", "sm_80", "8.8"),
        ("elect.sync %r1|%p1, -1;", "", "sm_80", "8.8"),
        ("elect.sync %r1|%p1, -1;", "", "sm_90", "7.8"),
        ("elect.sync %r1|%p1, -1;", "", "sm_90", "8.0"),
        ("setmaxnreg.inc.sync.aligned.u32 64;", "", "sm_100f", "8.8"),
        ("wgmma.fence.sync.aligned;", "", "sm_90a", "8.0"),
        ("mov.b128 %q, %q;", "", "sm_80", "8.8"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;", "", "sm_89", "8.0"),
        ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;", "", "sm_89", "8.1"),
        ("redux.sync.add.s32 %r1, %r2, -1;", "", "sm_70", "8.8"),
        ("shfl.up.b32 %r1, %r2, 1, 0;", "", "sm_60", "6.0"),
        ("@%p1 st.global.v8.b32 [%l1], {%r1, %r2, %r3, %r4, %r1, %r2, %r3, %r4};", "", "sm_100", "8.8"),
    ],
)  # fmt: skip
def test_as_it_stands_means_what_the_assembler_does(
    statement: str, head: str, own: str, version: str, target: str
) -> None:
    assert ptxas is not None
    ptx = text(".reg .b128 %q;" if "%q" in statement else "", statement, target=own, version=version, head=head)
    assert look(ptx, target).clean == (ptxas.complaint(ptx, target) is None)


def test_what_only_the_own_target_lacks() -> None:
    found = look(text("griddepcontrol.wait;", target="sm_80"), "sm_90a")
    (violation,) = found.violations
    assert (violation.kind, violation.line, violation.text) == (Kind.OWN_TARGET, 7, "griddepcontrol.wait")
    assert found.instructions_fit
    assert "sm_90a has it, but .target sm_80 lacks it" in render(found, 1)


def test_what_needs_a_higher_version() -> None:
    found = look(text("elect.sync %r1|%p1, -1;", target="sm_90", version="7.8"), "sm_90")
    (violation,) = found.violations
    assert (violation.kind, violation.needs_version) == (Kind.VERSION, "8.0")
    assert "needs .version 8.0, the text has 7.8" in render(found, 1)


def test_unknown_forms_are_never_guessed() -> None:
    found = look(text("add.rn.f32.bf16.bf16 %f1, %h1, %f2;", "frobnicate.b32 %r1;"), "sm_90a")
    assert [(place.line, place.form) for place in found.unknown] == [
        (7, "add.rn.f32.bf16.bf16 r,r,r"), (8, "frobnicate.b32 r"),
    ]  # fmt: skip
    assert not found.violations
    assert not found.clean
    assert not found.instructions_fit
    assert "unknown: not in the table, and no assembler" in render(found, 1)


@needs_ptxas
def test_unknown_forms_are_probed_on_the_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("griddepcontrol.wait;", "ld.shared.f32 %f1, [buffer+4];", "frobnicate.b32 %r1;")
    ptx = text(".shared .align 4 .b8 buffer[8];", *lines, target="sm_80")
    forms = {form: takes for form, takes in TABLE.forms.items() if not form.startswith(("griddep", "ld.shared"))}
    smaller = tables.Table(**{**vars(TABLE), "forms": forms})
    found = audit(read(ptx), "sm_89", smaller, assembler=ptxas)
    assert found.probed == ("griddepcontrol.wait", "ld.shared.f32 r,[a]")
    assert [(v.form, v.kind, v.lowest_target) for v in found.violations] == [
        ("griddepcontrol.wait", Kind.INSTRUCTION, "sm_90")
    ]
    (unknown,) = found.unknown
    assert "Not a name of any known instruction: 'frobnicate'" in unknown.reason


@pytest.mark.parametrize("target", ["sm_777", "nonsense", "sm_101a", ""])
def test_unknown_targets_are_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"target: expected one of sm_"):
        look(text(), target)


def test_replacements_name_instructions_of_sm_80() -> None:
    opcodes = {form.partition(" ")[0] for form, takes in TABLE.forms.items() if "sm_80" in takes}
    families = {".".join(opcode.split(".")[:n]) for opcode in opcodes for n in range(1, 13)}
    for _, words in REPLACEMENTS:
        for name in words.split("`")[1::2]:
            assert name in families, words


def test_most_of_what_is_new_since_sm_80_has_a_replacement() -> None:
    new = [form for form, takes in TABLE.forms.items() if "sm_80" not in takes and not form.startswith("cvt")]
    without = [form for form in new if not replacement(form)]
    assert len(without) < 0.15 * len(new)
    assert not replacement("add.s32 r,r,r")


def test_kernel_sources() -> None:
    assert kernel_source("skinny_n", "sm_90a", form=FmaForm.NATIVE).name == "skinny_n compiled for sm_100a"
    assert kernel_source("stamp", "sm_80").name == "stamp compiled for sm_80"
    assert kernel_source("read_bulk", "sm_80").name == "read_bulk compiled for sm_90"
    assert kernel_source("stamp", "sm_80", compiled_for="b200").name == "stamp compiled for sm_100a"
    with pytest.raises(SourceError, match="M: expected 1 to 16 tokens, got 99"):
        kernel_source("skinny_k", "sm_80", tokens=99)
    with pytest.raises(SourceError, match="skinny_k: sm_90a has no native"):
        kernel_source("skinny_k", "sm_90a", form=FmaForm.NATIVE, compiled_for="sm_90a")
    with pytest.raises(SourceError, match="kernel: expected one of skinny_n"):
        kernel_source("other", "sm_90a")
    assert set(CONFIGS) == set(KERNELS)


def test_command_reports_violations(tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(text("@%p1 fma.rn.f32.bf16 %f1, %h1, %h2, %f1;", "fma.rn.f32.bf16 %f1, %h2, %h2, %f1;"))
    code, out, _ = run(str(file), "--target", "h100", "--show", "1")
    assert code == 1
    assert "kernel.ptx (.target sm_90a, .version 8.8) for sm_90a" in out
    assert f"{NATIVE}: needs sm_100 or any later target; instead: shift both" in out
    assert "  line 7: @%p1 fma.rn.f32.bf16 %f1, %h1, %h2, %f1\n  and 1 more (--json lists them all)" in out
    assert out.endswith("not clean: 2 places need an instruction that sm_90a lacks\n")
    code, out, _ = run(str(file), "--target", "sm_90a", "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == 1
    assert [(v["line"], v["lowest_target"]) for v in data["violations"]] == [(7, "sm_100"), (8, "sm_100")]
    assert data["taken_by"][NATIVE][0] == "sm_100"
    assert (data["schema"], data["clean"], data["assembler"]) == ("kda-lib/ptx-audit/v1", False, TABLE.name)


def test_command_says_clean(tmp_path: Path) -> None:
    code, out, err = run("skinny_n", "--target", "sm_90a")
    assert (code, err) == (0, "")
    assert out.endswith("clean: nothing in it that sm_90a lacks\n")
    file = tmp_path / "kernel.ptx"
    file.write_text(text("add.f32 %f1, %f2, %f3;", target="sm_100a"))
    code, out, _ = run(str(file), "--target", "sm_90a")
    assert code == 1
    assert ".target sm_100a: runs on sm_100a; compile it for sm_90a" in out
    assert "no instruction stands in the way of compiling it for sm_90a" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.ptx", "--target", "sm_90a"], "none.ptx: No such file"),
        (["empty.ptx", "--target", "sm_90a"], "empty.ptx: expected PTX text, got nothing"),
        (["binary.ptx", "--target", "sm_90a"], "binary.ptx: expected PTX text, got a binary"),
        (["broken.ptx", "--target", "sm_90a"], "broken.ptx: line 3: expected a statement"),
        (["good.ptx", "--target", "sm_999"], "target: expected one of sm_75"),
        (["good.ptx", "--target", "sm_90a", "--fma", "native"], "beside --fma, --tokens and --compiled-for"),
        (["stamp", "--target", "sm_90a", "--fma", "other"], "fma: expected one of native, portable-cvt"),
        (["skinny_n", "--target", "sm_90a", "--tokens", "17"], "M: expected 1 to 16 tokens, got 17"),
        (["skinny_n", "--target", "sm_90a", "--compiled-for", "gpu"], "target: expected one of sm_80"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.ptx").touch()
    (tmp_path / "binary.ptx").write_bytes(b"\x7fELF\0")
    (tmp_path / "broken.ptx").write_text(".version 8.8\n.target sm_90a\nadd.s32 %r1\n")
    (tmp_path / "good.ptx").write_text(text())
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_answers_in_under_two_seconds(tmp_path: Path) -> None:
    """From a cold process; the best of three, since other tests run beside it."""
    file = tmp_path / "kernel.ptx"
    file.write_text(kernel_ptx("skinny_n", "sm_100a", FmaForm.NATIVE, 16))
    command = [sys.executable, "-m", "kda_lib.lab", "audit", str(file), "--target", "sm_90a"]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, env=os.environ, timeout=60)
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 1
    assert min(seconds) < 2


def test_lowest_target_is_the_plain_one_of_the_lowest_capability() -> None:
    order = ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_100f", "sm_100a", "sm_103"]
    assert max(order, key=target_key) == order[-1]
    assert sorted({*order}, key=target_key) == order
    found = look(text("redux.sync.min.f32 %f1, %f2, -1;", target="sm_100f"), "sm_90a")
    assert {v.lowest_target for v in found.violations if v.form.startswith("redux")} == {"sm_100f"}
