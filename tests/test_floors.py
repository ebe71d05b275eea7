"""The read floors: every byte is read once, and the compiled code is what the docstrings say. No device is needed.

The emulator has no atomics, bulk copies or dynamic shared memory, so :func:`emulable` puts slower equivalents into the
compiled PTX; indices, phases, waits and branches stay the compiler's own.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import compiled
from cuda.bindings import driver

from kda_lib.arch import Arch
from kda_lib.compile import compile_kernel
from kda_lib.kernels.lab_config import ReadBulkConfig, ReadLoadsConfig, StampConfig
from kda_lib.lab import sass
from kda_lib.lab.floors import FloorConfig, floor_configs, region_bytes
from kda_lib.lab.ptx import Buffer, Check, Machine, RunReport
from kda_lib.launch import LoadedKernel, _launch_config
from kda_lib.shapes import KdaShapes

SHAPES = KdaShapes(8)
HOPPER = Arch.parse("sm_90a")
TARGETS = ("sm_90a", "sm_100a", "sm_120a")
LOADS = ReadLoadsConfig(packed_bytes=40_000, f_b_bytes=1_600, ctas=3, threads=64, loads=4, evict_first=False, pdl=True)
BULK = ReadBulkConfig(
    packed_bytes=16_384, f_b_bytes=1_024, ctas=3, stages=2, stage_bytes=512, evict_first=False, pdl=True
)


def emulable(ptx: str, config: FloorConfig) -> str:
    """The PTX with equivalents for what the emulator lacks: ``out`` becomes one word a thread instead of an atomic."""
    each = (
        r"{ .reg .b32 t, b; .reg .b64 a; mov.u32 t, %tid.x; mov.u32 b, %ctaid.x; mad.lo.s32 t, b, THREADS, t; "
        r"mul.wide.s32 a, t, 4; add.s64 a, a, \1; st.global.b32 [a], \2; }"
    ).replace("THREADS", str(config.launch.block))
    ptx, count = re.subn(r"\{[^}]*@p red\.global\.xor\.b32 \[(\S+)\], (\S+); \}", each, ptx)
    assert count == 1
    if isinstance(config, ReadLoadsConfig):
        return ptx
    copy = (
        r"{ .reg .pred more; .reg .b32 i, v, s; .reg .b64 g; mov.b32 i, 0; mov.b32 s, \1; mov.b64 g, \2; "
        r"next: ld.global.b32 v, [g]; st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [s], v, [\4]; "
        r"add.s32 i, i, 4; add.s32 s, s, 4; add.s64 g, g, 4; setp.lt.u32 more, i, \3; @more bra next; }"
    )
    bulk = r"cp\.async\.bulk\.\S+ \[(\S+)\], \[(\S+)\], (\S+), \[(\S+)\];"
    ptx, count = re.subn(bulk, copy, ptx)
    assert count
    for theirs, ours in (
        ("fence.proxy.async.shared::cta;", ""),
        ("bar.warp.sync \t-1", "bar.sync 0"),
        ("try_wait.parity.shared", "try_wait.parity.acquire.cluster.shared"),
    ):
        assert theirs in ptx
        ptx = ptx.replace(theirs, ours)
    ptx, count = re.subn(r"\.extern (\.shared \S+ \S+ \S+ __dynamic_shmem__0)\[\]", rf"\1[{config.launch.smem}]", ptx)
    assert count == 1
    return ptx


def read_all(config: FloorConfig, ptx: str | None = None) -> tuple[int, int, RunReport]:
    """XOR of the words that the kernel reads, XOR of the words that there are, and the emulator's report."""
    artifact = compiled(config, "sm_90a")
    rng = np.random.default_rng(0)
    packed, f_b = (rng.integers(0, 256, size, np.uint8) for size in (config.packed_bytes, config.f_b_bytes))
    out = np.zeros(config.launch.grid * config.launch.block, np.uint32)
    report = Machine(emulable(ptx or artifact.ptx, config)).run(
        artifact.entry,
        [Buffer(packed, "packed"), Buffer(f_b, "f_b"), Buffer(out, "out", readonly=False, dependent=config.pdl)],
        grid=config.launch.grid,
        block=config.launch.block,
    )
    words = np.concatenate([packed, f_b]).view(np.uint32)
    return int(np.bitwise_xor.reduce(out)), int(np.bitwise_xor.reduce(words)), report


