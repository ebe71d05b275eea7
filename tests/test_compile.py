"""Real compiles: targets and threads in one process, determinism, the isolated process, what is refused beforehand."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kda_lib import compile as compile_module
from kda_lib.arch import TARGETS, Arch
from kda_lib.cache import ArtifactCache, CacheEntry
from kda_lib.compile import Artifact, KernelConfig, compile_isolated, compile_kernel
from kda_lib.errors import CompilerCrashed, UnknownTarget, UnsupportedInstruction
from kda_lib.kernels.config import SkinnyKConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm
from kda_lib.shapes import KdaShapes

ROOT = Path(__file__).resolve().parent.parent
SHAPES = KdaShapes(8)
HOPPER = Arch.parse("sm_90a")
AMPERE = Arch.parse("sm_80")


def skinny_k(target: str, m: int = 1) -> SkinnyKConfig:
    return skinny_k_config(Arch.parse(target), m, SHAPES)


@pytest.fixture(scope="module")
def artifacts() -> dict[str, Artifact]:
    """The same kernel for all targets, one after the other."""
    return {target: compile_kernel(skinny_k(target), target) for target in TARGETS}


def test_several_targets_in_one_process(artifacts: dict[str, Artifact]) -> None:
    # The compiler's CUDA 12 libraries call sm_110a by its former name.
    written = {target: f".target {'sm_101a' if target == 'sm_110a' else target}\n" for target in TARGETS}
    for target, artifact in artifacts.items():
        assert (artifact.target, artifact.kernel, artifact.cached) == (target, "skinny_k", False)
        assert written[target] in artifact.ptx
        assert f".entry {artifact.entry}(" in artifact.ptx
        assert artifact.cubin.startswith(b"\x7fELF")
        assert artifact.launch == artifact.config.launch
        assert 0 < artifact.seconds < 60
    assert len({artifact.cubin_sha256 for artifact in artifacts.values()}) == len(TARGETS)


def test_threads_give_the_same_bytes(artifacts: dict[str, Artifact]) -> None:
    targets = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda target: compile_kernel(skinny_k(target), target), targets * 2))
    for target, artifact in zip(targets * 2, threaded, strict=True):
        assert (artifact.cubin, artifact.ptx) == (artifacts[target].cubin, artifacts[target].ptx)


def test_processes_and_environment_do_not_change_the_result(artifacts: dict[str, Artifact]) -> None:
    code = (
        "from kda_lib.compile import *; from kda_lib.kernels.config import *; from kda_lib.shapes import KdaShapes\n"
        "a = Arch.parse('sm_90a'); print(compile_kernel(skinny_k_config(a, 1, KdaShapes(8)), a).cubin_sha256)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | extra, stdout=subprocess.PIPE)
        for extra in ({}, {"CUTE_DSL_ARCH": "sm_80", "CUTE_DSL_LINEINFO": "1", "CUTE_DSL_DRYRUN": "1"})
    ]
    printed = [process.communicate(timeout=120)[0].decode().split() for process in started]
    assert printed == [[artifacts["sm_90a"].cubin_sha256]] * 2


def kill(cache: ArtifactCache) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(cache: ArtifactCache) -> None:
    os._exit(0)


def hang(cache: ArtifactCache) -> None:
    time.sleep(600)


def chatter(cache: ArtifactCache) -> None:
    os.write(1, b"compiling ...\n")
    print("still compiling")


@dataclass(frozen=True)
class MisbehavingCache(ArtifactCache):
    """Stands in for the compiler's own crashes: its method runs in the compiling process, in the middle of its work."""

    act: Callable[[ArtifactCache], None]

    def load(self, key: Any) -> CacheEntry | None:
        self.act(self)
        return super().load(key)


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MisbehavingCache]:
    """Makes caches that the compiling process can unpickle: it must find this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    return lambda act: MisbehavingCache(tmp_path, act)


@pytest.mark.parametrize(
    ("act", "timeout", "message"),
    [
        (kill, 60, r"died on skinny_k for sm_90a \(exit code -11\)"),
        (leave, 60, r"died on skinny_k for sm_90a \(exit code 0\)"),
        (hang, 2, "still busy with skinny_k for sm_90a after 2 s"),
    ],
)
def test_isolated_compile_survives(
    act: Callable[..., None], timeout: float, message: str, misbehaving: Callable[..., MisbehavingCache]
) -> None:
    started = time.monotonic()
    with pytest.raises(CompilerCrashed, match=message) as caught:
        compile_isolated(skinny_k("sm_90a"), HOPPER, timeout=timeout, cache=misbehaving(act))
    assert caught.value.target == "sm_90a"
    assert time.monotonic() - started < 60


def test_isolated_compile_gives_the_same(
    artifacts: dict[str, Artifact], misbehaving: Callable[..., MisbehavingCache]
) -> None:
    cache = misbehaving(chatter)
    isolated = compile_isolated(skinny_k("sm_90a"), HOPPER, cache=cache)
    assert replace(isolated, seconds=0) == replace(artifacts["sm_90a"], seconds=0)
    assert compile_isolated(skinny_k("sm_90a"), HOPPER, cache=cache) == replace(isolated, cached=True)


def test_isolated_compile_passes_typed_errors_through() -> None:
    config = replace(skinny_k("sm_90a"), fma=FmaForm.NATIVE)
    with pytest.raises(UnsupportedInstruction) as here:
        compile_kernel(config, HOPPER)
    with pytest.raises(UnsupportedInstruction, match=r"fma\.rn\.f32\.bf16") as there:
        compile_isolated(config, HOPPER)
    assert str(there.value) == str(here.value)
    assert there.value.__dict__ == here.value.__dict__
    with pytest.raises(UnknownTarget, match="sm_99"):
        compile_isolated(replace(skinny_k("sm_90a"), pdl=False), "sm_99")


N = skinny_n_config(HOPPER, 2, SHAPES)
K = skinny_k_config(HOPPER, 2, SHAPES)
BAD: list[tuple[Any, Any, type[Exception], str]] = [
    (K, "sm_9", ValueError, r"target: expected one of sm_80.*got 'sm_9'"),
    (K, "", ValueError, r"target: expected one of"),
    (K, 90, TypeError, r"target: expected a string such as 'sm_90a', got int"),
    ({"m": 1}, "sm_90a", TypeError, r"config: expected one of SkinnyNConfig, SkinnyKConfig.* got dict"),
    (None, "sm_90a", TypeError, r"config: expected one of .* got NoneType"),
    *[
        case
        for config in (N, K)
        for case in (
            (replace(config, m=0), "sm_90a", ValueError, r"M: expected 1 to 16 tokens, got 0"),
            (replace(config, m=17), "sm_90a", ValueError, r"M: expected 1 to 16 tokens, got 17"),
            (replace(config, m=True), "sm_90a", TypeError, r"M: expected an int, got bool"),
            (replace(config, m=1.5), "sm_90a", TypeError, r"M: expected an int, got float"),
            (replace(config, k=config.k - 4), "sm_90a", ValueError, r"k: expected a multiple of the vector, 8, got"),
            (replace(config, k=0), "sm_90a", ValueError, r"k: expected at least 1, got 0"),
            (replace(config, rows=7), "sm_90a", ValueError, r"rows: expected a divisor of n = \d+, got 7"),
            (replace(config, tokens=0), "sm_90a", ValueError, r"tokens: expected at least 1, got 0"),
            (replace(config, tokens=4), "sm_90a", ValueError, r"tokens: expected less than 2 m = 4, got 4"),
            (replace(config, fma="native"), "sm_90a", TypeError, r"fma: expected an FmaForm, got str"),
            (replace(config, split=1) if config is N else config, "sm_80", ValueError, r"pdl: expected False on sm_80"),
        )
    ],
    (replace(N, split=3), "sm_90a", ValueError, r"k: expected a multiple of split x steps x 8 x 32 = \d+, got 7168"),
    (replace(N, split=9), "sm_90a", ValueError, r"k: expected a multiple of split x steps x 8 x 32 = \d+, got 7168"),
    (replace(N, split=14, steps=1), "sm_90a", ValueError, r"split: expected at most 8, got 14"),
    (replace(N, split=7, pdl=False), "sm_80", ValueError, r"split: expected 1 on sm_80, which has no clusters, got 7"),
    (replace(N, split=1, steps=1, groups=2), "sm_90a", ValueError, r"threads of a block: expected at most 1024, got 1"),
    (replace(N, rows=24), "sm_90a", ValueError, r"rows x steps: expected at most 16 vectors"),
    (replace(K, k=120, x_stride=144), "sm_90a", ValueError, r"k: expected 8, 16, 32, 64, 128 or 256, got 120"),
    (replace(K, rows=192, row_tile=1), "sm_90a", ValueError, r"threads of a block: expected at most 1024, got \d+"),
    (replace(K, x_stride=120), "sm_90a", ValueError, r"x_stride: expected a multiple of 8, at least k = 128, got 120"),
]  # fmt: skip


@pytest.mark.parametrize("compiler", [compile_kernel, compile_isolated])
@pytest.mark.parametrize(("config", "target", "error", "message"), BAD)
def test_bad_input_is_refused_before_compiling(
    compiler: Callable[..., Artifact],
    config: Any,
    target: Any,
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the compiler was called")

    monkeypatch.setattr(compile_module, "_compile_now", never)
    monkeypatch.setattr(compile_module.subprocess, "run", never)
    with pytest.raises(error, match=message):
        compiler(config, target)


def test_bad_input_loads_no_compiler() -> None:
    code = """
import json, sys
from kda_lib.compile import compile_kernel
from kda_lib.kernels.config import *
from kda_lib.shapes import KdaShapes
refused = 0
for m, target in ((0, "sm_90a"), (17, "sm_90a"), (True, "sm_90a"), (1, "sm_9"), (1, None)):
    try:
        compile_kernel(skinny_n_config(Arch.parse(target), m, KdaShapes(8)), target)
    except (TypeError, ValueError):
        refused += 1
config = skinny_n_config(Arch.parse("sm_90a"), 1, KdaShapes(8))
try:
    compile_kernel(config, "sm_80")
except ValueError:
    refused += 1
print(json.dumps([refused, [name for name in ("cutlass", "torch") if name in sys.modules]]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [6, []]


def test_the_configurations_that_the_bad_ones_come_from_are_good() -> None:
    configs: tuple[KernelConfig, ...] = (N, K)
    for config in configs:
        assert config.validate(HOPPER) is config
    assert replace(K, pdl=False).validate(AMPERE).pdl is False
