"""What a notebook does with kda_lib.lab.notebook, on no device, its own device and the wrong one."""

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fake_lab import device, make_repo
from matplotlib.figure import Figure

from kda_lib.lab import notebook, provenance
from kda_lib.lab.device import DeviceInfo, WrongDevice
from kda_lib.lab.notebook import ClaimFailed, Run, begin
from kda_lib.lab.profile import UnknownProfile
from kda_lib.lab.records import Result, ResultReadError, read_result


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_device(monkeypatch, None)
    return make_repo(tmp_path / "repo", monkeypatch)


def use_device(monkeypatch: pytest.MonkeyPatch, found: DeviceInfo | None) -> None:
    after = {"clocks": {"sm_mhz": 1755, "mem_mhz": 3201}, "throttle_reasons": ["sw_power_cap"]}
    monkeypatch.setattr(notebook, "current_device", lambda: found)
    monkeypatch.setattr(notebook, "sample_state", lambda: after)
    monkeypatch.setattr(provenance, "current_device", lambda: found)


def start(repo: Path, profile: str = "cpu", **parameters: Any) -> Run:
    return begin("02_demo", profile=profile, results_dir=str(repo / "reports" / profile / "results"), **parameters)


def finished(run: Run) -> Result:
    run.finish()
    return read_result(run.results_dir / "02_demo.json")


def html(display: notebook.Display) -> str:
    return display._repr_html_()


def test_compile_only_run(repo: Path) -> None:
    run = start(repo, "h100", seed=7, tokens=[1, 2])
    assert (run.mode, run.device, run.arch_name, run.profile.name) == ("compile-only", None, "sm_90a", "h100")
    written = finished(run)
    assert (written.mode, written.gpu, written.status, written.profile) == ("compile-only", None, "ok", "h100")
    assert written.parameters == {"profile": "h100", "seed": 7, "tokens": [1, 2]}
    assert written.seeds["numpy"] == 7
    assert written.inputs_sha256 == provenance.inputs_sha256(repo / "notebooks" / "02_demo.ipynb", "h100")
    assert written.started <= written.ended


def test_cpu_profile_ignores_the_device(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, device())
    run = start(repo, "cpu")
    assert (run.mode, run.device) == ("compile-only", None)


def test_full_run_records_the_device_before_and_after(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, device("NVIDIA H200 MIG 1g.18gb", sms=16, mig=True))
    run = start(repo, "h200")
    run.timing_method = "CUDA graph, events"
    assert "16 SMs, the profile has 132, MIG on" in repr(run.banner())
    written = finished(run)
    assert written.gpu is not None
    assert (written.gpu.name, written.gpu.sms, written.gpu.mig) == ("NVIDIA H200 MIG 1g.18gb", 16, True)
    assert (written.gpu.before.clocks.sm_mhz, written.gpu.before.throttle_reasons) == (1980, ["gpu_idle"])
    assert (written.gpu.after.clocks.sm_mhz, written.gpu.after.throttle_reasons) == (1755, ["sw_power_cap"])
    assert (written.mode, written.timing_method) == ("full", "CUDA graph, events")
    assert written.environment["driver"] == "580.95.05"


def test_wrong_device_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, device("NVIDIA H200"))
    with pytest.raises(WrongDevice, match="use GPU=h200"):
        start(repo, "h100")


@pytest.mark.parametrize(
    ("name", "arguments", "error", "fault"),
    [
        ("02_demo", {"profile": "nope"}, UnknownProfile, "expected one of cpu"),
        ("03_absent", {"profile": "cpu"}, ValueError, r"stem of a file in notebooks/; got '03_absent'"),
        ("02_demo", {"profile": "cpu", "seed": -1}, ValueError, "seed: expected an integer"),
        ("02_demo", {"profile": "cpu", "seed": True}, ValueError, "seed: expected an integer"),
        ("02_demo", {"profile": "cpu", "tokens": {1, 2}}, ValueError, "tokens"),
        ("02_demo", {"profile": "cpu", "scale": float("nan")}, ValueError, "finite"),
    ],
)
@pytest.mark.usefixtures("repo")
def test_bad_input(name: str, arguments: dict[str, Any], error: type[Exception], fault: str) -> None:
    with pytest.raises(error, match=fault):
        begin(name, **arguments)


