"""Tuning tables: kept, checked, and measured only where there is a choice; timing against a clock that is known."""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_flashinfer import FLASHINFER_0_7_4

from kda_lib import autotune
from kda_lib.arch import Arch
from kda_lib.autotune import (
    OVERLAP_LIMIT,
    TuningStore,
    TuningTable,
    measure_qkvg,
    shipped_table,
    time_interleaved,
    tune,
)
from kda_lib.backends import Backend, BrokenBackend, Installed, candidates, select_backend
from kda_lib.cache import CacheWarning
from kda_lib.lab.profile import load_profile
from kda_lib.shapes import HIDDEN, KdaShapes

TP8 = KdaShapes(8)
HOPPER, BLACKWELL = Arch.parse("h200"), Arch.parse("b200")
KEY = {"tp": 8, "device": "fake", "driver": 13000, "torch": "2.11.0", "cuda": "13.0", "flashinfer": "0.7.4"}
MM, TINY = Backend.TORCH, Backend.TINYGEMM
TABLE = TuningTable({3: {MM: 26.5, TINY: 24.25}}, {3: {"overlap": 25.0, "sequential": 29.0, "stream": 22.5}}, 12)


@pytest.fixture
def store(tmp_path: Path) -> TuningStore:
    return TuningStore(tmp_path / "tuning")


def test_table_survives_the_store(store: TuningStore) -> None:
    assert store.load(KEY) is None
    store.save(KEY, TABLE)
    assert store.load(KEY) == TABLE
    assert [path.suffix for path in store.folder.iterdir()] == [".json"]


@pytest.mark.parametrize("field", KEY)
def test_every_part_of_the_key_counts(store: TuningStore, field: str) -> None:
    store.save(KEY, TABLE)
    assert store.load({**KEY, field: "other"}) is None


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        data = json.loads(content)
        change(data)
        return json.dumps(data).encode()

    return changed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:-9],
        lambda content: b"\xff" + content,
        lambda content: b"[]",
        damage(lambda data: data["key"].update(tp=4)),
        damage(lambda data: data.pop("table")),
        damage(lambda data: data["table"].pop("overlap_limit")),
        damage(lambda data: data["table"].update(overlap_limit="14")),
        damage(lambda data: data["table"].update(overlap_limit=-1)),
        damage(lambda data: data["table"].update(qkvg_us=[])),
        damage(lambda data: data["table"]["qkvg_us"].update({"0": {}})),
        damage(lambda data: data["table"]["qkvg_us"].update(three={})),
        damage(lambda data: data["table"]["qkvg_us"]["3"].update({"magic": 1.0})),
        damage(lambda data: data["table"]["qkvg_us"]["3"].update({"torch.mm": 0})),
        damage(lambda data: data["table"]["qkvg_us"]["3"].update({"torch.mm": "fast"})),
        damage(lambda data: data["table"]["strategy_us"]["3"].update(overlap=float("nan"))),
    ],
)
def test_corrupt_files_are_discarded_with_a_warning(store: TuningStore, spoil: Callable[[bytes], bytes]) -> None:
    store.save(KEY, TABLE)
    path = store.path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(CacheWarning, match=f"discarding the corrupt tuning file {path.name}"):
        assert store.load(KEY) is None
    assert not path.exists()
    store.save(KEY, TABLE)
    assert store.load(KEY) == TABLE


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="cannot be written"):
        TuningStore(tmp_path / "file" / "tuning").save(KEY, TABLE)


def test_shipped_tables_are_sound() -> None:
    """Each is named for a profile whose device it names; another device or TP degree gets an empty table."""
    for file in (resources.files("kda_lib") / "tuning").iterdir():
        data = json.loads(file.read_text())
        assert data["device"] == "NVIDIA H200"
        assert load_profile(Path(file.name).stem).name == "h200"
        assert shipped_table(KdaShapes(data["tp"]), data["device"]) == TuningTable.from_json(data["table"])
    assert shipped_table(TP8, "NVIDIA H2000") == TuningTable()
    assert shipped_table(KdaShapes(1), "NVIDIA H200") == TuningTable()


# --- what is tuned --------------------------------------------------------------------------------------------------


