"""The table of evidence of notebook 07: what is missing, stale, refuted or only in part shows as that."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from kda_lib.arch import TARGETS
from kda_lib.lab import formal, provenance, records
from kda_lib.lab.audit import audit, evidence, load, read
from kda_lib.lab.audit.check import Audit
from kda_lib.lab.audit.evidence import COLUMNS, Cell, Standing
from kda_lib.lab.matrix import KERNELS

Rows = list[dict[str, Any]]
Write = Callable[[str, Rows], Path]

CLEAN = audit(read(".version 8.8\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\nret;\n}\n"), "sm_80", load())
EVERY = range(1, 17)


def audits() -> dict[tuple[str, str], Audit | None]:
    """Clean everywhere, with no stream kernel on sm_80."""
    found: dict[tuple[str, str], Audit | None] = {(kernel, target): CLEAN for kernel in KERNELS for target in TARGETS}
    return found | {("stream", "sm_80"): None}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with this one's sources, and no result."""
    for name in ("kda_lib", "notebooks", "requirements", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def write(root: Path) -> Write:
    """Write a result of a command as one would be now."""

    def written(name: str, rows: Rows) -> Path:
        now = datetime.now(UTC)
        result = records.Result(
            notebook=name,
            run_id="test",
            started=now,
            ended=now,
            status="ok",
            mode="compile-only",
            inputs_sha256=provenance.inputs_sha256(Path(f"{name}.ipynb"), "cpu", root),
            git=records.Git(commit=None, dirty=None),
            parameters={"profile": "cpu"},
            environment={},
            gpu=None,
            seeds={},
            claims=[],
            rows=rows,
        )
        path = root / "reports" / "cpu" / "results" / f"{name}.json"
        records.write_result(result, path)
        return path

    return written


def cell(
    root: Path, column: str, kernel: str = "skinny_n", target: str = "sm_90a", launches: Rows | None = None
) -> Cell:
    return evidence.table(root, audits(), launches or [])[kernel, target][column]


def compile_rows(outcome: str = "ok") -> Rows:
    return [
        {"kernel": "skinny_n", "fma": "portable-shift", "target": "sm_90a", "M": m,
         "outcome": outcome if m == 3 else "ok"}
        for m in EVERY
    ]  # fmt: skip


def emulation_rows(*m_values: int, outcome: str = "bit-exact") -> Rows:
    return [
        {"kernel": "skinny_n", "target": "sm_90a", "M": m, "variant": "ordinary", "outcome": outcome} for m in m_values
    ]


def proof_rows(*outcomes: str, ctas: int = 9, m_values: tuple[int, ...] = tuple(EVERY)) -> Rows:
    variants = ("synchronisation", "race freedom")
    return [
        {"kernel": "skinny_n", "target": "sm_90a", "M": m, "variant": variant, "outcome": outcome, "ctas": ctas,
         "grid": 9}
        for m in m_values
        for variant, outcome in zip(variants, outcomes, strict=False)
    ]  # fmt: skip


def test_without_records_nothing_is_assumed(root: Path) -> None:
    found = evidence.table(root, audits(), [])
    assert set(found) == {(kernel, target) for kernel in KERNELS for target in TARGETS}
    for (kernel, target), cells in found.items():
        absent = (kernel, target) == ("stream", "sm_80")
        for column in COLUMNS:
            if absent:
                assert cells[column] == evidence.NO_KERNEL
            elif column == "audited":
                assert cells[column].text == ("every M" if kernel == "stream" else "M = 8")
            else:
                assert cells[column] == Cell(Standing.NONE, "-", "")


def test_an_audit_that_is_not_clean_refutes(root: Path) -> None:
    foreign = read(
        ".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\ngriddepcontrol.wait;\nret;\n}\n"
    )
    found = evidence.table(root, audits() | {("skinny_n", "sm_90a"): audit(foreign, "sm_80", load())}, [])
    assert found["skinny_n", "sm_90a"]["audited"].standing is Standing.REFUTED


def test_compiles(root: Path, write: Write) -> None:
    write("compile_matrix", compile_rows())
    assert cell(root, "compiles") == Cell(Standing.WHOLE, "every M", "../cpu/results/compile_matrix.json")
    assert cell(root, "compiles", target="sm_90") == evidence.NOTHING
    write("compile_matrix", compile_rows("crashed"))
    assert (cell(root, "compiles").standing, cell(root, "compiles").text) == (Standing.REFUTED, "fails at M = 3")
    write("compile_matrix", [{"kernel": "stream", "target": "sm_90a", "tp": 8, "outcome": "ok"}])
    assert cell(root, "compiles", "stream").text == "every M"


def test_the_native_form_says_nothing_where_the_library_uses_the_portable_one(root: Path, write: Write) -> None:
    write("compile_matrix", [row | {"fma": "native"} for row in compile_rows()])
    assert cell(root, "compiles") == evidence.NOTHING


def test_a_record_of_other_code_is_stale(root: Path, write: Write) -> None:
    path = write("compile_matrix", compile_rows())
    result = records.read_result(path)
    hashes = result.inputs_sha256 | {"kda_lib": "0" * 64}
    records.write_result(result.model_copy(update={"inputs_sha256": hashes}), path)
    assert cell(root, "compiles") == Cell(Standing.PART, "every M, stale", "../cpu/results/compile_matrix.json")


def test_executed_now_or_recorded(root: Path, write: Write) -> None:
    now = cell(root, "executed", launches=emulation_rows(8))
    assert now == Cell(Standing.PART, "M = 8", "results/07_unseen_architectures.json")
    write("emulation", emulation_rows(*EVERY))
    assert cell(root, "executed", launches=emulation_rows(8)).standing is Standing.WHOLE
    refuted = cell(root, "executed", launches=emulation_rows(8, outcome="differs"))
    assert (refuted.standing, refuted.text) == (Standing.REFUTED, "fails at M = 8")
    write("emulation", emulation_rows(*EVERY) + emulation_rows(2, outcome="violation"))
    assert cell(root, "executed", launches=emulation_rows(8)).text == "fails at M = 2"


@pytest.mark.parametrize(
    ("rows", "standing", "text"),
    [
        (proof_rows("proved", "proved"), Standing.WHOLE, "every M"),
        (proof_rows("proved", "proved", ctas=1), Standing.PART, "every M, first CTAs"),
        (proof_rows("proved", "proved", m_values=(1, 2)), Standing.PART, "2 of 16 M"),
        (proof_rows("proved", "not proved"), Standing.NONE, "not proved"),
        (proof_rows("proved"), Standing.NONE, "not proved"),
        (proof_rows("proved", "proved") + proof_rows("not proved", m_values=(5,)), Standing.PART, "15 of 16 M"),
        ([{"kernel": "skinny_n", "target": "sm_90a", "M": 8, "variant": "fault: x", "outcome": "proved"}],
         Standing.NONE, "-"),
    ],
)  # fmt: skip
def test_not_proved_is_never_proved(root: Path, write: Write, rows: Rows, standing: Standing, text: str) -> None:
    write(formal.NAME, rows)
    found = cell(root, "race-free")
    assert (found.standing, found.text) == (standing, text)
    assert cell(root, "race-free", target="sm_100a") == evidence.NOTHING


def test_hardware_counts_only_on_its_own_target() -> None:
    """The committed records: an H200 ran the kernels, for sm_90a and no other target."""
    found = evidence.table(ROOT, audits(), [])
    ran = {key for key, cells in found.items() if cells["on hardware"].link}
    assert ran == {(kernel, "sm_90a") for kernel in KERNELS}
    for kernel, target in ran:
        shown = found[kernel, target]["on hardware"]
        assert shown.text.startswith("every M")
        assert shown.text.endswith("h200")
        assert (ROOT / "reports" / "cpu" / shown.link).is_file()


def test_the_table_shows_and_links_every_cell(root: Path, write: Write) -> None:
    write("compile_matrix", compile_rows())
    found = evidence.table(root, audits(), [])
    shown = evidence.shown(found)
    assert repr(shown).count("\n") == len(KERNELS) * len(TARGETS) - 1
    assert '<a href="../cpu/results/compile_matrix.json">every M</a>' in shown._repr_html_()
    assert len(evidence.rows_of(found)) == len(KERNELS) * len(TARGETS) * len(COLUMNS)
    assert all(records.ROW.validate_python(row) for row in evidence.rows_of(found))
