"""The matrix of DSL releases: its repro, its isolation, its result, and the committed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_lab import make_repo

from kda_lib.arch import Arch
from kda_lib.kernels.fma import FmaForm
from kda_lib.lab import dsl_matrix
from kda_lib.lab.dsl_matrix import MATRIX_TARGETS, REPRO, VERSIONS, Environment, claims, compile_one, run_dsl_matrix
from kda_lib.lab.records import Result, read_result, stale_inputs

ROOT = Path(__file__).parents[1]
HERE = Environment("4.8.1", Path(sys.executable), ("nvidia-cutlass-dsl==4.8.1",))


def python_that(does: str, folder: Path) -> Environment:
    """An environment whose Python is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    return Environment("0.0", python, ())


@pytest.mark.parametrize(("form", "code", "said"), [("native", 1, "requires .target"), ("portable-shift", 0, "ok")])
def test_the_repro_stands_alone(form: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / REPRO.name
    script.write_text(REPRO.read_text())
    command = [sys.executable, script.name, "sm_90a", form]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_the_repro_needs_the_dsl_only_and_fits_a_page() -> None:
    text = REPRO.read_text()
    assert "kda_lib" not in text
    assert "torch" not in text
    assert len(text.splitlines()) <= 66


def test_rows_of_this_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Environment, "create", classmethod(lambda cls, version, folder: HERE))
    repo = make_repo(tmp_path / "repo", monkeypatch)
    result = run_dsl_matrix(repo, versions=["4.8.1"], targets=["sm_90a"], progress=False)
    assert read_result(repo / "reports" / "cpu" / "results" / "dsl_matrix.json") == result
    assert stale_inputs(result, repo) == []
    assert (result.status, result.mode, result.gpu, result.seeds) == ("ok", "compile-only", None, {})
    assert set(result.environment) == {"python", "4.8.1"}
    assert "perf_counter" in str(result.timing_method)
    rows = {row["fma"]: row for row in result.rows}
    assert list(rows) == ["native", "portable-cvt", "portable-shift"]
    assert rows["portable-cvt"]["outcome"] == rows["portable-shift"]["outcome"] == "ok"
    assert "for sm_90a" in str(rows["portable-shift"]["detail"])
    native = rows["native"]
    assert native["outcome"] == "instruction rejected"
    assert (native["instruction"], native["lowest_target"]) == ("fma.rn.f32.bf16", "sm_100")
    assert (native["uses"], native["found_by"]) == (1, "log")
    file_name, _, line = str(native["source"]).partition(":")
    assert "fma(self.form" in (ROOT / file_name).read_text().splitlines()[int(line) - 1]
    # Verbatim, but the folder of the repro is nobody's business.
    assert str(native["detail"]).startswith('error: "Fma"("repro_fma.py":')
    assert result.parameters == {"profile": "cpu", "versions": ["4.8.1"], "targets": ["sm_90a"]}
    assert {claim.id: claim.holds for claim in result.claims}["native-rejected"]


def test_an_unknown_target_is_an_outcome(tmp_path: Path) -> None:
    row = compile_one(HERE, "sm_107a", FmaForm.SHIFT, tmp_path)
    assert row["outcome"] == "target unknown"
    assert row["detail"].startswith("DSLRuntimeError: Unsupported GPU architecture 'sm_107a'")


@pytest.mark.parametrize(
    ("does", "detail"),
    [
        ("echo 'LLVM ERROR: broken' >&2; kill -SEGV $$", "exit code -11: LLVM ERROR: broken"),
        ("exit 0", "exit code 0: it said nothing"),
        ("exec sleep 20", "no end after 0.5 s"),
    ],
)
def test_a_compiler_that_dies_or_hangs_is_an_outcome(
    does: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dsl_matrix, "LIMIT_S", 0.5)
    row = compile_one(python_that(does, tmp_path), "sm_90a", FmaForm.NATIVE, tmp_path)
    assert (row["outcome"], row["detail"]) == ("crashed", detail)
    assert (row["dsl"], row["target"], row["fma"], row["instruction"]) == ("0.0", "sm_90a", "native", None)
    assert row["seconds"] <= 5


