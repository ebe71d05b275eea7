"""Shapes of the KDA decode projections for one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

#: Kimi-K3: width of a hidden state, attention heads of one KDA layer, width of one head.
HIDDEN = 7168
HEADS = 96
HEAD_DIM = 128

#: Rank of the low-rank gate projection: F_A gives 128 values, F_B takes them.
F_A_ROWS = 128

#: The packed weight is padded to a multiple of 16 rows, the row tile of ``mma.sync.m16n8k16``.
ROW_ALIGNMENT = 16

#: Kernels are built and tested for up to this many tokens in a decode step.
MAX_TOKENS = 16


@dataclass(frozen=True)
class KdaShapes:
    """Rows and slices of the packed weight ``[packed_rows, 7168]`` and of F_B ``[f_b_rows, 128]``, all BF16.

    The packed weight holds, in this order: QKVG (4 x heads x 128 rows), F_A (128), beta (one row a head), zero padding.
    """

    tp: int

    def __post_init__(self) -> None:
        if isinstance(self.tp, bool) or not isinstance(self.tp, int):
            raise TypeError(f"tp: expected an int, got {type(self.tp).__name__}; pass the tensor-parallel degree")
        if self.tp < 1 or HEADS % self.tp:
            raise ValueError(f"tp: expected a divisor of {HEADS}, got {self.tp}; use 4, 8 or 16")

    @property
    def heads(self) -> int:
        """Heads on this rank."""
        return HEADS // self.tp

    @property
    def qkvg_rows(self) -> int:
        return 4 * self.heads * HEAD_DIM

    @property
    def packed_rows(self) -> int:
        used = self.qkvg_rows + F_A_ROWS + self.heads
        return -(-used // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def fa_beta_rows(self) -> int:
        """Rows of the F_A/beta slice, padding included."""
        return self.packed_rows - self.qkvg_rows

    @property
    def qkvg_slice(self) -> slice:
        return slice(0, self.qkvg_rows)

    @property
    def fa_beta_slice(self) -> slice:
        """Rows of the packed weight that hold F_A, beta and the padding: a view, never a copy."""
        return slice(self.qkvg_rows, self.packed_rows)

    @property
    def f_b_rows(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def weight_bytes(self) -> int:
        """Bytes of both weights: what one layer must read from memory at least."""
        return 2 * (self.packed_rows * HIDDEN + self.f_b_rows * F_A_ROWS)


def check_tokens(m: int, limit: int = MAX_TOKENS) -> int:
    """Return ``m`` if it is a legal number of tokens, 1 to ``limit``.

    Raises:
        TypeError: ``m`` is not an int.
        ValueError: ``m`` is outside the range.
    """
    if isinstance(m, bool) or not isinstance(m, int):
        raise TypeError(f"M: expected an int, got {type(m).__name__}; pass the number of tokens")
    if not 1 <= m <= limit:
        raise ValueError(f"M: expected 1 to {limit} tokens, got {m}; larger batches belong to a plain GEMM")
    return m
