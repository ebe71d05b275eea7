"""The stream kernel on a device: fp64, specials, batch invariance, replays, PDL, work beside it, stale counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_tools import GPU_ONLY, POISON, LateCopy, from_ptx

from kda_lib import Arch, KdaProjection, KdaShapes, runtime
from kda_lib.autotune import TuningTable
from kda_lib.kernels.stream_config import BLOCK_ROWS, F_A_START, RINGS, stream_config
from kda_lib.lab.replay import capture, endurance, replay_differences
from kda_lib.lab.validation import FP32_UNIT, HALF_ULP, ONE_ULP_FROM, Layer, differing
from kda_lib.runtime import COUNTER_BYTES, Outputs, Runtime, loaded_kernel
from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS
from kda_lib.strategies import Plan, Sequential, Stream

pytestmark = [
    *GPU_ONLY,
    pytest.mark.skipif(
        torch.cuda.is_available() and not Arch.of_device().has_clusters, reason="stream begins with sm_90"
    ),
]

ALL_M = range(1, MAX_TOKENS + 1)
#: Both sides of the second tile of tokens, and the ends.
SOME_M = (1, 2, 8, 9, 16)
DEGREES = (4, 8, 16)
#: BF16 magnitudes.
SMALLEST, LARGEST_SUBNORMAL, LARGEST = 2.0**-133, 127 * 2.0**-133, 255 * 2.0**120
#: What FP32 sums of K products can lose, relative to the sum of their magnitudes (Higham, section 3.1).
GAMMA = HIDDEN * FP32_UNIT / (1 - HIDDEN * FP32_UNIT)


@dataclass(frozen=True)
class Case:
    """Weights of one layer and inputs for 16 tokens on the device."""

    shapes: KdaShapes
    x: torch.Tensor
    packed: torch.Tensor
    f_b: torch.Tensor

    def project(self, strategy: Stream | str = "stream") -> KdaProjection:
        return KdaProjection(self.packed, self.f_b, tp=self.shapes.tp, strategy=strategy, table=TuningTable())

    def run(self, sms: int, m: int, own: Runtime | None = None, rings: Sequence[tuple[int, int]] = RINGS) -> Outputs:
        """One call, configured for a device with this many SMs and for one of these rings."""
        config = stream_config(Arch.of_device(), self.shapes, sms, pdl=True, rings=rings)
        plan = Plan(m, Stream(), "asked for", kernels=((Stream.PART, config),))
        return plan.strategy.run(own or Runtime(self.shapes, self.packed, self.f_b), plan, self.x[:m], None)


@cache
def layer(tp: int) -> Layer:
    return Layer.random(tp, np.random.default_rng(tp))


@cache
def case(tp: int) -> Case:
    return Case(layer(tp).shapes, *layer(tp).tensors("cuda"))


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@cache
def cancelling(tp: int) -> Case:
    """Each product of a sum has its negative somewhere: the bits of what is left show the order of additions."""
    shapes = KdaShapes(tp)
    x, packed = normal(tp, MAX_TOKENS, HIDDEN), normal(tp + 1, shapes.packed_rows, HIDDEN)
    places = torch.randperm(HIDDEN, generator=torch.Generator("cuda").manual_seed(tp), device="cuda")
    plus, minus = places.view(2, -1)
    x[:, minus], packed[:, minus] = x[:, plus], -packed[:, plus]
    return Case(shapes, x, packed, normal(tp + 2, shapes.f_b_rows, F_A_ROWS))


def unlike(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> torch.Tensor:
    """Outputs that differ in a bit, as a number on the device."""
    return cast(torch.Tensor, sum(differing(mine, theirs) for mine, theirs in zip(a, b, strict=True)))


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    return not unlike(a, b)


def rows_of(outputs: Outputs, rows: Any) -> list[torch.Tensor]:
    return [part[rows] for part in outputs]


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", DEGREES)
def test_against_fp64(tp: int) -> None:
    """qkvg, f_a, beta and g1: within the bound of FP32 sums, and one ulp where the output is not small."""
    proj = case(tp).project()
    for m in ALL_M:
        errors = layer(tp).errors(proj, case(tp).x[:m], case(tp).packed)
        assert errors.beyond_bound == 0, m
        assert errors.largest_over_one < ONE_ULP_FROM, m
        assert errors.cosine >= 0.9999998, m


def test_auto_is_stream_up_to_16_tokens() -> None:
    proj = case(8).project("auto")
    assert {proj.plan(m).strategy for m in ALL_M} == {Stream()}
    assert proj.plan(17).strategy == Sequential()
    assert same(proj(case(8).x), case(8).project()(case(8).x))


def check_row(case: Case, outputs: Outputs, x: torch.Tensor, row: int, packed: torch.Tensor) -> None:
    """qkvg and beta of one row against fp64, whatever their magnitudes. packed: FP64."""
    values = x[row].double()
    exact, magnitude = packed @ values, packed.abs() @ values.abs()
    # Products below 2**-149 are lost.
    bound = HALF_ULP * exact.abs() + (1 + HALF_ULP) * (GAMMA * magnitude + HIDDEN * 2.0**-149) + 2.0**-134
    first_beta = case.shapes.qkvg_rows + F_A_ROWS
    places = (case.shapes.qkvg_slice, slice(first_beta, first_beta + case.shapes.heads))
    for part, place in zip((outputs.qkvg, outputs.beta), places, strict=True):
        assert bool(((part[row].double() - exact[place]).abs() <= bound[place]).all())


@pytest.mark.parametrize("tp", DEGREES)
def test_specials_stay_in_their_row(tp: int) -> None:
    """One value of a row becomes special: the others keep their bits, the row is what IEEE arithmetic makes of it."""
    here = case(tp)
    proj, wide = here.project(), here.packed.double()
    for m in ALL_M if tp == 8 else SOME_M:
        x, row = here.x[:m], m // 2
        clean, others = proj(x), [i for i in range(m) if i != row]

        def with_special(value: float, x: torch.Tensor = x, row: int = row) -> tuple[torch.Tensor, Outputs]:
            bad = x.clone()
            bad[row, 4321] = value
            return bad, proj(bad)

        for value in (float("nan"), float("inf"), float("-inf"), SMALLEST, -LARGEST_SUBNORMAL, LARGEST, -LARGEST):
            bad, got = with_special(value)
            assert same(rows_of(got, others), rows_of(clean, others)), (m, value)
            if math.isfinite(value):
                check_row(here, got, bad, row, wide)
            else:
                assert not any(bool(part[row].isfinite().any()) for part in got), (m, value)
        assert same(with_special(0.0)[1], with_special(-0.0)[1]), m


def test_rows_of_subnormals_and_of_zeros() -> None:
    """Subnormal inputs count in full, and of zeros zeros come; beside rows of ordinary numbers."""
    here = case(8)
    large = Case(here.shapes, here.x.clone(), here.packed * 2.0**9, here.f_b)
    bits = torch.randint(1, 0x80, (HIDDEN,), generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    large.x[3] = bits.to(torch.int16).view(torch.bfloat16)
    large.x[5] = -0.0
    proj, wide = large.project(), large.packed.double()
    for m in (6, 9, 16):
        got = proj(large.x[:m])
        for row in range(m):
            check_row(large, got, large.x, row, wide)
        assert bool((got.qkvg[3] != 0).all())
        assert not any(bool(part[5].any()) for part in got)


def test_overflow_gives_infinities_in_its_own_row() -> None:
    """Products of one sign that leave the range of FP32; f_a overflows too, so that g1 has none but Inf and NaN."""
    here = case(16)
    same_sign = Case(here.shapes, here.x.clone(), here.packed.abs() + 1, here.f_b)
    clean = same_sign.project()(same_sign.x)
    same_sign.x[7] = LARGEST
    got = same_sign.project()(same_sign.x)
    others = [i for i in range(MAX_TOKENS) if i != 7]
    assert same(rows_of(got, others), rows_of(clean, others))
    assert all(bool(part[7].isposinf().all()) for part in (got.qkvg, got.beta))
    assert not bool(got.g1[7].isfinite().any())


@pytest.mark.parametrize("tp", DEGREES)
def test_every_launch_gives_the_same_bits(tp: int) -> None:
    here = cancelling(tp)
    proj, count = here.project(), torch.zeros((), dtype=torch.int64, device="cuda")
    for m in SOME_M:
        want = proj(here.x[:m])
        assert bool(want.qkvg.any())
        assert bool(want.g1.any())
        for _ in range(50):
            count += unlike(proj(here.x[:m]), want)
    assert count.item() == 0


@pytest.mark.parametrize("tp", DEGREES)
def test_a_row_does_not_depend_on_its_batch(tp: int) -> None:
    """Each token alone, with others, and at every place of every batch among rows of arbitrary bits, NaN included."""
    here = cancelling(tp)
    proj, count = here.project(), torch.zeros((), dtype=torch.int64, device="cuda")
    alone = Outputs(*(torch.cat(parts) for parts in zip(*(proj(row) for row in here.x.split(1)), strict=True)))
    generator = torch.Generator("cuda").manual_seed(tp)
    for m in ALL_M:
        count += unlike(proj(here.x[:m]), rows_of(alone, slice(m)))
        order = torch.randperm(MAX_TOKENS, generator=generator, device="cuda")[:m]
        count += unlike(proj(here.x[order]), rows_of(alone, order))
        for place in range(m):
            token = (5 * place + m) % MAX_TOKENS
            junk = torch.randint(-(2**15), 2**15, (m, HIDDEN), generator=generator, device="cuda")
            rows = junk.to(torch.int16).view(torch.bfloat16)
            rows[place] = here.x[token]
            count += unlike(rows_of(proj(rows), place), rows_of(alone, token))
    assert count.item() == 0


@pytest.mark.parametrize("tp", DEGREES)
def test_other_numbers_of_sms_give_the_same_bits(tp: int) -> None:
    """Fewer than there are, an odd number, and twice as many CTAs as can be resident; and without PDL."""
    here = cancelling(tp)
    there = torch.cuda.get_device_properties("cuda").multi_processor_count
    proj = here.project()
    for m in (1, 8, 16):
        want = proj(here.x[:m])
        for sms in (16, 78, 114, 131, 2 * there):
            assert same(here.run(sms, m), want), (m, sms)
        assert same(here.project(Stream(pdl=False))(here.x[:m]), want)


@pytest.mark.parametrize("tp", DEGREES)
def test_the_small_ring_gives_the_same_bits(tp: int) -> None:
    """That of targets with less shared memory, whose stages hold a part of a block's rows."""
    here = cancelling(tp)
    proj, own = here.project(), Runtime(here.shapes, here.packed, here.f_b)
    there, count = torch.cuda.get_device_properties("cuda").multi_processor_count, torch.zeros(1, device="cuda")
    for m in SOME_M:
        want = proj(here.x[:m])
        for sms in (16, there):
            for _ in range(20):
                count += unlike(here.run(sms, m, own, RINGS[-1:]), want)
    assert count.item() == 0
    assert own.armed()


