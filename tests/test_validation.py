"""What the numerical notebooks compare with: errors, scales, kernels on a played device, replays, predicted graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, FakeKernel, fake_cuda, layer_weights, random
from fake_cuda import words as fake_words

from kda_lib import Arch, KdaProjection, KdaShapes
from kda_lib import reference as ref
from kda_lib.autotune import TuningTable
from kda_lib.backends import Installed
from kda_lib.lab import records, replay, validation
from kda_lib.lab.graphs import lanes, node_counts
from kda_lib.lab.validation import Errors, Layer
from kda_lib.shapes import F_A_ROWS, HIDDEN
from kda_lib.strategies import Facts, Overlap, Sequential, Strategy, Stream, make_plan

HOPPER = Arch.parse("h200")
TP16 = KdaShapes(16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def project(strategy: str | Strategy) -> KdaProjection:
    return KdaProjection(*layer_weights(16), tp=16, strategy=strategy, table=TuningTable())


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors_count_what_they_say() -> None:
    exact = np.array([1.0, 1.0 + 2.0**-9, 3.0, -0.25, 2.0**-12])
    got = ref.f64_to_bf16(exact)
    assert Errors.of(got, exact, np.zeros(5)) == Errors(5, 0, 0, 0.0, 0, 2.0**-9, 0.0, 1.0, 3.0)
    got[3] += 1
    got[4] += 3
    errors = Errors.of(got, exact, np.zeros(5))
    assert (errors.max_ulp, errors.over_one_ulp, errors.largest_over_one) == (3, 1, 2.0**-12)
    assert errors.beyond_bound == 2
    assert errors.max_abs_error_rounded == 2.0**-9
    assert errors.cosine < 1
    assert Errors.of(got, exact, np.full(5, 2.0**-9)).beyond_bound == 0
    assert errors.row().keys() <= records.ROW_FIELDS.keys()


def test_a_nan_is_beyond_every_bound() -> None:
    with np.errstate(invalid="ignore"):
        errors = Errors.of(np.array([ref.BF16_NAN, 0x3F80], np.uint16), np.ones(2), np.full(2, 1e30))
    assert (errors.beyond_bound, errors.max_ulp) == (1, ref.NAN_DISTANCE)


def test_errors_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one shape that is not empty, got \[2\], \[3\], \[3\]"):
        Errors.of(np.zeros(2, np.uint16), np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="not empty"):
        Errors.of(np.zeros(0, np.uint16), np.zeros(0), np.zeros(0))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_roundings_bound_the_error_of_the_models_and_are_not_idle() -> None:
    """Cancelled sums need the bound; their errors stay within it and come near enough to show that it is no giant."""
    rng = np.random.default_rng(1)
    for name in ("skinny_n", "skinny_k"):
        config = validation.model_config(name, HOPPER, TP16, 16)
        x, w = validation.input_pairs(rng, config.m, config.n, config.k)["cancelling"]
        out, exact = validation.KERNELS[name].model(config, x, w), ref.project_fp64(x, w)
        bound = validation.accumulation_bound(x, w, validation.roundings(config))
        assert Errors.of(out, exact, bound).beyond_bound == 0
        assert Errors.of(out, exact, bound / 500).beyond_bound > 0


@pytest.mark.parametrize("ulp", [2.0**-13, 2.0**-11, 1.0])
def test_binade_of_an_ulp(ulp: float) -> None:
    low, high = validation.binade_of_ulp(ulp)
    for value in (low, high - ulp):
        bits = ref.f32_to_bf16(np.array([value], np.float32))
        assert ref.bf16_to_f32(bits + np.uint16(1)) - ref.bf16_to_f32(bits) == ulp
    assert high == 2 * low
    with pytest.raises(ValueError, match=r"expected a power of two, got 3.0"):
        validation.binade_of_ulp(3.0)


def test_scaling_by_a_power_of_two_scales_the_errors() -> None:
    rng = np.random.default_rng(2)
    config = validation.model_config("skinny_k", HOPPER, TP16, 16)
    x, w = validation.input_pairs(rng, config.m, config.n, config.k)["plain"]
    exact, binade = ref.project_fp64(x, w), validation.binade_of_ulp(2.0**-13)
    factor = validation.factor_into(exact, binade)
    scaled = validation.scaled_bits(w, factor)
    assert binade[0] <= np.abs(ref.project_fp64(x, scaled)).max() < binade[1]
    model = validation.KERNELS["skinny_k"].model
    before, after = (Errors.of(model(config, x, v), ref.project_fp64(x, v), np.zeros(exact.shape)) for v in (w, scaled))
    assert after.max_abs_error == before.max_abs_error * factor
    assert after.max_ulp == before.max_ulp


# --- on a played device ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
def test_kernels_equal_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel, M and input; and a kernel that writes one wrong bit is counted, each time."""
    few = validation.KERNELS["skinny_gemv"]._replace(
        config=lambda arch, m, shapes: replace(gemv(arch, m, shapes), n=192)
    )
    gemv = validation.KERNELS["skinny_gemv"].config
    monkeypatch.setattr(validation, "KERNELS", {**validation.KERNELS, "skinny_gemv": few})
    cases = list(validation.bits_against_model(HOPPER, TP16, (1, 5), 0, "cpu"))
    assert {(case.kernel, case.m) for case in cases} == {
        (name, m) for name, kernel in validation.KERNELS.items() for m in (1, 5) if m <= kernel.most
    }
    assert all(case.differing == 0 and case.outputs > 0 for case in cases)
    right = FakeKernel.__call__

    def wrong(self: FakeKernel, x: int, w: int, out: int, *, stream: int) -> None:
        right(self, x, w, out, stream=stream)
        fake_words(out, self.config.m, self.config.n)[0, 0] ^= 1

    monkeypatch.setattr(FakeKernel, "__call__", wrong)
    assert {case.differing for case in validation.bits_against_model(HOPPER, TP16, (2,), 0, "cpu")} == {1}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("strategy", [Sequential(), Overlap(), Stream()], ids=str)
