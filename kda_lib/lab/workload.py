"""Weights and inputs to measure with: several layers with weights of their own, as a decoding model has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS, KdaShapes, check_tokens

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """packed: one ``[packed_rows, 7168]`` BF16 tensor a layer. f_b: one ``[f_b_rows, 128]`` BF16 tensor a layer."""

    shapes: KdaShapes
    packed: tuple[torch.Tensor, ...]
    f_b: tuple[torch.Tensor, ...]

    @property
    def layers(self) -> int:
        return len(self.packed)

    @property
    def device(self) -> torch.device:
        return self.packed[0].device


def make_weights(shapes: KdaShapes, layers: int, device: torch.device | str, seed: int) -> Weights:
    """Normally distributed weights, scaled by 1 / sqrt(K) so that outputs are of the inputs' size."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, k: int) -> torch.Tensor:
        values = torch.randn(rows, k, generator=generator, device=device, dtype=torch.float32)
        return (values / math.sqrt(k)).to(torch.bfloat16)

    return Weights(
        shapes,
        tuple(matrix(shapes.packed_rows, HIDDEN) for _ in range(layers)),
        tuple(matrix(shapes.f_b_rows, F_A_ROWS) for _ in range(layers)),
    )


def make_inputs(m: int, device: torch.device | str, seed: int, limit: int = MAX_TOKENS) -> torch.Tensor:
    """Normally distributed hidden states ``[m, 7168]``, BF16.

    Raises:
        TypeError, ValueError: m is no legal number of tokens, 1 to ``limit``.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(check_tokens(m, limit), HIDDEN, generator=generator, device=device, dtype=torch.bfloat16)
