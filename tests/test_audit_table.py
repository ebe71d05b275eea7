"""The committed table: it covers what it should, and single probes assembled anew give what it says."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kda_lib.arch import TARGETS
from kda_lib.lab import __main__ as cli
from kda_lib.lab.audit import build, command, probes, probing
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.assembler import Assembler, AssemblerMissing, installed, version_key
from kda_lib.lab.audit.reader import PtxReadError, read

TABLE = tables.load()
ptxas = installed()
needs_ptxas = pytest.mark.skipif(ptxas is None, reason="nvidia-cuda-nvcc is not installed")

#: Forms, each as a start that at least one in the table must have, with its lowest target.
COVERED = {
    "fma.rn.f32.bf16 ": "sm_100", "fma.rn.f32.f16 ": "sm_100", "add.f32.bf16 ": "sm_100", "sub.f32.f16 ": "sm_100",
    "cvt.f32.bf16 ": "sm_80", "cvt.rn.bf16.f32 ": "sm_80", "cvt.rn.bf16x2.f32 ": "sm_80",
    "cvt.rn.satfinite.e4m3x2.f32 ": "sm_89", "cvt.rn.satfinite.e2m1x2.f32 ": "sm_100f", "cvt.rs.bf16x2.f32 ": "sm_100a",
    "fma.rn.f32x2 ": "sm_100", "griddepcontrol.wait": "sm_90", "elect.sync ": "sm_90", "cp.async.bulk.shared": "sm_90",
    "cp.async.bulk.tensor.2d.shared": "sm_90", "mbarrier.try_wait.parity": "sm_90", "mbarrier.init": "sm_80",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16": "sm_80", "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4": "sm_100f",
    "ldmatrix.sync.aligned.m8n8.x4": "sm_75", "stmatrix.sync.aligned.m8n8.x4": "sm_90", "wgmma.mma_async": "sm_90a",
    "tcgen05.mma.cta_group::1": "sm_100f", "redux.sync.add": "sm_80", "redux.sync.min.f32": "sm_100f",
    "st.async": "sm_90", "multimem.ld_reduce": "sm_90", "fence.proxy.async": "sm_90", "barrier.cluster.wait": "sm_90",
    "createpolicy.fractional": "sm_80", "setmaxnreg": "sm_90a", "ld.global.v8.b32 ": "sm_100",
    "atom.global.v2.f32.add ": "sm_90", "mov.u32 r,%clusterid": "sm_90", ".maxclusterrank": "sm_90",
    ".reqnctapercluster": "sm_90", "clusterlaunchcontrol": "sm_100",
}  # fmt: skip


@pytest.mark.parametrize("start", COVERED)
def test_covers(start: str) -> None:
    found = [takes for form, takes in TABLE.forms.items() if form.startswith(start)]
    real = [target for target in TABLE.targets if any(target in takes for takes in found)]
    assert real[:1] == [COVERED[start]]


def test_every_curated_probe_is_in_the_table() -> None:
    asked = probes.curated()
    missing = [probe for probe in asked if probe not in TABLE.refused and probes.form_of(probe) not in TABLE.forms]
    assert missing == []
    assert len(TABLE.forms) > 6000
    assert len(TABLE.refused) < 100


def test_its_targets() -> None:
    assert set(TARGETS) <= set(TABLE.targets)
    assert list(TABLE.targets) == sorted(TABLE.targets, key=list(TABLE.runs_on).index)
    assert set(TABLE.unknown) == set(build.EXPECTED) - set(TABLE.targets)
    assert {name for takes in TABLE.forms.values() for name in takes} <= set(TABLE.runs_on)
    assert TABLE.runs_on["sm_100a"] == ["sm_100a"]
    assert "sm_103a" in TABLE.runs_on["sm_100f"]
    assert "sm_120a" not in TABLE.runs_on["sm_100f"]
    assert "sm_120a" in TABLE.runs_on["sm_90"]


def test_its_probes_stand_for_their_forms() -> None:
    for form, probe in random.Random(1).sample(sorted(TABLE.probes.items()), 500):
        assert probes.form_of(probe) == form


@needs_ptxas
def test_probes_assembled_one_by_one_give_what_it_says() -> None:
    """The table was made with thousands of probes in one text; here each is alone, with code generated."""
    assert ptxas is not None
    chosen = random.Random(2).sample(sorted(TABLE.probes.items()), 120)
    names = TABLE.names
    for index, (form, probe) in enumerate(chosen):
        for name in random.Random(index).sample(sorted(names), 3):
            complaint = ptxas.complaint(probes.module([probe], TABLE.versions[-1], name), names[name])
            assert (complaint is None) == (name in TABLE.forms[form]), (probe, name, complaint)


@needs_ptxas
def test_lowest_versions_assembled_one_by_one() -> None:
    assert ptxas is not None
    chosen = random.Random(3).sample(sorted(TABLE.probes.items()), 80)
    for form, probe in chosen:
        name, since = random.Random(form).choice(sorted(TABLE.forms[form].items()))
        assert ptxas.complaint(probes.module([probe], since, name), TABLE.names[name]) is None, (probe, name, since)
        if before := TABLE.versions[: TABLE.versions.index(since)]:
            assert ptxas.complaint(probes.module([probe], before[-1], name), TABLE.names[name]), (probe, name, since)


@needs_ptxas
def test_refused_probes_are_refused_alone() -> None:
    assert ptxas is not None
    for probe in random.Random(4).sample(sorted(TABLE.refused), 10):
        for target in ("sm_80", "sm_90a", "sm_100a", "sm_120a"):
            assert ptxas.complaint(probes.module([probe], TABLE.versions[-1], target), target)


@pytest.fixture
def few_targets(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """An assembler that says it knows three targets: the whole table takes minutes to make."""
    targets = ("sm_80", "sm_90a", "sm_100a")
    monkeypatch.setattr(Assembler, "targets", targets)
    monkeypatch.setattr(build, "OLDER_NAMES", ("sm_50", "sm_70"))
    return targets


@needs_ptxas
def test_a_small_table_made_now_is_a_part_of_the_committed_one(few_targets: tuple[str, ...], tmp_path: Path) -> None:
    """Also with probes that fail in every way: unknown instructions, operands that lack, syntax errors."""
    assert ptxas is not None
    good = [
        "ret",
        "fma.rn.f32.bf16 f1, h2, h3, f4",
        "cvt.f32.bf16 f1, h2",
        "wgmma.fence.sync.aligned",
        ".maxclusterrank 8",
    ]
    bad = ["frobnicate.b32 r1", "add.s32 r1, r2", "add.s32 r1, , r2"]
    made = build.make_table(ptxas, [*good, *bad], workers=2)
    build.write(made, tmp_path / "table.json")
    again = tables.load(tmp_path / "table.json")
    assert again == made
    assert set(again.refused) == set(bad)
    assert "frobnicate" in again.refused["frobnicate.b32 r1"]
    if again.assembler == TABLE.assembler:
        for form, takes in again.forms.items():
            assert takes == {name: TABLE.forms[form][name] for name in again.runs_on if name in TABLE.forms[form]}
        for name, targets in again.runs_on.items():
            assert targets == [target for target in TABLE.runs_on[name] if target in few_targets]
        assert again.versions == TABLE.versions


@needs_ptxas
def test_what_a_macro_says_is_laid_on_nobody_else() -> None:
    """shfl.sync is a macro of ptxas 13.5. After a fatal error it complains about line 3 of "<macro util>"."""
    assert ptxas is not None
    fatal = "mbarrier.arrive.release.cta.b64 _, [l2]"
    asked = [*(f"mov.b32 r1, {i}" for i in range(9)), "shfl.sync.idx.b32 r1|p1, r2, r3, r4, r5", fatal]
    log = ptxas.log(probes.module(asked, "7.0", "sm_80"), "compute_80")
    assert log is not None
    assert "<macro util>, line 3; error" in log
    prober = probing.Prober(ptxas, "sm_80", "sm_80", TABLE.versions)
    assert set(prober.refuses(asked, "7.0", generate=False)) == {fatal}


@needs_ptxas
def test_errors_without_a_line_are_halved_down_to_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ptxas is not None
    bad = "bar.sync 3"

    def log(self: Assembler, ptx: str, target: str) -> str | None:
        return "ptxas fatal   : Memory allocation failure" if bad in ptx else None

    monkeypatch.setattr(Assembler, "log", log)
    asked = [f"bar.sync {i}" for i in range(8)]
    refused = probing.Prober(ptxas, "sm_90", "sm_90", TABLE.versions).refuses(asked, "9.5")
    assert refused == {bad: "ptxas fatal   : Memory allocation failure"}


@needs_ptxas
def test_a_form_that_leaves_out_too_much_is_an_error(
    few_targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ptxas is not None
    monkeypatch.setattr(build, "form_of", lambda probe: "one form")
    with pytest.raises(build.AmbiguousForm, match="griddepcontrol"):
        build.make_table(ptxas, ["ret", "griddepcontrol.wait"], workers=2)


def test_patterns_expand() -> None:
    assert list(probes.expand("add<|.rn>.<f32|f64> x")) == ["add.f32 x", "add.f64 x", "add.rn.f32 x", "add.rn.f64 x"]
    assert list(probes.expand("ld.v2.b32 {2r}, [l1]")) == ["ld.v2.b32 {r1, r2}, [l1]"]
    text = probes.module(["ld.shared.b32 r1, [S]", "bra L", ".maxnreg 32"], "8.0", "sm_90")
    assert set(read(text).uses) >= {"ld.shared.b32 r,[a]", "bra r", ".maxnreg"}
    kernels = text.splitlines()[probes.FIRST_LINE - 1 :]
    assert [line.split()[2] for line in kernels] == ["k0()", "k1()", "k2()"]
    with pytest.raises(PtxReadError):
        probes.form_of("+")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "not json", '{"schema": "other"}', '{"schema": "kda-lib/ptx-table/v1"}', "null"]
)
def test_a_broken_table_says_how_to_make_it(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ptx_table.json"
    path.write_text(content)
    with pytest.raises(tables.TableReadError, match="run: make ptx-table"):
        tables.load(path)
    monkeypatch.setattr(command.tables, "load", lambda: tables.loads(content))
    result = CliRunner().invoke(cli.app, ["audit", "stamp", "--target", "sm_90a"])
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_missing_table_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(tables.TableReadError, match=r"ptx_table\.json: .*run: make ptx-table"):
        tables.load(tmp_path / "ptx_table.json")


def test_no_assembler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(cls: type[Assembler]) -> Assembler:
        raise AssemblerMissing("ptxas: expected nvidia-cuda-nvcc")

    monkeypatch.setattr(Assembler, "find", classmethod(missing))
    assert installed() is None
    result = CliRunner().invoke(cli.app, ["ptx-table"])
    assert result.exit_code == 1
    assert result.stderr == "error: ptxas: expected nvidia-cuda-nvcc (exit 1)\n"
    result = CliRunner().invoke(cli.app, ["audit", "stamp", "--target", "sm_90a"])
    assert result.exit_code == 0, "the table is enough for what it has"


def test_versions_are_in_order() -> None:
    assert list(TABLE.versions) == sorted(TABLE.versions, key=version_key)
    assert version_key("8.10") > version_key("8.9")
