"""The compile matrix: its rows and claims on real compiles, dead workers, Ctrl-C, progress, the result file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_lab import make_repo

from kda_lib.arch import TARGETS, Arch
from kda_lib.cache import ArtifactCache, CacheEntry
from kda_lib.compile import compile_kernel
from kda_lib.errors import CompileError, CompilerCrashed, UnknownTarget
from kda_lib.kernels.fma import FmaForm, supports
from kda_lib.kernels.stream_config import stream_config
from kda_lib.lab import matrix, provenance, records, sass
from kda_lib.lab.matrix import compile_matrix, matrix_claims, run_matrix
from kda_lib.lab.scripted import Row
from kda_lib.shapes import KdaShapes

ROOT = Path(__file__).resolve().parent.parent
SUBSET: dict[str, Any] = {"targets": ("sm_90a", "sm_100a"), "m_values": (1, 3)}
WARM: dict[str, Any] = {"kernels": ("skinny_k",), "forms": (FmaForm.SHIFT,), "workers": 1}


def is_warm(row: Row) -> bool:
    return row["kernel"] == "skinny_k" and row["fma"] == "portable-shift"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def rows(cache: ArtifactCache) -> list[Row]:
    return compile_matrix(**SUBSET, workers=2, cache=cache, progress=False)


def gemms(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kernel"] != "stream"]


def find(rows: list[Row], kernel: str, fma: str, target: str, m: int) -> Row:
    (row,) = (r for r in gemms(rows) if (r["kernel"], r["fma"], r["target"], r["M"]) == (kernel, fma, target, m))
    return row


def test_rows_follow_the_arguments(rows: list[Row]) -> None:
    assert [(r["kernel"], r["fma"], r["target"], r["M"]) for r in gemms(rows)] == [
        (kernel, fma, target, m)
        for kernel in ("skinny_n", "skinny_k")
        for fma in ("native", "portable-cvt", "portable-shift")
        for target in ("sm_90a", "sm_100a")
        for m in (1, 3)
    ]
    assert [(r["kernel"], r["target"], r["tp"]) for r in rows[len(gemms(rows)) :]] == [
        ("stream", target, tp) for target in ("sm_90a", "sm_100a") for tp in (4, 8, 16)
    ]
    for row in rows:
        records.ROW.validate_python(row)


def test_accepted_rows_say_what_became_of_the_kernel(rows: list[Row], cache: ArtifactCache) -> None:
    accepted = [row for row in rows if row["outcome"] == "ok"]
    assert len(accepted) == 20 + 6
    for row in accepted:
        assert 0 < row["registers"] <= 255
        assert row["spills"] == row["stack_bytes"] == 0
        assert (row["smem_bytes"] > 0) == (row["kernel"] != "skinny_k")
        assert row["code_bytes"] % sass.INSTRUCTION_BYTES == 0
        assert len(row["cubin_sha256"]) == 64
        assert 0 < row["seconds"] < 60
    for row in gemms(accepted):
        assert row["sass"]["FHFMA" if row["fma"] == "native" else "FFMA"] > 0
        assert (row["cvt_per_fma"] == 0) == (row["fma"] == "native")
    for row in accepted[20:]:
        config = stream_config(Arch.parse(row["target"]), KdaShapes(row["tp"]), matrix.SMS, pdl=True)
        assert row["smem_bytes"] >= config.launch.smem, "dynamic shared memory counts"
        assert row.keys().isdisjoint({"fma", "M", "sass", "cvt_per_fma"})
    assert len({row["cubin_sha256"] for row in accepted}) == len(accepted)


def test_rejected_rows_name_the_instruction(rows: list[Row]) -> None:
    for kernel in ("skinny_n", "skinny_k"):
        row = find(rows, kernel, "native", "sm_90a", 3)
        assert row["outcome"] == "instruction rejected"
        assert (row["instruction"], row["lowest_target"]) == ("fma.rn.f32.bf16", "sm_100")
        assert row["uses"] > 0
        assert row["source"].startswith("kda_lib/kernels/fma.py:")
        assert "registers" not in row


def test_claims_hold(rows: list[Row]) -> None:
    claims = {claim.id: claim for claim in matrix_claims(rows)}
    assert {claim.id for claim in claims.values() if not claim.holds} == set()
    assert set(claims) == {
        "native-accepted", "native-rejected", "portable-accepted", "no-crash", "no-spills", "no-stack",
        "native-no-conversion", "shift-not-dearer", "stream-accepted",
    }  # fmt: skip
    assert claims["stream-accepted"].statement == "the stream kernel compiles on sm_90a, sm_100a"
    assert claims["native-accepted"].statement == "native compiles on sm_100a"
    assert claims["native-rejected"].statement.startswith("native is rejected on sm_90a,")
    assert claims["portable-accepted"].statement == "portable compiles on sm_90a, sm_100a"


@pytest.mark.parametrize(
    ("claim", "where", "change"),
    [
        ("native-accepted", ("native", "sm_100a"), {"outcome": "instruction rejected"}),
        ("native-rejected", ("native", "sm_90a"), {"outcome": "failed"}),
        ("native-rejected", ("native", "sm_90a"), {"instruction": "mapa"}),
        ("native-rejected", ("native", "sm_90a"), {"lowest_target": "sm_120"}),
        ("portable-accepted", ("portable-shift", "sm_90a"), {"outcome": "crashed"}),
        ("no-crash", ("portable-cvt", "sm_90a"), {"outcome": "crashed"}),
        ("no-crash", ("portable-cvt", "sm_90a"), {"outcome": "failed"}),
        ("no-spills", ("portable-cvt", "sm_90a"), {"spills": 4}),
        ("no-stack", ("portable-cvt", "sm_100a"), {"stack_bytes": 16}),
        ("native-no-conversion", ("native", "sm_100a"), {"cvt_per_fma": 0.125}),
        ("shift-not-dearer", ("portable-shift", "sm_90a"), {"cvt_per_fma": 9.0}),
    ],
)
def test_claims_see_what_is_wrong(claim: str, where: tuple[str, str], change: Row, rows: list[Row]) -> None:
    wrong = find(rows, "skinny_k", *where, 3)
    changed = [row | change if row is wrong else row for row in rows]
    assert claim in {c.id for c in matrix_claims(changed) if not c.holds}


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("stream-accepted", {"outcome": "failed"}),
        ("no-crash", {"outcome": "crashed"}),
        ("no-spills", {"spills": 4}),
        ("no-stack", {"stack_bytes": 16}),
    ],
)
def test_claims_see_what_is_wrong_with_the_stream_kernel(claim: str, change: Row, rows: list[Row]) -> None:
    failed = {c.id for c in matrix_claims([*rows[:-1], rows[-1] | change]) if not c.holds}
    assert claim in failed


def test_claims_about_nothing_are_left_out(rows: list[Row]) -> None:
    hopper = [row for row in gemms(rows) if row["target"] == "sm_90a" and row["fma"] == "native"]
    assert {claim.id for claim in matrix_claims(hopper)} == {"native-rejected", "no-crash"}


def test_warm_cache_compiles_nothing(rows: list[Row], cache: ArtifactCache, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in cache.folder.iterdir()}
    again = compile_matrix(**(SUBSET | WARM), cache=cache, progress=False)
    assert capsys.readouterr() == ("", "")
    assert again == [row for row in rows if is_warm(row)]
    assert len(again) == 4
    assert {path.name: path.stat().st_mtime_ns for path in cache.folder.iterdir()} == before


def test_a_unit_gives_the_same_rows_in_this_process(rows: list[Row], cache: ArtifactCache) -> None:
    (unit,) = matrix.plan(("skinny_k",), ("sm_90a",), (1, 3), (FmaForm.SHIFT,))
    expected = [row for row in rows if is_warm(row) and row["target"] == "sm_90a"]
    assert matrix._run(unit, compile_kernel, cache) == expected


def test_plan_is_the_whole_matrix() -> None:
    units = matrix.plan(matrix.KERNELS, TARGETS, matrix.M_VALUES, matrix.FORMS)
    jobs = [job for unit in units for job in unit]
    with_cvt = sum(supports(Arch.parse(target), FmaForm.CVT) for target in TARGETS)
    with_clusters = sum(Arch.parse(target).has_clusters for target in TARGETS)
    assert len(jobs) == len(set(jobs)) == 2 * 16 * (2 * len(TARGETS) + with_cvt) + 3 * with_clusters
    assert all(len({job.arch for job in unit}) == 1 for unit in units)


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        (
            {"kernels": ("skinny_n", "gemm")},
            ValueError,
            "kernels: expected some of skinny_n, skinny_k, stream, got gemm",
        ),
        ({"targets": ("sm_90a", "h1000")}, ValueError, "target: expected one of .* got 'h1000'"),
        ({"m_values": (1, 17)}, ValueError, "M: expected 1 to 16 tokens, got 17"),
        ({"m_values": (True,)}, TypeError, "M: expected an int, got bool"),
        ({"forms": ("native",)}, TypeError, "fma: expected an FmaForm, got str"),
    ],
)
def test_bad_arguments(
    argument: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "worker_pool", lambda workers: pytest.fail("processes were started"))
    with pytest.raises(error, match=message):
        compile_matrix(**argument)


@dataclass(frozen=True)
class DeadlyCache(ArtifactCache):
    """Kills the process that would compile one M: the compiler crashing in the middle of its work."""

    m: int

    def load(self, key: Any) -> CacheEntry | None:
        if key["config"]["m"] == self.m and key["target"] == "sm_90a":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(key)


def test_only_the_culprit_of_a_crash_is_recorded(
    rows: list[Row], cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    deadly = DeadlyCache(cache.folder, m=3)
    survived = compile_matrix(**(SUBSET | WARM | {"workers": 2}), cache=deadly, progress=False)
    expected = [row for row in rows if is_warm(row)]
    assert len(survived) == len(expected) == 4
    for row, normal in zip(survived, expected, strict=True):
        if row["M"] == 3 and row["target"] == "sm_90a":
            assert (row["outcome"], row["error"]) == ("crashed", "CompilerCrashed")
            assert row["detail"] == "the compiler's process died on skinny_k for sm_90a (exit code -9)"
        else:
            assert row == normal


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnknownTarget("sm_90a is not known\nmore", target="sm_90a"), "target unknown"),
        (CompileError("the compiler said no\nmore", target="sm_90a"), "failed"),
        (CompilerCrashed("it died\nmore", target="sm_90a"), "crashed"),
    ],
)
def test_other_outcomes(error: CompileError, outcome: str) -> None:
    def compiler(*args: Any, **kwargs: Any) -> None:
        raise error

    ((job,),) = matrix.plan(("skinny_k",), ("sm_90a",), (1,), (FmaForm.SHIFT,))
    (row,) = matrix._run((job,), compiler, None)
    assert (row["outcome"], row["error"]) == (outcome, type(error).__name__)
    assert row["detail"] == str(error).splitlines()[0]
    records.ROW.validate_python(row)


def group(leader: int) -> list[psutil.Process]:
    """Living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A long run in a process group of its own, with its two workers at work."""
    # A job in the background of a script starts with SIGINT ignored, which Python then leaves so.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kda_lib.lab.matrix import compile_matrix; compile_matrix(workers=2)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    # A worker makes its first folder for the compiler's output when it starts to compile.
    while not list(tmp_path.glob("kda_lib-*/kda_lib-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield process
    for stray in group(process.pid):
        stray.kill()
    process.wait()


def ended(leader: int) -> bool:
    deadline = time.monotonic() + 15
    while group(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not group(leader)


def test_interrupt_leaves_no_process_and_no_file(running: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert len(group(running.pid)) >= 3
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode != 0
    assert said.count(b"Traceback") == 1  # of the caller, who let KeyboardInterrupt pass; workers are silent
    assert ended(running.pid)
    assert list(tmp_path.glob("kda_lib-*")) == []


def test_workers_end_with_their_parent(running: subprocess.Popen[bytes]) -> None:
    assert len(group(running.pid)) >= 3
    running.kill()
    running.wait()
    assert ended(running.pid)


def test_progress_in_plain_lines(rows: list[Row], cache: ArtifactCache, capsys: pytest.CaptureFixture[str]) -> None:
    compile_matrix(**(SUBSET | WARM), cache=cache)
    out, said = capsys.readouterr()
    assert out == ""
    assert [line.rpartition(",")[0] for line in said.splitlines()] == [
        "compile matrix: 2/4 kernels",
        "compile matrix: 4/4 kernels",
    ]


def test_progress_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with matrix._reporter(4, True) as report:
        report(1)
        report(3)
    assert "4/4" in capsys.readouterr().err


def test_result_file(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repo(tmp_path / "repo", monkeypatch)
    selection = SUBSET | WARM

    def found(**asked: Any) -> list[Row]:
        assert asked == selection
        return [row for row in rows if is_warm(row)]

    monkeypatch.setattr(matrix, "compile_matrix", found)
    monkeypatch.setattr(provenance, "current_device", lambda: None)
    path = repo / "reports" / "cpu" / "results" / "compile_matrix.json"
    result = run_matrix(repo, **selection)
    assert records.read_result(path) == result
    assert (result.status, result.mode, result.profile, result.gpu) == ("ok", "compile-only", "cpu", None)
    assert records.stale_inputs(result, repo) == []
    assert result.rows == [row for row in rows if is_warm(row)]
    (repo / "kda_lib" / "lab" / "profiles" / "cpu.yaml").write_text("name: cpu\n")
    assert records.stale_inputs(result, repo) == ["profile"]


def test_result_says_when_a_claim_fails(
    rows: list[Row], cache: ArtifactCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = make_repo(tmp_path / "repo", monkeypatch)
    monkeypatch.setattr(matrix, "compile_matrix", lambda **selection: [rows[-1] | {"spills": 8}])
    assert run_matrix(repo).status == "failed"


def test_unwritable_result(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repo(tmp_path / "repo", monkeypatch)
    monkeypatch.setattr(matrix, "compile_matrix", lambda **selection: rows)
    (repo / "reports").write_text("a file")
    with pytest.raises(records.ResultWriteError, match="cannot write"):
        run_matrix(repo)
    assert (repo / "reports").read_text() == "a file"
