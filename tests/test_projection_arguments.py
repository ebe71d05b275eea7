"""Everything that KdaProjection is given is checked before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_flashinfer
import pytest
import torch
from fake_cuda import FakeCuda, Weights, fake_cuda, layer_weights, random

from kda_lib import Arch, KdaProjection
from kda_lib.shapes import HIDDEN
from kda_lib.strategies import Overlap

HOPPER = Arch.parse("h200")


@pytest.fixture
def weights() -> Weights:
    return layer_weights(16)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """An H200 without FlashInfer."""
    fake_flashinfer.pretend_version(monkeypatch, None)
    with fake_cuda(monkeypatch, HOPPER) as fake:
        yield fake


def project(weights: Weights, **options: Any) -> KdaProjection:
    return KdaProjection(*weights, tp=16, **options)


def launches(cuda: FakeCuda) -> list[str]:
    """The log since the last time, emptied."""
    lines, cuda.log[:] = list(cuda.log), []
    return lines


def shifted(rows: int, columns: int) -> torch.Tensor:
    """Contiguous, but 2 bytes after a multiple of 16."""
    return torch.zeros(rows * columns + 8, dtype=torch.bfloat16)[1 : rows * columns + 1].view(rows, columns)


def zeros(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "shape", "rows"), [("packed_weight", (3216, HIDDEN), True), ("f_b_weight", (768, 128), True),
                                ("hidden_states", (3, HIDDEN), False)],
)  # fmt: skip
@pytest.mark.parametrize("flaw", ["list", "dtype", "rows", "columns", "dims", "stride", "gaps", "alignment", "device"])
def test_tensors_are_checked(
    cuda: FakeCuda,
    weights: Weights,
    name: str,
    shape: tuple[int, int],
    rows: bool,
    flaw: str,
) -> None:
    n, k = shape
    bad, error, words = {
        "list": (lambda: [1.0], TypeError, "expected a torch.Tensor, got list"),
        "dtype": (lambda: zeros(n, k).half(), TypeError, r"expected torch.bfloat16, got torch.float16; convert"),
        "rows": (lambda: zeros(n + 16 if rows else 0, k), ValueError, f"expected shape .*{k}\\], got \\["),
        "columns": (lambda: zeros(n, k + 8), ValueError, f"expected shape .*{k}\\], got \\[{n}, {k + 8}\\]"),
        "dims": (lambda: zeros(n, k)[None], ValueError, r"expected shape .*got \[1, "),
        "stride": (lambda: zeros(k, n).T, ValueError, f"expected strides .*{k}, 1.*got"),
        "gaps": (lambda: zeros(n, k + 8)[:, :k], ValueError, f"strides .*got \\[{k + 8}, 1\\]; use .contiguous"),
        "alignment": (lambda: shifted(n, k), ValueError, "expected an address divisible by 16, got 0x"),
        "device": (lambda: zeros(n, k).to("meta"), ValueError, "device.* got meta; move it"),
    }[flaw]  # fmt: skip
    arguments: dict[str, Any] = {"packed_weight": weights[0], "f_b_weight": weights[1]}
    x = random(3, HIDDEN, 18)
    if name == "hidden_states":
        x = bad()  # type: ignore[operator]
    else:
        arguments[name] = bad()  # type: ignore[operator]
    with pytest.raises(error, match=f"^{name}: .*{words}"):  # type: ignore[call-overload]
        KdaProjection(**arguments, tp=16)(x)
    assert cuda.log == []


def test_no_cuda_device_at_all(weights: Weights) -> None:
    """Nothing played: CPU tensors are refused in words."""
    with pytest.raises(ValueError, match=r"packed_weight: expected a CUDA device, got cpu; move it with \.cuda\(\)"):
        project(weights)


def out_of(m: int = 3) -> list[Any]:
    return [zeros(m, 3072), zeros(m, 768), zeros(m, 6)]


def test_out_is_checked(cuda: FakeCuda, weights: Weights) -> None:
    x = random(3, HIDDEN, 19)
    proj = project(weights, strategy="overlap", qkvg="torch.mm")
    proj.warmup([3])
    launches(cuda)
    both = zeros(2, 3 * 768 + 3 * 3072).view(-1)
    overlapping = [both[: 3 * 3072].view(3, 3072), both[8 : 8 + 3 * 768].view(3, 768), zeros(3, 6)]
    inside_x = [zeros(3, 3072), x.view(-1)[: 3 * 768].view(3, 768), zeros(3, 6)]
    inside_weight = [weights[0].view(-1)[: 3 * 3072].view(3, 3072), zeros(3, 768), zeros(3, 6)]
    for out, error, words in (
        (zeros(3, 6), TypeError, r"out: expected \(qkvg, g1, beta\), got Tensor"),
        (out_of()[:2], TypeError, "out: expected .* got 2 items"),
        ([None, *out_of()[1:]], TypeError, r"out\[0\] \(qkvg\): expected a torch.Tensor, got NoneType"),
        (out_of(2), ValueError, r"out\[0\] \(qkvg\): expected shape \[3, 3072\], got \[2, 3072\]"),
        ([zeros(3, 3216)[:, :3072], *out_of()[1:]], ValueError, r"out\[0\] \(qkvg\): expected strides"),
        ([*out_of()[:2], zeros(6, 3).T], ValueError, r"out\[2\] \(beta\): expected a column stride of 1, got 3"),
        ([*out_of()[:2], zeros(1, 6).expand(3, 6)], ValueError, r"out\[2\] \(beta\): expected a row stride.* 6, got 0"),
        ([out_of()[0], shifted(3, 768), out_of()[2]], ValueError, r"out\[1\] \(g1\): expected an address"),
        (overlapping, ValueError, r"out\[0\]: expected memory of its own"),
        (inside_x, ValueError, r"out\[1\]: expected memory of its own"),
        (inside_weight, ValueError, r"out\[0\]: expected memory of its own"),
    ):
        with pytest.raises(error, match=words):
            proj(x, out=out)  # type: ignore[arg-type]
    assert launches(cuda) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 5}, ValueError, "tp: expected a divisor of 96"),
        (
            {"tp": 8},
            ValueError,
            r"packed_weight: expected shape \[6288, 7168\], got \[3216, 7168\]; check the tensor-par",
        ),
        ({"strategy": "stream!"}, ValueError, "strategy: expected one of auto, sequential, .*, got 'stream!'"),
        ({"strategy": None}, TypeError, "strategy: expected a name or a Strategy, got NoneType"),
        ({"qkvg": "cublas"}, ValueError, r"qkvg: expected one of skinny_gemv, torch\.mm, .* got 'cublas'"),
        ({"qkvg": 1}, TypeError, "qkvg: expected the name of a backend, got int"),
    ],
)
def test_options_are_checked(
    cuda: FakeCuda, weights: Weights, options: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        KdaProjection(*weights, **{"tp": 16, **options})
    assert cuda.log == []


def test_tokens_are_checked(cuda: FakeCuda, weights: Weights) -> None:
    proj = project(weights)
    for m, error in ((0, ValueError), (-1, ValueError), (True, TypeError), ("3", TypeError), (2.0, TypeError)):
        for call in (proj.plan, proj.explain, lambda m: proj.warmup([m])):
            with pytest.raises(error, match=r"^M: expected"):
                call(m)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fork: expected one of wide_first, side_first, got 'both'"):
        Overlap(fork="both")  # type: ignore[arg-type]
    assert cuda.log == []
