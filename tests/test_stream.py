"""The stream kernel without a device: configurations, real compiles for every target, the program for sanitizers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiled import compiled
from fake_cuda import FakeCuda, FakeKernel, FakeStreamKernel, words

from kda_lib import Arch, KdaShapes
from kda_lib.compile import KERNELS, compile_kernel, kernel_name
from kda_lib.kernels.lab_config import shared_bytes
from kda_lib.kernels.stream_config import F_A_START, WORKSPACE_BYTES, StreamConfig, stream_config
from kda_lib.lab import sanitized, sass
from kda_lib.shapes import F_A_ROWS

HOPPER = Arch.parse("h200")
#: Targets, and the SMs of a product that has them.
TARGETS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_110a": 20, "sm_120a": 170, "sm_121a": 48}
#: A MIG slice of an H200, an H20, an H100 PCIe, an H200, a B200.
SMS = (16, 78, 114, 132, 148)


def config_for(target: str, tp: int = 8, sms: int = 132, pdl: bool = True) -> StreamConfig:
    return stream_config(Arch.parse(target), KdaShapes(tp), sms, pdl=pdl)


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sms", [2, 3, *SMS])
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("target", TARGETS)
def test_configurations(target: str, tp: int, sms: int) -> None:
    """Every CTA in a pair, every pair with work, and shared memory that the target has."""
    for pdl in (True, False):
        config = config_for(target, tp, sms, pdl)
        launch = config.launch
        assert (launch.grid, launch.cluster, launch.pdl) == (sms // 2 * 2, 2, pdl)
        assert launch.smem <= shared_bytes(Arch.parse(target))
        assert config.validate(Arch.parse(target)) is config
        assert config == config_for(target, tp, sms, pdl)
        assert config.clusters <= config.qkvg_blocks + config.fa_beta_blocks


def test_smaller_shared_memory_gets_another_ring() -> None:
    assert config_for("sm_120a").launch.smem < shared_bytes(Arch.parse("sm_120a")) < config_for("sm_90a").launch.smem


GOOD = config_for("sm_90a")
BAD: list[tuple[Any, str, type[Exception], str]] = [
    (replace(GOOD, pdl=False), "sm_80", ValueError, r"target: expected sm_90 or higher, got sm_80; .*use overlap"),
    (GOOD, "sm_130a", ValueError, r"target: expected sm_90 or higher, got sm_130a"),
    (GOOD, "sm_120a", ValueError, r"shared memory of a block: expected at most \d+ bytes on sm_120a, got \d+; lower"),
    (replace(GOOD, stages=99), "sm_90a", ValueError, r"shared memory of a block: expected at most 232448 bytes"),
    (replace(GOOD, ctas=131), "sm_90a", ValueError, r"ctas: expected a multiple of 2, got 131; leave one SM out"),
    (replace(GOOD, ctas=0), "sm_90a", ValueError, r"ctas: expected at least 1, got 0"),
    (replace(GOOD, ctas=2000), "sm_90a", ValueError, r"ctas: expected at most \d+, got 2000"),
    (replace(GOOD, ctas=132.0), "sm_90a", TypeError, r"ctas: expected an int, got float"),
    (replace(GOOD, ctas=True), "sm_90a", TypeError, r"ctas: expected an int, got bool"),
    (replace(GOOD, rows=3), "sm_90a", ValueError, r"rows: expected a divisor of 8, got 3"),
    (replace(GOOD, stages=GOOD.parts), "sm_90a", ValueError, r"stages: expected more than the \d of a block"),
    (replace(GOOD, stages="5"), "sm_90a", TypeError, r"stages: expected an int, got str"),
    (replace(GOOD, tp=32), "sm_90a", ValueError, r"tp: expected one with an even number of heads, got 32"),
    (replace(GOOD, tp=7), "sm_90a", ValueError, r"tp: expected a divisor of 96, got 7"),
    (replace(GOOD, pdl=1), "sm_90a", TypeError, r"pdl: expected a bool, got int"),
]


@pytest.mark.parametrize(("config", "target", "error", "message"), BAD)
def test_bad_configurations_are_refused_before_compiling(
    config: StreamConfig, target: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kda_lib.compile._compile_now", lambda *_: pytest.fail("the compiler was called"))
    with pytest.raises(error, match=message):
        compile_kernel(config, target)


@pytest.mark.parametrize(
    ("target", "tp", "sms", "message"),
    [
        ("sm_90a", 8, 1, "sms: expected at least 2, got 1; use overlap"),
        ("sm_90a", 8, 0, "sms: expected at least 2, got 0"),
        ("sm_89", 8, 142, "target: expected sm_90 or higher, got sm_89"),
        ("sm_90a", 32, 132, "tp: expected one with an even number of heads, got 32"),
    ],
)
def test_where_there_is_no_configuration(target: str, tp: int, sms: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_for(target, tp, sms, pdl=False)


def test_configuring_loads_neither_torch_nor_the_compiler() -> None:
    code = (
        "import sys; from kda_lib.arch import Arch; from kda_lib.shapes import KdaShapes\n"
        "from kda_lib.kernels.stream_config import stream_config\n"
        "stream_config(Arch.parse('h200'), KdaShapes(8), 132, pdl=True)\n"
        "print([name for name in ('torch', 'cutlass') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


# --- real compiles --------------------------------------------------------------------------------------------------


def check_compiled(config: StreamConfig, target: str) -> None:
    artifact = compiled(config, target)
    assert (artifact.kernel, artifact.target, artifact.launch) == ("stream", target, config.launch)
    resources, instructions = sass.read_resources(artifact.cubin), sass.disassemble(artifact.cubin)
    assert resources.stack_bytes == 0
    assert sass.spills(instructions).stores == sass.spills(instructions).loads == 0
    assert resources.registers * config.launch.block <= 65536, "a CTA fits into the registers of an SM"
    assert resources.smem_bytes + config.launch.smem <= shared_bytes(Arch.parse(target))
    assert any(instruction.base == "HMMA" for instruction in instructions)
    assert ("griddepcontrol.wait" in artifact.ptx) == config.pdl


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target: str, tp: int) -> None:
    check_compiled(config_for(target, tp, TARGETS[target]), target)


@pytest.mark.parametrize("sms", SMS)
def test_compiles_for_every_number_of_sms(sms: int) -> None:
    check_compiled(config_for("sm_90a", sms=sms), "sm_90a")


def test_compiles_without_pdl() -> None:
    check_compiled(config_for("sm_90a", pdl=False), "sm_90a")


def test_it_is_registered() -> None:
    assert kernel_name(GOOD) == "stream"
    assert KERNELS["stream"][0] is StreamConfig


# --- the program that the sanitizers run ----------------------------------------------------------------------------


class OnHost:
    """Plays a loaded kernel on host memory, which also stands for the device's."""

    def __init__(self, config: Any, spoil: int) -> None:
        cuda = FakeCuda(HOPPER)
        stream = isinstance(config, StreamConfig)
        self.artifact = SimpleNamespace(kernel=kernel_name(config))
        self._kernel = FakeStreamKernel(cuda, config) if stream else FakeKernel(cuda, config)
        self._spoil = spoil if stream else 0

    def __call__(self, *values: int, stream: int) -> None:
        self._kernel(*values, stream=1)
        if self._spoil:
            words(values[-3], 1, 2)[0, 0] = self._spoil & 1
            words(values[4], 1, 2)[0, 1] ^= self._spoil & 2 and 0x4000