# --- how it is called -----------------------------------------------------------------------------------------------


def test_the_first_call_needs_no_warm_up() -> None:
    """Eager, on the default stream or on another one."""
    here = case(8)
    want = here.project()(here.x[:3])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = here.project()(here.x[:3])
        assert same(got, want)
    torch.cuda.synchronize()


@pytest.mark.parametrize("m", SOME_M)
def test_out_is_written_where_it_lies(m: int) -> None:
    """qkvg and g1 in one buffer, beta with gaps at an odd place; nothing beside them is touched."""
    here, shapes = case(8), case(8).shapes
    proj = here.project()
    want = proj(here.x[:m])
    heads, qkvg_size = shapes.heads, m * shapes.qkvg_rows
    buffer = torch.full((qkvg_size + m * shapes.f_b_rows + 64,), POISON, dtype=torch.bfloat16, device="cuda")
    wide = torch.full((m + 2, 2 * heads + 7), POISON, dtype=torch.bfloat16, device="cuda")
    out = Outputs(
        buffer[:qkvg_size].view(m, -1),
        buffer[qkvg_size + 32 : -32].view(m, -1),
        wide[1:-1, 3 : 3 + heads],
    )
    got = proj(here.x[:m], out=out)
    assert all(mine is theirs for mine, theirs in zip(got, out, strict=True))
    assert same(out, want)
    assert buffer.isnan().sum().item() == 64
    assert wide.isnan().sum().item() == wide.numel() - m * heads


