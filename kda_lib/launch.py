"""Load a compiled kernel and launch it through the CUDA driver, on any stream, inside or outside graph capture."""

from __future__ import annotations

import ctypes
from typing import Any

from kda_lib.compile import Artifact
from kda_lib.errors import KdaError

#: A kernel asks for more shared memory by attribute (CUDA C++ Programming Guide, "Compute Capability 7.x").
DEFAULT_SHARED_BYTES = 48 * 1024


class CudaError(KdaError):
    """A CUDA driver call failed; the message names the call and the driver's error."""


def check(call: str, result: tuple[Any, ...]) -> Any:
    """What a ``cuda.bindings.driver`` call returned beside its status.

    Raises:
        CudaError: the status is not CUDA_SUCCESS.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"{call}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class LoadedKernel:
    """A kernel in the driver's hands. The driver loads it into each context that launches it.

    Args:
        artifact: compiled for the device that will run it.
    """

    def __init__(self, artifact: Artifact[Any]) -> None:
        from cuda.bindings import driver

        self.artifact = artifact
        check("cuInit", driver.cuInit(0))
        self._library = check("cuLibraryLoadData", driver.cuLibraryLoadData(artifact.cubin, [], [], 0, [], [], 0))
        self._kernel = check("cuLibraryGetKernel", driver.cuLibraryGetKernel(self._library, artifact.entry.encode()))
        self._function = driver.CUfunction(int(self._kernel))
        self._config = _launch_config(artifact)
        self._large_shared = artifact.launch.smem > DEFAULT_SHARED_BYTES
        self._allowed_on: set[int] = set()
        self._launch = driver.cuLaunchKernelEx
        self._stream_type = driver.CUstream

    def __call__(self, *pointers: int, stream: int) -> None:
        """Launch on ``stream`` (a CUstream handle) in the current context.

        Args:
            pointers: device addresses, one for each argument of the kernel.

        Raises:
            CudaError: the driver refused the launch.
        """
        values = (ctypes.c_uint64 * len(pointers))(*pointers)
        first = ctypes.addressof(values)
        arguments = (ctypes.c_void_p * len(pointers))(*(first + 8 * i for i in range(len(pointers))))
        self._config.hStream = self._stream_type(stream)
        if self._large_shared:
            self._allow_large_shared()
        check("cuLaunchKernelEx", self._launch(self._config, self._function, ctypes.addressof(arguments), 0))

    def _allow_large_shared(self) -> None:
        """Ask for more dynamic shared memory than the default, once for each device."""
        from cuda.bindings import driver

        device = check("cuCtxGetDevice", driver.cuCtxGetDevice())
        if int(device) not in self._allowed_on:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = driver.cuKernelSetAttribute(attribute, self.artifact.launch.smem, self._kernel, device)
            check("cuKernelSetAttribute", result)
            self._allowed_on.add(int(device))


def _launch_config(artifact: Artifact[Any]) -> Any:
    from cuda.bindings import driver

    launch = artifact.launch
    attributes = []
    if launch.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = launch.cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if launch.pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.smem
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