def test_without_a_results_dir_nothing_lands_in_the_repository(repo: Path) -> None:
    before = sorted(repo.rglob("*"))
    run = begin("02_demo", profile="cpu")
    run.finish()
    assert (run.results_dir / "02_demo.json").is_file()
    assert sorted(repo.rglob("*")) == before


def test_seeding(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    first = start(repo, seed=3)
    drawn = (first.rng.random(), np.random.random())
    again = start(repo, seed=3)
    assert (again.rng.random(), np.random.random()) == drawn
    assert start(repo, seed=4).rng.random() != drawn[0]
    assert finished(first).seeds == {"numpy": 3}
    assert "torch" not in sys.modules


def test_torch_is_seeded_where_the_notebook_has_it(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    fake = type(sys)("torch")
    monkeypatch.setattr(fake, "manual_seed", seen.append, raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert finished(start(repo, seed=5)).seeds == {"numpy": 5, "torch": 5}
    assert seen == [5]


def test_banner_says_what_was_not_run(repo: Path) -> None:
    banner = start(repo, "b200").banner()
    for text in (repr(banner), html(banner)):
        assert "compile-only for sm_100a: nothing on this page was run on a GPU" in text
        assert "b200 (NVIDIA B200 SXM)" in text
        assert "no git commit" in text
    assert ":" not in repr(banner).split("date")[1].split("\n")[0]


def test_banner_names_the_device_and_the_commit(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, device())
    monkeypatch.setattr(provenance, "git_state", lambda root: {"commit": "0123456789abcdef" + "0" * 24, "dirty": True})
    text = repr(start(repo, "h200").banner())
    assert "full: run on NVIDIA H200 (compute capability 9.0, 132 SMs)" in text
    assert "commit 0123456789 with uncommitted changes" in text


@pytest.mark.parametrize("origin", ["computed", "compiled", "recorded"])
def test_label_shows_the_word_and_escapes(repo: Path, origin: Any) -> None:
    badge = start(repo).label(origin, "a < b")
    assert repr(badge) == f"[{origin}] a < b"
    assert f">{origin}</span> a &lt; b" in html(badge)


def test_label_of_unknown_origin(repo: Path) -> None:
    with pytest.raises(ValueError, match="origin: expected one of computed, compiled, recorded; got 'guessed'"):
        start(repo).label("guessed", "x")  # type: ignore[arg-type]


def test_claims_and_rows_reach_the_file(repo: Path) -> None:
    run = start(repo)
    run.claim("ulp", "error", value=np.float32(0.5), unit="ulp", bound="<= 1", holds=np.bool_(True))
    run.claim("hope", "faster", value=np.int64(3), bound=2, holds=False, required=False)
    run.row(variant="a", M=np.int64(4), samples=np.array([1.5, 2.5]), sass={"FFMA": np.int32(32)})
    run.rows([{"variant": "b", "M": 5}])
    run.rows(pd.DataFrame({"variant": ["c", "d"], "median_us": [1.0, 2.0]}))
    table = run.finish()
    written = read_result(run.results_dir / "02_demo.json")
    assert [(claim.id, claim.value, claim.holds) for claim in written.claims] == [
        ("ulp", 0.5, True),
        ("hope", 3, False),
    ]
    assert written.rows == [
        {"variant": "a", "M": 4, "samples": [1.5, 2.5], "sass": {"FFMA": 32}},
        {"variant": "b", "M": 5},
        {"variant": "c", "median_us": 1.0},
        {"variant": "d", "median_us": 2.0},
    ]
    assert repr(table).splitlines() == [
        "holds          ulp: error; 0.5 ulp (bound: <= 1)",
        "does not hold  hope: faster; 3 (bound: 2)",
    ]
    assert "<td>does not hold</td><td>hope</td>" in html(table)


def test_finish_without_claims(repo: Path) -> None:
    assert repr(start(repo).finish()) == "no claims"


def test_a_required_claim_that_fails_is_written_then_raised(repo: Path) -> None:
    run = start(repo)
    run.claim("good", "fine", value=1, holds=True)
    run.claim("bad", "no spills", value=8, unit="bytes", bound="== 0", holds=False)
    with pytest.raises(ClaimFailed) as caught:
        run.finish()
    assert str(caught.value) == "1 required claims do not hold:\n  bad: no spills; 8 bytes (bound: == 0)"
    written = read_result(run.results_dir / "02_demo.json")
    assert written.status == "failed"
    assert [claim.id for claim in written.claims] == ["good", "bad"]


def test_a_claim_cell_can_be_run_again_but_ids_are_not_shared(repo: Path) -> None:
    run = start(repo)
    run.claim("a", "same", value=1, holds=False)
    run.claim("a", "same", value=2, holds=True)
    with pytest.raises(ValueError, match="'a' already states 'same'"):
        run.claim("a", "other", value=2, holds=True)
    assert [claim.value for claim in finished(run).claims] == [2]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [({"speed": 1}, "got speed"), ({"median_us": float("nan")}, "finite"), ({"detail": Path("x")}, "JSON")],
)
def test_bad_rows_are_refused_at_once(repo: Path, fields: dict[str, Any], fault: str) -> None:
    run = start(repo)
    with pytest.raises(ValueError, match=fault):
        run.row(**fields)
    assert finished(run).rows == []


def test_a_claim_that_contradicts_its_bound_is_refused(repo: Path) -> None:
    with pytest.raises(ValueError, match="claim a: 3 <= 2 is False; got holds=True"):
        start(repo).claim("a", "s", value=3, bound="<= 2", holds=True)


def test_recorded_result_stands_under_its_own_gpu(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, device())
    monkeypatch.setattr(provenance, "git_state", lambda root: {"commit": "b" * 40, "dirty": False})
    measured = start(repo, "h200")
    measured.row(variant="stream", M=1, median_us=20.1)
    measured.finish()
    use_device(monkeypatch, None)
    shown = start(repo, "cpu").recorded("02_demo", "h200")
    assert shown is not None
    assert shown.result.rows == [{"variant": "stream", "M": 1, "median_us": 20.1}]
    assert repr(shown) == f"recorded on NVIDIA H200, {shown.result.ended:%Y-%m-%d}, commit {'b' * 10}"
    assert ">recorded</span> on NVIDIA H200, " in html(shown)
    assert "without a GPU, profile cpu" in repr(_recorded_cpu(repo))


def _recorded_cpu(repo: Path) -> notebook.Recorded | None:
    run = start(repo, "cpu")
    run.finish()
    return run.recorded("02_demo", "cpu")


def test_recorded_absent_unknown_or_broken(repo: Path) -> None:
    run = start(repo)
    assert run.recorded("02_demo", "b300") is None
    with pytest.raises(UnknownProfile):
        run.recorded("02_demo", "nope")
    run.finish()
    (run.results_dir / "02_demo.json").write_text("{}")
    with pytest.raises(ResultReadError, match=r"02_demo\.json: not a valid result"):
        run.recorded("02_demo", "cpu")


def test_figure_is_saved_and_shown_with_its_text(repo: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1], [0, 1])
    run = start(repo)
    shown = run.figure(figure, "line", 'rises from "0" to 1')
    saved = (repo / "reports" / "cpu" / "figures" / "line.png").read_bytes()
    assert saved.startswith(b"\x89PNG")
    assert 'alt="rises from &quot;0&quot; to 1"' in html(shown)
    assert base64.b64encode(saved).decode() in html(shown)
    assert repr(shown) == '[figure line] rises from "0" to 1'


@pytest.mark.parametrize(
    ("name", "alt", "fault"), [("a", " ", "alt of figure 'a'"), ("../a", "text", "figure name"), ("", "text", "figure")]
)
def test_figure_needs_a_name_and_an_alternative_text(repo: Path, name: str, alt: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        start(repo).figure(Figure(), name, alt)
