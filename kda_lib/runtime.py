"""What every strategy runs on: checked weights, compiled kernels, and a second stream forked and joined by events."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import KernelConfig, compile_kernel
from kda_lib.errors import NotWarmedUp
from kda_lib.kernels.stream_config import WORKSPACE_BYTES, StreamConfig
from kda_lib.launch import LoadedKernel
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes

DEVICE_TYPE = "cuda"

#: Kernels and FlashInfer load 16 bytes at once.
ALIGNMENT = 16

#: The first bytes of the stream kernel's workspace: two 32-bit counters.
COUNTER_BYTES = 8

#: What strategies launch.
LayerKernel: TypeAlias = KernelConfig | StreamConfig

#: A loaded kernel is shared by all projections, and a launch passes through its state.
_launching = threading.Lock()


class Outputs(NamedTuple):
    """BF16 qkvg [M, 4*128*H], g1 [M, 128*H], beta [M, H]; qkvg and beta may be views with a longer row stride."""

    qkvg: torch.Tensor
    g1: torch.Tensor
    beta: torch.Tensor


def check_tensor(
    name: str,
    tensor: Any,
    rows: int | None,
    columns: int,
    device: torch.device | None = None,
    *,
    whole_rows: bool = True,
) -> torch.Tensor:
    """Return the tensor if it is BF16 [rows, columns], row-major and 16-byte aligned on a CUDA device.

    Args:
        rows: ``None`` takes 1 or more.
        device: ``None`` takes every CUDA device.
        whole_rows: rows must follow each other without gaps, and the first one be aligned.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device, stride or alignment.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; pass a BF16 CUDA tensor")
    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected torch.bfloat16, got {tensor.dtype}; convert it with .bfloat16()")
    shape = list(tensor.shape)
    if len(shape) != 2 or shape[1] != columns or (shape[0] != rows if rows is not None else shape[0] < 1):
        wanted = f"[{'M >= 1' if rows is None else rows}, {columns}]"
        raise ValueError(f"{name}: expected shape {wanted}, got {shape}; check the tensor-parallel degree and M")
    if device is None and tensor.device.type != DEVICE_TYPE:
        raise ValueError(f"{name}: expected a CUDA device, got {tensor.device}; move it with .cuda()")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, where the weights are, got {tensor.device}; move it there")
    if whole_rows and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected strides {[columns, 1]}, got {list(tensor.stride())}; use .contiguous()")
    if tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected a column stride of 1, got {tensor.stride(1)}; make it row-major")
    if shape[0] > 1 and tensor.stride(0) < columns:
        raise ValueError(
            f"{name}: expected a row stride of at least {columns}, got {tensor.stride(0)}; rows must not overlap"
        )
    if whole_rows and tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"{name}: expected an address divisible by {ALIGNMENT}, got {tensor.data_ptr():#x}; start the view at a "
            "multiple of 8 elements or clone it"
        )
    return tensor


@cache
def loaded_kernel(config: LayerKernel, arch: Arch) -> LoadedKernel:
    """Compile, or take from the cache, and load; once a process.

    Raises:
        CompileError: it does not compile for this target.
        CudaError: the driver refused it.
    """
    return LoadedKernel(compile_kernel(config, arch, cache=ArtifactCache.default()))


