"""Measuring on a device: floors read every byte, graphs are as expected, times are possible, stamps tell the time."""

from collections.abc import Iterator

import pytest
import torch

from kda_lib.arch import Arch
from kda_lib.lab import measure, verdicts
from kda_lib.lab.device import DeviceInfo, current_device
from kda_lib.lab.floors import FloorConfig, ReadFloor, expected_checksum, floor_configs, floor_variants
from kda_lib.lab.graphs import Topology, lanes, node_counts, topology
from kda_lib.lab.measure import MIN_LAYERS, Refused, Variant, capture
from kda_lib.lab.peers import peers
from kda_lib.lab.profile import Profile, match_profile
from kda_lib.lab.stamps import Branch, Stamps, exposed_us, overlap_us, resolution_ns
from kda_lib.lab.workload import Weights, make_inputs, make_weights
from kda_lib.shapes import HIDDEN, KdaShapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = KdaShapes(8)
LAYERS = MIN_LAYERS


@pytest.fixture(scope="module")
def device() -> DeviceInfo:
    found = current_device()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def profile(device: DeviceInfo) -> Profile:
    found = match_profile(device.name)
    if found is None or found.bandwidth_bytes_per_s is None:
        pytest.skip(f"no profile with a bandwidth for {device.name}")
    return found


@pytest.fixture(scope="module")
def weights() -> Iterator[Weights]:
    yield make_weights(SHAPES, LAYERS, "cuda", seed=0)
    torch.cuda.empty_cache()


def configs(device: DeviceInfo, shapes: KdaShapes = SHAPES) -> dict[str, FloorConfig]:
    return floor_configs(Arch.of_device(), shapes, device.sms)


def graph_of(variant: Variant, layers: int) -> Topology:
    return topology(capture(variant, layers, torch.cuda.Stream()))


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_floors_read_every_byte(device: DeviceInfo, tp: int) -> None:
    weights = make_weights(KdaShapes(tp), 1, "cuda", seed=tp)
    expected = expected_checksum(weights, 0)
    for name, config in configs(device, weights.shapes).items():
        floor = ReadFloor(config, weights)
        assert [floor.checksum(0) for _ in range(20)] == [expected] * 20, name
        for region, place in ((weights.packed[0], -1), (weights.f_b[0], 0), (weights.f_b[0], -1)):
            words = region.view(torch.int32).view(-1)
            words[place] ^= 0x1234567
            assert floor.checksum(0) == expected ^ 0x1234567, f"{name} does not read word {place}"
            words[place] ^= 0x1234567


def test_floor_graphs(device: DeviceInfo, weights: Weights) -> None:
    for variant in floor_variants(weights, configs(device)):
        graph = graph_of(variant, LAYERS)
        counts = node_counts(graph)
        assert (counts.kernels, counts.memsets, counts.other, counts.edges) == (LAYERS, 0, 0, LAYERS - 1)
        assert counts.programmatic == (LAYERS - 1 if variant.pdl else 0)
        assert lanes(graph) == 1


def test_forked_branches_are_two_lanes_however_many_layers(weights: Weights) -> None:
    x = make_inputs(4, "cuda", seed=0)
    side = torch.cuda.Stream()
    outs = [x.new_empty(4, rows) for rows in (SHAPES.qkvg_rows, SHAPES.fa_beta_rows)]

    def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
        packed = weights.packed[layer % LAYERS]
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            torch.mm(x, packed[SHAPES.fa_beta_slice].t(), out=outs[1])
        torch.mm(x, packed[SHAPES.qkvg_slice].t(), out=outs[0])
        stream.wait_stream(side)

    variant = Variant("forked", enqueue, SHAPES.weight_bytes, tp=8, m=4)
    assert [lanes(graph_of(variant, layers)) for layers in (1, 8, 69)] == [2, 2, 2]


