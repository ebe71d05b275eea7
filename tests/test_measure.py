"""Timing without a device: order, refusals, rows, noise and verdicts on a bench whose times are made up."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from kda_lib.lab import measure as m
from kda_lib.lab import records, stamps, verdicts
from kda_lib.lab.device import Clocks, DeviceInfo, DeviceState
from kda_lib.lab.graphs import NodeCounts, Topology, lanes, node_counts, topology
from kda_lib.lab.measure import AGAIN, Refused, Variant, measure
from kda_lib.lab.profile import load_profile
from kda_lib.lab.stamps import Branch, Interval, exposed_us, intervals, overlap_us, resolution_ns

MB = 10**6
SIZE = 90 * MB
DEVICE = DeviceInfo(name="NVIDIA H200", index=0, capability="9.0", sms=132, memory_bytes=141 * 10**9, l2_bytes=60 * MB)
PROFILE = load_profile("h200")
CHAIN = Topology(("kernel",) * 3, ((0, 1), (1, 2)))
BUSY = DeviceState(clocks=Clocks(sm_mhz=1980, mem_mhz=3201))


def variant(name: str, m: int | None = 1, **fields: Any) -> Variant:
    return Variant(name, lambda layer, stream: None, **{"bytes": SIZE, "tp": 8, "m": m, **fields})


class FakeBench:
    """Takes the time of a variant from ``us(key, sample)`` and writes down what it is asked to do."""

    def __init__(self, us: Callable[[m.Key, int], float], graph: Topology = CHAIN, states: Any = ()) -> None:
        self.us, self.graph, self.states = us, graph, list(states)
        self.log: list[tuple[str, m.Key]] = []
        self.layers: set[int] = set()
        self.flushed: set[str] = set()
        self._pending: list[float] = []
        self._count: dict[m.Key, int] = {}

    def capture(self, variant: Variant, layers: int) -> Variant:
        self.layers.add(layers)
        return variant

    def topology(self, graph: Variant) -> Topology:
        return self.graph

    def replay(self, graph: Variant) -> None:
        self.log.append(("replay", graph.key))

    def timed(self, graph: Variant, flush: bool) -> None:
        self.log.append(("timed", graph.key))
        if flush:
            self.flushed.add(graph.name)
        sample = self._count.setdefault(graph.key, 0)
        self._count[graph.key] += 1
        (layers,) = self.layers
        self._pending.append(self.us(graph.key, sample) * layers / 1000)

    def collect(self) -> list[float]:
        times, self._pending = self._pending, []
        return times

    def state(self) -> DeviceState:
        return self.states.pop(0) if self.states else BUSY


def noisy(medians: dict[str, float], seed: int = 0, relative: float = 0.004) -> Callable[[m.Key, int], float]:
    """Times around a median by name, the second capture of a variant like the first."""
    rng = np.random.default_rng(seed)
    return lambda key, sample: medians[key.variant.removesuffix(AGAIN)] * (1 + relative * rng.standard_normal())


def run(bench: FakeBench, *variants: Variant, **arguments: Any) -> m.Measurement:
    defaults = {"layers": 8, "samples": 40, "seed": 1, "device": DEVICE, "profile": PROFILE, "bench": bench}
    return measure(variants, **{**defaults, **arguments})


def test_times_reach_the_row_of_their_own_variant_whatever_the_order() -> None:
    us = {"a": 30.0, "b": 40.0, "c": 50.0}
    result = run(FakeBench(lambda key, sample: us[key.variant.removesuffix(AGAIN)] + sample / 100), *map(variant, us))
    for row in result.rows:
        first = us[row["variant"].removesuffix(AGAIN)]
        assert row["samples"] == pytest.approx([first + sample / 100 for sample in range(40)])
        assert row["median_us"] == pytest.approx(first + 0.195)
        assert row["min_us"] == pytest.approx(first)
        assert (row["p10_us"], row["p90_us"]) == pytest.approx((first + 0.039, first + 0.351))


def test_rows_have_the_fields_of_result_files() -> None:
    for row in run(FakeBench(noisy({"a": 30})), variant("a", pdl=True)).rows:
        assert records.ROW.validate_python(row) == row
        assert row.keys() == records.MEASUREMENT_FIELDS.keys() - {"max_ulp"}
        assert (row["M"], row["tp"], row["pdl"], row["bytes"]) == (1, 8, True, SIZE)


def test_every_round_holds_each_graph_once_in_a_new_order() -> None:
    bench = FakeBench(noisy({"a": 30, "b": 30, "c": 30}))
    run(bench, *map(variant, "abc"))
    order = [key.variant for what, key in bench.log if what == "timed"]
    rounds = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(rounds) == 40
    assert {tuple(sorted(names)) for names in rounds} == {("a", "a" + AGAIN, "b", "c")}
    assert len(set(rounds)) > 10
    first = [names[0] for names in rounds]
    assert all(first.count(name) >= 3 for name in set(first))


@pytest.mark.parametrize(("seed", "same"), [(1, True), (2, False)])
def test_the_order_follows_from_the_seed(seed: int, same: bool) -> None:
    logs = []
    for s in (1, seed):
        bench = FakeBench(noisy({"a": 30, "b": 30}))
        run(bench, variant("a"), variant("b"), seed=s)
        logs.append(bench.log)
    assert (logs[0] == logs[1]) is same


def test_nothing_is_timed_on_an_idle_device() -> None:
    bench = FakeBench(noisy({"a": 30}))
    run(bench, variant("a"))
    blocks = "".join("t" if what == "timed" else "r" for what, _ in bench.log).split("rrrr")
    assert blocks == ["", *["t" * 8] * 10, ""]


def test_the_control_is_captured_twice_for_every_m() -> None:
    many = [variant(name, m=tokens) for tokens in (1, 2) for name in ("overlap", "sequential")]
    result = run(FakeBench(noisy({"overlap": 25, "sequential": 30})), *many, control="sequential")
    again = [(row["variant"], row["M"]) for row in result.rows if row["variant"].endswith(AGAIN)]
    assert again == [("sequential" + AGAIN, 1), ("sequential" + AGAIN, 2)]


def test_floor_is_the_fastest_of_the_same_bytes_and_kind_of_launch() -> None:
    names = {"sequential": 30, "read_loads": 23, "read_bulk": 21, "qkvg": 24, "stream": 22}
    bench = FakeBench(lambda key, sample: 20 if key.pdl else names[key.variant.removesuffix(AGAIN)])
    rows = run(
        bench,
        variant("sequential"),
        variant("read_loads", floor=True),
        variant("read_bulk", floor=True),
        variant("read_bulk", floor=True, pdl=True),
        variant("qkvg", bytes=SIZE - MB),
        variant("stream"),
        variant("stream", pdl=True),
        variant("read_loads", m=None),
    ).rows
    assert [row["floor_us"] for row in rows] == [21, 21, 21, 20, None, 21, 20, 21, 21]


def test_only_variants_that_ask_for_it_are_flushed() -> None:
    bench = FakeBench(noisy({"a": 30, "side": 4}))
    run(bench, variant("a"), variant("side", bytes=2 * MB, flush=True))
    assert bench.flushed == {"side"}


BAD: list[tuple[tuple[Variant, ...], dict[str, Any], str]] = [
    ((), {}, "variants: expected at least one"),
    ((variant("a"), variant("a")), {}, "variants: expected one of each"),
    ((variant("a"),), {"layers": 7}, "layers: expected at least 8, got 7"),
    ((variant("a"),), {"samples": 9}, "samples: expected at least 10, got 9"),
    ((variant("a"),), {"control": "b"}, "control: expected the name of a variant, got 'b'"),
    ((variant("a"),), {"profile": load_profile("cpu")}, "profile: expected one with a bandwidth, got 'cpu'"),
    ((variant("a", bytes=0),), {}, "a: expected at least 1 byte, got 0"),
    ((variant("a", bytes=75 * MB),), {}, r"a: expected weight sets of more than 10 times the L2 \(60000000 bytes\)"),
]


@pytest.mark.parametrize(("variants", "arguments", "message"), BAD)
def test_bad_arguments_are_refused_before_anything_runs(
    variants: tuple[Variant, ...], arguments: dict[str, Any], message: str
) -> None:
    bench = FakeBench(noisy({"a": 30}))
    with pytest.raises(ValueError, match=message):
        run(bench, *variants, **arguments)
    assert bench.log == []


def test_as_many_bytes_as_ten_times_the_l2_are_not_enough_but_one_more_is() -> None:
    bench = FakeBench(noisy({"a": 30}))
    assert run(bench, variant("a", bytes=75 * MB + 1)).rows


def test_a_graph_without_kernels_is_refused() -> None:
    with pytest.raises(Refused, match="has no kernel"):
        run(FakeBench(noisy({"a": 30}), Topology(("empty", "memset"), ())), variant("a"))


@pytest.mark.parametrize(("factor", "refused"), [(0.999, True), (1.001, False)])
def test_times_below_the_byte_floor_are_refused(factor: float, refused: bool) -> None:
    least = SIZE / (1.05 * 4.8e12) * 1e6
    bench = FakeBench(lambda key, sample: least * factor if sample == 17 else 30)
    if refused:
        with pytest.raises(Refused, match=r"faster than 1\.05 times the peak bandwidth"):
            run(bench, variant("a"))
    else:
        assert run(bench, variant("a")).rows[0]["min_us"] == pytest.approx(least * factor)


@pytest.mark.parametrize(
    ("states", "flags"),
    [
        ([], []),
        ([DeviceState(clocks=BUSY.clocks, throttle_reasons=["gpu_idle"])], []),
        ([BUSY, DeviceState(clocks=Clocks(sm_mhz=1950, mem_mhz=3201))], []),
        ([BUSY, DeviceState(clocks=Clocks(sm_mhz=1900, mem_mhz=3201))], ["sm_mhz changed: 1900 to 1980"]),
        ([BUSY, DeviceState(clocks=BUSY.clocks, throttle_reasons=["sw_power_cap"])],
         ["throttle reasons changed: sw_power_cap"]),
        ([DeviceState(throttle_reasons=["hw_slowdown"])] * 11, []),
    ],
)  # fmt: skip
def test_what_changed_is_flagged_and_the_times_are_kept(states: list[DeviceState], flags: list[str]) -> None:
    result = run(FakeBench(noisy({"a": 30}), states=states), variant("a"))
    assert list(result.flags) == flags
    assert len(result.states) == 11
    assert len(result.rows) == 2


def compared(ratio: float, seed: int = 0, relative: float = 0.004) -> verdicts.Verdict:
    """The verdict where overlap truly takes ``ratio`` times as long as sequential."""
    bench = FakeBench(noisy({"overlap": 29 * ratio, "sequential": 29}, seed, relative))
    rows = run(bench, variant("overlap"), variant("sequential"), control="sequential", samples=60).rows
    (verdict,) = verdicts.verdicts(rows, verdicts.noise(rows, control="sequential", seed=0))
    return verdict


@pytest.mark.parametrize(("ratio", "outcome"), [(0.9, "wins"), (0.995, "inside noise"), (1, "inside noise"),
                                                (1.005, "inside noise"), (1.1, "loses")])  # fmt: skip
def test_verdicts_are_right_and_the_same_for_every_rerun(ratio: float, outcome: str) -> None:
    found = [compared(ratio, seed) for seed in range(8)]
    assert {verdict.outcome for verdict in found} == {outcome}
    assert all(verdict.ratio.low <= verdict.ratio.value <= verdict.ratio.high for verdict in found)
    assert all(verdict.ratio.value == pytest.approx(ratio, rel=0.005) for verdict in found)
    assert all(verdict.margin > 0 for verdict in found)


def test_verdicts_follow_from_the_rows_and_the_seed() -> None:
    rows = run(FakeBench(noisy({"a": 25, "b": 30})), variant("a"), variant("b")).rows
    noise = verdicts.noise(rows, control="a", seed=3)
    assert noise == verdicts.noise(rows, control="a", seed=3)
    first = verdicts.verdicts(rows, noise, contender="a", baseline="b", seed=3)
    assert first == verdicts.verdicts(rows, noise, contender="a", baseline="b", seed=3)
    assert first != verdicts.verdicts(rows, noise, contender="a", baseline="b", seed=4)


def test_a_difference_as_large_as_that_of_two_captures_is_noise() -> None:
    us = {"sequential": 29.0, "sequential" + AGAIN: 31.0, "overlap": 27.5}
    bench = FakeBench(lambda key, sample: us[key.variant] + sample % 3 * 0.01)
    rows = run(bench, variant("overlap"), variant("sequential"), control="sequential").rows
    noise = verdicts.noise(rows, control="sequential", seed=0)
    assert noise.band == pytest.approx(2 / 29, rel=0.01)
    (verdict,) = verdicts.verdicts(rows, noise)
    assert verdict.outcome == "inside noise"
    (verdict,) = verdicts.verdicts(rows, verdicts.Noise({}, verdicts.RUN_TO_RUN))
    assert verdict.outcome == "wins"


def test_the_noise_of_all_m_counts_for_each() -> None:
    def us(key: m.Key, sample: int) -> float:
        return 29 * (1.04 if key.variant == "s" + AGAIN and key.m == 2 else 1) + sample % 3 * 0.01

    rows = run(FakeBench(us), variant("s", m=1), variant("s", m=2)).rows
    noise = verdicts.noise(rows, control="s", seed=0)
    assert noise.band == pytest.approx(0.04, rel=0.05)
    assert noise.aa[8, 1].value == pytest.approx(1)


def test_slow_drift_of_the_clock_cancels() -> None:
    bench = FakeBench(lambda key, sample: {"a": 30, "b": 33}[key.variant.removesuffix(AGAIN)] * (1 + sample / 100))
    rows = run(bench, variant("a"), variant("b")).rows
    ratio = verdicts.compare(rows[1]["samples"], rows[0]["samples"], 0)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.1, 1.1, 1.1), rel=1e-4)


def test_missing_or_doubled_rows_are_refused() -> None:
    rows = run(FakeBench(noisy({"a": 25, "b": 30})), variant("a"), variant("b")).rows
    noise = verdicts.noise(rows, control="a", seed=0)
    with pytest.raises(ValueError, match="control: expected rows of 'b' and 'b_again'"):
        verdicts.noise(rows, control="b", seed=0)
    with pytest.raises(ValueError, match="expected 'overlap' and 'b' at the same M"):
        verdicts.verdicts(rows, noise, baseline="b")
    with pytest.raises(ValueError, match=r"expected one of 'a' at .* got two"):
        verdicts.verdicts([*rows, rows[0]], noise, contender="a", baseline="b")
    with pytest.raises(ValueError, match="expected as many of both, got 2 and 3"):
        verdicts.compare([1, 2], [1, 2, 3], 0)


def layered(layers: int, forks: int) -> Topology:
    """Layers in sequence; each forks ``forks`` branches of two kernels, joined by an empty node."""
    kinds: list[str] = ["empty"]
    edges = []
    for _ in range(layers):
        join = len(kinds) + 2 * forks
        for branch in range(forks):
            first = len(kinds)
            kinds += ["kernel"] * 2
            edges += [(join - 2 * forks - 1, first), (first, first + 1), (first + 1, join)]
            assert first == join - 2 * forks + 2 * branch
        kinds.append("empty")
    return Topology(tuple(kinds), tuple(edges))


@pytest.mark.parametrize("layers", [1, 8, 69])
@pytest.mark.parametrize("forks", [1, 2, 3])
def test_lanes_do_not_grow_with_layers(layers: int, forks: int) -> None:
    assert lanes(layered(layers, forks)) == forks


def test_lanes_grow_where_layers_are_not_joined() -> None:
    assert lanes(Topology(("kernel",) * 5, ())) == 5
    assert lanes(Topology(("memset", "memset"), ())) == 0
    # 0 -> 1 and 2 -> 3 with 0 -> 3: 1 and 2, or 1 and 3, are side by side; never three.
    assert lanes(Topology(("kernel",) * 4, ((0, 1), (2, 3), (0, 3)))) == 2
    # A node that is no kernel still orders the kernels around it.
    assert lanes(Topology(("kernel", "memset", "kernel"), ((0, 1), (1, 2)))) == 1


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="got a cycle"):
        lanes(Topology(("kernel", "kernel"), ((0, 1), (1, 0))))


def test_nodes_are_counted_by_kind() -> None:
    kinds = ("kernel", "memset", "event_record", "wait_event", "empty", "kernel", "memcpy")
    assert node_counts(Topology(kinds, ((0, 5), (1, 0)), programmatic=1)) == NodeCounts(
        kernels=2, memsets=1, events=2, other=2, edges=2, programmatic=1
    )


def test_overlap_and_what_sticks_out() -> None:
    main, side, later = Interval(1000, 26000), Interval(1500, 8000), Interval(26000, 30000)
    assert (main.length_us, overlap_us(main, side), overlap_us(side, main)) == (25, 6.5, 6.5)
    assert (exposed_us(side, main), exposed_us(later, main)) == (0, 4)
    assert overlap_us(main, later) == overlap_us(side, later) == 0
    assert resolution_ns({Branch(0, "main"): main, Branch(0, "side"): side}) == 500


def test_stamps_become_intervals() -> None:
    main, side = Branch(0, "main"), Branch(0, "side")
    places: dict[tuple[Branch, Any], int] = {
        (main, "start"): 0, (side, "start"): 1, (side, "end"): 2, (main, "end"): 3,
    }  # fmt: skip
    words = [[100, 7], [110, 8], [150, 8], [300, 9]]
    assert intervals(places, words) == {main: Interval(100, 300, (7, 9)), side: Interval(110, 150, (8, 8))}
    with pytest.raises(ValueError, match="got no end"):
        intervals({(main, "start"): 0}, words)
    with pytest.raises(ValueError, match="replay the graph first"):
        intervals(places, [[100, 7], [110, 8], [0, 0], [300, 9]])


def test_a_graph_is_read_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``cuda.bindings`` returns, by its documentation: a status, lists of the length asked for, and the count."""
    kinds = {10: "KERNEL", 20: "EVENT_RECORD", 30: "KERNEL"}
    edge_data = [driver.CUgraphEdgeData() for _ in range(2)]
    edge_data[1].type = 1
    ok = driver.CUresult.CUDA_SUCCESS

    def nodes(graph: Any, count: int = 0) -> tuple[Any, ...]:
        assert int(graph) == 99
        return ok, [driver.CUgraphNode(number) for number in kinds][:count], 3

    def edges(graph: Any, count: int = 0) -> tuple[Any, ...]:
        sources, targets = ([driver.CUgraphNode(number) for number in ends] for ends in ((10, 20), (20, 30)))
        return ok, sources[:count], targets[:count], edge_data[:count], 2

    def kind(node: Any) -> tuple[Any, ...]:
        return ok, getattr(driver.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kinds[int(node)]}")

    monkeypatch.setattr(driver, "cuGraphGetNodes", nodes)
    monkeypatch.setattr(driver, "cuGraphGetEdges", edges)
    monkeypatch.setattr(driver, "cuGraphNodeGetType", kind)
    graph = SimpleNamespace(raw_cuda_graph=lambda: 99)
    assert topology(graph) == Topology(("kernel", "event_record", "kernel"), ((0, 1), (1, 2)), programmatic=1)


def test_marks_of_one_place_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(stamps, "compile_kernel", lambda config, arch, cache: None)
    monkeypatch.setattr(stamps, "LoadedKernel", lambda artifact: lambda address, stream: written.append(address))
    monkeypatch.setattr(stamps.Arch, "of_device", lambda device: None)
    stream: Any = SimpleNamespace(cuda_stream=5)
    marks = stamps.Stamps(slots=2, device="cpu")  # type: ignore[arg-type]
    for edge in ("start", "end", "start", "end"):
        marks.mark(0, "main", edge, stream)  # type: ignore[arg-type]
    first, second = written[:2]
    assert written == [first, second] * 2
    assert second - first == 16
    with pytest.raises(ValueError, match="slots: expected at least 3, got 2"):
        marks.mark(1, "main", "start", stream)
