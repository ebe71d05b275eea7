"""Which GEMM computes QKVG: a pure function of (arch, shapes, M, what is installed, what was measured).

FlashInfer's part is its public API: ``flashinfer.gemm.mm_bf16`` (backends ``"cute-dsl"`` and ``"cublaslt"``) and
``flashinfer.gemm.tinygemm_bf16``. Which capabilities each accepts is asked of the installed FlashInfer, never guessed
from its version.

Scope: BF16 in and out, no bias. Not here: FlashInfer's own tactic tuning; its backends run with their heuristics.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from kda_lib.arch import KNOWN_CAPABILITIES, TARGETS, Arch, Capability
from kda_lib.errors import KdaError
from kda_lib.kernels.config import GEMV_TOKENS
from kda_lib.shapes import KdaShapes

if TYPE_CHECKING:
    import torch

    from kda_lib.autotune import TuningTable

FLASHINFER = "flashinfer-python"

#: Where the cute-dsl backend is preferred to all others, if the installed FlashInfer accepts it there.
CUTE_DSL_CAPABILITIES: frozenset[Capability] = frozenset({(10, 0), (10, 3), (10, 7)})

#: Most tokens that FlashInfer's cute-dsl backend takes (documented with ``mm_bf16``, FlashInfer 0.7.4).
CUTE_DSL_TOKENS = 32


#: Up to so many tokens our GEMV is taken unmeasured: it reads the weights at memory speed, notebook 05 measures it.
RULE_TOKENS = 2


class BrokenBackend(KdaError):
    """A backend is installed but does not work. It is never treated as absent."""


class Backend(StrEnum):
    """A way to compute QKVG.

    - ``SKINNY``: :mod:`kda_lib.kernels.skinny_n` as :func:`~kda_lib.kernels.config.qkvg_gemv_config` has it: a rule up
      to :data:`RULE_TOKENS` tokens, a measured candidate up to ``GEMV_TOKENS``. How K is divided depends on M, so it is
      not batch-invariant.
    - ``TORCH``: ``torch.mm``.
    - ``CUTE_DSL``, ``CUBLASLT``: FlashInfer ``mm_bf16`` with that backend, without PDL.
    - ``TINYGEMM``, ``TINYGEMM_PDL``: FlashInfer ``tinygemm_bf16``. With programmatic dependent launch it reads the
      weight before it waits for the kernel in front of it, which therefore must not write the weight.
    """

    SKINNY = "skinny_gemv"
    TORCH = "torch.mm"
    CUTE_DSL = "flashinfer-cute-dsl"
    CUBLASLT = "flashinfer-cublaslt"
    TINYGEMM = "flashinfer-tinygemm"
    TINYGEMM_PDL = "flashinfer-tinygemm-pdl"


@dataclass(frozen=True)
class Installed:
    """What is there to choose from.

    flashinfer: its version, ``None`` where it is not installed. accepts: the pairs of backend and capability that it
    says it supports.
    """

    flashinfer: str | None = None
    accepts: frozenset[tuple[Backend, Capability]] = frozenset()


@dataclass(frozen=True)
class Choice:
    backend: Backend
    reason: str


@cache
def detect_installed() -> Installed:
    """Import FlashInfer, if it is installed, and ask what it accepts; done once a process.

    Raises:
        BrokenBackend: FlashInfer is installed, but does not import or lacks one of the two functions used here.
    """
    try:
        version = importlib.metadata.version(FLASHINFER)
    except importlib.metadata.PackageNotFoundError:
        return Installed()
    try:
        gemm = importlib.import_module("flashinfer.gemm")
        mm_bf16: Callable[[str, int], bool] = gemm.mm_bf16.is_backend_supported
        tinygemm: Callable[[int], bool] = gemm.tinygemm_bf16.is_compute_capability_supported
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise BrokenBackend(
            f"FlashInfer {version} is installed but flashinfer.gemm does not work: {error}; repair or uninstall it, or "
            "use strategy='sequential', which does not need it"
        ) from error
    accepts = set()
    for capability in KNOWN_CAPABILITIES:
        number = capability[0] * 10 + capability[1]
        if mm_bf16("cute-dsl", number):
            accepts.add((Backend.CUTE_DSL, capability))
        if mm_bf16("cublaslt", number):
            accepts.add((Backend.CUBLASLT, capability))
        if tinygemm(number):
            accepts |= {(Backend.TINYGEMM, capability), (Backend.TINYGEMM_PDL, capability)}
    return Installed(version, frozenset(accepts))


def has_kernels(arch: Arch) -> bool:
    """Whether this project's own kernels are built and tested for this target."""
    return arch.target in TARGETS