def test_layers_are_judged_by_fp64(strategy: Strategy) -> None:
    layer = Layer.random(16, np.random.default_rng(3))
    x, packed, f_b = layer.tensors("cpu")
    proj = KdaProjection(packed, f_b, tp=16, strategy=strategy, table=TuningTable())
    errors = layer.errors(proj, x[:3], packed)
    assert errors.outputs == 3 * (TP16.qkvg_rows + F_A_ROWS + TP16.f_b_rows + TP16.heads)
    assert errors.beyond_bound == 0
    assert errors.cosine > 0.9999998
    assert layer.qkvg_errors(proj(x[:3]).qkvg).outputs == 3 * TP16.qkvg_rows
    f_a = slice(TP16.qkvg_rows, TP16.qkvg_rows + F_A_ROWS)
    for change in ("f_b", "f_a"):
        packed_bits, f_b_bits = layer.packed.copy(), layer.f_b.copy()
        if change == "f_b":
            f_b_bits = f_b_bits[::-1]
        else:
            packed_bits[f_a] = packed_bits[f_a][::-1]
        other = Layer(layer.shapes, layer.x, packed_bits, f_b_bits)
        assert other.errors(proj, x[:3], packed).beyond_bound > 0, change
    assert layer.scaled(0.5).exact.max() == layer.exact.max() / 2


class Leaky:
    """A projection whose rows all see the first value of the batch, or whose NaNs are cleared."""

    def __init__(self, leaks: bool) -> None:
        self.leaks = leaks

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        part = x[:, :4] + x.sum() if self.leaks else torch.nan_to_num(x.sum(1, keepdim=True))
        return [part]


@pytest.mark.usefixtures("cuda")
def test_what_a_special_spoils() -> None:
    x = random(3, HIDDEN, 4)
    for strategy in ("sequential", "overlap", "stream"):
        assert validation.spoiled(project(strategy), x, 1, float("nan")) == (0, 0)
    assert validation.spoiled(Leaky(True), x, 1, float("nan"))[0] == 8  # type: ignore[arg-type]
    assert validation.spoiled(Leaky(False), x, 1, float("nan")) == (0, 1)  # type: ignore[arg-type]


