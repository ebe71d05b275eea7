"""A small process that launches the skinny kernels, to be run under compute-sanitizer: no torch, little else.

    compute-sanitizer --tool racecheck python -m kda_lib.lab.sanitized

Every output is compared with the host model. Exit code 1: bits differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kda_lib import reference
from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import compile_kernel
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.launch import LoadedKernel, check
from kda_lib.shapes import HIDDEN, KdaShapes

#: Tokens that the issue of the sanitizer runs names: both sides of every change of configuration.
TOKENS = (1, 2, 8, 14, 16)


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


def main() -> int:
    """Launch both kernels for each M of :data:`TOKENS`; the number of outputs that differ from the model."""
    from cuda.bindings import driver

    check("cuInit", driver.cuInit(0))
    device = check("cuDeviceGet", driver.cuDeviceGet(0))
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(check("primary", driver.cuDevicePrimaryCtxRetain(device))))
    attribute = driver.CUdevice_attribute
    capability = (
        check("major", driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)),
        check("minor", driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)),
    )
    arch, shapes, rng = Arch.of_capability(capability), KdaShapes(8), np.random.default_rng(0)
    wrong = 0
    for m in TOKENS:
        short = skinny_k_config(arch, m, shapes)
        jobs: tuple[tuple[SkinnyNConfig | SkinnyKConfig, int, Callable[..., reference.Bits]], ...] = (
            (skinny_n_config(arch, m, shapes), HIDDEN, reference.model_skinny_n),
            (short, short.x_stride, reference.model_skinny_k),
        )
        for config, stride, model in jobs:
            kernel = LoadedKernel(compile_kernel(config, arch, cache=ArtifactCache.default()))
            x, w = reference.cancelling_inputs(rng, m, config.n, config.k)
            wide = np.zeros((m, stride), np.uint16)
            wide[:, : config.k] = x
            out = np.full((m, config.n), reference.BF16_NAN, np.uint16)
            with _on_device(wide, w, out) as (x_pointer, w_pointer, out_pointer):
                kernel(x_pointer, w_pointer, out_pointer, stream=0)
                check("cuMemcpyDtoH", driver.cuMemcpyDtoH(out.ctypes.data, out_pointer, out.nbytes))
            wrong += int((out != model(config, x, w)).sum())
            print(f"{kernel.artifact.kernel} M={m}: launched", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main()))
