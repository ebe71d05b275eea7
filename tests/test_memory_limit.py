"""The variants of notebook 06 on a played CUDA, and the notes on tuning that it shows."""

import json
from collections.abc import Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from conftest import ROOT
from fake_cuda import FakeCuda, fake_cuda, layer_weights

from kda_lib import Arch
from kda_lib.autotune import TuningTable
from kda_lib.lab import floors, memory_limit
from kda_lib.lab.comparison import Comparison
from kda_lib.lab.measure import Variant
from kda_lib.lab.records import ROW
from kda_lib.lab.workload import Weights
from kda_lib.projection import KdaProjection
from kda_lib.shapes import KdaShapes

HOPPER = Arch.parse("h200")
TP16 = KdaShapes(16)
MAIN: Any = None  # a stream that no variant looks at
TABLE = TuningTable()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer, whose floors read nothing."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    monkeypatch.setattr(
        memory_limit.peers, "absent", lambda arch: dict.fromkeys(("tinygemm", "tinygemm_pdl", "cublaslt"), "absent")
    )
    monkeypatch.setattr(floors, "compile_kernel", lambda config, arch, cache: config)
    monkeypatch.setattr(floors, "LoadedKernel", lambda config: config)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def compare(tokens: tuple[int, ...]) -> Comparison:
    packed, f_b = layer_weights(16)
    return Comparison(Weights(TP16, (packed, packed.flip(0)), (f_b, f_b)), tokens, seed=0)


def launched_by(cuda: FakeCuda, variant: Variant, layer: int = 0) -> list[str]:
    cuda.log.clear()
    variant.enqueue(layer, MAIN)
    return [line for line in cuda.log if "=" in line]


def test_stream_both_ways_beside_its_floors(cuda: FakeCuda) -> None:
    compared = compare((1, 3))
    stream = memory_limit.stream_projections(compared, TABLE)
    variants = memory_limit.stream_and_floors(compared, stream, sms=132)
    assert [(v.name, v.m, v.pdl, v.floor) for v in variants] == [
        ("stream", 1, False, False), ("stream", 3, False, False),
        ("stream", 1, True, False), ("stream", 3, True, False),
        ("read_loads", None, False, False), ("read_bulk", None, False, True), ("read_bulk", None, True, True),
    ]  # fmt: skip
    assert {v.bytes for v in variants} == {TP16.weight_bytes}
    assert launched_by(cuda, variants[1]) == launched_by(cuda, variants[3]) == ["stream M=3 on main"]
    assert {config.launch.pdl for config in cuda.compiled} == {False, True}
    assert all(compared.largest_error(made) < 2**-5 for made in stream.values())


def test_bits_that_pdl_changes_are_counted(cuda: FakeCuda) -> None:
    compared = compare((2, 3))
    stream = dict(memory_limit.stream_projections(compared, TABLE))
    assert memory_limit.bits_that_pdl_changes(compared, stream) == 0
    stream[True] = stream[True][::-1]
    outputs = 5 * (TP16.qkvg_rows + TP16.f_b_rows + TP16.heads)
    assert outputs // 2 < memory_limit.bits_that_pdl_changes(compared, stream) <= outputs


def test_what_it_replaces(cuda: FakeCuda) -> None:
    variants, absent = memory_limit.replaced(compare((2, 3)), TABLE)
    peers = ("torch_packed", "qkvg_torch_mm", "torch_split")
    assert [(v.name, v.m) for v in variants] == [
        *((name, m) for m in (2, 3) for name in peers),
        *((name, m) for name in ("sequential", "overlap") for m in (2, 3)),
    ]
    assert set(absent) == {"tinygemm", "tinygemm_pdl", "cublaslt"}
    assert not any(v.pdl for v in variants)


def test_larger_batches(cuda: FakeCuda) -> None:
    compared = compare((17, 32))
    variants, chosen = memory_limit.crossing(compared, TABLE)
    by_key = {(v.name, v.m): v for v in variants}
    assert list(by_key) == [(name, m) for name in ("sequential", "auto", "stream_split") for m in (17, 32)]
    assert launched_by(cuda, by_key["stream_split", 17]) == ["stream M=16 on main", "stream M=1 on main"]
    assert launched_by(cuda, by_key["stream_split", 32]) == ["stream M=16 on main"] * 2
    assert launched_by(cuda, by_key["auto", 17]) == launched_by(cuda, by_key["sequential", 17])
    assert by_key["stream_split", 17].pdl
    assert list(chosen) == [17, 32]
    assert all(why.startswith("sequential, because ") for why in chosen.values())


def test_first_call_and_a_call_after_idling(cuda: FakeCuda) -> None:
    packed, f_b = layer_weights(16)
    compared = compare((3,))
    projection = KdaProjection(packed, f_b, tp=16, strategy="stream")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        packed[0].neg_()

    try:
        first, idle = memory_limit.first_and_idle(projection, compared.inputs[3], 20, sleep)
    finally:
        packed[0].neg_()
    assert slept == [20]
    assert all(ROW.validate_python(row) == row for row in (first, idle))
    assert (first["variant"], idle["variant"]) == ("stream_first_call", "stream_after_idle")
    assert (first["differing"], idle["differing"]) == (0, 3), "the weights changed while it slept"
    assert first["outputs"] == 3 * (TP16.qkvg_rows + TP16.f_b_rows + TP16.heads)
    assert first["median_us"] > 0
    assert idle["detail"].endswith("20 s without a launch")
    assert len(cuda.compiled) == 1


def test_notes_on_tuning_say_what_they_are() -> None:
    notes = json.loads((ROOT / "docs" / "stream_tuning.json").read_text(encoding="utf-8"))
    assert notes["status"] == "exploration, not part of the recorded run"
    assert set(notes["provenance"]) == {"made", "date", "gpu", "code", "method", "unit"}
    names = [version["version"] for version in notes["versions"]]
    assert names == sorted(set(names), key=lambda name: int(name[1:]))
    for version in notes["versions"]:
        assert set(version) == {"version", "design", "prediction", "outcome", "us", "us_pdl"}
        assert version["design"]
        assert version["outcome"]
        for way in ("us", "us_pdl"):
            assert len(version[way]) == len(notes["tokens"])
        pairs = [pair for pair in zip(version["us"], version["us_pdl"], strict=True) if None not in pair]
        assert all(20 < pdl < plain < 35 for plain, pdl in pairs), "a launch that PDL hides is not slower"
    counted = {(row["case"], row["M"]): row for row in notes["ncu"]["rows"]}
    assert {names[-1], names[-2]} <= {case for case, _ in counted}, "before and after the last change"
    weights = KdaShapes(8).weight_bytes / 1e6
    for row in counted.values():
        assert weights - 0.1 < row["dram_mb"] < 1.02 * weights, "the weights are read from memory once"
        assert row["l2_to_sm_mb"] > weights - 0.1
