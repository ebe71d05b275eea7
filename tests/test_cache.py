"""The on-disk cache: what makes a hit, what becomes of a damaged entry, two writers, a disk that refuses."""

import errno
import json
import multiprocessing
import os
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kda_lib import cache as cache_module
from kda_lib import compile as compile_module
from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache, CacheEntry, CacheWarning
from kda_lib.compile import KernelConfig, cache_key, compile_kernel
from kda_lib.kernels.config import skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm
from kda_lib.shapes import KdaShapes

HOPPER = Arch.parse("sm_90a")
CONFIG = skinny_k_config(HOPPER, 2, KdaShapes(8))
KEY = cache_key(CONFIG, HOPPER)
PTX = ".visible .entry kda_skinny_k_0(\n" + "fma.rn.f32 %f1, %f2, %f3, %f1;\n" * 20
ENTRY = CacheEntry("kda_skinny_k_0", PTX, b"\x7fELF" + bytes(range(256)), 0.25)


def store(cache: ArtifactCache, key: dict[str, Any] = KEY) -> None:
    cache.store(key, name=ENTRY.name, ptx=ENTRY.ptx, cubin=ENTRY.cubin, seconds=ENTRY.seconds)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that only says what it was asked for."""
    asked: list[str] = []

    def compile_now(name: str, config: KernelConfig, arch: Arch) -> tuple[str, bytes, float]:
        asked.append(f"{name} {arch}")
        return ENTRY.ptx, ENTRY.cubin, ENTRY.seconds

    monkeypatch.setattr(compile_module, "_compile_now", compile_now)
    return asked


def test_hit_gives_what_was_compiled(tmp_path: Path, compiles: list[str]) -> None:
    cache = ArtifactCache(tmp_path / "new" / "folder")
    first = compile_kernel(CONFIG, "h100", cache=cache)
    second = compile_kernel(CONFIG, "sm_90a", cache=cache)
    assert compiles == ["skinny_k sm_90a"]
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first


def test_without_a_cache_nothing_is_kept(tmp_path: Path, compiles: list[str]) -> None:
    compile_kernel(CONFIG, HOPPER)
    compile_kernel(CONFIG, HOPPER)
    assert len(compiles) == 2


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (CONFIG, "sm_90"),
        (CONFIG, "sm_100a"),
        (replace(CONFIG, fma=FmaForm.CVT), "sm_90a"),
        (replace(CONFIG, pdl=False), "sm_90a"),
        (replace(CONFIG, m=3), "sm_90a"),
        (replace(CONFIG, n=768), "sm_90a"),
        (replace(CONFIG, k=64, rows=32), "sm_90a"),
        (replace(CONFIG, x_stride=256), "sm_90a"),
        (replace(CONFIG, rows=8), "sm_90a"),
        (replace(CONFIG, tokens=1), "sm_90a"),
        (skinny_n_config(HOPPER, 2, KdaShapes(8)), "sm_90a"),
    ],
)
def test_miss_on_config_or_target(config: KernelConfig, target: str, tmp_path: Path, compiles: list[str]) -> None:
    cache = ArtifactCache(tmp_path)
    compile_kernel(CONFIG, HOPPER, cache=cache)
    assert not compile_kernel(config, target, cache=cache).cached
    assert len(list(tmp_path.glob("*.zip"))) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dsl_distributions", (("nvidia-cutlass-dsl", "4.8.1"), ("nvidia-cutlass-dsl-libs-base", "4.8.2"))),
        ("source_sha256", "0" * 64),
    ],
)
def test_miss_on_dsl_or_source(
    name: str, value: Any, tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ArtifactCache(tmp_path)
    compile_kernel(CONFIG, HOPPER, cache=cache)
    monkeypatch.setattr(compile_module, name, lambda: value)
    assert not compile_kernel(CONFIG, HOPPER, cache=cache).cached


def test_miss_on_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ArtifactCache(tmp_path)
    store(cache)
    monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
    assert cache.load(KEY) is None


def test_key_names_the_installed_compiler_and_every_source_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ["nvidia-cutlass-dsl", "4.8.1"] in KEY["dsl"]
    assert set(KEY["config"]) == set(CONFIG.__dataclass_fields__)
    (tmp_path / "kernels").mkdir()
    module, kernel = tmp_path / "compile.py", tmp_path / "kernels" / "skinny_n.py"
    hashes = set()
    monkeypatch.setattr(compile_module, "__file__", str(module))
    for contents in (("a", "b"), ("a", "c"), ("d", "b"), ("ab", "")):
        module.write_text(contents[0])
        kernel.write_text(contents[1])
        hashes.add(compile_module.source_sha256.__wrapped__())
    assert len(hashes) == 4


def damaged_entries(whole: bytes) -> list[bytes]:
    """The entry cut short everywhere, and with one bit flipped everywhere."""
    flipped = [whole[:i] + bytes([whole[i] ^ 0x20]) + whole[i + 1 :] for i in range(len(whole))]
    return [whole[:i] for i in range(len(whole))] + flipped


def test_no_damage_is_ever_taken_for_an_entry(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    store(cache)
    path = cache.path(KEY)
    discarded = 0
    for content in damaged_entries(path.read_bytes()):
        path.write_bytes(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            entry = cache.load(KEY)
        # A flipped bit in a timestamp, say, harms nothing.
        assert entry in (None, ENTRY)
        if entry is None:
            discarded += 1
            assert [w.category for w in caught] == [CacheWarning]
            assert "\n" not in str(caught[0].message)
            assert not path.exists()
    assert discarded > 1000


def test_corrupt_entry_is_compiled_anew(tmp_path: Path, compiles: list[str]) -> None:
    cache = ArtifactCache(tmp_path)
    compile_kernel(CONFIG, HOPPER, cache=cache)
    cache.path(KEY).write_bytes(b"")
    with pytest.warns(CacheWarning, match=r"discarding the corrupt cache entry .*\.zip"):
        assert not compile_kernel(CONFIG, HOPPER, cache=cache).cached
    assert compile_kernel(CONFIG, HOPPER, cache=cache).cached


def test_entry_of_another_key_is_discarded(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    other = KEY | {"target": "sm_100a"}
    store(cache, other)
    cache.path(other).rename(cache.path(KEY))
    with pytest.warns(CacheWarning, match="belongs to another key"):
        assert cache.load(KEY) is None


def test_entry_with_foreign_members_is_discarded(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    for meta in ([], {"key": KEY}):
        with zipfile.ZipFile(cache.path(KEY), "w") as archive:
            archive.writestr("meta.json", json.dumps(meta))
        with pytest.warns(CacheWarning, match="discarding"):
            assert cache.load(KEY) is None


def write_often(folder: Path) -> None:
    for _ in range(100):
        store(ArtifactCache(folder))


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(cache.load(KEY))  # a half-written entry would be a CacheWarning, which is an error in tests
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [entry for entry in seen if entry not in (None, ENTRY)] == []
    assert cache.load(KEY) == ENTRY
    assert [path.name for path in tmp_path.iterdir()] == [cache.path(KEY).name]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("at", ["mkstemp", "write", "replace"])
def test_refusal_is_one_warning_and_leaves_nothing(
    number: int, at: str, tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    owner, name = {
        "mkstemp": (cache_module.tempfile, "mkstemp"),
        "write": (zipfile.ZipFile, "writestr"),
        "replace": (cache_module.os, "replace"),
    }[at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.warns(CacheWarning) as caught:
            artifact = compile_kernel(CONFIG, HOPPER, cache=ArtifactCache(tmp_path))
    assert artifact.cubin == ENTRY.cubin
    assert [str(w.message) for w in caught] == [f"the kernel cache cannot be written: {os.strerror(number)}"]
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "writestr", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store(ArtifactCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_a_file(tmp_path: Path, compiles: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.warns(CacheWarning) as caught:
        assert compile_kernel(CONFIG, HOPPER, cache=ArtifactCache(file)).cubin == ENTRY.cubin
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "the kernel cache cannot be read",
        "the kernel cache cannot be written",
    ]
    assert file.read_text() == "mine"


def test_corrupt_entry_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ArtifactCache(tmp_path)
    cache.path(KEY).write_bytes(b"no zip file")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.warns(CacheWarning, match="discarding"):
            assert cache.load(KEY) is None


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("users") / name)
    assert ArtifactCache.default().folder == Path("users/kda_lib/kernels")
