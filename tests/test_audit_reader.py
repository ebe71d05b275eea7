"""Reading any PTX: forms, places, scopes; and what is no PTX."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_lib.lab.audit.reader import Module, PtxReadError, read, split_operands
from kda_lib.lab.audit.sources import SourceError, read_file

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"


def body(*lines: str, head: str = ".visible .entry k()") -> Module:
    return read(HEAD + f"{head}\n{{\n" + "\n".join(lines) + "\nret;\n}\n")


def forms(module: Module) -> list[str]:
    return [form for form in module.uses if not form.startswith(".") and form != "ret"]


@pytest.mark.parametrize(
    ("statement", "form"),
    [
        ("fma.rn.f32.bf16 %f1, %h1, %h2, %f1;", "fma.rn.f32.bf16 r,r,r,r"),
        ("@%p1 add.s32 %r1, %r2, -5;", "add.s32 r,r,r"),
        ("@!%p1 add.s32 %r1, %r2, 0x1F;", "add.s32 r,r,r"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%l1+16];", "ld.global.v4.b32 {4},[a]"),
        ("ld.global.v4.b32 {%r1, _, %r3, %r4}, [G];", "ld.global.v4.b32 {4_},[a]"),
        ("mov.b32 {%h1, %h2}, %r1;", "mov.b32 {2},r"),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;", "shfl.sync.bfly.b32 r|p,r,r,r,r"),
        ("elect.sync _|%p1, %r1;", "elect.sync _|p,r"),
        ("selp.f32 %f1, %f2, 0f3F800000, !%p1;", "selp.f32 r,r,r,p"),
        ("mov.u32 %r1, %tid.x;", "mov.u32 r,%tid"),
        ("mov.u64 %l1, %globaltimer;", "mov.u64 r,%globaltimer"),
        ("bra.uni LOOP;", "bra.uni r"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%l1, {%r2, %r3}], [%r4];",
         "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [a],[a,{2}],[a]"),
        ("call.uni (%r1), callee, (%r2, %l1);", "call.uni function"),
        ("call (%r1), %l1, (%r2), prototype;", "call pointer"),
        ("ld.global\n  .v2\n  .f32 {%f1,\n %f2}, [%l1];", "ld.global.v2.f32 {2},[a]"),
        ("ld.global /* cached */ .b32 %r1, // the value\n [%l1];", "ld.global.b32 r,[a]"),
    ],
)  # fmt: skip
def test_forms(statement: str, form: str) -> None:
    module = body(
        ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %l<9>;",
        "LOOP:", statement,
    )  # fmt: skip
    assert forms(module) == [form]


def test_every_place_has_its_line() -> None:
    module = body(".reg .b32 %r<9>;", "add.s32 %r1, %r2, 1; add.s32 %r3, %r4, %r5;", "", "@%p add.s32 %r1,\n  %r2, 3;")
    places = module.places(module.uses["add.s32 r,r,r"])
    assert [place.line for place in places] == [7, 7, 9]
    assert [place.text for place in places] == [
        "add.s32 %r1, %r2, 1", "add.s32 %r3, %r4, %r5", "@%p add.s32 %r1, %r2, 3",
    ]  # fmt: skip


def test_inline_assembly_has_its_own_names() -> None:
    module = body(
        ".reg .b32 %r<9>; .reg .pred %p<3>;",
        "{ .reg .pred a; setp.eq.b32 a, %r1, 0; selp.b32 %r1, %r2, %r3, a; }",
        "{ .reg .b32 a; add.s32 a, %r1, a; selp.b32 %r1, a, %r3, %p1; }",
        "{ .reg .b64 a; add.s64 a, a, 1; }",
        "{ .reg .pred a; selp.b32 %r1, %r2, %r3, a; }",
    )
    assert forms(module) == ["setp.eq.b32 p,r,r", "selp.b32 r,r,r,p", "add.s32 r,r,r", "add.s64 r,r,r"]
    assert module.uses["add.s64 r,r,r"].probe == "add.s64 l1, l1, 1"
    assert module.uses["setp.eq.b32 p,r,r"].probe == "setp.eq.b32 p1, r2, 0"


def test_directives_of_a_kernel() -> None:
    module = body(
        ".shared .align 16 .b8 buffer[64];", ".reg .b32 %r1;", '.pragma "nounroll; {";', "ld.shared.b32 %r1, [buffer];",
        head=".visible .entry k(.param .u64 .ptr .global .align 16 k_param_0)\n.reqntid 64, 1, 1\n.maxclusterrank 8",
    )  # fmt: skip
    assert [form for form in module.uses if form.startswith(".")] == [
        ".reqntid", ".maxclusterrank", ".shared", ".reg .b32", '.pragma "nounroll "',
    ]  # fmt: skip
    assert [(p.line, p.text) for p in module.places(module.uses[".maxclusterrank"])] == [(6, ".maxclusterrank 8")]
    assert module.uses["ld.shared.b32 r,[a]"].probe == "ld.shared.b32 r1, [S]"


def test_what_surrounds_kernels_is_passed_over() -> None:
    module = read(
        HEAD + '.file 1 "a;{b.py"\n.extern .func (.param .b32 r) printf(.param .b64 f, .param .b64 a);\n'
        ".visible .global .align 4 .b8 table[4] = {1, 2, {3}};\n.global .u64 p = generic(table);\n"
        ".func (.param .b32 out) helper(.param .b32 in)\n{\n.loc 1 2 3\nret;\n}\n"
        '.section .debug_str\n{\n.b8 1\n.b8 2\n}\n.alias other, helper;\n.file 2 "c"\n'
    )
    assert list(module.uses) == [".global", "ret", ".alias"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is it PTX"),
        ("// nothing\n", "is it PTX"),
        ("hello world\n", "line 1: expected a statement that ends with ';', got 'hello world'"),
        (".version 8.8\n", "names .version and .target"),
        (HEAD + ".visible .entry k() { add.s32 %r1, %r2, 3 }", "line 4: expected a statement"),
        (HEAD + ".visible .entry k() { ret;", "line 4: the text ends inside"),
        (HEAD + "}", "line 4: '}' without '{'"),
        (HEAD + ".visible .entry k() {\nadd.s32 %r1, %r2, 3\nsub.s32 %r1, %r2, 3;\n}", "line 5: expected a statement"),
        (HEAD + ".visible .entry k() {\n/* open\nret;\n}", "line 5: expected a statement"),
        (HEAD + HEAD, "line 4: a second module begins"),
        (HEAD + ".global .b32 x[2] = {1, 2", "line 4: expected a statement"),
        (HEAD + ".visible .entry k() {\n+;\n}", "line 5: expected a statement"),
        (HEAD + "a[;", "line 4: expected a statement"),
        (HEAD + "ld.b32 %r1, [ ];", "line 4: expected a statement"),
        (HEAD + "ld.b32 %r1, [a, [];", "line 4: expected a statement"),
    ],
)  # fmt: skip
def test_broken_text_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(PtxReadError) as raised:
        read(text)
    assert message in str(raised.value)


def test_bytes_are_refused() -> None:
    with pytest.raises(TypeError, match="expected the PTX text as a string, got bytes"):
        read(HEAD.encode())  # type: ignore[arg-type]


@given(st.text(alphabet=st.sampled_from('.{}[]();,@!%"/*|_:=\n re1a'), max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    with suppress(PtxReadError):
        module = read(HEAD + text)
        assert all(module.places(use) for use in module.uses.values())


@given(st.lists(st.text(alphabet="ab1", min_size=1, max_size=3), max_size=4))
def test_operands_split_at_the_outer_commas(items: list[str]) -> None:
    nested = [f"[{item}, {{x, y}}]" for item in items]
    assert split_operands(", ".join(nested)) == nested


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got nothing"),
        (b"\n \n", "got nothing"),
        (b"\x7fELF\x02\x01\x01", "extract its PTX first"),
        (b"\x50\xed\x55\xba\x01\x00", "extract its PTX first"),
        (b".version\0.target", "got a binary"),
        (b"\xff\xfe\x00", "bytes that are none (at 0)"),
    ],
)
def test_files_that_hold_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "kernel.ptx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"kernel\.ptx: expected PTX text") as raised:
        read_file(path)
    assert message in str(raised.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file or directory; name a file or one of skinny_n"):
        read_file(tmp_path / "none.ptx")
    with pytest.raises(SourceError, match="Is a directory"):
        read_file(tmp_path)


def test_a_text_from_a_fatbin_ends_with_nul(tmp_path: Path) -> None:
    path = tmp_path / "kernel.ptx"
    path.write_bytes((HEAD + ".visible .entry k() { ret; }\n").encode() + b"\0")
    assert list(read_file(path).read().uses) == ["ret"]


def test_a_huge_text_is_read_in_seconds() -> None:
    statements = "".join(
        f"fma.rn.f32 %f{i}, %f{i + 1}, %f{i + 2}, 0f3F800000;\n@%p1 ld.global.v2.f32 {{%f{i}, %f{i + 1}}}, [%l1+{i}];\n"
        for i in range(60_000)
    )
    started = time.perf_counter()
    module = body(".reg .f32 %f<99999>; .reg .b64 %l<3>; .reg .pred %p<3>;", statements)
    assert time.perf_counter() - started < 10
    assert len(module.text) > 5e6
    assert len(module.uses["fma.rn.f32 r,r,r,r"].spans) == 60_000
    assert module.places(module.uses["ld.global.v2.f32 {2},[a]"])[-1].line == 6 + 120_000
