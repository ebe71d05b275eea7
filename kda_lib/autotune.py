"""Measured times that the selector and strategy ``auto`` decide by, where they are kept, and how they are taken.

A table is plain data: what is chosen from it is a pure function elsewhere. Tables measured on this machine live in
the user's cache folder, one file for each (shapes, device, driver, library versions); ``kda_lib/tuning`` holds tables
that come with the library. Nothing is read from the environment.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_lib.arch import Arch
from kda_lib.backends import Backend, Installed, candidates, naming, run_gemm
from kda_lib.cache import ArtifactCache, CacheWarning
from kda_lib.kernels.config import qkvg_gemv_config
from kda_lib.shapes import HIDDEN, KdaShapes

if TYPE_CHECKING:
    import torch

#: Part of every key: raise it when the layout of a file or the way of measuring changes.
FORMAT = 1

#: Most tokens for which overlap is used where stream cannot run and nothing says otherwise: vLLM pull request 54697
#: found 15 and 16 slower.
OVERLAP_LIMIT = 14

#: Launches of one timed graph, each with its own weight, and how often each graph is replayed.
WEIGHTS = 8
ROUNDS = 30


@dataclass(frozen=True)
class TuningTable:
    """Median microseconds by number of tokens, exactly that number.

    qkvg_us: M -> backend -> QKVG alone. strategy_us: M -> strategy -> the whole projection.
    overlap_limit: most tokens for which overlap is the default where stream cannot run and nothing was measured.
    """

    qkvg_us: Mapping[int, Mapping[Backend, float]] = field(default_factory=dict)
    strategy_us: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    overlap_limit: int = OVERLAP_LIMIT

    def with_qkvg(self, times: Mapping[int, Mapping[Backend, float]]) -> TuningTable:
        """This table with other times for QKVG at some M."""
        return replace(self, qkvg_us={**self.qkvg_us, **times})

    def to_json(self) -> dict[str, Any]:
        return {
            "qkvg_us": {str(m): {str(b): us for b, us in times.items()} for m, times in self.qkvg_us.items()},
            "strategy_us": {str(m): dict(times) for m, times in self.strategy_us.items()},
            "overlap_limit": self.overlap_limit,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuningTable:
        """The table written by :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not one.
        """
        limit = data["overlap_limit"]
        if type(limit) is not int or limit < 0:
            raise ValueError(f"overlap_limit: expected a number of tokens, got {limit!r}; measure again")
        return cls(
            {_tokens(m): {Backend(b): _time(us) for b, us in times.items()} for m, times in data["qkvg_us"].items()},
            {_tokens(m): {str(s): _time(us) for s, us in times.items()} for m, times in data["strategy_us"].items()},
            limit,
        )


def _tokens(text: str) -> int:
    if (m := int(text)) < 1:
        raise ValueError(f"M: expected at least 1, got {m}; measure again")
    return m


def _time(value: Any) -> float:
    if not isinstance(value, float | int) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"time: expected microseconds above 0, got {value!r}; measure again")
    return float(value)


#: What reading a damaged file raises: JSON and UTF-8 errors are ValueErrors.
_CORRUPT = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class TuningStore:
    """Tables under ``folder``, which is made when first written to. A file appears whole, by rename."""

    folder: Path

    @classmethod
    def default(cls) -> TuningStore:
        """In the user's cache folder, beside the compiled kernels."""
        return cls(ArtifactCache.default().folder.parent / "tuning")

    def path(self, key: Mapping[str, Any]) -> Path:
        return ArtifactCache(self.folder).path({"tuning": FORMAT, **key}).with_suffix(".json")

    def load(self, key: Mapping[str, Any]) -> TuningTable | None:
        """The table for this key, or ``None``. A corrupt file is removed, with a :class:`CacheWarning`."""
        path = self.path(key)
        try:
            data = json.loads(path.read_bytes())
            if data["key"] != json.loads(json.dumps(key)):
                raise ValueError("it belongs to another key")
            return TuningTable.from_json(data["table"])
        except FileNotFoundError:
            return None
        except _CORRUPT as error:
            reason = str(error) or type(error).__name__
            warnings.warn(f"discarding the corrupt tuning file {path.name}: {reason}", CacheWarning, stacklevel=2)
            # Where it cannot be removed, it cannot be replaced either, and save() says so.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def save(self, key: Mapping[str, Any], table: TuningTable) -> None:
        """Keep a table. Where the folder cannot be written, warn with :class:`CacheWarning` and go on."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"key": dict(key), "table": table.to_json()}, file, indent=1, allow_nan=False)
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"the tuning results cannot be written: {reason}", CacheWarning, stacklevel=2)


def tuning_key(shapes: KdaShapes, device: torch.device, installed: Installed) -> dict[str, Any]:
    """Everything that the times depend on: shapes, device, driver (its CUDA version) and library versions."""
    import torch
    from cuda.bindings import driver

    from kda_lib.launch import check

    return {
        "tp": shapes.tp,
        "device": torch.cuda.get_device_name(device),
        "driver": check("cuDriverGetVersion", driver.cuDriverGetVersion()),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "flashinfer": installed.flashinfer,
    }


def shipped_table(shapes: KdaShapes, device_name: str) -> TuningTable:
    """What came with the library for this device name and TP degree; an empty table where nothing did.

    The files are named for profiles and hold ``device`` (its CUDA name), ``tp`` and ``table``.
    """
    for file in (resources.files("kda_lib") / "tuning").iterdir():
        if file.name.endswith(".json"):
            data = json.loads(file.read_text(encoding="utf-8"))
            if (data["device"], data["tp"]) == (device_name, shapes.tp):
                return TuningTable.from_json(data["table"])
    return TuningTable()


def untuned(arch: Arch, tokens: Sequence[int], installed: Installed, table: TuningTable) -> list[int]:
    """Each M that has more than one backend to choose from, of which the table lacks at least one."""

    def lacks(m: int) -> bool:
        options = candidates(arch, m, installed)
        return len(options) > 1 and not set(options) <= set(table.qkvg_us.get(m, {}))

    return [m for m in tokens if lacks(m)]


def tune(
    arch: Arch,
    shapes: KdaShapes,
    tokens: Sequence[int],
    device: torch.device,
    installed: Installed,
    table: TuningTable,
    store: TuningStore,
) -> TuningTable:
    """``table`` with QKVG measured for every M of ``tokens`` that needs it; the times of every other M stay.

    What the store has is taken from there, so one process tunes for all. Measuring needs :data:`WEIGHTS` or more random
    weights of QKVG's size for as long as it lasts (0.7 GB at TP8).

    Raises:
        BrokenBackend: a candidate failed to run.
        torch.OutOfMemoryError: the weights do not fit.
    """
    if not (missing := untuned(arch, tokens, installed, table)):
        return table
    key = tuning_key(shapes, device, installed)
    kept = store.load(key) or TuningTable()
    table = table.with_qkvg({m: kept.qkvg_us[m] for m in missing if m in kept.qkvg_us})
    if not (missing := untuned(arch, missing, installed, table)):
        return table
    measured = measure_qkvg(shapes, {m: candidates(arch, m, installed) for m in missing}, device)
    # Read again: another process may have added its own meanwhile.
    store.save(key, (store.load(key) or TuningTable()).with_qkvg(measured))
    return table.with_qkvg(measured)


def measure_qkvg(
    shapes: KdaShapes, options: Mapping[int, Sequence[Backend]], device: torch.device
) -> dict[int, dict[Backend, float]]:
    """Median microseconds of QKVG for every M and backend, reading its weight from memory each time."""
    import torch

    from kda_lib.runtime import loaded_kernel

    with torch.cuda.device(device), torch.no_grad():
        one = 2 * shapes.qkvg_rows * HIDDEN
        # A weight must have left L2 before its turn comes again.
        count = max(WEIGHTS, -(-4 * torch.cuda.get_device_properties(device).L2_cache_size // one))
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, scale: float) -> torch.Tensor:
            values = torch.randn(rows, HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)
            return values.mul_(scale)

        # The scale of a trained weight: outputs near 1.
        weights = [random(shapes.qkvg_rows, HIDDEN**-0.5) for _ in range(count)]

        def launch(backend: Backend, x: torch.Tensor, out: torch.Tensor) -> None:
            if backend is not Backend.SKINNY:
                for weight in weights:
                    run_gemm(backend, x, weight, out)
                return
            # Loaded by the first call, which is not captured.
            arch = Arch.of_device(device)
            kernel = loaded_kernel(qkvg_gemv_config(arch, len(x), shapes), arch)
            stream = torch.cuda.current_stream(device).cuda_stream
            for weight in weights:
                kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), stream=stream)

        times = {}
        for m, backends in options.items():
            x, out = random(m, 1.0), torch.empty(m, shapes.qkvg_rows, device=device, dtype=torch.bfloat16)
            spans = time_interleaved(backends, partial(launch, x=x, out=out))
            times[m] = {backend: us / count for backend, us in spans.items()}
        return times


def _timer() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_interleaved(
    backends: Sequence[Backend], launch: Callable[[Backend], None], rounds: int = ROUNDS
) -> dict[Backend, float]:
    """Median microseconds of ``launch(backend)`` as a CUDA graph; the graphs take turns.

    Raises:
        BrokenBackend: a backend failed to run.
    """
    import torch

    graphs = {}
    for backend in backends:
        with naming(backend):
            launch(backend)
            torch.cuda.current_stream().synchronize()
            graphs[backend] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[backend], capture_error_mode="thread_local"):
                launch(backend)
    spans: dict[Backend, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {backend: [] for backend in backends}
    for turn in range(rounds):
        for place in range(len(backends)):
            backend = backends[(turn + place) % len(backends)]
            start, end = _timer(), _timer()
            start.record()
            graphs[backend].replay()
            end.record()
            spans[backend].append((start, end))
    torch.cuda.current_stream().synchronize()
    return {b: statistics.median(1000 * start.elapsed_time(end) for start, end in pairs) for b, pairs in spans.items()}