def test_a_wrong_target_is_refused_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "create", classmethod(lambda cls, version, folder: pytest.fail("installed")))
    with pytest.raises(ValueError, match="target: expected one of"):
        run_dsl_matrix(tmp_path, targets=["sm_90a", "hopper"], progress=False)


def test_a_release_that_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(folder: Path, with_pip: bool) -> None:
        assert with_pip
        (folder / "bin").mkdir(parents=True)
        python_that("echo 'ERROR: No matching distribution' >&2; exit 1", folder / "bin")

    monkeypatch.setattr("venv.create", create)
    with pytest.raises(dsl_matrix.InstallFailed, match=r"4\.6\.2 could not be installed; pip said: ERROR: No matching"):
        Environment.create("4.6.2", tmp_path / "new")


def test_claims_see_a_release_that_behaves_otherwise() -> None:
    def row(target: str, fma: FmaForm, outcome: str, instruction: str | None = None) -> dict[str, Any]:
        return {"target": target, "fma": fma.value, "outcome": outcome, "instruction": instruction}

    rows = [
        row("sm_90a", FmaForm.NATIVE, "instruction rejected", "fma.rn.f32.bf16"),
        row("sm_100a", FmaForm.NATIVE, "ok"),
        row("sm_90a", FmaForm.SHIFT, "ok"),
        row("sm_107a", FmaForm.NATIVE, "target unknown"),
    ]
    assert all(claim.holds for claim in claims(rows))
    for broken, name in (
        (row("sm_80", FmaForm.NATIVE, "ok"), "native-rejected"),
        (row("sm_80", FmaForm.NATIVE, "failed"), "named"),
        (row("sm_100a", FmaForm.NATIVE, "instruction rejected", "fma.rn.f32.bf16"), "native-ok"),
        (row("sm_80", FmaForm.CVT, "failed"), "portable-ok"),
        (row("sm_90a", FmaForm.NATIVE, "crashed", "fma.rn.f32.bf16"), "survived"),
    ):
        assert [claim.id for claim in claims([*rows, broken]) if not claim.holds] == [name]


@pytest.fixture(scope="module")
def committed() -> Result:
    return read_result(ROOT / "reports" / "cpu" / "results" / "dsl_matrix.json")


def test_the_committed_result_is_of_this_repro(committed: Result) -> None:
    assert stale_inputs(committed, ROOT) == []


def test_the_committed_result_is_complete(committed: Result) -> None:
    found = {(row["dsl"], row["target"], row["fma"]) for row in committed.rows}
    assert found == {(v, t, f.value) for v in VERSIONS for t in MATRIX_TARGETS for f in FmaForm}
    assert len(found) == len(committed.rows)
    assert all(claim.holds for claim in committed.claims)
    for version in VERSIONS:
        assert f"nvidia-cutlass-dsl=={version}" in str(committed.environment[version])


def test_how_the_releases_differ(committed: Result) -> None:
    native = [row for row in committed.rows if row["fma"] == "native"]
    lacking = [row for row in native if Arch.parse(str(row["target"])) < Arch(10, 0)]
    assert len(lacking) == 3 * 5
    for row in lacking:
        silent = row["dsl"] == "4.6.2"
        assert row["outcome"] == ("compiler gave no log" if silent else "instruction rejected")
        assert row["found_by"] == ("probe" if silent else "log")
        assert ("NVVM_ERROR_COMPILATION" in str(row["detail"])) == silent
    unknown = {str(row["dsl"]): str(row["detail"]) for row in native if row["target"] == "sm_107a"}
    assert unknown["4.6.2"] == unknown["4.7.1"] == "KeyError: 'sm_107a'"
    assert unknown["4.8.1"].startswith("DSLRuntimeError: Unsupported GPU architecture")
