"""Result files."""

import errno
import json
import math
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_lab import device, make_repo
from pydantic import ValidationError

from kda_lib.lab import records
from kda_lib.lab.device import DeviceState
from kda_lib.lab.records import (
    Claim,
    Result,
    ResultReadError,
    ResultWriteError,
    read_result,
    write_result,
)

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_repo(tmp_path / "repo", monkeypatch)


def gpu() -> records.Gpu:
    kept = device().model_dump(include=set(records.Gpu.model_fields))
    return records.Gpu(**kept, before=DeviceState(), after=DeviceState())


def result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "notebook": "02_demo",
        "run_id": "run-1",
        "started": STARTED,
        "ended": STARTED + timedelta(seconds=9),
        "status": "ok",
        "mode": "compile-only",
        "inputs_sha256": dict.fromkeys(records.INPUTS, "0" * 64),
        "git": {"commit": "a" * 40, "dirty": False},
        "parameters": {"profile": "cpu", "seed": 0},
        "environment": {"python": "3.11.7", "driver": None},
        "gpu": None,
        "seeds": {"numpy": 0},
        "claims": [Claim(id="bit-equal", statement="both agree", value=0, bound="== 0", holds=True)],
        "rows": [
            {"variant": "portable", "M": 4, "sass": {"FFMA": 32}, "pdl": True, "median_us": 24.5, "samples": [1.5]}
        ],
    }
    return Result.model_validate({**fields, **changes})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "02_demo.json"
    for written in (result(), result(mode="full", gpu=gpu(), parameters={"profile": "h200"})):
        write_result(written, path)
        assert read_result(path) == written
    assert [file.name for file in path.parent.iterdir()] == ["02_demo.json"]


