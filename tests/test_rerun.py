"""The second process of notebook 05: what it measures, and how it is heard when it cannot."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
from fake_cuda import FakeCuda, fake_cuda, layer_weights
from test_measure import BUSY, DEVICE, PROFILE, FakeBench, noisy

from kda_lib import Arch
from kda_lib.lab import rerun as module
from kda_lib.lab import verdicts
from kda_lib.lab.comparison import REPEAT
from kda_lib.lab.device import Clocks, DeviceState
from kda_lib.lab.records import ROW
from kda_lib.lab.rerun import Rerun, RerunFailed, measure_anew, rerun
from kda_lib.lab.workload import Weights
from kda_lib.shapes import KdaShapes

TP16 = KdaShapes(16)
SMALL_L2 = DEVICE.model_copy(update={"l2_bytes": 10**6})
SLOW = DeviceState(clocks=Clocks(sm_mhz=990, mem_mhz=3201))
MEDIANS = {"qkvg_gemv": 14.0, "qkvg_torch_mm": 12.0, "sequential_repeat": 29.0, "overlap_repeat": 25.0}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, Arch.parse("h200")) as fake:
        yield fake


def anew(bench: FakeBench) -> Rerun:
    packed, f_b = layer_weights(16)
    weights = Weights(TP16, (packed,) * 8, (f_b,) * 8)
    return measure_anew(weights, (2, 3), device=SMALL_L2, profile=PROFILE, samples=20, seed=5, bench=bench)


def test_its_rows_give_verdicts_and_say_which_qkvg_was_chosen(cuda: FakeCuda) -> None:
    found = anew(FakeBench(noisy(MEDIANS)))
    assert all(ROW.validate_python(row) == row for row in found.rows)
    names = ("sequential_repeat", "sequential_repeat_again", "overlap_repeat")
    assert {(row["variant"], row["M"]) for row in found.rows} == {(name, m) for m in (2, 3) for name in names}
    noise = verdicts.noise(found.rows, control="sequential" + REPEAT, seed=0)
    judged = verdicts.verdicts(found.rows, noise, contender="overlap" + REPEAT, baseline="sequential" + REPEAT)
    assert [verdict.outcome for verdict in judged] == ["wins", "wins"]
    assert [row.get("detail") for row in found.rows if row["M"] == 3 and row["variant"].startswith("overlap")] == [
        "QKVG by torch.mm"
    ]
    assert found.flags == []


def test_it_chooses_qkvg_by_its_own_times(cuda: FakeCuda) -> None:
    """For 2 tokens the rule holds whatever was measured."""
    found = anew(FakeBench(noisy(MEDIANS | {"qkvg_gemv": 10.0})))
    assert {row["M"]: row["detail"] for row in found.rows if "detail" in row} == {
        2: "QKVG by skinny_gemv", 3: "QKVG by skinny_gemv",
    }  # fmt: skip


def test_what_makes_it_doubtful_is_told(cuda: FakeCuda) -> None:
    (flag,) = anew(FakeBench(noisy(MEDIANS), states=[BUSY, SLOW])).flags
    assert flag == "sm_mhz changed: 990 to 1980"


def test_the_rows_come_back_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rerun([{"variant": "overlap_repeat", "M": 1, "samples": [0.1, 24.0001]}], ["hot"])
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[-1]).write_text(json.dumps(made._asdict()))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(module.subprocess, "run", run)
    assert rerun(PROFILE, TP16, samples=30, seed=7) == made
    ((*command, file),) = commands
    assert command == [sys.executable, "-m", "kda_lib.lab.rerun", "h200", "16", "30", "7"]
    assert not Path(file).parent.exists()


@pytest.mark.skipif(module.current_device() is not None, reason="needs a machine without a device")
def test_a_process_that_cannot_measure_says_why() -> None:
    """A real one."""
    with pytest.raises(RerunFailed, match=r"exit code 1: .*RerunFailed: no device of profile 'h200'"):
        rerun(PROFILE, TP16, samples=30, seed=7)


def test_the_process_measures_every_m_and_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measured(weights: Any, tokens: Any, **arguments: Any) -> Rerun:
        asked.update(arguments, weights=weights, tokens=list(tokens))
        return Rerun([{"variant": "overlap_repeat"}], [])

    monkeypatch.setattr(module, "current_device", lambda: DEVICE)
    monkeypatch.setattr(module, "measure_anew", measured)
    monkeypatch.setattr("kda_lib.lab.workload.make_weights", lambda *arguments: arguments)
    module.main("h200", "8", "30", "7", str(tmp_path / "rows.json"))
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [{"variant": "overlap_repeat"}], "flags": []}
    assert asked == {
        "weights": (KdaShapes(8), 8, "cuda", 7), "tokens": list(range(1, 17)), "device": DEVICE, "profile": PROFILE,
        "samples": 30, "seed": 7,
    }  # fmt: skip
