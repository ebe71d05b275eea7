"""The CUDA device a notebook runs on, and the mode that follows from it and the profile.

Facts that CUDA knows (name, capability, SMs, memory, L2) come from the CUDA driver, so that CUDA_VISIBLE_DEVICES and
MIG are honoured; power limit, MIG, driver version, clocks and throttle reasons come from NVML for the same device.
Neither torch nor a CUDA context is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from kda_lib.lab.profile import CPU, Profile, load_profile, match_profile

Mode = Literal["full", "compile-only"]
T = TypeVar("T")

DEVICE_INDEX = 0
"""CUDA ordinal of the device the notebooks use; CUDA_VISIBLE_DEVICES chooses which GPU that is."""

THROTTLE_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons: NVML API reference, group nvmlClocksEventReasons."""


class WrongDevice(ValueError):
    """The device is not one of the profile's; the message names both and the profile that fits."""


class Clocks(BaseModel):
    """Current clocks in MHz; None where NVML does not report them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sm_mhz: int | None = None
    mem_mhz: int | None = None


class DeviceState(BaseModel):
    """What changes while a notebook runs: clocks, and why they are not higher (names of `THROTTLE_REASONS`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clocks: Clocks = Clocks()
    throttle_reasons: list[str] = []


class DeviceInfo(DeviceState):
    """One CUDA device as its driver reports it.

    `capability` is "major.minor"; `sms`, `memory_bytes` and `l2_bytes` are those of the MIG slice where there is one.
    `power_limit_w`, `mig` and `driver` are None where NVML does not support the query (integrated GPUs).
    """

    name: str
    index: int
    capability: str
    sms: int
    memory_bytes: int
    l2_bytes: int
    power_limit_w: float | None = None
    mig: bool | None = None
    driver: str | None = None


def current_device() -> DeviceInfo | None:
    """The device at CUDA ordinal 0, or None where there is no driver library, no driver or no visible device.

    Raises:
        RuntimeError: a device is visible but the CUDA driver fails to answer about it.
        pynvml.NVMLError: the CUDA driver answers and NVML, which comes with it, does not.
    """
    ordinal = _cuda_device()
    if ordinal is None:
        return None
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute

    def read(which: Any) -> int:
        return int(_checked(driver.cuDeviceGetAttribute(which, ordinal)))

    major = read(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = read(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    with _nvml(ordinal) as (nvml, handle):
        limit_mw = _supported(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle)
        mig_modes = _supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
        return DeviceInfo(
            name=_checked(driver.cuDeviceGetName(128, ordinal)).split(b"\0")[0].decode(),
            index=DEVICE_INDEX,
            capability=f"{major}.{minor}",
            sms=read(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_bytes=int(_checked(driver.cuDeviceTotalMem(ordinal))),
            l2_bytes=read(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            mig=None if mig_modes is None else mig_modes[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            driver=_supported(nvml, nvml.nvmlSystemGetDriverVersion),
            **_state(nvml, handle).model_dump(),
        )


def sample_state() -> dict[str, Any]:
    """Clocks and throttle reasons of the device now, as `DeviceState` fields; all None or empty without a device."""
    ordinal = _cuda_device()
    if ordinal is None:
        return DeviceState().model_dump()
    with _nvml(ordinal) as (nvml, handle):
        return _state(nvml, handle).model_dump()


def default_profile(device: DeviceInfo | None) -> Profile:
    """The profile that fits the device; `cpu` where there is no device or no profile for it."""
    found = match_profile(device.name) if device is not None else None
    return found or load_profile(CPU)


def resolve_mode(profile: Profile, device: DeviceInfo | None) -> Mode:
    """What can run: everything on a device of the profile, compilation alone without a device or for `cpu`.

    A MIG slice or a part with another SM count fits its profile by name; what differs is in `DeviceInfo`.

    Raises:
        WrongDevice: there is a device and it is not one of the profile's.
    """
    if device is None or profile.name == CPU:
        return "compile-only"
    if profile.fits(device.name):
        return "full"
    right = match_profile(device.name)
    advice = f"use GPU={right.name}" if right else "no profile yet: add kda_lib/lab/profiles/<name>.yaml"
    raise WrongDevice(
        f"profile {profile.name!r} is for {profile.title}; this device is {device.name!r} "
        f"(compute capability {device.capability}): {advice}"
    )


def _cuda_device() -> Any | None:
    """CUDA's handle of the device, None where there is none."""
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:
        # What every version of cuda-bindings raises where the driver library cannot be loaded.
        return None
    absent = (driver.CUresult.CUDA_ERROR_NO_DEVICE, driver.CUresult.CUDA_ERROR_STUB_LIBRARY)
    if status in absent:
        return None
    _checked((status,))
    return _checked(driver.cuDeviceGet(DEVICE_INDEX))


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA driver call, whose first element is its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver call failed: {status.name} ({int(status)})")
    return values[0] if values else None


@contextmanager
def _nvml(ordinal: Any) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of the physical device (a MIG slice's parent), found by PCI bus id."""
    import pynvml
    from cuda.bindings import driver

    bus_id = _checked(driver.cuDeviceGetPCIBusId(32, ordinal)).split(b"\0")[0]
    pynvml.nvmlInit()
    try:
        yield pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    finally:
        pynvml.nvmlShutdown()


def _supported(nvml: Any, query: Callable[..., T], *arguments: Any) -> T | None:
    """The answer of an NVML query, None where the device or an old driver does not support it."""
    try:
        return query(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        return None


def _state(nvml: Any, handle: Any) -> DeviceState:
    bits = _supported(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return DeviceState(
        clocks=Clocks(
            sm_mhz=_supported(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            mem_mhz=_supported(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        ),
        throttle_reasons=[name for name, bit in THROTTLE_REASONS.items() if bits & bit],
    )