@pytest.mark.parametrize("m", [1, 8, 16])
def test_replays_equal_eager_calls(m: int) -> None:
    """2,000 replays, each with another input and outputs that were poisoned; the counters are 0 afterwards."""
    here = case(8)
    proj = here.project()
    proj.warmup([m])
    x = here.x[:m].clone()
    graph, outputs = capture(partial(proj, x))
    assert replay_differences(graph.replay, partial(proj, x), x, outputs, normal(m, 2000, m, HIDDEN)) == 0
    assert proj.armed()


def test_many_replays_are_compared_on_the_device() -> None:
    proj, m = case(16).project(), 16
    proj.warmup([m])
    found = endurance(proj, normal(9, 8, m, HIDDEN), 2000)
    shapes = case(16).shapes
    assert found == (2000, 2000 * m * (shapes.qkvg_rows + shapes.f_b_rows + shapes.heads), 0, True)


def test_calls_follow_each_other_closely() -> None:
    """One projection and its workspace, another M and input in each call, nothing between launches; also replayed."""
    here = case(8)
    proj = here.project()
    proj.warmup(ALL_M)
    inputs = [normal(i, 1 + i * 7 % MAX_TOKENS, HIDDEN) for i in range(64)]
    want = []
    for x in inputs:
        want.append(proj(x))
        torch.cuda.synchronize()

    def all_of_them() -> list[Outputs]:
        return [proj(x) for x in inputs]

    eager = all_of_them()
    graph, replayed = capture(all_of_them)
    for _ in range(20):
        graph.replay()
    for mine, again, right in zip(eager, replayed, want, strict=True):
        assert same(mine, right)
        assert same(again, right)


