"""Profiles, the device, and the mode that follows from both."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_lab import PROFILES, device
from pydantic import ValidationError

from kda_lib.lab.device import WrongDevice, current_device, default_profile, resolve_mode, sample_state
from kda_lib.lab.profile import FIGURES, Profile, UnknownProfile, load_profile, match_profile, profile_names

GB, TB, MHZ, KIB, MIB = 10**9, 10**12, 10**6, 2**10, 2**20

# Kept apart from the YAML files on purpose: a figure changed there alone must fail here.
# name: target, SMs, DRAM bytes/s, L2 bytes, shared memory per CTA, memory bytes, boost clock Hz
EXPECTED: dict[str, tuple[Any, ...]] = {
    "cpu": ("sm_90a", None, None, None, None, None, None),
    "a100": ("sm_80", 108, 2039 * GB, 40 * MIB, 163 * KIB, 80 * GB, 1410 * MHZ),
    "l40s": ("sm_89", 142, 864 * GB, None, 99 * KIB, 48 * GB, None),
    "h100": ("sm_90a", 132, 3350 * GB, 50 * MIB, 227 * KIB, 80 * GB, None),
    "h200": ("sm_90a", 132, 4800 * GB, None, 227 * KIB, 141 * GB, None),
    "h20": ("sm_90a", 78, 4 * TB, None, 227 * KIB, 96 * GB, None),
    "b200": ("sm_100a", 148, 8 * TB, 253 * MIB // 2, 227 * KIB, 179 * GB, None),
    "b300": ("sm_103a", None, 8 * TB, None, 227 * KIB, 288 * GB, None),
    "rtx5090": ("sm_120a", 170, 1792 * GB, 96 * MIB, 99 * KIB, 32 * GB, 2407 * MHZ),
    "thor": ("sm_110a", 20, 273 * GB, None, 227 * KIB, 128 * GB, 1570 * MHZ),
    "dgx_spark": ("sm_121a", 48, 273 * GB, None, 99 * KIB, 128 * GB, None),
}

# CUDA device names as drivers report them, and the profile of each; None has no profile.
DEVICE_NAMES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "A100-SXM4-40GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA A100X": None,
    "NVIDIA A10": None,
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": None,
    "NVIDIA L4": None,
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "h100",
    "NVIDIA H100 PCIe": "h100",
    "NVIDIA H100 NVL": "h100",
    "NVIDIA H800": None,
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA H200 MIG 1g.18gb": "h200",
    "NVIDIA GH200 480GB": None,
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": None,
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": None,
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 5090 D": None,
    "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA Thor": "thor",
    "NVIDIA GB10": "dgx_spark",
    "Tesla V100-SXM2-16GB": None,
}


def test_the_profiles_are_the_expected_ones() -> None:
    assert profile_names()[0] == "cpu"
    assert sorted(profile_names()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_target_and_figures(name: str) -> None:
    profile = load_profile(name)
    assert (profile.target, *(getattr(profile, figure) for figure in FIGURES)) == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "cpu"])
def test_a_missing_figure_is_explained(name: str) -> None:
    profile = load_profile(name)
    absent = [figure for figure in FIGURES if getattr(profile, figure) is None]
    assert [figure for figure in absent if figure not in profile.notes] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_profile_file_is_named_like_its_profile(name: str) -> None:
    assert yaml.safe_load((PROFILES / f"{name}.yaml").read_text())["name"] == name


def test_unknown_profile_lists_all() -> None:
    with pytest.raises(UnknownProfile) as caught:
        load_profile("nope")
    assert isinstance(caught.value, ValueError)
    assert "'nope'" in str(caught.value)
    assert all(name in str(caught.value) for name in EXPECTED)


def test_a_path_is_no_profile_name() -> None:
    with pytest.raises(UnknownProfile):
        load_profile("../profiles/h100")


GOOD: dict[str, Any] = {
    "name": "x1",
    "title": "X",
    "target": "sm_90a",
    "device_pattern": "X1",
    "sms": 1,
    "sources": {"sms": "Document, https://example.org/x1"},
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"sources": {}}, "figures without a source: sms"),
        ({"sources": {**GOOD["sources"], "l2_bytes": "Document, https://example.org"}}, "not given: l2_bytes"),
        ({"sources": {"sms": "somebody said so"}}, "https URL: sms"),
        ({"device_pattern": None}, "without device_pattern"),
        ({"sms": "many"}, "valid integer"),
        ({"sms": 0}, "greater than 0"),
        ({"bandwidth": 1}, "Extra inputs"),
        ({"target": "hopper"}, "match pattern"),
    ],
)
def test_bad_profiles_are_rejected(change: dict[str, Any], fault: str) -> None:
    Profile.model_validate(GOOD)
    with pytest.raises(ValidationError, match=fault):
        Profile.model_validate({**GOOD, **change})


@pytest.mark.parametrize(("text", "fault"), [("name: h100\ntitle: [", "not a valid"), ("name: x1\n", "not a valid")])
def test_a_broken_profile_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fault: str) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    monkeypatch.setattr("kda_lib.lab.profile._PROFILES", tmp_path)
    with pytest.raises(ValueError, match=rf"broken\.yaml is {fault}"):
        load_profile("broken")


def test_a_misnamed_profile_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.yaml").write_text((PROFILES / "h100.yaml").read_text())
    monkeypatch.setattr("kda_lib.lab.profile._PROFILES", tmp_path)
    with pytest.raises(ValueError, match="expected name: other; got 'h100'"):
        load_profile("other")


@pytest.mark.parametrize(("device_name", "profile"), DEVICE_NAMES.items())
def test_exactly_one_profile_fits_each_device(device_name: str, profile: str | None) -> None:
    fitting = [name for name in profile_names() if load_profile(name).fits(device_name)]
    assert fitting == ([profile] if profile else [])
    found = match_profile(device_name)
    assert (found.name if found else None) == profile


def test_mode_without_a_device() -> None:
    assert {resolve_mode(load_profile(name), None) for name in profile_names()} == {"compile-only"}


def test_mode_cpu_never_uses_the_device() -> None:
    assert resolve_mode(load_profile("cpu"), device("NVIDIA H200")) == "compile-only"


def test_mode_full_on_a_fitting_device() -> None:
    assert resolve_mode(load_profile("h200"), device("NVIDIA H200")) == "full"
    assert resolve_mode(load_profile("h200"), device("NVIDIA H200 MIG 1g.18gb", sms=16, mig=True)) == "full"


def test_wrong_device_names_both_and_the_right_profile() -> None:
    with pytest.raises(WrongDevice) as caught:
        resolve_mode(load_profile("h100"), device("NVIDIA H200"))
    assert all(part in str(caught.value) for part in ("'h100'", "'NVIDIA H200'", "use GPU=h200"))


def test_wrong_device_without_a_profile_says_what_to_add() -> None:
    with pytest.raises(WrongDevice, match=r"no profile yet: add kda_lib/lab/profiles/<name>\.yaml"):
        resolve_mode(load_profile("h100"), device("NVIDIA GH200 480GB"))


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H20", "h20"), ("NVIDIA GH200 480GB", "cpu"), (None, "cpu")])
def test_default_profile(name: str | None, expected: str) -> None:
    assert default_profile(device(name) if name else None).name == expected


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An H200 behind the CUDA driver and NVML; returns monkeypatch so that a test can change one answer."""
    driver = import_module("cuda.bindings.driver")
    pynvml = import_module("pynvml")
    success = driver.CUresult.CUDA_SUCCESS
    attribute = driver.CUdevice_attribute
    attributes = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
        attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 62_914_560,
    }
    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    answers: dict[str, Any] = {
        "cuInit": lambda flags: (success,),
        "cuDeviceGet": lambda ordinal: (success, f"ordinal {ordinal}"),
        "cuDeviceGetName": lambda size, dev: (success, b"NVIDIA H200\0\0\0"),
        "cuDeviceGetPCIBusId": lambda size, dev: (success, b"0000:01:00.0\0\0"),
        "cuDeviceTotalMem": lambda dev: (success, 150_000_000_000),
        "cuDeviceGetAttribute": lambda which, dev: (success, attributes[which]),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: {b"0000:01:00.0": "handle"}[bus_id],
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x40,
        "nvmlDeviceGetClockInfo": lambda handle, which: clocks[which],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


@pytest.mark.usefixtures("fake_gpu")
def test_current_device_reads_cuda_and_nvml() -> None:
    found = current_device()
    assert found is not None
    assert found.model_dump() == {
        "name": "NVIDIA H200",
        "index": 0,
        "capability": "9.0",
        "sms": 132,
        "memory_bytes": 150_000_000_000,
        "l2_bytes": 62_914_560,
        "power_limit_w": 700.0,
        "mig": False,
        "driver": "580.95.05",
        "clocks": {"sm_mhz": 1980, "mem_mhz": 3201},
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
    }
    assert sample_state() == {"clocks": found.clocks.model_dump(), "throttle_reasons": found.throttle_reasons}


def _unsupported(*arguments: Any) -> None:
    pynvml = import_module("pynvml")
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_what_nvml_does_not_support_is_none(fake_gpu: pytest.MonkeyPatch) -> None:
    pynvml = import_module("pynvml")
    for name in ("PowerManagementLimit", "MigMode", "CurrentClocksEventReasons", "ClockInfo"):
        fake_gpu.setattr(pynvml, f"nvmlDeviceGet{name}", _unsupported)
    found = current_device()
    assert found is not None
    assert (found.power_limit_w, found.mig, found.clocks.sm_mhz, found.throttle_reasons) == (None, None, None, [])


def test_mig_is_reported(fake_gpu: pytest.MonkeyPatch) -> None:
    fake_gpu.setattr(import_module("pynvml"), "nvmlDeviceGetMigMode", lambda handle: [1, 1])
    found = current_device()
    assert found is not None
    assert found.mig is True


@pytest.mark.parametrize("status", ["CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"])
def test_no_device(fake_gpu: pytest.MonkeyPatch, status: str) -> None:
    driver = import_module("cuda.bindings.driver")
    fake_gpu.setattr(driver, "cuInit", lambda flags: (getattr(driver.CUresult, status),))
    assert current_device() is None
    assert sample_state() == {"clocks": {"sm_mhz": None, "mem_mhz": None}, "throttle_reasons": []}


def test_no_driver_library(fake_gpu: pytest.MonkeyPatch) -> None:
    def fail(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    fake_gpu.setattr(import_module("cuda.bindings.driver"), "cuInit", fail)
    assert current_device() is None


def test_a_broken_driver_is_an_error_not_absence(fake_gpu: pytest.MonkeyPatch) -> None:
    driver = import_module("cuda.bindings.driver")
    mismatch = driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    fake_gpu.setattr(driver, "cuInit", lambda flags: (mismatch,))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        current_device()