def test_replays_are_compared_with_eager_calls() -> None:
    x, inputs = torch.zeros(2, 8, dtype=torch.bfloat16), random(5 * 2, 8, 5).view(5, 2, 8)
    outputs = [torch.empty(2, 8, dtype=torch.bfloat16)]

    def eager() -> list[torch.Tensor]:
        return [x * 2]

    def follow() -> None:
        outputs[0].copy_(x * 2)

    stale = x.clone()

    def keep_the_old() -> None:
        outputs[0].copy_(stale)

    assert replay.replay_differences(follow, eager, x, outputs, inputs) == 0
    assert replay.replay_differences(lambda: None, eager, x, outputs, inputs) == 5 * 16
    assert replay.replay_differences(keep_the_old, eager, x, outputs, inputs) == 5 * 16


class Recorded:
    """A captured call on the CPU: it is called again."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.replay = call


@pytest.mark.usefixtures("cuda")
def test_endurance_compares_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, and the input that each replay must read; a replay that goes wrong once is counted once."""
    monkeypatch.setattr(replay, "capture", lambda call: (Recorded(call), None))
    proj, inputs = project(Stream()), random(3 * 2, HIDDEN, 7).view(3, 2, HIDDEN)
    outputs = 2 * (TP16.qkvg_rows + TP16.f_b_rows + TP16.heads)
    assert replay.endurance(proj, inputs, 5) == (5, 5 * outputs, 0, True)
    right, calls = KdaProjection.__call__, iter(range(100))

    def wrong_once(self: KdaProjection, x: torch.Tensor, out: Any = None) -> Any:
        results = right(self, x, out)
        # One call for the widths, three for what is wanted, and one before the capture come first.
        if next(calls) == 5 + 3:
            results.beta[1, 2] += 1
        return results

    monkeypatch.setattr(KdaProjection, "__call__", wrong_once)
    assert replay.endurance(proj, inputs, 5).differing == 1
    monkeypatch.setattr(KdaProjection, "__call__", lambda self, x, out=None: right(self, inputs[0], out))
    assert replay.endurance(proj, inputs, 1).differing == 0
    stale = iter([0, 0, 1, 2, 0, 0, 0, 2])
    monkeypatch.setattr(KdaProjection, "__call__", lambda self, x, out=None: right(self, inputs[next(stale)], out))
    assert replay.endurance(proj, inputs, 3).differing > outputs // 2, "the second replay read an old input"


# --- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "m", "kernels", "wide"), [
    (Sequential(), 8, 3, 1), (Overlap(), 2, 3, 2), (Overlap(), 8, 4, 2), (Overlap(fork="side_first"), 8, 4, 2),
    (Stream(), 1, 1, 1), (Stream(), 16, 1, 1),
])  # fmt: skip
def test_predicted_graphs(strategy: Strategy, m: int, kernels: int, wide: int) -> None:
    """A library GEMM of two kernels: one more node; lanes do not grow with the layers."""
    plan = make_plan(Facts(HOPPER, KdaShapes(8), detect=Installed, sms=132), m, strategy)
    for layers in (1, 5):
        graph = replay.predicted_graph(plan, layers, {"packed GEMM": 2, "QKVG": 2, "F_B": 1})
        assert node_counts(graph).kernels == layers * kernels
        assert lanes(graph) == wide
    # From the fork to both branches, inside the branches, and from both into the next layer.
    assert wide == 1 or len(graph.edges) == 5 * (kernels - 2) + 4 * 4


@pytest.mark.usefixtures("cuda")
def test_the_branches_are_those_that_are_launched(cuda: FakeCuda) -> None:
    for strategy in (Sequential(), Overlap(), Stream()):
        proj = project(strategy)
        proj.warmup([3])
        cuda.log.clear()
        proj(random(3, HIDDEN, 6))
        launched = [line for line in cuda.log if " on " in line]
        parts = [part for branch in replay.branches(proj.plan(3)) for part in branch]
        assert len(launched) == len(parts)
        own = sum(part in dict(proj.plan(3).kernels) for part in parts)
        assert sum(line.startswith(("skinny", "stream")) for line in launched) == own


def test_with_stride_puts_nan_beside_x() -> None:
    config = validation.KERNELS["skinny_k"].config(HOPPER, 2, TP16)
    x = np.zeros((2, F_A_ROWS), np.uint16)
    wide = validation.with_stride(x, config)
    assert wide.shape == (2, config.x_stride)
    assert (wide[:, F_A_ROWS:] == ref.BF16_NAN).all()
    assert not wide[:, :F_A_ROWS].any()
