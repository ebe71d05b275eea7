"""Compile a kernel for a named target, with or without a GPU, through an on-disk cache.

The target is an argument and stays on the artifact; nothing is read from the environment. Several targets may be
compiled in one process and from several threads. A compile that could bring its process down is run by
:func:`compile_isolated`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic

from typing_extensions import TypeVar

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.diagnosis import compiler_errors, explain_failure, gpu_arch, read_dump, trace_ptx
from kda_lib.errors import CompilerCrashed
from kda_lib.kernels.config import Launch, SkinnyKConfig, SkinnyNConfig
from kda_lib.kernels.lab_config import ReadBulkConfig, ReadLoadsConfig, StampConfig
from kda_lib.kernels.stream_config import StreamConfig

#: The GEMMs, and all kernels.
KernelConfig = SkinnyNConfig | SkinnyKConfig
AnyConfig = KernelConfig | StreamConfig | ReadLoadsConfig | ReadBulkConfig | StampConfig
C = TypeVar("C", bound=AnyConfig, default=KernelConfig)

#: Kernel name -> configuration class and where the device code is.
KERNELS: Mapping[str, tuple[type, str, str]] = {
    "skinny_n": (SkinnyNConfig, "kda_lib.kernels.skinny_n", "SkinnyN"),
    "skinny_k": (SkinnyKConfig, "kda_lib.kernels.skinny_k", "SkinnyK"),
    "stream": (StreamConfig, "kda_lib.kernels.stream", "Stream"),
    "read_loads": (ReadLoadsConfig, "kda_lib.kernels.read_floor", "ReadLoads"),
    "read_bulk": (ReadBulkConfig, "kda_lib.kernels.read_floor", "ReadBulk"),
    "stamp": (StampConfig, "kda_lib.kernels.stamp", "Stamp"),
}

#: Tracing mutates state that all compiles of a process share, so one runs at a time.
_compiler = threading.Lock()


@dataclass(frozen=True)
class Artifact(Generic[C]):
    """A compiled kernel.

    entry: name of the kernel inside ``ptx`` and ``cubin``. seconds: what the compile took when it was made.
    cached: whether this one came from the cache.
    """

    kernel: str
    config: C
    target: str
    entry: str
    ptx: str
    cubin: bytes
    seconds: float
    cached: bool

    @property
    def launch(self) -> Launch:
        return self.config.launch

    @property
    def cubin_sha256(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()


def kernel_name(config: AnyConfig) -> str:
    """The name of the kernel that this configuration is for.

    Raises:
        TypeError: not a configuration of a known kernel.
    """
    for name, (config_class, _, _) in KERNELS.items():
        if type(config) is config_class:
            return name
    expected = ", ".join(c.__name__ for c, _, _ in KERNELS.values())
    raise TypeError(f"config: expected one of {expected}, got {type(config).__name__}; see kda_lib.kernels.config")


@cache
def dsl_distributions() -> tuple[tuple[str, str], ...]:
    """Name and version of every installed nvidia-cutlass-dsl distribution, sorted."""
    found = {
        (str(d.metadata["Name"]).lower(), d.version)
        for d in importlib.metadata.distributions()
        if str(d.metadata["Name"]).lower().startswith("nvidia-cutlass-dsl")
    }
    return tuple(sorted(found))


@cache
def source_sha256() -> str:
    """Hash of the code that decides what is compiled: the device code and this module."""
    digest = hashlib.sha256()
    for path in [*sorted((Path(__file__).parent / "kernels").glob("*.py")), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_key(config: AnyConfig, arch: Arch) -> dict[str, Any]:
    """Everything that the compiled code depends on, as strict JSON."""
    return {
        "kernel": kernel_name(config),
        "config": asdict(config),
        "target": arch.target,
        "dsl": [list(d) for d in dsl_distributions()],
        "source_sha256": source_sha256(),
    }


def compile_kernel(config: C, target: str | Arch, *, cache: ArtifactCache | None = None) -> Artifact[C]:
    """Compile one kernel for one target.

    Args:
        config: a configuration from :mod:`kda_lib.kernels.config`; it is validated for the target first.
        target: such as ``"sm_90a"``, ``"h100"`` or an :class:`Arch`.
        cache: where to look first and to keep the result; ``None`` compiles anew.

    Raises:
        TypeError, ValueError: the configuration or target is not legal; nothing was compiled.
        UnsupportedInstruction: the assembler rejected an instruction for this target.
        UnknownTarget: the installed compiler does not know the target.
        CompileError: it failed in another way; the compiler's log is attached.
    """
    name = kernel_name(config)
    arch = Arch.parse(target)
    config.validate(arch)
    key = cache_key(config, arch)
    if cache is not None and (entry := cache.load(key)) is not None:
        return Artifact(name, config, arch.target, entry.name, entry.ptx, entry.cubin, entry.seconds, cached=True)
    ptx, cubin, seconds = _compile_now(name, config, arch)
    artifact = Artifact(name, config, arch.target, _entry_name(ptx), ptx, cubin, seconds, cached=False)
    if cache is not None:
        cache.store(key, name=artifact.entry, ptx=ptx, cubin=cubin, seconds=artifact.seconds)
    return artifact


def compile_isolated(
    config: C, target: str | Arch, *, timeout: float = 120.0, cache: ArtifactCache | None = None
) -> Artifact[C]:
    """As :func:`compile_kernel`, in a process of its own, which the compiler may crash or hang.

    Args:
        timeout: seconds after which the process is ended.

    Raises:
        CompilerCrashed: the process died or ran past ``timeout``.
    """
    name, arch = kernel_name(config), Arch.parse(target)
    config.validate(arch)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kda_lib.compile_worker"],
            input=pickle.dumps((config, arch, cache)),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompilerCrashed(
            f"the compiler was still busy with {name} for {arch} after {timeout:g} s and was ended", target=arch.target
        ) from error
    # Some ways to die give exit code 0, but none gives a result.
    if done.returncode or not done.stdout:
        raise CompilerCrashed(
            f"the compiler's process died on {name} for {arch} (exit code {done.returncode})",
            target=arch.target,
            log=done.stderr.decode(errors="replace"),
        )
    # Written by the worker just above, not by anybody else.
    outcome: Artifact[C] | Exception = pickle.loads(done.stdout)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _compile_now(name: str, config: AnyConfig, arch: Arch) -> tuple[str, bytes, float]:
    """PTX, cubin and seconds (loading the DSL not counted), or the exception that explains the failure."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    _, module, class_name = KERNELS[name]
    kernel = getattr(importlib.import_module(module), class_name)(config)
    arguments = kernel.trace_arguments()
    with _compiler, _environment_ignored(), tempfile.TemporaryDirectory(prefix="kda_lib-") as dump:
        options = (gpu_arch(arch), cute.KeepPTX(), cute.KeepCUBIN(), DumpDir(dump))
        started = time.perf_counter()
        try:
            cute.compile[options](kernel, *arguments)
        except compiler_errors() as error:
            raise explain_failure(error, arch, read_dump(dump), partial(trace_ptx, kernel, arguments)) from error
        # Not compiled.artifacts: for sm_110a the DSL looks for files of that name, but its CUDA 12 libraries know
        # the chip as sm_101a and name the files so; the DSL then gives the missing file's path for its content.
        (ptx_file,), (cubin_file,) = Path(dump).glob("*.ptx"), Path(dump).glob("*.cubin")
        return ptx_file.read_text(), cubin_file.read_bytes(), time.perf_counter() - started


@contextmanager
def _environment_ignored() -> Iterator[None]:
    """Keep the DSL from letting its environment variables (CUTE_DSL_*) overrule what it is asked for."""
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    kept = dsl.envar
    dsl.envar = type(kept)("KDA_LIB_NO_SUCH_PREFIX")
    try:
        yield
    finally:
        dsl.envar = kept


def _entry_name(ptx: str) -> str:
    match = re.search(r"\.visible\s+\.entry\s+([\w$]+)", ptx)
    if match is None:
        raise ValueError("the compiled PTX has no entry point; this is a fault of kda_lib or of the DSL")
    return match[1]
