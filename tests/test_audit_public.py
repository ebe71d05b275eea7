"""The survey of public PTX, on a few texts made here: its rows, what its claims notice, failing tools."""

import sys
from pathlib import Path

import pytest
from compiled import compiled

from kda_lib.arch import TARGETS, Arch
from kda_lib.lab import records
from kda_lib.lab.audit import public
from kda_lib.lab.audit import table as tables
from kda_lib.lab.audit.assembler import Assembler, installed
from kda_lib.lab.audit.reader import read
from kda_lib.lab.audit.sources import kernel_config
from kda_lib.lab.scripted import Row

pytestmark = pytest.mark.skipif(installed() is None, reason="nvidia-cuda-nvcc is not installed")
TABLE = tables.load()
Files = list[tuple[str, str, Path]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Two texts of one library, and one of another."""
    found = []
    for origin, name, target in (("a.so", "one", "sm_80"), ("a.so", "two", "sm_80"), ("b.so", "three", "sm_100a")):
        path = tmp_path / f"{name}.ptx"
        path.write_text(compiled(kernel_config("skinny_k", Arch.parse(target), None, 1 + len(found)), target).ptx)
        found.append((f"package {target}", origin, path))
    return found


def survey(files: Files, table: tables.Table = TABLE) -> tuple[list[Row], dict[str, records.Claim]]:
    rows, claims = public.survey(files, table, Assembler.find())
    return rows, {claim.id: claim for claim in claims}


def test_rows_and_claims(files: Files) -> None:
    rows, claims = survey(files)
    assert [(row["kernel"], row["target"]) for row in rows] == [(o, t) for o in ("b.so", "a.so") for t in TARGETS]
    for row in rows:
        records.ROW.validate_python(row)
    of = {(row["kernel"], row["target"]): row for row in rows}
    assert {row["outcome"] for row in rows if row["kernel"] == "a.so"} == {"clean"}
    assert of["a.so", "sm_80"]["detail"].startswith(".target sm_80: 2 texts, ")
    assert of["b.so", "sm_100a"]["outcome"] == "clean"
    assert of["b.so", "sm_120a"]["outcome"] == "instructions fit"
    hopper = of["b.so", "sm_90a"]
    assert (hopper["outcome"], hopper["instruction"]) == ("instructions lacking", "fma.rn.f32.bf16 r,r,r,r")
    assert hopper["lowest_target"] == "sm_100"
    assert hopper["uses"] == files[2][2].read_text().count("fma.rn.f32.bf16") > 0
    assert all(claim.holds for claim in claims.values())
    assert (claims["mixed"].value, claims["mixed"].unit) == (1, "of 3")


def test_a_text_that_cannot_be_read_is_counted(files: Files) -> None:
    files[0][2].write_text("no PTX")
    rows, claims = survey(files)
    assert (claims["all-read"].value, claims["all-read"].holds) == (1, False)
    assert len(rows) == 2 * len(TARGETS)


def test_a_table_that_is_wrong_is_noticed(files: Files) -> None:
    takes = {**TABLE.forms["fma.rn.f32.bf16 r,r,r,r"], "sm_90a": "8.0"}
    wrong = tables.Table(**{**vars(TABLE), "forms": {**TABLE.forms, "fma.rn.f32.bf16 r,r,r,r": takes}})
    _, claims = survey(files, wrong)
    assert (claims["agrees"].value, claims["agrees"].holds) == (1, False)


def test_forms_that_the_table_lacks_are_counted_and_probed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "TARGETS", ("sm_90a",))
    forms = {form: takes for form, takes in TABLE.forms.items() if not form.startswith("fma.rn.f32")}
    rows, claims = survey(files, tables.Table(**{**vars(TABLE), "forms": forms}))
    assert claims["covered"].value == 2
    assert not claims["covered"].required
    assert claims["agrees"].holds
    assert "unknown" not in {row["outcome"] for row in rows}


def test_retarget_changes_nothing_else(files: Files) -> None:
    ptx = files[2][2].read_text()
    moved = public.retarget(read(ptx), "sm_90a", "8.0")
    changed = [(a, b) for a, b in zip(ptx.splitlines(), moved.splitlines(), strict=True) if a != b]
    assert changed == [(".version 8.8", ".version 8.0"), (".target sm_100a", ".target sm_90a")]


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    script = "import sys; sys.exit('info: no code here')"
    with pytest.raises(public.SurveyFailed, match="-c failed; it said last: info: no code here"):
        public._run([sys.executable, "-c", script], cwd=tmp_path)
    public._run([sys.executable, "-c", script], cwd=tmp_path, harmless="no code")
    with pytest.raises(public.SurveyFailed):
        public._run([sys.executable, "-c", script], cwd=tmp_path, harmless="other")
