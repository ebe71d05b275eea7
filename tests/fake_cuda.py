"""CUDA as seen from Python, played on the CPU: streams and events write a log, kernels are the host models."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kda_lib import reference as ref
from kda_lib import runtime
from kda_lib.arch import Arch
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig
from kda_lib.kernels.stream_config import F_A_START, StreamConfig
from kda_lib.runtime import LayerKernel
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes


def words(address: int, rows: int, stride: int) -> np.ndarray:
    """[rows, stride] BF16 patterns at an address: a view of the memory, as a kernel sees it."""
    return np.ctypeslib.as_array((ctypes.c_uint16 * (rows * stride)).from_address(address)).reshape(rows, stride)


class FakeCuda:
    """One device. ``log`` has everything that would have been enqueued, in order; ``capturing`` and ``fail`` are knobs.

    fail: the part of the log line of a launch that raises instead. sms: too few for the stream kernel if below 2.
    """

    def __init__(self, arch: Arch, sms: int = 132) -> None:
        self.arch, self.sms = arch, sms
        self.log: list[str] = []
        self.compiled: list[LayerKernel] = []
        self.capturing = False
        self.fail: str | None = None
        self.streams: dict[int, FakeStream] = {}
        self.main = FakeStream(self, "main")

    def launch(self, line: str) -> None:
        if self.fail is not None and self.fail in line:
            raise RuntimeError(f"no {line}")
        self.log.append(line)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.cuda_stream = 1 + len(cuda.streams)
        cuda.streams[self.cuda_stream] = self

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.recorded_on}")

    def synchronize(self) -> None:
        assert not self.cuda.capturing, "a capture does not survive a synchronisation"


class FakeEvent:
    recorded_on: str | None = None

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream.name


class FakeKernel:
    """Runs the host model on the memory that it is given, on the side where a kernel would run."""

    def __init__(self, cuda: FakeCuda, config: SkinnyNConfig | SkinnyKConfig) -> None:
        self.cuda, self.config = cuda, config

    def __call__(self, x: int, w: int, out: int, *, stream: int) -> None:
        c = self.config
        narrow = isinstance(c, SkinnyNConfig)
        self.cuda.launch(f"{'skinny_n' if narrow else 'skinny_k'} n={c.n} on {self.cuda.streams[stream].name}")
        weights = words(w, c.n, c.k)
        if isinstance(c, SkinnyNConfig):
            result = ref.model_skinny_n(c, words(x, c.m, c.k), weights)
        else:
            # The last row of x ends after its k values.
            rows = words(x, 1, (c.m - 1) * c.x_stride + c.k)[0]
            inputs = np.stack([rows[m * c.x_stride : m * c.x_stride + c.k] for m in range(c.m)])
            result = ref.model_skinny_k(c, inputs, weights)
        words(out, c.m, c.n)[:] = result


class FakeStreamKernel:
    """What the stream kernel must give, up to the order of additions, on the memory that it is given.

    Sums are FP64, rounded once. Counters that are set let F_B begin before f_a is there, as on a device.
    """

    def __init__(self, cuda: FakeCuda, config: StreamConfig) -> None:
        self.cuda, self.config = cuda, config

    def __call__(
        self,
        packed: int,
        f_b: int,
        x: int,
        qkvg: int,
        g1: int,
        beta: int,
        workspace: int,
        beta_stride: int,
        m: int,
        *,
        stream: int,
    ) -> None:
        s = self.config.shapes
        self.cuda.launch(f"stream M={m} on {self.cuda.streams[stream].name}")
        sums = ref.f64_to_bf16(ref.project_fp64(words(x, m, HIDDEN), words(packed, s.packed_rows, HIDDEN)))
        wide, f_a, narrow = np.split(sums, [s.qkvg_rows, s.qkvg_rows + F_A_ROWS], axis=1)
        words(qkvg, m, s.qkvg_rows)[:] = wide
        for token in range(m):
            words(beta + 2 * token * beta_stride, 1, s.heads)[0] = narrow[token, : s.heads]
        counters, kept = words(workspace, 1, 4), words(workspace + F_A_START, m, F_A_ROWS)
        early = kept.copy()
        kept[:] = f_a
        gate = early if counters.any() else kept
        words(g1, m, s.f_b_rows)[:] = ref.f64_to_bf16(ref.project_fp64(gate, words(f_b, s.f_b_rows, F_A_ROWS)))


def random(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).mul_(scale).bfloat16()


Weights = tuple[torch.Tensor, torch.Tensor]


@cache
def layer_weights(tp: int) -> Weights:
    """Packed and F_B weight of a layer, with outputs near 1."""
    shapes = KdaShapes(tp)
    return random(shapes.packed_rows, HIDDEN, 1, HIDDEN**-0.5), random(shapes.f_b_rows, F_A_ROWS, 2, 0.1)


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch, arch: Arch, sms: int = 132) -> Iterator[FakeCuda]:
    """Let CPU tensors pass for tensors of one device of this architecture."""
    cuda = FakeCuda(arch, sms)
    mm = torch.mm

    def logged_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        cuda.launch(f"torch.mm n={b.shape[1]} on main")
        return mm(a, b) if out is None else mm(a, b, out=out)

    class CurrentDevice:
        def __init__(self, device: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def compiled(config: LayerKernel, target: Arch, **_: Any) -> LayerKernel:
        assert not cuda.capturing, "nothing may be compiled during capture"
        cuda.compiled.append(config)
        return config

    def loaded(config: LayerKernel) -> FakeKernel | FakeStreamKernel:
        if isinstance(config, StreamConfig):
            return FakeStreamKernel(cuda, config)
        return FakeKernel(cuda, config)

    patch.setattr(runtime, "DEVICE_TYPE", "cpu")
    patch.setattr(Arch, "of_device", classmethod(lambda cls, device=None: arch))
    patch.setattr(runtime, "compile_kernel", compiled)
    patch.setattr(runtime, "LoadedKernel", loaded)
    patch.setattr(torch, "mm", logged_mm)
    patch.setattr(torch.cuda, "device", CurrentDevice)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: f"fake {arch}")
    patch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=cuda.sms)
    )
    patch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.main)
    patch.setattr(torch.cuda, "Stream", lambda device=None: FakeStream(cuda, f"side{len(cuda.streams)}"))
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    runtime.loaded_kernel.cache_clear()
    yield cuda
    runtime.loaded_kernel.cache_clear()