@pytest.fixture(params=[0, 1, 2], ids=["right", "counter set", "g1 wrong"])
def spoil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is wrong with the stream kernel."""

    @contextmanager
    def on_host(*sizes: int) -> Iterator[list[int]]:
        arrays = [np.full(size, 0xFF, np.uint8) for size in sizes]
        yield [array.ctypes.data for array in arrays]

    monkeypatch.setattr(sanitized, "_loaded", lambda config, arch: OnHost(config, request.param))
    monkeypatch.setattr(sanitized, "_memory", on_host)
    monkeypatch.setattr(sanitized, "_write", lambda to, array: ctypes.memmove(to, array.ctypes.data, array.nbytes))
    monkeypatch.setattr(
        sanitized, "_read", lambda array, pointer: ctypes.memmove(array.ctypes.data, pointer, array.nbytes)
    )
    return int(request.param)


@pytest.mark.parametrize("kernels", sanitized.STREAMS)
def test_sanitized_judges_what_the_stream_kernel_left(spoil: int, kernels: str) -> None:
    tp, sms, rings = sanitized.STREAMS[kernels]
    config = stream_config(HOPPER, KdaShapes(tp), sms or 132, pdl=True, rings=rings)
    assert (sanitized._stream(config, HOPPER, np.random.default_rng(0)) > 0) is bool(spoil)


@pytest.mark.parametrize("spoil", [0], indirect=True)
@pytest.mark.parametrize("stores", [True, False])
def test_f_a_is_for_the_kernel_to_write(spoil: int, stores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host writes the counters alone, and one row that a later launch does not store is seen, although the memory,
    given back and had again, holds what was right for the launch before.
    """
    tp, sms, rings = sanitized.STREAMS["stream_small"]
    config = stream_config(HOPPER, KdaShapes(tp), sms or 0, pdl=True, rings=rings)
    places = {WORKSPACE_BYTES: np.full(WORKSPACE_BYTES, 0xFF, np.uint8)}
    workspace = places[WORKSPACE_BYTES]
    copied: list[int] = []

    @contextmanager
    def had_again(*sizes: int) -> Iterator[list[int]]:
        arrays = [places.get(size, np.full(size, 0xFF, np.uint8)) for size in sizes]
        yield [array.ctypes.data for array in arrays]

    def write(to: int, array: np.ndarray[Any, Any]) -> None:
        if 0 <= to - workspace.ctypes.data < WORKSPACE_BYTES:
            copied.append(to - workspace.ctypes.data + array.nbytes)
        ctypes.memmove(to, array.ctypes.data, array.nbytes)

    class Forgetful(OnHost):
        def __call__(self, *values: int, stream: int) -> None:
            row = workspace[F_A_START:].view(np.uint16)[:F_A_ROWS]
            kept = row.copy()
            super().__call__(*values, stream=stream)
            if not stores and values[-1] > 1:
                row[:] = kept

    monkeypatch.setattr(sanitized, "_loaded", lambda config, arch: Forgetful(config, 0))
    monkeypatch.setattr(sanitized, "_memory", had_again)
    monkeypatch.setattr(sanitized, "_write", write)
    assert (sanitized._stream(config, HOPPER, np.random.default_rng(0)) == 0) is stores
    assert copied == [F_A_START] * len(sanitized.STREAM_TOKENS)


def test_the_small_launch_for_sanitizers_fills_the_ring_as_often_as_tp8_on_an_h200() -> None:
    """It is no toy: as many blocks for a cluster, f_a and F_B in CTAs of their own."""

    def blocks(config: StreamConfig) -> int:
        return (config.qkvg_blocks + config.fa_beta_blocks) // config.clusters

    for name, target in (("stream_small", "h200"), ("stream_small_ring", "sm_120a")):
        tp, sms, rings = sanitized.STREAMS[name]
        small = stream_config(HOPPER, KdaShapes(tp), sms or 0, pdl=True, rings=rings)
        whole = stream_config(Arch.parse(target), KdaShapes(8), 132, pdl=True)
        assert (small.rows, small.stages) == (whole.rows, whole.stages)
        assert blocks(small) >= blocks(whole) > small.stages / small.parts
        assert 0 < small.first_gate < small.ctas


@pytest.mark.parametrize("spoil", [0], indirect=True)
def test_sanitized_judges_the_skinny_kernels(spoil: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized, "TOKENS", (1, 2))
    assert sanitized._skinny(HOPPER, np.random.default_rng(0)) == 0