class Runtime:
    """Weights of one layer and what serves it: a second stream with its events, and the stream kernel's workspace.

    Calls must not overlap in time, on the host or on the device, because all of these are reused. For work on two CUDA
    streams at once make two; the weights are not copied.

    Args:
        packed: [packed_rows, 7168], checked. f_b: [128*H, 128], checked, same device.
    """

    def __init__(self, shapes: KdaShapes, packed: torch.Tensor, f_b: torch.Tensor) -> None:
        self.shapes = shapes
        self.device = packed.device
        self.arch = Arch.of_device(self.device)
        # Detached: out= of torch.mm refuses parameters that want gradients.
        self.packed, self.f_b = packed.detach(), f_b.detach()
        self.qkvg = self.packed[shapes.qkvg_slice]
        self.fa_beta = self.packed[shapes.fa_beta_slice]
        self._workspace: torch.Tensor | None = None
        self._side: torch.cuda.Stream | None = None
        self._forked: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._joined: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.packed, self.f_b

    def empty(self, m: int, columns: int) -> torch.Tensor:
        """An uninitialised BF16 output, in the memory pool of the current stream (of the graph during capture)."""
        return torch.empty(m, columns, dtype=torch.bfloat16, device=self.device)

    def launch(
        self, config: LayerKernel, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """Launch one of this library's GEMMs.

        Raises:
            CudaError: the driver refused the launch.
        """
        kernel = loaded_kernel(config, self.arch)
        with _launching:
            kernel(x.data_ptr(), w.data_ptr(), out.data_ptr(), stream=stream.cuda_stream)

    def launch_stream(self, config: LayerKernel, x: torch.Tensor, out: Outputs, stream: torch.cuda.Stream) -> None:
        """Launch the stream kernel, which writes all outputs for the tokens of x.

        Raises:
            NotWarmedUp: as :attr:`workspace`.
            CudaError: the driver refused the launch.
        """
        kernel = loaded_kernel(config, self.arch)
        tensors = (self.packed, self.f_b, x, *out, self.workspace)
        with _launching:
            kernel(*(tensor.data_ptr() for tensor in tensors), out.beta.stride(0), len(x), stream=stream.cuda_stream)

    @property
    def workspace(self) -> torch.Tensor:
        """The stream kernel's workspace, ``WORKSPACE_BYTES`` on the device, made and cleared when first asked for.

        Its counters are 0 before a launch, and again after it. It never lies in a graph's memory pool, which may be
        given back before another graph's last replay.

        Raises:
            NotWarmedUp: it would have to be made while a CUDA graph is being captured.
        """
        if self._workspace is None:
            if torch.cuda.is_current_stream_capturing():
                raise NotWarmedUp(["the workspace of the stream kernel"])
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return self._workspace

    def armed(self) -> bool:
        """Whether the counters of the stream kernel are 0, as a launch needs them. Waits for the current stream."""
        return self._workspace is None or not self._workspace[:COUNTER_BYTES].any()

    def rearm(self) -> None:
        """Clear the counters of the stream kernel on the current stream. No launch of it may be running."""
        if self._workspace is not None:
            self._workspace.zero_()

    @contextmanager
    def fork(self) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        """The current stream and a second one that continues from it; joined at the end, also after an exception.

        Memory that the second stream uses must be allocated before, on the current stream. Thus no buffer is given back
        to another stream's pool before the join.
        """
        main = torch.cuda.current_stream(self.device)
        side = self._side_of(main)
        self._forked.record(main)
        side.wait_event(self._forked)
        try:
            yield main, side
        finally:
            self._joined.record(side)
            main.wait_event(self._joined)

    def _side_of(self, main: torch.cuda.Stream) -> torch.cuda.Stream:
        # torch hands out its 32 streams in turn, so a new one may be the caller's own, and nothing would overlap.
        while self._side is None or self._side == main:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side


def packed_parts(shapes: KdaShapes, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkvg, f_a and beta as views of the packed output [M, packed_rows]."""
    return (packed[:, shapes.qkvg_slice], *fa_beta_parts(shapes, packed[:, shapes.fa_beta_slice]))


def fa_beta_parts(shapes: KdaShapes, fa_beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f_a [M, 128] and beta [M, H] as views of the F_A/beta output [M, fa_beta_rows]."""
    return fa_beta[:, :F_A_ROWS], fa_beta[:, F_A_ROWS : F_A_ROWS + shapes.heads]


def check_input(hidden: Any, device: torch.device) -> torch.Tensor:
    """hidden_states [M, 7168], M at least 1. Errors as in :func:`check_tensor`."""
    return check_tensor("hidden_states", hidden, None, HIDDEN, device)


def check_out(out: Any, shapes: KdaShapes, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Outputs:
    """The caller's (qkvg, g1, beta) for the tokens of x; beta may have gaps between its rows.

    Raises:
        TypeError, ValueError: not three tensors, as in :func:`check_tensor`, or memory shared with another argument.
    """
    m, device = x.shape[0], x.device
    if not isinstance(out, tuple | list) or len(out) != 3:
        got = f"{len(out)} items" if isinstance(out, tuple | list) else type(out).__name__
        raise TypeError(f"out: expected (qkvg, g1, beta), got {got}; pass three tensors or None")
    outputs = Outputs(
        check_tensor("out[0] (qkvg)", out[0], m, shapes.qkvg_rows, device),
        check_tensor("out[1] (g1)", out[1], m, shapes.f_b_rows, device),
        check_tensor("out[2] (beta)", out[2], m, shapes.heads, device, whole_rows=False),
    )
    spans = [_span(tensor) for tensor in (*outputs, x, *weights)]
    for i, (start, end) in enumerate(spans[: len(outputs)]):
        if any(start < other_end and other < end for other, other_end in spans[i + 1 :]):
            raise ValueError(f"out[{i}]: expected memory of its own, got memory of another argument; use a new tensor")
    return outputs


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
