"""What a user would run instead: cuBLAS through torch, and FlashInfer's public GEMMs, as variants.

``qkvg_<gemm>`` is QKVG alone. ``torch_packed`` is one GEMM over the packed weight, then F_B. ``<gemm>_split`` are three
GEMMs, QKVG by the named one and F_A/beta and F_B by torch. A GEMM of a library that is not installed, or that has no
kernel for the target, is absent, with the reason; one that is there and fails raises.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kda_lib.arch import Arch
from kda_lib.kernels.config import BF16_BYTES
from kda_lib.lab.measure import Variant
from kda_lib.lab.workload import Weights
from kda_lib.shapes import F_A_ROWS, HIDDEN

if TYPE_CHECKING:
    import torch

#: ``gemm(x [m, k], w [n, k], out [m, n])``: out = x @ w.T
Gemm = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], None]


def torch_mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """``torch.mm``."""
    import torch

    torch.mm(x, w.t(), out=out)


def tinygemm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """``flashinfer.gemm.tinygemm_bf16``."""
    from flashinfer.gemm import tinygemm_bf16

    tinygemm_bf16(x, w, out)


def tinygemm_pdl(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """``flashinfer.gemm.tinygemm_bf16`` with programmatic dependent launch."""
    from flashinfer.gemm import tinygemm_bf16

    tinygemm_bf16(x, w, out, use_pdl=True)


def cublaslt(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """``flashinfer.mm_bf16``, backend cuBLASLt."""
    import flashinfer

    flashinfer.mm_bf16(x, w.t(), out=out, backend="cublaslt")


#: Names of the GEMMs as row variants have them. FlashInfer 0.7.4 asks that everything in front of tinygemm with PDL on
#: the stream uses PDL too, so that one is measured alone only.
GEMMS: Mapping[str, Gemm] = {
    "torch_mm": torch_mm,
    "tinygemm": tinygemm,
    "tinygemm_pdl": tinygemm_pdl,
    "cublaslt": cublaslt,
}


def absent(arch: Arch) -> dict[str, str]:
    """Why a GEMM of :data:`GEMMS` cannot be measured on this target; the others can."""
    reasons = {}
    installed = importlib.util.find_spec("flashinfer") is not None
    for name in GEMMS:
        if name != "torch_mm" and not installed:
            reasons[name] = "flashinfer is not installed"
        elif name.startswith("tinygemm") and arch.capability < (9, 0):
            reasons[name] = f"flashinfer's tinygemm needs sm_90 or higher, the target is {arch}"
    return reasons


def peers(weights: Weights, x: torch.Tensor, arch: Arch) -> tuple[list[Variant], dict[str, str]]:
    """The variants that can be measured for these inputs, warmed up, and for the absent ones the reason by GEMM.

    Args:
        x: hidden states ``[m, 7168]``, BF16, on the device of the weights.

    Raises:
        Exception: whatever an installed library raises when it fails.
    """
    missing = absent(arch)
    gemms = {name: gemm for name, gemm in GEMMS.items() if name not in missing}
    if "cublaslt" in gemms:
        tune_cublaslt(weights, x)
    variants = [torch_packed(weights, x)]
    variants += [qkvg_alone(name, gemm, weights, x) for name, gemm in gemms.items()]
    variants += [split(name, gemm, weights, x) for name, gemm in gemms.items() if name != "tinygemm_pdl"]
    return variants, missing


def tune_cublaslt(weights: Weights, x: torch.Tensor) -> None:
    """Let FlashInfer's autotuner choose among cuBLASLt's algorithms, for the bucket of its own that M falls into."""
    import flashinfer

    with flashinfer.autotune():
        cublaslt(x, weights.packed[0][weights.shapes.qkvg_slice], _output(x, weights.shapes.qkvg_rows))


def torch_packed(weights: Weights, x: torch.Tensor) -> Variant:
    """``torch.mm`` over the packed weight, then ``torch.mm`` for F_B, which reads f_a where the first left it.

    Results: packed output ``[m, packed_rows]``, g1 ``[m, f_b_rows]``.
    """
    s = weights.shapes
    packed, g1 = _output(x, s.packed_rows), _output(x, s.f_b_rows)
    f_a = packed[:, s.qkvg_rows : s.qkvg_rows + F_A_ROWS]

    def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
        torch_mm(x, weights.packed[layer], packed)
        torch_mm(f_a, weights.f_b[layer], g1)

    return _variant("torch_packed", enqueue, s.weight_bytes, weights, x, (packed, g1))


def split(name: str, gemm: Gemm, weights: Weights, x: torch.Tensor) -> Variant:
    """QKVG by ``gemm``, F_A/beta and F_B by ``torch.mm``.

    Results: qkvg ``[m, qkvg_rows]``, F_A/beta ``[m, fa_beta_rows]``, g1 ``[m, f_b_rows]``.
    """
    s = weights.shapes
    qkvg, fa_beta, g1 = (_output(x, rows) for rows in (s.qkvg_rows, s.fa_beta_rows, s.f_b_rows))
    f_a = fa_beta[:, :F_A_ROWS]

    def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
        packed = weights.packed[layer]
        gemm(x, packed[s.qkvg_slice], qkvg)
        torch_mm(x, packed[s.fa_beta_slice], fa_beta)
        torch_mm(f_a, weights.f_b[layer], g1)

    label = "torch" if name == "torch_mm" else name
    return _variant(f"{label}_split", enqueue, s.weight_bytes, weights, x, (qkvg, fa_beta, g1))


def qkvg_alone(name: str, gemm: Gemm, weights: Weights, x: torch.Tensor) -> Variant:
    """QKVG by ``gemm``. Results: qkvg ``[m, qkvg_rows]``."""
    s = weights.shapes
    qkvg = _output(x, s.qkvg_rows)

    def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
        gemm(x, weights.packed[layer][s.qkvg_slice], qkvg)

    size = BF16_BYTES * s.qkvg_rows * HIDDEN
    return _variant(f"qkvg_{name}", enqueue, size, weights, x, (qkvg,), pdl=name.endswith("_pdl"))


def _output(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty(len(x), rows)


def _variant(
    name: str,
    enqueue: Callable[[int, Any], None],
    size: int,
    weights: Weights,
    x: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    pdl: bool = False,
) -> Variant:
    return Variant(name, enqueue, size, tp=weights.shapes.tp, m=len(x), pdl=pdl, results=results)