CONFIGS: list[FloorConfig] = [
    LOADS,
    replace(LOADS, pdl=False),
    replace(LOADS, ctas=1, threads=32, loads=1),
    replace(LOADS, ctas=1, threads=1024, loads=16),
    replace(LOADS, packed_bytes=3 * 64 * 4 * 16),
    BULK,
    replace(BULK, pdl=False),
    replace(BULK, stages=1),
    replace(BULK, stages=3),
    replace(BULK, stages=40),
    replace(BULK, stage_bytes=1_024, ctas=5),
    replace(BULK, ctas=100),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_byte_is_read(config: FloorConfig) -> None:
    read, expected, report = read_all(config)
    assert report.ok, str(report)
    assert read == expected


@pytest.mark.parametrize("config", [LOADS, BULK], ids=str)
def test_a_floor_that_leaves_a_vector_out_is_noticed(config: FloorConfig) -> None:
    """The checksum of the device test rests on this: one 16-byte vector less gives another XOR."""
    shorter = replace(config, f_b_bytes=config.f_b_bytes - (16 if config is LOADS else 512))
    read, expected, report = read_all(config, compiled(shorter, "sm_90a").ptx)
    assert report.ok
    assert read != expected


def without_last(ptx: str, text: str) -> str:
    before, found, after = ptx.rpartition(text)
    assert found
    return before + after


def test_the_ring_needs_its_barrier() -> None:
    ptx = compiled(BULK, "sm_90a").ptx
    _, _, report = read_all(BULK, without_last(ptx, "bar.warp.sync \t-1;"))
    assert report.failed(Check.RACE)


def test_the_ring_needs_its_wait() -> None:
    ptx, count = re.subn(r"\{[^}]*try_wait[^}]*\}", "", compiled(BULK, "sm_90a").ptx)
    assert count == 1
    artifact_without_wait = emulable(ptx + "// try_wait.parity.shared", BULK)
    out = np.zeros(BULK.launch.grid * BULK.launch.block, np.uint32)
    regions = [np.ones(size, np.uint8) for size in (BULK.packed_bytes, BULK.f_b_bytes)]
    report = Machine(artifact_without_wait).run(
        params=[*(Buffer(r, "weights") for r in regions), Buffer(out, "out", readonly=False)],
        grid=BULK.launch.grid,
        block=BULK.launch.block,
    )
    assert report.failed(Check.RACE)


@pytest.mark.parametrize("config", [LOADS, BULK], ids=str)
def test_out_is_not_touched_before_the_launch_in_front_is_done(config: FloorConfig) -> None:
    ptx = compiled(config, "sm_90a").ptx
    _, _, report = read_all(config, without_last(ptx, "griddepcontrol.wait;"))
    assert report.failed(Check.DEPENDENT)


@pytest.mark.parametrize("target", TARGETS)
def test_floors_of_real_layers_compile_without_spills(target: str) -> None:
    arch = Arch.parse(target)
    found = []
    for shapes in map(KdaShapes, (4, 8, 16)):
        configs = floor_configs(arch, shapes, sms=132)
        assert sum(region_bytes(shapes)) == shapes.weight_bytes
        assert list(configs) == ["read_loads", "read_bulk", "read_bulk_pdl"]
        found += [(name, config, compiled(config, arch)) for name, config in configs.items()]
    listings = sass.disassemble_all([artifact.cubin for _, _, artifact in found], arch)
    for (name, config, artifact), code in zip(found, listings, strict=True):
        loads = [i for i in code if i.base == "LDG"]
        if name == "read_loads":
            assert len(loads) >= config.loads
            assert all(i.opcode.split(".")[0] == "LDG" and "128" in i.opcode for i in loads)
        else:
            assert not loads
            assert sum(i.base == "UBLKCP" for i in code) == 2
        assert sass.spills(code) == sass.Spills(0, 0, 0, 0)
        assert ("griddepcontrol.wait" in artifact.ptx) is config.pdl
        assert ("L2::cache_hint" in artifact.ptx) is config.evict_first


def test_without_bulk_copies_there_are_plain_loads() -> None:
    configs = floor_configs(Arch.parse("sm_80"), SHAPES, sms=108)
    assert list(configs) == ["read_loads"]
    assert compiled(configs["read_loads"], "sm_80").cubin


def test_out_is_written_only_where_it_is_given() -> None:
    """The reduction is predicated on the pointer: the timed launch, which passes null, runs the checked code."""
    for config in floor_configs(HOPPER, SHAPES, 132).values():
        reductions = [line for line in compiled(config, HOPPER).ptx.splitlines() if "red.global" in line]
        (line,) = reductions
        assert re.search(r"setp\.ne\.b64 p, (%rd\d+), 0; @p red\.global\.xor\.b32 \[\1\]", line)


def test_dynamic_shared_memory_reaches_the_launch() -> None:
    config = floor_configs(HOPPER, SHAPES, 132)["read_bulk"]
    launch = _launch_config(compiled(config, HOPPER))
    assert launch.sharedMemBytes == config.launch.smem == config.stages * (config.stage_bytes + 8)


def test_large_shared_memory_is_asked_for_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    current = [0]
    ok = driver.CUresult.CUDA_SUCCESS

    def answer(name: str, *values: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            calls.append((name, arguments))
            return ok, *values

        return call

    for name, values in (("cuInit", ()), ("cuLibraryLoadData", (1,)), ("cuLibraryGetKernel", (2,)),
                         ("cuKernelSetAttribute", ()), ("cuLaunchKernelEx", ())):  # fmt: skip
        monkeypatch.setattr(driver, name, answer(name, *values))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (ok, current[0]))
    configs = floor_configs(HOPPER, SHAPES, 132)
    for name in ("read_bulk", "read_loads"):
        kernel = LoadedKernel(compiled(configs[name], HOPPER))
        for current[0] in (0, 0, 1, 0):
            kernel(1, 2, 0, stream=0)
    asked = [arguments for name, arguments in calls if name == "cuKernelSetAttribute"]
    size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert asked == [(size, configs["read_bulk"].launch.smem, 2, device) for device in (0, 1)]
    assert sum(name == "cuLaunchKernelEx" for name, _ in calls) == 8


BAD: list[tuple[Any, str, str]] = [
    (replace(LOADS, packed_bytes=40_001), "sm_90a", "packed_bytes: expected a multiple of 16, got 40001"),
    (replace(LOADS, f_b_bytes=0), "sm_90a", "f_b_bytes: expected a multiple of 16, got 0"),
    (replace(LOADS, ctas=0), "sm_90a", "ctas: expected at least 1, got 0"),
    (replace(LOADS, threads=48), "sm_90a", "threads: expected a multiple of 32 up to 1024, got 48"),
    (replace(LOADS, loads=17), "sm_90a", "loads: expected 1 to 16 vectors"),
    (LOADS, "sm_80", "pdl: expected False on sm_80"),
    (BULK, "sm_89", "target: expected sm_90 or higher, got sm_89"),
    (replace(BULK, stage_bytes=256), "sm_90a", "stage_bytes: expected a multiple of 512, got 256"),
    (replace(BULK, stage_bytes=1_536), "sm_90a", "packed_bytes: expected a multiple of 1536, got 16384"),
    (replace(BULK, stages=0), "sm_90a", "stages: expected at least 1, got 0"),
    (replace(BULK, ctas=0), "sm_90a", "ctas: expected at least 1, got 0"),
    (replace(BULK, stages=448), "sm_90a", "block: expected at most 232448 bytes on sm_90a, got 232960; lower stages"),
    (replace(BULK, stages=200), "sm_120a", "shared memory of a block: expected at most 101376 bytes on sm_120a"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "target", "message"), BAD)
def test_bad_configurations_are_refused(config: FloorConfig, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_kernel(config, target)


@pytest.mark.parametrize("target", ["sm_80", *TARGETS])
def test_a_stamp_is_one_store_of_two_words(target: str) -> None:
    code = sass.disassemble(compiled(StampConfig(), target).cubin)
    (store,) = [i for i in code if i.base == "STG"]
    assert "128" in store.opcode
    assert any("GLOBALTIMER" in operand for i in code for operand in i.operands)
    assert any("VIRTUALSMID" in operand or "VIRTID" in operand for i in code for operand in i.operands)