def runnable(arch: Arch, m: int, installed: Installed) -> tuple[Backend, ...]:
    """Every backend that can compute QKVG for m tokens here. All take the rows of TP4, TP8 and TP16."""

    def runs(backend: Backend) -> bool:
        if backend is Backend.TORCH:
            return True
        if backend is Backend.SKINNY:
            return has_kernels(arch) and m <= GEMV_TOKENS
        if backend is Backend.CUTE_DSL and (arch.capability not in CUTE_DSL_CAPABILITIES or m > CUTE_DSL_TOKENS):
            return False
        return (backend, arch.capability) in installed.accepts

    return tuple(backend for backend in Backend if runs(backend))


def candidates(arch: Arch, m: int, installed: Installed) -> tuple[Backend, ...]:
    """The backends that measurement decides between: one alone where a rule decides."""
    found = runnable(arch, m, installed)
    if Backend.SKINNY in found and m <= RULE_TOKENS:
        return (Backend.SKINNY,)
    if Backend.CUTE_DSL in found:
        return (Backend.CUTE_DSL,)
    return found


def select_backend(arch: Arch, shapes: KdaShapes, m: int, installed: Installed, table: TuningTable) -> Choice:
    """The backend for QKVG and the reason in words.

    Our skinny GEMV up to :data:`RULE_TOKENS`; FlashInfer's cute-dsl on :data:`CUTE_DSL_CAPABILITIES`, if accepted
    there; elsewhere the fastest that ``table`` has for exactly this M, ``torch.mm`` where it has nothing.
    """
    options = candidates(arch, m, installed)
    if options == (Backend.SKINNY,):
        return Choice(Backend.SKINNY, f"this library's skinny GEMV serves up to {RULE_TOKENS} tokens")
    flashinfer = f"FlashInfer {installed.flashinfer}"
    if options == (Backend.CUTE_DSL,):
        return Choice(Backend.CUTE_DSL, f"{flashinfer} accepts its cute-dsl backend on {arch}")
    if options == (Backend.TORCH,):
        if installed.flashinfer is None:
            return Choice(Backend.TORCH, "FlashInfer is not installed")
        return Choice(Backend.TORCH, f"{flashinfer} accepts none of its backends used here on {arch} for M = {m}")
    measured = {backend: table.qkvg_us[m][backend] for backend in options if backend in table.qkvg_us.get(m, {})}
    if not measured:
        unmeasured = f"none of {', '.join(options)} has been measured on this device for M = {m}, TP{shapes.tp}"
        return Choice(Backend.TORCH, unmeasured)
    ranked = sorted(measured, key=lambda backend: measured[backend])
    times = ", ".join(f"{backend} {measured[backend]:.1f} us" for backend in ranked)
    return Choice(ranked[0], f"fastest measured for M = {m}: {times}")


def run_gemm(backend: Backend, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``out[M, N] = x[M, K] @ weight[N, K].T`` on the current stream, all BF16 and contiguous.

    Raises:
        ValueError: ``Backend.SKINNY``, which is compiled and launched by the runtime.
    """
    import torch

    if backend is Backend.TORCH:
        torch.mm(x, weight.T, out=out)
        return
    if backend is Backend.SKINNY:
        raise ValueError("backend: expected a GEMM of a library, got skinny_gemv; launch it as a compiled kernel")
    from flashinfer import gemm

    if backend in (Backend.TINYGEMM, Backend.TINYGEMM_PDL):
        gemm.tinygemm_bf16(x, weight, out, use_pdl=backend is Backend.TINYGEMM_PDL)
    else:
        gemm.mm_bf16(x, weight.T, out=out, backend=backend.removeprefix("flashinfer-"))


@contextmanager
def naming(backend: Backend) -> Iterator[None]:
    """Run a backend for the first time; where FlashInfer fails to build or to launch, say which backend and what to do.

    Raises:
        BrokenBackend: in place of FlashInfer's error, which is attached. Running out of device memory is not one.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        if backend in (Backend.TORCH, Backend.SKINNY):
            raise
        raise BrokenBackend(
            f"{backend} is installed and says that it supports this device, but failed: {error}; repair or uninstall "
            "FlashInfer, or choose another backend with qkvg='torch.mm'"
        ) from error
