"""Peers without a device: what they compute, on the CPU, and when they are absent."""

import importlib.util
import sys
import types

import pytest
import torch

from kda_lib.arch import Arch
from kda_lib.lab import peers
from kda_lib.lab.measure import Variant
from kda_lib.lab.workload import Weights, make_inputs, make_weights
from kda_lib.shapes import F_A_ROWS, KdaShapes

SHAPES = KdaShapes(16)
HOPPER, AMPERE = Arch.parse("sm_90a"), Arch.parse("sm_80")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights(SHAPES, 2, "cpu", seed=0)


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch, log: list[str], error: Exception | None = None) -> None:
    """A FlashInfer with the signatures of 0.7.4 that writes down its calls."""

    class Autotune:
        def __enter__(self) -> None:
            log.append("tune")

        def __exit__(self, *details: object) -> None:
            log.append("tuned")

    def tinygemm_bf16(input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias=None, use_pdl=False) -> None:
        if error:
            raise error
        log.append("tinygemm_pdl" if use_pdl else "tinygemm")
        torch.mm(input, weight.t(), out=out)

    def mm_bf16(a, b, bias=None, pdl=False, out=None, out_dtype=torch.bfloat16, backend="cudnn"):
        if error:
            raise error
        log.append(backend)
        return torch.mm(a, b, out=out)

    module, gemm = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.gemm")
    module.autotune, module.mm_bf16, gemm.tinygemm_bf16 = Autotune, mm_bf16, tinygemm_bf16  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: module if name == "flashinfer" else found(name))


def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flashinfer" else found(name))


def expected(weights: Weights, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed output and g1 in fp64, f_a rounded to BF16 in between."""
    packed = x.double() @ weights.packed[layer].double().t()
    f_a = packed[:, SHAPES.qkvg_rows : SHAPES.qkvg_rows + F_A_ROWS].to(torch.bfloat16)
    return packed, f_a.double() @ weights.f_b[layer].double().t()


def check(variant: Variant, weights: Weights, layer: int, x: torch.Tensor) -> None:
    for result in variant.results:
        result.fill_(float("nan"))
    variant.enqueue(layer, None)  # type: ignore[arg-type]
    packed, g1 = expected(weights, layer, x)
    wanted = torch.cat([packed, g1], 1)[:, : sum(result.shape[1] for result in variant.results)]
    # Two BF16 roundings, of numbers up to about 4, and fp32 sums.
    torch.testing.assert_close(torch.cat(variant.results, 1).double(), wanted, rtol=2**-7, atol=2**-7)


def test_peers_compute_the_projections(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    fake_flashinfer(monkeypatch, log)
    x = make_inputs(3, "cpu", seed=1)
    variants, missing = peers.peers(weights, x, HOPPER)
    assert missing == {}
    assert log == ["tune", "cublaslt", "tuned"]
    names = [variant.name for variant in variants]
    assert names == [
        "torch_packed",
        "qkvg_torch_mm", "qkvg_tinygemm", "qkvg_tinygemm_pdl", "qkvg_cublaslt",
        "torch_split", "tinygemm_split", "cublaslt_split",
    ]  # fmt: skip
    for variant in variants:
        log.clear()
        for layer in range(weights.layers):
            check(variant, weights, layer, x)
        theirs = variant.name.removeprefix("qkvg_").removesuffix("_split")
        assert log == [theirs] * 2 * (not theirs.startswith("torch"))
        assert variant.pdl is variant.name.endswith("_pdl")
        assert (variant.m, variant.tp) == (3, 16)
        alone = variant.name.startswith("qkvg_")
        assert variant.bytes == (2 * 7168 * SHAPES.qkvg_rows if alone else SHAPES.weight_bytes)


def test_missing_flashinfer_is_said(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    without_flashinfer(monkeypatch)
    variants, missing = peers.peers(weights, make_inputs(1, "cpu", seed=1), HOPPER)
    assert missing == dict.fromkeys(("tinygemm", "tinygemm_pdl", "cublaslt"), "flashinfer is not installed")
    assert [variant.name for variant in variants] == ["torch_packed", "qkvg_torch_mm", "torch_split"]


def test_what_the_target_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer(monkeypatch, [])
    assert peers.absent(AMPERE) == dict.fromkeys(
        ("tinygemm", "tinygemm_pdl"), "flashinfer's tinygemm needs sm_90 or higher, the target is sm_80"
    )
    assert peers.absent(HOPPER) == {}


def test_an_installed_library_that_fails_raises(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer(monkeypatch, [], RuntimeError("no nvcc"))
    with pytest.raises(RuntimeError, match="no nvcc"):
        peers.peers(weights, make_inputs(1, "cpu", seed=1), HOPPER)


def test_weights_differ_by_layer_and_follow_from_the_seed(weights: Weights) -> None:
    again = make_weights(SHAPES, 2, "cpu", seed=0)
    assert all(torch.equal(a, b) for a, b in zip(weights.packed + weights.f_b, again.packed + again.f_b, strict=True))
    assert not torch.equal(weights.packed[0], weights.packed[1])
    assert weights.packed[0].shape == (SHAPES.packed_rows, 7168)
    assert weights.f_b[1].shape == (SHAPES.f_b_rows, 128)
    assert weights.packed[0].dtype == weights.f_b[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected 1 to 16 tokens, got 0"):
        make_inputs(0, "cpu", seed=0)