def test_the_file_has_the_fields_of_the_design(tmp_path: Path) -> None:
    path = tmp_path / "02_demo.json"
    write_result(result(), path)
    content = json.loads(path.read_text())
    assert content["schema"] == "kda-lib/result/v1"
    assert list(content) == [
        *("schema", "notebook", "run_id", "started", "ended", "status", "mode", "inputs_sha256", "git", "parameters"),
        *("environment", "gpu", "seeds", "timing_method", "claims", "rows"),
    ]
    assert content["started"] == "2026-01-02T03:04:05Z"
    assert list(content["claims"][0]) == ["id", "statement", "value", "unit", "bound", "holds", "required"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rows": [{"speed": 1}]}, "got speed"),
        ({"rows": [{"M": math.nan}]}, "finite"),
        ({"rows": [{"sass": {"FFMA": [1, math.inf]}}]}, "finite"),
        ({"rows": [{"detail": object()}]}, "JSON"),
        ({"parameters": {"profile": "cpu", "x": math.nan}}, "finite"),
        ({"parameters": {"profile": "nope"}}, "known profile"),
        ({"parameters": {}}, "known profile"),
        ({"inputs_sha256": {"notebook": "0" * 64}}, "expected the keys notebook, kda_lib, profile, lock"),
        ({"inputs_sha256": dict.fromkeys(records.INPUTS, "x")}, "match pattern"),
        ({"mode": "full"}, "gpu must be given in mode full"),
        ({"gpu": gpu()}, "null in compile-only"),
        ({"ended": STARTED - timedelta(seconds=1)}, "is before started"),
        ({"started": STARTED.replace(tzinfo=None)}, "timezone"),
        ({"status": "failed"}, "contradicts"),
        ({"claims": [Claim(id="a", statement="s", value=1, holds=False)]}, r"contradicts.*'a'"),
        ({"claims": [Claim(id="a", statement="s", value=1, holds=True)] * 2}, "unique; repeated: a"),
        ({"git": {"commit": "main", "dirty": False}}, "match pattern"),
        ({"host": "somewhere"}, "Extra inputs"),
    ],
)
def test_invalid_results_are_rejected(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        result(**changes)


@pytest.mark.parametrize(
    ("value", "bound", "truth"),
    [(1.5, "<= 2", True), (2.5, "<= 2", False), (0, "== 0", True), (1e-9, "< 1e-8", True), (3, ">= 4.0", False)],
)
def test_a_claim_must_agree_with_its_bound(value: float, bound: str, truth: bool) -> None:
    assert Claim(id="a", statement="s", value=value, bound=bound, holds=truth).holds is truth
    with pytest.raises(ValidationError, match=f"is {truth}; got holds={not truth}"):
        Claim(id="a", statement="s", value=value, bound=bound, holds=not truth)


@pytest.mark.parametrize("bound", [None, 2, "as fast as the sequential path"])
def test_a_bound_that_is_no_comparison_is_not_judged(bound: Any) -> None:
    assert Claim(id="a", statement="s", value=9, bound=bound, holds=True).bound == bound


def test_a_failing_claim_that_is_not_required_leaves_the_status_ok() -> None:
    claim = Claim(id="a", statement="s", value=1, holds=False, required=False)
    assert result(claims=[claim]).status == "ok"


def test_rows_changed_after_validation_are_caught(tmp_path: Path) -> None:
    changed = result()
    changed.rows[0]["median_us"] = math.nan
    with pytest.raises(ValueError, match="JSON compliant"):
        write_result(changed, tmp_path / "02_demo.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = tmp_path / "02_demo.json"
    write_result(result(), path)
    before = path.read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ResultWriteError) as caught:
        write_result(result(run_id="run-2"), path)
    assert str(caught.value) == f"cannot write {path}: {os.strerror(code)}"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ResultWriteError, match=r"Permission denied$"):
        write_result(result(), tmp_path / "02_demo.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("not a folder")
    with pytest.raises(ResultWriteError, match="cannot write"):
        write_result(result(), tmp_path / "results" / "02_demo.json")


def _with_text(place: str, text: str) -> Result:
    if place == "row":
        return result(rows=[{"detail": text}])
    if place == "nested":
        return result(rows=[{"config": {"files": [text]}}])
    if place == "key":
        return result(rows=[{"config": {text: 1}}])
    if place == "claim":
        return result(claims=[Claim(id="a", statement=text, value=1, holds=True)])
    return result(parameters={"profile": "cpu", "x": text})


@pytest.mark.parametrize("place", ["row", "nested", "key", "claim", "parameter"])
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("ran on node-17.example", "host name"),
        ("ran on node-17, twice", "host name"),
        ("/users/ada/x.cubin", "home directory"),
        ("error in file:///users/ada", "home directory"),
    ],
)
def test_traces_of_the_machine_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str, what: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17.example")
    monkeypatch.setattr(Path, "home", lambda: Path("/users/ada"))
    with pytest.raises(ValueError, match=f"got the {what} in it"):
        write_result(_with_text(place, text), tmp_path / "02_demo.json")
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_the_repository_is_rejected(tmp_path: Path, repo: Path) -> None:
    with pytest.raises(ValueError, match=r"result\.rows\[0\]\.detail: .* repository path"):
        write_result(result(rows=[{"detail": f"{repo}/kda_lib/kernel.py:1"}]), tmp_path / "02_demo.json")


@pytest.mark.parametrize(
    ("host", "text"), [("vm", "libnvvm failed"), ("localhost", "localhost"), ("h200", "profile h200"), ("", "anything")]
)
def test_words_that_are_no_trace_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, text: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    write_result(result(rows=[{"detail": f"{text} kernels/x.py"}]), tmp_path / "02_demo.json")
    assert read_result(tmp_path / "02_demo.json").rows[0]["detail"] == f"{text} kernels/x.py"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"holds": true', '"holds": false', "claims.0: .*got holds=False"),
        ('"value": 0', '"value": 3', "claims.0: .*== 0 is False"),
        ('"status": "ok"', '"status": "failed"', "contradicts"),
        ('"median_us": 24.5', '"median_us": NaN', "finite"),
        ('"median_us": 24.5', '"best_us": 24.5', "got best_us"),
        ('"mode": "compile-only"', '"mode": "full"', "gpu must be given"),
        ('"holds": true', '"holds": "yes"', "claims.0.holds: .*boolean"),
        ("kda-lib/result/v1", "kda-lib/result/v2", "schema: "),
        ('"run_id": "run-1",', "", "run_id: Field required"),
        ("}", "", "Invalid JSON"),
    ],
)
def test_a_tampered_file_is_rejected(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = tmp_path / "02_demo.json"
    write_result(result(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ResultReadError, match=rf"02_demo\.json: not a valid result: .*{fault}"):
        read_result(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ResultReadError, match=r"gone\.json: No such file"):
        read_result(tmp_path / "gone.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResultReadError, match=r"binary\.json: not a valid result"):
        read_result(tmp_path / "binary.json")