class Bench:
    """Stands for the GPU: counts what is measured; torch.mm always takes 20 us, the others 21 and more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        patch.setattr(autotune, "measure_qkvg", self.measure)
        patch.setattr(autotune, "tuning_key", lambda shapes, device, installed: KEY)

    def measure(self, shapes: KdaShapes, options: dict[int, tuple[Backend, ...]], device: Any) -> dict[int, Any]:
        self.measured += options
        return {m: {backend: 20.0 + place for place, backend in enumerate(listed)} for m, listed in options.items()}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def tuned(
    store: TuningStore,
    tokens: list[int],
    arch: Arch = HOPPER,
    installed: Installed = FLASHINFER_0_7_4,
    table: TuningTable | None = None,
) -> TuningTable:
    return tune(arch, TP8, tokens, torch.device("cuda", 0), installed, table or TuningTable(), store)


def test_only_where_there_is_a_choice(bench: Bench, store: TuningStore) -> None:
    """M = 1 and 2 have one backend, and so have Blackwell and, above M = 4, a machine without FlashInfer.

    The limit is set anyway.
    """
    tables = [
        tuned(store, [1, 2]),
        tuned(store, [1, 2, 3, 16], arch=BLACKWELL),
        tuned(store, [1, 2, 5, 16], installed=Installed()),
    ]
    assert bench.measured == []
    assert not store.folder.exists()
    tables.append(tuned(store, [1, 2, 3, 16]))
    assert bench.measured == [3, 16]
    tables.append(tuned(store, [1, 2, 4, 5], installed=Installed()))
    assert bench.measured == [3, 16, 4]
    assert set(tables[-1].qkvg_us[4]) == {Backend.SKINNY, MM}
    assert {table.overlap_limit for table in tables} == {OVERLAP_LIMIT}


def test_once_for_each_m(bench: Bench, store: TuningStore) -> None:
    """Neither the same table, nor another process with the same key, measures an M again."""
    first = tuned(store, [3, 4])
    assert tuned(store, [3, 4], table=first) is first
    assert tuned(store, [3, 4]) == first
    assert bench.measured == [3, 4]
    second = tuned(store, [4, 5])
    assert bench.measured == [3, 4, 5]
    assert set(second.qkvg_us) == {4, 5}
    kept = store.load(KEY)
    assert kept is not None
    assert set(kept.qkvg_us) == {3, 4, 5}


def test_what_was_decided_stays(bench: Bench, store: TuningStore) -> None:
    """A later result of another process for an M that is already in use is not taken over."""
    mine = TuningTable({3: {b: 9.0 if b is TINY else 10.0 for b in candidates(HOPPER, 3, FLASHINFER_0_7_4)}}, {}, 12)
    store.save(KEY, TuningTable({3: dict.fromkeys(Backend, 5.0), 4: dict.fromkeys(Backend, 6.0)}))
    table = tuned(store, [3, 4], table=mine)
    assert bench.measured == []
    assert table.qkvg_us[3] == mine.qkvg_us[3]
    assert table.qkvg_us[4] == dict.fromkeys(Backend, 6.0)
    assert table.overlap_limit == 12
    assert select_backend(HOPPER, TP8, 3, FLASHINFER_0_7_4, table).backend is TINY


def test_times_that_miss_a_candidate_are_taken_anew(bench: Bench, store: TuningStore) -> None:
    store.save(KEY, TABLE)
    table = tuned(store, [3], table=TABLE)
    assert bench.measured == [3]
    assert set(table.qkvg_us[3]) == set(candidates(HOPPER, 3, FLASHINFER_0_7_4))
    assert table.strategy_us == TABLE.strategy_us


def test_the_key_names_device_driver_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, 13000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    key = autotune.tuning_key(TP8, torch.device("cuda", 1), FLASHINFER_0_7_4)
    assert key == {**KEY, "device": "GPU 1", "torch": torch.__version__, "cuda": torch.version.cuda}


# --- how it is timed ------------------------------------------------------------------------------------------------


class Clock:
    """A device on which each launch takes as long as ``cost`` says; graphs replay what they captured."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_us = 0.0
        self.cost: Callable[[Backend], float] = lambda backend: 10.0
        self.recording: list[Backend] | None = None
        self.replays: list[list[Backend]] = []
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = clock.now_us

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) / 1000

        class Graph:
            def __init__(self) -> None:
                self.launches: list[Backend] = []

            def replay(self) -> None:
                clock.replays.append(self.launches)
                clock.now_us += sum(clock.cost(backend) for backend in self.launches)

        @contextmanager
        def graph(target: Graph, capture_error_mode: str) -> Iterator[None]:
            clock.recording = target.launches
            yield
            clock.recording = None

        class Stream:
            cuda_stream = 7

            def synchronize(self) -> None:
                assert clock.recording is None

        for name, fake in (("Event", Event), ("CUDAGraph", Graph), ("graph", graph)):
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())

    def launch(self, backend: Backend) -> None:
        if self.recording is not None:
            self.recording.append(backend)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_medians_of_graphs_that_take_turns(clock: Clock) -> None:
    """A device that gets slower all the time does not favour who comes first; one outlier does not count."""
    clock.cost = lambda backend: 10.0 + len(clock.replays) * 0.01 + (500.0 if len(clock.replays) == 7 else 0.0)
    times = time_interleaved([MM, TINY, Backend.CUBLASLT], clock.launch, rounds=30)
    assert len(clock.replays) == 90
    for turn in range(0, 90, 3):
        assert {launches[0] for launches in clock.replays[turn : turn + 3]} == {MM, TINY, Backend.CUBLASLT}
    first = [launches[0] for launches in clock.replays[::3]]
    assert [first.count(backend) for backend in times] == [10, 10, 10]
    assert max(times.values()) - min(times.values()) < 0.05
    assert statistics.mean(times.values()) == pytest.approx(10.45, abs=0.05)