def test_peers_are_right_and_their_times_are_possible(device: DeviceInfo, profile: Profile, weights: Weights) -> None:
    x = make_inputs(4, "cuda", seed=0)
    found, missing = peers(weights, x, Arch.of_device())
    print("absent:", missing)
    wanted = x.double() @ weights.packed[1].double().t()
    for variant in found:
        for result in variant.results:
            result.fill_(float("nan"))
        variant.enqueue(1, torch.cuda.current_stream())
        first = variant.results[0]
        torch.testing.assert_close(first.double(), wanted[:, : first.shape[1]], rtol=2**-7, atol=2**-7)

    floors = floor_variants(weights, configs(device))
    result = measure.measure(
        [*found, *floors], layers=LAYERS, samples=50, seed=0, device=device, profile=profile, control="torch_packed"
    )
    floor = min(row["median_us"] for row in result.rows if row["floor_us"] is not None and row["M"] is None)
    for row in result.rows:
        print({key: value for key, value in row.items() if key != "samples"})
        if row["M"] is not None:
            assert row["median_us"] > 0.9 * floor * row["bytes"] / SHAPES.weight_bytes
    print("flags:", result.flags)
    noise = verdicts.noise(result.rows, control="torch_packed", seed=0)
    print(noise)
    assert noise.band < 0.1


def test_floors_reach_four_fifths_of_the_peak(device: DeviceInfo, profile: Profile, weights: Weights) -> None:
    """A floor that is far from the memory's peak is no floor. 23.4 us, the slowest seen on an H200, is 81% of it."""
    assert profile.bandwidth_bytes_per_s
    floors = floor_variants(weights, configs(device))
    rows = measure.measure(floors, layers=LAYERS, samples=100, seed=0, device=device, profile=profile).rows
    least = SHAPES.weight_bytes / profile.bandwidth_bytes_per_s * 1e6
    for row in rows:
        print(row["variant"], row["pdl"], row["median_us"], row["p10_us"], row["p90_us"])
    assert min(row["median_us"] for row in rows) < least / 0.8


def test_results_that_cannot_be_true_are_refused(device: DeviceInfo, profile: Profile, weights: Weights) -> None:
    tiny = torch.zeros(16, device="cuda")
    liar = Variant("liar", lambda layer, stream: tiny.add_(1), SHAPES.weight_bytes, tp=8)
    idle = Variant("idle", lambda layer, stream: None, SHAPES.weight_bytes, tp=8)
    for variant, message in ((liar, "faster than"), (idle, "has no kernel")):
        with pytest.raises(Refused, match=message):
            measure.measure([variant], layers=LAYERS, samples=20, seed=0, device=device, profile=profile)


def test_stamps_show_what_overlapped(weights: Weights) -> None:
    """A wide GEMM and a narrow one at once overlap, the same two in sequence do not."""
    side = torch.cuda.Stream()
    stamps = Stamps(slots=4 * LAYERS, device=weights.device)
    x = torch.randn(16, HIDDEN, device="cuda", dtype=torch.bfloat16)
    # Two GEMMs that each fill the GPU would not run at once.
    outs = [x.new_empty(16, rows) for rows in (SHAPES.packed_rows, SHAPES.fa_beta_rows)]

    def branch(layer: int, name: str, stream: torch.cuda.Stream, out: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            stamps.mark(layer, name, "start", stream)
            torch.mm(x, weights.packed[layer][: out.shape[1]].t(), out=out)
            stamps.mark(layer, name, "end", stream)

    def forked(layer: int, stream: torch.cuda.Stream) -> None:
        side.wait_stream(stream)
        branch(layer, "side", side, outs[1])
        branch(layer, "main", stream, outs[0])
        stream.wait_stream(side)

    def in_sequence(layer: int, stream: torch.cuda.Stream) -> None:
        branch(layer, "main", stream, outs[0])
        branch(layer, "side", stream, outs[1])

    for enqueue, overlaps in ((forked, True), (in_sequence, False)):
        graph = capture(Variant("stamped", enqueue, SHAPES.weight_bytes, tp=8), LAYERS, torch.cuda.Stream())
        # The first launch of a graph starts its branches one after the other.
        for _ in range(3):
            graph.replay()
        found = stamps.read()
        print("resolution", resolution_ns(found), "ns")
        for layer in range(LAYERS):
            main, aside = found[Branch(layer, "main")], found[Branch(layer, "side")]
            assert 5 < main.length_us < 1000
            assert (overlap_us(main, aside) > 1) is overlaps, (main, aside)
            assert exposed_us(aside, main) < 1000
            if not overlaps:
                assert aside.start_ns >= main.end_ns
