"""Read floors as variants: how fast the weights of one layer can be read if nothing is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import compile_kernel
from kda_lib.kernels.config import BF16_BYTES
from kda_lib.kernels.lab_config import ReadBulkConfig, ReadLoadsConfig, shared_bytes
from kda_lib.lab.measure import Variant
from kda_lib.lab.workload import Weights
from kda_lib.launch import LoadedKernel
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes

if TYPE_CHECKING:
    import torch

FloorConfig = ReadLoadsConfig | ReadBulkConfig

#: Plain loads: blocks on an SM, threads of a block, loads of a thread: the fastest of a sweep on an H200 (unrecorded).
#: 128 KB in flight on an SM, which is well above its bandwidth times latency (4.8 TB/s / 132 SMs x 1 us = 36 KB).
LOAD_CTAS, LOAD_THREADS, LOADS = 4, 512, 4
#: Bulk copies: bytes of a stage, and stages of the one block on an SM where 227 KB of shared memory allow that many:
#: the fastest of a sweep on an H200 (not recorded).
STAGE_BYTES, STAGES = 32 * 1024, 6


def read_loads_config(arch: Arch, shapes: KdaShapes, sms: int, *, pdl: bool = False) -> ReadLoadsConfig:
    """Plain loads on a device with this many SMs."""
    return ReadLoadsConfig(
        *region_bytes(shapes), ctas=LOAD_CTAS * sms, threads=LOAD_THREADS, loads=LOADS, evict_first=True, pdl=pdl
    ).validate(arch)


def read_bulk_config(arch: Arch, shapes: KdaShapes, sms: int, *, pdl: bool) -> ReadBulkConfig:
    """Bulk copies on a device with this many SMs; fewer stages where there is less shared memory.

    Raises:
        ValueError: the target has no bulk copies (below sm_90).
    """
    stages = min(STAGES, shared_bytes(arch) // (STAGE_BYTES + 1024))
    return ReadBulkConfig(
        *region_bytes(shapes), ctas=sms, stages=stages, stage_bytes=STAGE_BYTES, evict_first=True, pdl=pdl
    ).validate(arch)


def floor_configs(arch: Arch, shapes: KdaShapes, sms: int) -> dict[str, FloorConfig]:
    """All floors that the target can run, by the names of their variants."""
    configs: dict[str, FloorConfig] = {"read_loads": read_loads_config(arch, shapes, sms)}
    if arch.has_clusters:
        configs["read_bulk"] = read_bulk_config(arch, shapes, sms, pdl=False)
        configs["read_bulk_pdl"] = read_bulk_config(arch, shapes, sms, pdl=True)
    return configs


def region_bytes(shapes: KdaShapes) -> tuple[int, int]:
    """Bytes of the packed weight and of F_B."""
    return BF16_BYTES * shapes.packed_rows * HIDDEN, BF16_BYTES * shapes.f_b_rows * F_A_ROWS


class ReadFloor:
    """A floor kernel on some weights.

    Args:
        config: for the regions of ``weights.shapes``.
        cache: of compiled kernels, see :func:`kda_lib.compile.compile_kernel`.
    """

    def __init__(self, config: FloorConfig, weights: Weights, cache: ArtifactCache | None = None) -> None:
        expected = region_bytes(weights.shapes)
        if (config.packed_bytes, config.f_b_bytes) != expected:
            raise ValueError(f"config: expected regions of {expected} bytes, got {config.packed_bytes} and "
                             f"{config.f_b_bytes}; make it for the shapes of the weights")  # fmt: skip
        self._weights = weights
        self._kernel = LoadedKernel(compile_kernel(config, Arch.of_device(weights.device), cache=cache))

    def enqueue(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Read the weights of one layer."""
        self._launch(layer, 0, stream)

    def checksum(self, layer: int) -> int:
        """XOR of all 32-bit words that the kernel read, by the machine code that is timed."""
        import torch

        out = torch.zeros(1, dtype=torch.int32, device=self._weights.device)
        self._launch(layer, out.data_ptr(), torch.cuda.current_stream(self._weights.device))
        return int(out.item())

    def _launch(self, layer: int, out: int, stream: torch.cuda.Stream) -> None:
        packed, f_b = self._weights.packed[layer], self._weights.f_b[layer]
        self._kernel(packed.data_ptr(), f_b.data_ptr(), out, stream=stream.cuda_stream)


def expected_checksum(weights: Weights, layer: int) -> int:
    """XOR of all 32-bit words of one layer's weights, computed on the host."""
    import numpy as np
    import torch

    words = [t.view(torch.int32).cpu().numpy() for t in (weights.packed[layer], weights.f_b[layer])]
    return int(np.bitwise_xor(*(np.bitwise_xor.reduce(w, axis=None) for w in words)))


def floor_variants(
    weights: Weights, configs: dict[str, FloorConfig], m: int | None = None, cache: ArtifactCache | None = None
) -> list[Variant]:
    """The floors as variants, compiled. m: recorded with the rows, where floors are measured together with an M."""
    return [
        Variant(
            name=name.removesuffix("_pdl"),
            enqueue=ReadFloor(config, weights, cache).enqueue,
            bytes=weights.shapes.weight_bytes,
            tp=weights.shapes.tp,
            m=m,
            pdl=config.pdl,
            floor=True,
        )
        for name, config in configs.items()
    ]
