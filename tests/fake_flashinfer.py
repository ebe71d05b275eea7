"""A package that looks like the part of FlashInfer 0.7.4 used here, as far as calls and capabilities go."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import pytest

from kda_lib import backends
from kda_lib.backends import Backend, Installed

#: From the ``supported_compute_capability`` lines in flashinfer/gemm of the 0.7.4 wheel.
TINYGEMM = (90, 100, 103, 107, 110, 120, 121)
CUBLASLT = (80, 86, 87, 89, *TINYGEMM)
CUTE_DSL = (100, 103, 107)


def accepts(number: int) -> set[Backend]:
    """The backends that 0.7.4 says it has for a capability of major * 10 + minor."""
    listed = ((Backend.CUTE_DSL, CUTE_DSL), (Backend.CUBLASLT, CUBLASLT), (Backend.TINYGEMM, TINYGEMM),
              (Backend.TINYGEMM_PDL, TINYGEMM))  # fmt: skip
    return {backend for backend, numbers in listed if number in numbers}


FLASHINFER_0_7_4 = Installed(
    "0.7.4",
    frozenset((backend, divmod(number, 10)) for number in CUBLASLT for backend in accepts(number)),
)


def pretend_version(patch: pytest.MonkeyPatch, version: str | None) -> None:
    """Have FlashInfer installed with this version, or not (``None``), as far as the package metadata says."""
    true_version = importlib.metadata.version

    def answer(name: str) -> str:
        if name != backends.FLASHINFER:
            return true_version(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    patch.setattr(importlib.metadata, "version", answer)
    backends.detect_installed.cache_clear()


def install(patch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> ModuleType:
    """Put the module in place; its two functions append their arguments to ``calls`` and write 1 to out."""
    package, gemm = ModuleType("flashinfer"), ModuleType("flashinfer.gemm")

    def mm_bf16(a: Any, b: Any, *, out: Any, backend: str, pdl: bool = False) -> None:
        calls.append(("mm_bf16", backend, pdl, tuple(b.shape)))
        out.fill_(1)

    def tinygemm_bf16(input: Any, weight: Any, out: Any, bias: Any = None, use_pdl: bool = False) -> None:
        calls.append(("tinygemm_bf16", use_pdl, tuple(weight.shape)))
        out.fill_(1)

    known = {"cute-dsl": CUTE_DSL, "cublaslt": CUBLASLT}
    mm_bf16.is_backend_supported = lambda backend, cc=None: cc in known.get(backend, ())  # type: ignore[attr-defined]
    tinygemm_bf16.is_compute_capability_supported = lambda cc: cc in TINYGEMM  # type: ignore[attr-defined]
    gemm.mm_bf16, gemm.tinygemm_bf16, package.gemm = mm_bf16, tinygemm_bf16, gemm  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer", package)
    patch.setitem(sys.modules, "flashinfer.gemm", gemm)
    pretend_version(patch, "0.7.4")
    return gemm
