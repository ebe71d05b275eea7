"""A small process that launches this library's kernels, to be run under compute-sanitizer: no torch, little else.

    compute-sanitizer --tool racecheck python -m kda_lib.lab.sanitized skinny

The argument is one of :data:`KERNELS`.

initcheck has little to find here: every buffer is written from the host before a launch.

Every output of the skinny kernels is compared with the host model, every one of the stream kernel with fp64. Exit code
1: bits differ, an error is beyond its bound, or the stream kernel left a counter set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from kda_lib import reference
from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import AnyConfig, compile_kernel
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.stream_config import F_A_START, WORKSPACE_BYTES, stream_config
from kda_lib.lab.validation import Errors, Layer, accumulation_bound
from kda_lib.launch import LoadedKernel, check
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Tensor parallelism of a launch of the stream kernel, and its SMs; ``None``: all that the device has. The small one
#: has 2 of 96 heads and 12 blocks for a cluster, as TP8 has on an H200, so that the ring goes round as often.
STREAMS: Mapping[str, tuple[int, int | None]] = {"stream": (16, None), "stream_small": (48, 24)}
#: What can be asked for, and the tools that it is meant for. racecheck follows every byte of shared memory: 40 s are
#: not enough for one launch that fills an H200.
KERNELS: Mapping[str, tuple[str, ...]] = {
    "skinny": SANITIZERS,
    "stream": tuple(tool for tool in SANITIZERS if tool != "racecheck"),
    "stream_small": SANITIZERS,
}
#: Tokens that the issue of the sanitizer runs names: both sides of every change of configuration.
TOKENS = (1, 2, 8, 14, 16)
#: One kernel serves every M: the ends, and the last M that has one tile of tokens.
STREAM_TOKENS = (1, 8, 16)


@contextmanager
def _on_device(*arrays: np.ndarray[Any, Any]) -> Iterator[list[int]]:
    """Device copies of the arrays, freed afterwards."""
    from cuda.bindings import driver

    pointers = []
    try:
        for array in arrays:
            pointers.append(check("cuMemAlloc", driver.cuMemAlloc(array.nbytes)))
            check("cuMemcpyHtoD", driver.cuMemcpyHtoD(pointers[-1], array.ctypes.data, array.nbytes))
        yield [int(pointer) for pointer in pointers]
    finally:
        for pointer in pointers:
            check("cuMemFree", driver.cuMemFree(pointer))


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
    tp, sms = STREAMS[kernels]
    return _stream(arch, tp, sms or attribute("MULTIPROCESSOR_COUNT"), rng)


def _loaded(config: AnyConfig, arch: Arch) -> LoadedKernel:
    return LoadedKernel(compile_kernel(config, arch, cache=ArtifactCache.default()))


def _read(array: np.ndarray[Any, Any], pointer: int) -> None:
    from cuda.bindings import driver

    check("cuMemcpyDtoH", driver.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes))


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
            wide = np.zeros((m, stride), np.uint16)
            wide[:, : config.k] = x
            out = np.full((m, config.n), reference.BF16_NAN, np.uint16)
            with _on_device(wide, w, out) as pointers:
                kernel(*pointers, stream=0)
                _read(out, pointers[-1])
            wrong += int((out != model(config, x, w)).sum())
            print(f"{kernel.artifact.kernel} M={m}: launched", flush=True)
    return wrong


def _stream(arch: Arch, tp: int, sms: int, rng: np.random.Generator) -> int:
    """The stream kernel for each M of :data:`STREAM_TOKENS`; outputs beyond their bound and counters left set."""
    layer, wrong = Layer.random(tp, rng), 0
    shapes = layer.shapes
    kernel = _loaded(stream_config(arch, shapes, sms, pdl=True), arch)
    workspace = np.zeros(WORKSPACE_BYTES, np.uint8)
    for m in STREAM_TOKENS:
        widths = (shapes.qkvg_rows, shapes.f_b_rows, shapes.heads)
        qkvg, g1, beta = (np.full((m, width), reference.BF16_NAN, np.uint16) for width in widths)
        with _on_device(layer.packed, layer.f_b, layer.x[:m], qkvg, g1, beta, workspace) as pointers:
            kernel(*pointers, shapes.heads, m, stream=0)
            results: tuple[np.ndarray[Any, Any], ...] = (qkvg, g1, beta, workspace)
            for array, pointer in zip(results, pointers[3:], strict=True):
                _read(array, pointer)
        f_a = workspace[F_A_START:].view(np.uint16).reshape(-1, F_A_ROWS)[:m]
        used = shapes.qkvg_rows + F_A_ROWS + shapes.heads
        for got, exact, bound in (
            (np.concatenate([qkvg, f_a, beta], axis=1), layer.exact[:m, :used], layer.bound[:m, :used]),
            (g1, reference.project_fp64(f_a, layer.f_b), accumulation_bound(f_a, layer.f_b, F_A_ROWS)),
        ):
            wrong += Errors.of(got, exact, bound).beyond_bound
        wrong += int(workspace[:F_A_START].any())
        print(f"{kernel.artifact.kernel} M={m}: launched", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))