def test_a_candidate_that_fails_is_named(clock: Clock) -> None:
    def fails(backend: Backend) -> None:
        if backend is TINY:
            raise RuntimeError("no nvcc")

    with pytest.raises(BrokenBackend, match=r"flashinfer-tinygemm .*no nvcc"):
        time_interleaved([MM, TINY], fails)


@pytest.mark.parametrize(("l2_mb", "count"), [(1, 8), (50, 8), (126, 12)])
def test_each_launch_reads_a_weight_that_has_left_l2(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, l2_mb: int, count: int
) -> None:
    """At least 8 distinct weights, together at least 4 times the L2 cache; the result is the time of one launch."""
    shapes = replace(TP8, tp=16)
    seen: list[tuple[int, int, tuple[int, ...]]] = []

    def gemm(backend: Backend, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        seen.append((weight.data_ptr(), x.shape[0], tuple(out.shape)))
        clock.launch(backend)

    class Properties:
        L2_cache_size = l2_mb * 10**6

    class NoDevice:
        def __init__(self, device: Any) -> None:
            pass

        __enter__ = __exit__ = lambda *_: None

    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    def own_kernel(config: Any, arch: Arch) -> Callable[..., None]:
        """Our GEMV is no library's GEMM: it is compiled for the M at hand, and launched by address."""
        assert (config.m, config.n) == (3, shapes.qkvg_rows)

        def launch(x: int, weight: int, out: int, *, stream: int) -> None:
            assert stream == 7
            seen.append((weight, config.m, (config.m, config.n)))
            clock.launch(Backend.SKINNY)

        return launch

    monkeypatch.setattr(autotune, "run_gemm", gemm)
    monkeypatch.setattr("kda_lib.runtime.loaded_kernel", own_kernel)
    monkeypatch.setattr(Arch, "of_device", classmethod(lambda cls, device: HOPPER))
    # Only the addresses matter: uninitialised memory is never touched.
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device, dtype: untouched(shape, dtype))
    options = {3: candidates(HOPPER, 3, Installed()), 5: (MM, TINY)}
    assert Backend.SKINNY in options[3]
    times = measure_qkvg(shapes, options, torch.device("cpu"))
    assert times == {3: dict.fromkeys(options[3], 10.0), 5: {MM: 10.0, TINY: 10.0}}
    assert len({address for address, _, _ in seen}) == count
    assert {(m, out) for _, m, out in seen} == {(3, (3, 3072)), (5, (5, 3072))}
    assert {len(launches) for launches in clock.replays} == {count}
    assert count * 2 * shapes.qkvg_rows * HIDDEN >= 4 * Properties.L2_cache_size


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.mul_ = lambda scale: tensor  # type: ignore[method-assign]
    return tensor
