"""Plans as a pure function of facts, M and strategy; words for them; strategies from outside; stream's workspace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import fake_flashinfer
import pytest
import torch
from fake_cuda import FakeCuda, Weights, fake_cuda, layer_weights, random
from fake_flashinfer import FLASHINFER_0_7_4

from kda_lib import Arch, KdaProjection, KdaShapes, strategies
from kda_lib.autotune import TuningTable
from kda_lib.backends import Backend, Installed
from kda_lib.errors import NotWarmedUp
from kda_lib.kernels.config import GEMV_TOKENS, qkvg_gemv_config
from kda_lib.kernels.stream_config import F_A_START, WORKSPACE_BYTES, stream_config
from kda_lib.runtime import Outputs, Runtime
from kda_lib.shapes import HIDDEN
from kda_lib.strategies import Facts, Overlap, Plan, Sequential, Strategy, Stream, make_plan

HOPPER = Arch.parse("h200")
UNKNOWN = Arch.of_capability((13, 0))
TP16 = KdaShapes(16)


@pytest.fixture
def weights() -> Weights:
    return layer_weights(16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def project(weights: Weights, **options: Any) -> KdaProjection:
    return KdaProjection(*weights, tp=16, **options)


def facts(arch: Arch, installed: Installed = FLASHINFER_0_7_4, **fields: Any) -> Facts:
    """Of a device whose number of SMs is not known, where stream cannot run, unless ``sms`` says it."""
    return Facts(arch, TP16, detect=lambda: installed, **fields)


#: SMs of a product with this capability; (10, 7) and (13, 0) have none that is known here.
SMS = {
    "8.0": 108, "8.6": 84, "8.9": 142, "9.0": 132, "10.0": 148, "10.3": 148, "10.7": 148, "11.0": 20, "12.0": 170,
    "12.1": 48, "13.0": 148,
}  # fmt: skip
NO_KERNELS = ("10.7", "13.0")


@pytest.mark.parametrize("arch", SMS)
@pytest.mark.parametrize("installed", [Installed(), FLASHINFER_0_7_4], ids=["alone", "flashinfer"])
def test_auto_by_rule(arch: str, installed: Installed) -> None:
    """Unmeasured: stream up to 16 tokens from sm_90 on; overlap up to its limit below; sequential otherwise."""
    for m in (1, 2, 3, 4, 5, 14, 15, 16, 17, 1000):
        found = facts(Arch.parse(arch), installed, sms=SMS[arch])
        plan = make_plan(found, m, None)
        if arch in NO_KERNELS or m > 16:
            expected, parts = Sequential(), []
        elif SMS[arch] and not arch.startswith("8"):
            expected, parts = Stream(), [Stream.PART]
        elif m <= 14:
            expected, parts = Overlap(), ["F_A/beta", "F_B"] + ["QKVG"] * (m <= 2)
        else:
            expected, parts = Sequential(), []
        assert plan.strategy == expected
        assert [part for part, _ in plan.kernels] == parts
        assert plan == make_plan(found, m, None), "the same facts give the same plan"
    with pytest.raises(FrozenInstanceError):
        plan.m = 3  # type: ignore[misc]


def test_reasons_of_the_rule() -> None:
    def reason(arch: str, m: int, **fields: Any) -> str:
        return make_plan(facts(Arch.parse(arch), **{"sms": 132, **fields}), m, None).reason

    unmeasured = "no strategies were measured against each other"
    assert reason("9.0", 16) == f"it reads every weight once, in one launch, and {unmeasured}"
    assert reason("8.9", 3) == (
        "stream cannot run here (sm_89 lacks bulk copies to shared memory, which begin with sm_90), overlap is the "
        f"default up to M = 14, and {unmeasured}"
    )
    assert reason("9.0", 16, sms=1) == (
        "stream cannot run here (its kernel is not configured for TP16 (sms: expected at least 2, got 1; use "
        "overlap)), and M is above the overlap limit, 14"
    )
    assert reason("9.0", 17) == (
        "stream cannot run here (its kernel takes up to 16 tokens), nor can overlap (its kernels take up to 16 tokens)"
    )
    assert reason("13.0", 1).startswith("stream cannot run here (its kernel is not built for sm_130a), nor can overlap")
    assert "its kernel is not configured for TP16 (sms: expected the number of SMs" in reason("9.0", 1, sms=None)


@pytest.mark.parametrize("arch", ["9.0", "10.0", "10.3", "11.0", "12.0", "12.1"])
@pytest.mark.parametrize("tp", [4, 8, 16])
def test_one_stream_kernel_serves_every_m(arch: str, tp: int) -> None:
    found = Facts(Arch.parse(arch), KdaShapes(tp), sms=SMS[arch], detect=Installed)
    for strategy in (Stream(), Stream(pdl=False)):
        configs = {make_plan(found, m, strategy).kernel(Stream.PART) for m in range(1, 17)}
        (config,) = configs
        assert config == stream_config(found.arch, found.shapes, SMS[arch], pdl=strategy.pdl)
        assert config.launch.grid == SMS[arch]
        assert config.launch.pdl == strategy.pdl


def test_stream_is_refused_in_words() -> None:
    odd_heads = Facts(HOPPER, KdaShapes(32), sms=132, detect=Installed)
    small = facts(HOPPER, sms=132)
    for found, m, words in (
        (facts(Arch.parse("8.0"), sms=108), 1, "sm_80 lacks bulk copies"),
        (facts(UNKNOWN, sms=148), 1, "its kernel is not built for sm_130a"),
        (small, 17, "its kernel takes up to 16 tokens"),
        (odd_heads, 1, r"not configured for TP32 \(tp: expected one with an even number of heads, got 32"),
        (facts(HOPPER), 1, r"sms: expected the number of SMs, got None; ask the device"),
        (facts(HOPPER, sms=132, qkvg=Backend.TORCH), 1, r"it computes QKVG itself, and torch\.mm was asked for"),
    ):
        with pytest.raises(ValueError, match=f"strategy: .*got stream: .*{words}.*use 'auto' or 'sequential'"):
            make_plan(found, m, Stream())
        assert make_plan(found, m, None).strategy != Stream()
        assert (Stream().refusal(found, m) is None) == (found is small and m <= 16)


def test_auto_takes_the_fastest_measured_strategy() -> None:
    def plan(**times: float) -> Plan:
        return make_plan(facts(HOPPER, table=TuningTable(strategy_us=dict.fromkeys((3, 17), times))), 3, None)

    assert plan(sequential=25.0, overlap=26.0).strategy == Sequential()
    assert plan(sequential=27.0, overlap=26.0).strategy == Overlap()
    assert "fastest measured: sequential 25.0 us, overlap 26.0 us" in plan(sequential=25.0, overlap=26.0).reason
    assert plan(sequential=25.0).strategy == Overlap(), "one time decides nothing"
    assert plan(sequential=25.0, unheard_of=1.0).strategy == Overlap()
    assert plan(sequential=25.0, overlap=26.0, stream=1.0).strategy == Sequential(), "its SMs are not known"
    table = TuningTable(strategy_us={17: {"sequential": 25.0, "overlap": 20.0}}, overlap_limit=2)
    assert make_plan(facts(HOPPER, table=table), 17, None).strategy == Sequential(), "overlap does not take 17"
    assert make_plan(facts(HOPPER, table=table), 3, None).strategy == Sequential()
    assert "above the overlap limit, 2" in make_plan(facts(HOPPER, table=table), 3, None).reason


@pytest.mark.parametrize("pairs", [{"stream": 22.0, "overlap": 25.0}, {"stream": 25.0, "overlap": 22.0}])
def test_auto_takes_stream_where_it_was_measured_fastest(pairs: dict[str, float]) -> None:
    """From a table that went through JSON; a table that lacks stream decides between the others."""
    fastest = min(pairs, key=lambda name: pairs[name])
    written = json.loads(json.dumps(TuningTable(strategy_us={3: {**pairs, "sequential": 29.0}}).to_json()))
    plan = make_plan(facts(HOPPER, sms=132, table=TuningTable.from_json(written)), 3, None)
    assert plan.strategy.name == fastest
    assert plan.reason.startswith(f"it is the fastest measured: {fastest} 22.0 us, ")
    older = TuningTable(strategy_us={3: {"sequential": 29.0, "overlap": 25.0}})
    assert make_plan(facts(HOPPER, sms=132, table=older), 3, None).strategy == Overlap()
    assert make_plan(facts(HOPPER, sms=132, table=older), 4, None).strategy == Stream(), "nothing was measured for 4"


@pytest.mark.parametrize("m", [3, 4])
@pytest.mark.parametrize("installed", [Installed(), FLASHINFER_0_7_4], ids=["alone", "flashinfer"])
def test_the_gemv_is_planned_where_it_was_measured_fastest(installed: Installed, m: int) -> None:
    """Unmeasured, or measured slower than torch.mm, it is not; M = 5 has none, whatever the table says."""

    def plan(tokens: int, **times: float) -> Plan:
        row = {Backend[name.upper()]: us for name, us in times.items()}
        return make_plan(facts(HOPPER, installed, table=TuningTable({tokens: row})), tokens, Overlap())

    fast = plan(m, skinny=20.0, torch=21.0)
    assert fast.backend is Backend.SKINNY
    assert fast.kernel("QKVG") == qkvg_gemv_config(HOPPER, m, TP16)
    for other in (plan(m), plan(m, skinny=22.0, torch=21.0), plan(5, skinny=20.0, torch=21.0)):
        assert other.backend is Backend.TORCH
        assert "QKVG" not in dict(other.kernels)


def test_explain(cuda: FakeCuda, weights: Weights) -> None:
    assert project(weights).explain(5) == (
        "sm_90a, TP16, M = 5: stream, because it reads every weight once, in one launch, and no strategies were "
        "measured against each other.\n"
        "QKVG, F_A/beta and F_B: kernel stream, 132 CTAs of 352 threads in clusters of 2, with PDL."
    )
    assert project(weights, strategy=Stream(pdl=False)).explain(16) == (
        "sm_90a, TP16, M = 16: stream (without PDL), because it was asked for.\n"
        "QKVG, F_A/beta and F_B: kernel stream, 132 CTAs of 352 threads in clusters of 2, without PDL."
    )
    assert project(weights, strategy="overlap").explain(5) == (
        "sm_90a, TP16, M = 5: overlap (side first), because it was asked for.\n"
        "QKVG: torch.mm, because FlashInfer is not installed.\n"
        "F_A/beta: kernel skinny_n (portable-shift FMA), 168 CTAs of 128 threads in clusters of 7, with PDL.\n"
        "F_B: kernel skinny_k (portable-shift FMA), 48 CTAs of 128 threads, with PDL."
    )
    unmeasured = (
        "QKVG: torch.mm, because none of skinny_gemv, torch.mm has been measured on this device for M = 3, TP16."
    )
    assert unmeasured in project(weights, strategy="overlap").explain(3)
    assert project(weights).explain(17) == (
        "sm_90a, TP16, M = 17: sequential, because stream cannot run here (its kernel takes up to 16 tokens), nor can "
        "overlap (its kernels take up to 16 tokens)."
    )


def test_explicit_strategies_are_refused_where_they_cannot_run() -> None:
    for arch, m, words in ((UNKNOWN, 3, "its kernels are not built for sm_130a"), (HOPPER, 17, "up to 16 tokens")):
        with pytest.raises(ValueError, match=f"strategy: .*{words}.*use 'auto' or 'sequential'"):
            make_plan(facts(arch), m, Overlap())
        assert make_plan(facts(arch), m, Sequential()).strategy == Sequential()
    tp1 = Facts(HOPPER, KdaShapes(1), detect=Installed)
    with pytest.raises(
        ValueError, match=r"strategy: .*its kernels are not configured for TP1 \(rows: expected a divisor"
    ):
        make_plan(tp1, 8, Overlap())
    assert make_plan(tp1, 8, None).strategy == Sequential()
    for tp in (4, 8, 16):
        assert make_plan(Facts(HOPPER, KdaShapes(tp), detect=Installed), 14, None).strategy == Overlap()


def test_a_backend_asked_for_must_run_there() -> None:
    asked = facts(HOPPER, qkvg=Backend.SKINNY)
    for m in range(1, GEMV_TOKENS + 1):
        assert make_plan(asked, m, Overlap()).backend is Backend.SKINNY
    with pytest.raises(
        ValueError, match=r"qkvg: expected a backend that runs on sm_90a for M = 5 \(torch\.mm, .*skinny"
    ):
        make_plan(asked, GEMV_TOKENS + 1, Overlap())
    with pytest.raises(ValueError, match="plan: expected one with a QKVG backend"):
        _ = make_plan(asked, 2, Sequential()).backend


@dataclass(frozen=True)
class Zeros(Strategy):
    """A strategy from outside: up to 2 tokens."""

    name = "zeros"

    def refusal(self, facts: Facts, m: int) -> str | None:
        return None if m <= 2 else "it takes up to 2 tokens"

    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        return Plan(m, self, reason)

    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        shapes = runtime.shapes
        return Outputs(*(runtime.empty(plan.m, n).zero_() for n in (shapes.qkvg_rows, shapes.f_b_rows, shapes.heads)))


def test_registry_is_open(cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not project(weights, strategy=Zeros())(random(2, HIDDEN, 17)).qkvg.any()
    monkeypatch.setattr(strategies, "STRATEGIES", dict(strategies.STRATEGIES))
    strategies.register(Zeros())
    for name in ("zeros", "auto"):
        with pytest.raises(ValueError, match=f"expected a new name, got '{name}'"):
            strategies.register(type("Other", (Zeros,), {"name": name})())
    assert project(weights, strategy="zeros").plan(1).strategy == Zeros()
    times = {"zeros": 1.0, "overlap": 2.0, "sequential": 3.0}
    proj = project(weights, table=TuningTable(strategy_us={2: times, 3: times}))
    assert proj.plan(2).strategy == Zeros()
    assert proj.plan(3).strategy == Overlap()


def test_the_workspace_is_made_by_warmup_and_kept(
    cuda: FakeCuda, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each projection, also where they share weights; other strategies have none; capture makes none."""
    made: list[torch.Tensor] = []
    zeros = torch.zeros

    def logged(*shape: int, **options: Any) -> torch.Tensor:
        tensor = zeros(*shape, **options)
        if options.get("dtype") == torch.uint8:
            assert not cuda.capturing
            made.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "zeros", logged)
    project(weights, strategy="overlap").warmup([2])
    assert made == []
    for proj in (project(weights, strategy="stream"), project(weights, strategy="stream")):
        proj.warmup([3, 4])
        cuda.capturing = True
        proj(random(3, HIDDEN, 1))
        cuda.capturing = False
        proj(random(5, HIDDEN, 1))
    assert [tensor.numel() for tensor in made] == [WORKSPACE_BYTES] * 2
    assert len({tensor.data_ptr() for tensor in made}) == 2
    runtime = Runtime(TP16, *weights)
    cuda.capturing = True
    with pytest.raises(NotWarmedUp, match="the workspace of the stream kernel"):
        _ = runtime.workspace


def test_rearm_after_an_aborted_launch(cuda: FakeCuda, weights: Weights) -> None:
    """Counters that a launch left set spoil the next one, until they are cleared."""
    proj, x = project(weights, strategy="stream"), random(3, HIDDEN, 5)
    assert proj.armed()
    proj.rearm()
    want = proj(x)
    assert proj.armed()
    runtime = proj._runtime
    runtime.workspace[:4] = torch.tensor([5, 0, 0, 0], dtype=torch.uint8)
    runtime.workspace[F_A_START:] = 0
    assert not proj.armed()
    assert not torch.equal(proj(x).g1, want.g1)
    proj.rearm()
    assert proj.armed()
    assert all(torch.equal(a, b) for a, b in zip(proj(x), want, strict=True))
