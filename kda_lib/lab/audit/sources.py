"""PTX to audit: a file, or one of this library's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kda_lib.arch import TARGETS, Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import AnyConfig, compile_kernel
from kda_lib.kernels.config import skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm, supports
from kda_lib.kernels.lab_config import StampConfig
from kda_lib.kernels.stream_config import stream_config
from kda_lib.lab.audit.reader import Module, PtxReadError, read
from kda_lib.shapes import KdaShapes

SHAPES = KdaShapes(tp=8)

#: SMs that the stream and read kernels are launched on: of an H200. No instruction depends on it.
SMS = 132


class SourceError(ValueError):
    """There is no PTX to audit; the message says what was expected."""


@dataclass(frozen=True)
class Source:
    """A PTX text and how a report calls it."""

    name: str
    ptx: str

    def read(self) -> Module:
        """The text, read.

        Raises:
            SourceError: it is no PTX, or broken.
        """
        try:
            return read(self.ptx)
        except PtxReadError as error:
            raise SourceError(f"{self.name}: {error}") from error


def read_file(path: Path) -> Source:
    """The PTX text in a file.

    Raises:
        SourceError: there is no such file, or it holds no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}; name a file or one of {_names()}") from error
    if data.startswith((b"\x7fELF", b"\x50\xed\x55\xba")):
        raise SourceError(f"{path}: expected PTX text, got a binary; extract its PTX first: cuobjdump -xptx all FILE")
    try:
        # cuobjdump leaves the NUL that ends the text in its fatbin.
        text = data.rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: expected PTX text, got bytes that are none (at {error.start})") from error
    if "\0" in text or not text.strip():
        raise SourceError(f"{path}: expected PTX text, got {'a binary' if text.strip() else 'nothing'}")
    return Source(path.name, text)


def kernel_source(
    kernel: str, target: str | Arch, *, form: FmaForm | None = None, tokens: int = 8, compiled_for: str | None = None
) -> Source:
    """The PTX of a kernel of this library, TP8 shapes, from the compile cache or compiled now.

    Args:
        target: what the audit asks about.
        form: of the FMA, where the kernel has one; default: what the kernel uses on the target it is compiled for.
        tokens: M, where the kernel has it.
        compiled_for: default: ``target``, or the lowest target that has the kernel where ``target`` lacks it.

    Raises:
        SourceError: no such kernel, or the configuration is not legal.
        CompileError: it does not compile for ``compiled_for``.
    """
    if kernel not in CONFIGS:
        raise SourceError(f"kernel: expected one of {_names()} or a PTX file, got {kernel!r}")
    wanted = Arch.parse(target)
    candidates = [Arch.parse(compiled_for)] if compiled_for else [wanted, *map(Arch.parse, TARGETS)]
    refusal: ValueError | None = None
    for arch in candidates:
        if form is not None and not supports(arch, form):
            continue
        try:
            config = kernel_config(kernel, arch, form, tokens)
        except ValueError as error:
            refusal = refusal or error
            continue
        artifact = compile_kernel(config, arch, cache=ArtifactCache.default())
        return Source(f"{kernel} compiled for {arch}", artifact.ptx)
    raise SourceError(f"{kernel}: {refusal or f'{candidates[0]} has no {form}'}") from refusal


def kernel_config(kernel: str, arch: Arch, form: FmaForm | None = None, tokens: int = 8) -> AnyConfig:
    """The configuration of a kernel for a target.

    Raises:
        KeyError: the kernel is none of :data:`CONFIGS`.
        ValueError: the target lacks what the kernel needs, or the number of tokens is not legal.
    """
    return CONFIGS[kernel](arch, form, tokens)


def kernel_modules() -> Iterator[Module]:
    """Every kernel for every target, in every form of the FMA, for few and many tokens, read."""
    for kernel, arch in product(CONFIGS, map(Arch.parse, TARGETS)):
        configs = []
        for form in FmaForm:
            if supports(arch, form):
                with suppress(ValueError):
                    configs += [kernel_config(kernel, arch, form, tokens) for tokens in (1, 7, 16)]
        for config in dict.fromkeys(configs):
            yield read(compile_kernel(config, arch, cache=ArtifactCache.default()).ptx)


def _names() -> str:
    return ", ".join(CONFIGS)


def _read_loads(arch: Arch, form: FmaForm | None, tokens: int) -> AnyConfig:
    from kda_lib.lab.floors import read_loads_config

    return read_loads_config(arch, SHAPES, SMS, pdl=arch.has_pdl)


def _read_bulk(arch: Arch, form: FmaForm | None, tokens: int) -> AnyConfig:
    from kda_lib.lab.floors import read_bulk_config

    return read_bulk_config(arch, SHAPES, SMS, pdl=arch.has_pdl)


#: Kernel -> its configuration for a target, a form of the FMA and a number of tokens; what a kernel lacks is ignored.
CONFIGS: Mapping[str, Callable[[Arch, FmaForm | None, int], AnyConfig]] = {
    "skinny_n": lambda arch, form, tokens: skinny_n_config(arch, tokens, SHAPES, form),
    "skinny_k": lambda arch, form, tokens: skinny_k_config(arch, tokens, SHAPES, form),
    "stream": lambda arch, form, tokens: stream_config(arch, SHAPES, SMS, pdl=arch.has_pdl),
    "read_loads": _read_loads,
    "read_bulk": _read_bulk,
    "stamp": lambda arch, form, tokens: StampConfig(),
}
