"""A small process that launches this library's kernels, to be run under compute-sanitizer: no torch, little else.

    compute-sanitizer --tool racecheck python -m kda_lib.lab.sanitized skinny

The argument is one of :data:`KERNELS`.

The host writes no more than a caller would: inputs, outputs (which no kernel reads), and the counters of the stream
kernel. What lies between the rows of a skinny kernel's x and the place of f_a in the workspace stay as they were
allocated, so that initcheck would see a read of either too early.

Every output of the skinny kernels is compared with the host model, every one of the stream kernel with fp64. Exit code
1: bits differ, an error is beyond its bound, or the stream kernel left a counter set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kda_lib import reference
from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import AnyConfig, compile_kernel
from kda_lib.kernels.config import BF16_BYTES, SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.stream_config import F_A_START, RINGS, WORKSPACE_BYTES, StreamConfig, stream_config
from kda_lib.lab.validation import Errors, Layer, accumulation_bound
from kda_lib.launch import LoadedKernel, check
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


class StreamLaunch(NamedTuple):
    """A launch of the stream kernel: tensor parallelism, SMs (``None``: all that the device has), rings to choose from.

    The small ones have 2 of 96 heads and 12 blocks for a cluster, as TP8 has on an H200, so that the ring goes round as
    often. ``stream_small_ring`` has the ring of targets with less shared memory, sm_12x.
    """

    tp: int
    sms: int | None
    rings: Sequence[tuple[int, int]] = RINGS


STREAMS: Mapping[str, StreamLaunch] = {
    "stream": StreamLaunch(16, None),
    "stream_small": StreamLaunch(48, 24),
    "stream_small_ring": StreamLaunch(48, 24, RINGS[-1:]),
}
#: What can be asked for, and the tools that it is meant for. racecheck follows every byte of shared memory: 40 s are
#: not enough for one launch that fills an H200.
KERNELS: Mapping[str, tuple[str, ...]] = {
    "skinny": SANITIZERS,
    "stream": tuple(tool for tool in SANITIZERS if tool != "racecheck"),
    "stream_small": SANITIZERS,
    "stream_small_ring": SANITIZERS,
}
#: Each launch configuration of the skinny kernels at least once, with and without tokens that are not there.
TOKENS = (1, 2, 4, 8, 14, 16)
#: One kernel serves every M: the ends, and the last M that has one tile of tokens.
STREAM_TOKENS = (1, 8, 16)


@contextmanager
def _memory(*sizes: int) -> Iterator[list[int]]:
    """Device memory of these many bytes each, uninitialised, freed afterwards."""
    from cuda.bindings import driver

    pointers = []
    try:
        for size in sizes:
            pointers.append(check("cuMemAlloc", driver.cuMemAlloc(size)))
        yield [int(pointer) for pointer in pointers]
    finally:
        for pointer in pointers:
            check("cuMemFree", driver.cuMemFree(pointer))


@contextmanager
def _on_device(*arrays: np.ndarray[Any, Any]) -> Iterator[list[int]]:
    """Device copies of the arrays, freed afterwards."""
    with _memory(*(array.nbytes for array in arrays)) as pointers:
        for array, pointer in zip(arrays, pointers, strict=True):
            _write(pointer, array)
        yield pointers


def _write(pointer: int, array: np.ndarray[Any, Any]) -> None:
    from cuda.bindings import driver

    check("cuMemcpyHtoD", driver.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))


def _read(array: np.ndarray[Any, Any], pointer: int) -> None:
    from cuda.bindings import driver

    check("cuMemcpyDtoH", driver.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes))


def main(kernels: str) -> int:
    """Launch these kernels; the number of outputs, and of counters, that are wrong."""
    from cuda.bindings import driver

    check("cuInit", driver.cuInit(0))
    device = check("cuDeviceGet", driver.cuDeviceGet(0))
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(check("primary", driver.cuDevicePrimaryCtxRetain(device))))

    def attribute(name: str) -> int:
        which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(name, driver.cuDeviceGetAttribute(which, device)))

    arch = Arch.of_capability((attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")))
    rng = np.random.default_rng(0)
    if kernels == "skinny":
        return _skinny(arch, rng)
    tp, sms, rings = STREAMS[kernels]
    config = stream_config(arch, KdaShapes(tp), sms or attribute("MULTIPROCESSOR_COUNT"), pdl=True, rings=rings)
    return _stream(config, arch, rng)


def _loaded(config: AnyConfig, arch: Arch) -> LoadedKernel:
    return LoadedKernel(compile_kernel(config, arch, cache=ArtifactCache.default()))


def _skinny(arch: Arch, rng: np.random.Generator) -> int:
    """Both kernels for each M of :data:`TOKENS`, TP8; the outputs that differ from the model."""
    shapes, wrong = KdaShapes(8), 0
    for m in TOKENS:
        short = skinny_k_config(arch, m, shapes)
        jobs: tuple[tuple[SkinnyNConfig | SkinnyKConfig, int, Callable[..., reference.Bits]], ...] = (
            (skinny_n_config(arch, m, shapes), HIDDEN, reference.model_skinny_n),
            (short, short.x_stride, reference.model_skinny_k),
        )
        for config, stride, model in jobs:
            kernel = _loaded(config, arch)
            x, w = reference.cancelling_inputs(rng, m, config.n, config.k)
            out = np.full((m, config.n), reference.BF16_NAN, np.uint16)
            with _memory(m * stride * BF16_BYTES) as (rows,), _on_device(w, out) as pointers:
                for token in range(m):
                    _write(rows + token * stride * BF16_BYTES, x[token])
                kernel(rows, *pointers, stream=0)
                _read(out, pointers[-1])
            wrong += int((out != model(config, x, w)).sum())
            print(f"{kernel.artifact.kernel} M={m}: launched", flush=True)
    return wrong


def _stream(config: StreamConfig, arch: Arch, rng: np.random.Generator) -> int:
    """The stream kernel for each M of :data:`STREAM_TOKENS`; outputs beyond their bound and counters left set."""
    layer, wrong = Layer.random(config.tp, rng), 0
    shapes, kernel = layer.shapes, _loaded(config, arch)
    for m in STREAM_TOKENS:
        # Other tokens for each M: memory that is allocated again may still hold what was right for the M before.
        tokens = (np.arange(m) - m) % len(layer.x)
        widths = (shapes.qkvg_rows, shapes.f_b_rows, shapes.heads)
        qkvg, g1, beta = (np.full((m, width), reference.BF16_NAN, np.uint16) for width in widths)
        counters, f_a = np.zeros(F_A_START, np.uint8), np.empty((m, F_A_ROWS), np.uint16)
        inputs = (layer.packed, layer.f_b, layer.x[tokens])
        with _memory(WORKSPACE_BYTES) as (workspace,), _on_device(*inputs, qkvg, g1, beta) as pointers:
            _write(workspace, counters)
            kernel(*pointers, workspace, shapes.heads, m, stream=0)
            results: tuple[np.ndarray[Any, Any], ...] = (qkvg, g1, beta, counters, f_a)
            for array, pointer in zip(results, (*pointers[3:], workspace, workspace + F_A_START), strict=True):
                _read(array, pointer)
        used = shapes.qkvg_rows + F_A_ROWS + shapes.heads
        for got, exact, bound in (
            (np.concatenate([qkvg, f_a, beta], axis=1), layer.exact[tokens, :used], layer.bound[tokens, :used]),
            (g1, reference.project_fp64(f_a, layer.f_b), accumulation_bound(f_a, layer.f_b, F_A_ROWS)),
        ):
            wrong += Errors.of(got, exact, bound).beyond_bound
        wrong += int(counters.any())
        print(f"{kernel.artifact.kernel} M={m}: launched", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))