def test_a_launch_reads_what_the_one_in_front_writes() -> None:
    """Layer after layer with PDL: the input of each is the output of the one in front, which lets it start early."""
    here = case(4)
    projections = [here.project() for _ in range(2)]
    for proj in projections:
        proj.warmup([1])

    def chain(wait: bool) -> list[torch.Tensor]:
        x, found = here.x[:1], []
        for step in range(40):
            # Scaled by the weights, outputs keep the size of the inputs.
            x = projections[step % 2](x).qkvg[:, :HIDDEN]
            found.append(x)
            if wait:
                torch.cuda.synchronize()
        return found

    want = chain(wait=True)
    assert bool(want[-1].isfinite().all())
    assert bool(want[-1].any())
    for _ in range(10):
        assert same(chain(wait=False), want)


@pytest.mark.parametrize("waits", [True, False], ids=["as built", "wait removed"])
def test_it_waits_for_its_input(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Behind a predecessor that lets it start and writes x much later; without the wait it reads too early."""
    late_copy, arch = LateCopy(), Arch.of_device()
    for tp in (8, 16):
        here = case(tp)
        proj = here.project()
        want = {m: proj(here.x[:m]) for m in SOME_M}
        config = proj.plan(1).kernel(Stream.PART)
        kernel = loaded_kernel(config, arch)
        if not waits:
            ptx = kernel.artifact.ptx
            assert "griddepcontrol.wait;" in ptx
            kernel = from_ptx(kernel.artifact.entry, ptx.replace("griddepcontrol.wait;", ""), config)
        monkeypatch.setattr(runtime, "loaded_kernel", lambda config, arch, kernel=kernel: kernel)
        for m in SOME_M:
            source, x = here.x[:m], torch.zeros_like(here.x[:m])
            # The first launch loads the kernel, which waits for the device.
            proj(x)
            torch.cuda.synchronize()
            late_copy(source, x)
            assert same(proj(x), want[m]) is waits, (tp, m)
        monkeypatch.undo()


# --- what runs beside it --------------------------------------------------------------------------------------------


def test_two_streams_at_once() -> None:
    """Two projections of the same weights, each with its own workspace."""
    here, calls = case(8), 300
    wanted, counts, streams, inputs = [], [], [], []
    projections = [here.project() for _ in range(2)]
    for i, proj in enumerate(projections):
        inputs.append(normal(i, 16 - 7 * i, HIDDEN))
        wanted.append(proj(inputs[i]))
        counts.append(torch.zeros((), dtype=torch.int64, device="cuda"))
        streams.append(torch.cuda.Stream())
    torch.cuda.synchronize()
    for _ in range(calls):
        for proj, x, want, count, stream in zip(projections, inputs, wanted, counts, streams, strict=True):
            with torch.cuda.stream(stream):
                count += unlike(proj(x), want)
    torch.cuda.synchronize()
    assert [count.item() for count in counts] == [0, 0]
    assert all(proj.armed() for proj in projections)


@pytest.mark.parametrize("m", [1, 16])
def test_beside_other_work(m: int) -> None:
    """Large matrix products on another stream, which take SMs away at any moment."""
    here = case(8)
    proj = here.project()
    want, count = proj(here.x[:m]), torch.zeros((), dtype=torch.int64, device="cuda")
    a, other = normal(5, 8192, 8192), torch.cuda.Stream()
    product = torch.mm(a, a)
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(other):
            for _ in range(5):
                torch.mm(a, a, out=product)
        for _ in range(30):
            count += unlike(proj(here.x[:m]), want)
    torch.cuda.synchronize()
    assert count.item() == 0
    assert proj.armed()


def test_stale_counters_are_cleared_by_rearm() -> None:
    """As if a launch had been aborted after it had published f_a: F_B then begins before its input is there."""
    here, own = case(8), Runtime(case(8).shapes, case(8).packed, case(8).f_b)
    there = torch.cuda.get_device_properties("cuda").multi_processor_count
    want = here.run(there, 16, own)
    assert own.armed()
    published = F_A_ROWS // BLOCK_ROWS
    own.workspace[:COUNTER_BYTES].view(torch.int32).copy_(torch.tensor([published, 0], dtype=torch.int32))
    own.workspace[F_A_START:].view(torch.bfloat16).fill_(POISON)
    assert not own.armed()
    assert bool(here.run(there, 16, own).g1.isnan().any()), "stale counters do harm, so this test can fail"
    own.rearm()
    for _ in range(3):
        assert same(here.run(there, 16, own), want)
        assert own.armed()


def test_rearm_repairs_a_captured_graph() -> None:
    here = case(8)
    proj = here.project()
    proj.rearm()
    assert proj.armed()
    want = proj(here.x)
    graph, outputs = capture(partial(proj, here.x))
    for part in outputs:
        part.fill_(POISON)
    proj.rearm()
    graph.replay()
    assert same(outputs, want)
    assert proj.armed()
