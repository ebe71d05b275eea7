"""Compare kernels and strategies with what they should give: the host model bit for bit, fp64 within rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kda_lib import reference as ref
from kda_lib.arch import Arch
from kda_lib.compile import KernelConfig
from kda_lib.kernels.config import (
    GEMV_TOKENS,
    VECTOR,
    WARP,
    SkinnyNConfig,
    qkvg_gemv_config,
    skinny_k_config,
    skinny_n_config,
)
from kda_lib.reference import Bits, Float64s
from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS, KdaShapes

if TYPE_CHECKING:
    import torch

    from kda_lib.projection import KdaProjection

#: BF16 numbers have 8 significant bits (1 + 7 stored).
STORED_BITS = 7
#: Largest error that one rounding to BF16 makes, relative to the exact value: half an ulp at the low end of a binade.
HALF_ULP = 2.0 ** -(STORED_BITS + 1)
#: Unit roundoff of FP32.
FP32_UNIT = 2.0**-24
#: From this magnitude on an output must be within one ulp of the rounded fp64 result, however FP32 sums are made: a
#: sum of 7168 products near 1 on tensor cores, which cut each partial sum to about 23 bits, loses 16 times less.
ONE_ULP_FROM = 2.0**-9
#: Rows of QKVG that the host model computes; the weight of the kernel repeats them.
GEMV_MODEL_ROWS = 96

# --- inputs -----------------------------------------------------------------------------------------------------------


def random_bits(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Bits:
    """BF16 bit patterns of normally distributed values."""
    return ref.f32_to_bf16((rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32))


def special_bits(rng: np.random.Generator, *shape: int, share: float) -> Bits:
    """Normally distributed values, a ``share`` of them replaced by :data:`kda_lib.reference.BF16_SPECIALS`."""
    return np.where(rng.random(shape) < share, rng.choice(ref.BF16_SPECIALS, shape), random_bits(rng, *shape))


def input_pairs(rng: np.random.Generator, m: int, n: int, k: int) -> dict[str, tuple[Bits, Bits]]:
    """x [m, k] and w [n, k] by kind: sums that cancel show the order of additions, specials what becomes of them."""
    cancelling, w = ref.cancelling_inputs(rng, m, n, k)
    return {
        "plain": (random_bits(rng, m, k), random_bits(rng, n, k, scale=k**-0.5)),
        "cancelling": (cancelling, w),
        "specials in x": (special_bits(rng, m, k, share=1e-3), w),
        "specials in both": (special_bits(rng, m, k, share=1e-4), special_bits(rng, n, k, share=1e-5)),
    }


# --- errors against fp64 ----------------------------------------------------------------------------------------------


def accumulation_bound(x: Bits, w: Bits, additions: int) -> Float64s:
    """Most that ``additions`` FP32 roundings in a row can add up to in ``x @ w.T``, for each output [m, n].

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
    """
    magnitude = np.uint16(0x7FFF)
    return additions * FP32_UNIT / (1 - additions * FP32_UNIT) * ref.project_fp64(x & magnitude, w & magnitude)


def roundings(config: KernelConfig) -> int:
    """How many FP32 roundings in a row an output of this kernel goes through before the one to BF16."""
    if isinstance(config, SkinnyNConfig):
        return config.steps * VECTOR + int(math.log2(WARP)) + config.warps - 1 + config.split - 1
    return VECTOR + int(math.log2(config.lanes))


@dataclass(frozen=True)
class Errors:
    """How BF16 outputs differ from exact results.

    outputs: how many. max_ulp: largest distance from the exact result rounded once, in BF16 numbers. over_one_ulp:
    outputs further away than one. largest_over_one: largest exact magnitude among these, 0 where there are none.
    beyond_bound: outputs whose error is more than half an ulp and what FP32 accumulation can lose.
    max_abs_error: from the exact result; max_abs_error_rounded: from the exact result rounded once.
    cosine: with the exact result rounded once. output_scale: largest exact magnitude.
    """

    outputs: int
    max_ulp: int
    over_one_ulp: int
    largest_over_one: float
    beyond_bound: int
    max_abs_error: float
    max_abs_error_rounded: float
    cosine: float
    output_scale: float

    @classmethod
    def of(cls, got: Bits, exact: Float64s, bound: Float64s) -> Errors:
        """Compare outputs with exact results, all finite, and the ``bound`` of :func:`accumulation_bound`.

        Raises:
            ValueError: shapes differ or there is nothing to compare.
        """
        if not got.shape == exact.shape == bound.shape or not got.size:
            shapes = f"{list(got.shape)}, {list(exact.shape)}, {list(bound.shape)}"
            raise ValueError(f"got, exact, bound: expected one shape that is not empty, got {shapes}; slice them alike")
        rounded_bits = ref.f64_to_bf16(exact)
        values, rounded = (ref.bf16_to_f32(bits).astype(np.float64) for bits in (got, rounded_bits))
        error, magnitude = np.abs(values - exact), np.abs(exact)
        distance = ref.ulp_distance_bf16(got, rounded_bits)
        over = distance > 1
        # A NaN is beyond every bound.
        within = error <= HALF_ULP * magnitude + bound * (1 + HALF_ULP)
        return cls(
            outputs=got.size,
            max_ulp=int(distance.max()),
            over_one_ulp=int(over.sum()),
            largest_over_one=float(magnitude[over].max(initial=0.0)),
            beyond_bound=int((~within).sum()),
            max_abs_error=float(error.max()),
            max_abs_error_rounded=float(np.abs(values - rounded).max()),
            cosine=float((values * rounded).sum() / np.sqrt((values**2).sum() * (rounded**2).sum())),
            output_scale=float(magnitude.max()),
        )

    def row(self) -> dict[str, int | float]:
        """The fields that a result row has, see :data:`kda_lib.lab.records.ROW_FIELDS`."""
        return {name: value for name, value in vars(self).items() if name != "largest_over_one"}


def binade_of_ulp(ulp: float) -> tuple[float, float]:
    """The magnitudes [low, high) whose BF16 unit in the last place is this power of two.

    Raises:
        ValueError: ``ulp`` is no power of two.
    """
    mantissa, exponent = math.frexp(ulp)
    if mantissa != 0.5:
        raise ValueError(f"ulp: expected a power of two, got {ulp}; every BF16 ulp is one")
    low = math.ldexp(1.0, exponent - 1 + STORED_BITS)
    return low, 2 * low


def factor_into(exact: Float64s, binade: tuple[float, float]) -> float:
    """The power of two that brings the largest magnitude of ``exact`` into the binade.

    Multiplying the weights by it is exact, and so are all sums then, up to that factor: errors scale with it.
    """
    return math.ldexp(binade[0], 1 - math.frexp(float(np.abs(exact).max()))[1])


def scaled_bits(bits: Bits, factor: float) -> Bits:
    """Values times a power of two; exact unless one leaves the normal BF16 range."""
    return ref.f32_to_bf16(ref.bf16_to_f32(bits) * np.float32(factor))


# --- the skinny kernels -----------------------------------------------------------------------------------------------


class SkinnyKernel(NamedTuple):
    """most: tokens it takes. model_rows: rows that the host model computes, ``None`` for all."""

    config: Callable[[Arch, int, KdaShapes], Any]
    model: Callable[[Any, Bits, Bits], Bits]
    most: int
    model_rows: int | None = None


KERNELS: Mapping[str, SkinnyKernel] = {
    "skinny_n": SkinnyKernel(skinny_n_config, ref.model_skinny_n, MAX_TOKENS),
    "skinny_k": SkinnyKernel(skinny_k_config, ref.model_skinny_k, MAX_TOKENS),
    "skinny_gemv": SkinnyKernel(qkvg_gemv_config, ref.model_skinny_n, GEMV_TOKENS, GEMV_MODEL_ROWS),
}
"""This library's GEMMs: F_A/beta, F_B, and QKVG for few tokens."""


def order_of_additions(config: KernelConfig) -> tuple[int, int, int]:
    """How K is divided: where it is the same, an output has the same bits whatever else differs."""
    return config.k, getattr(config, "split", 1), getattr(config, "steps", 1)


def model_config(name: str, arch: Arch, shapes: KdaShapes, m: int) -> Any:
    """What the host model is run with: the order of additions that the kernel has for m tokens, for the most tokens."""
    kernel = KERNELS[name]
    config = kernel.config(arch, m, shapes)
    return replace(config, m=kernel.most, n=kernel.model_rows or config.n)


def model_outputs(
    name: str, arch: Arch, shapes: KdaShapes, tokens: Sequence[int], x: Bits, w: Bits
) -> dict[int, tuple[Any, Bits]]:
    """For each of ``tokens`` that the kernel takes: the model's configuration and its outputs for all rows of x.

    Computed once for each order of additions.
    """
    found: dict[tuple[int, int, int], tuple[Any, Bits]] = {}
    by_m = {}
    for m in (m for m in tokens if m <= KERNELS[name].most):
        config = model_config(name, arch, shapes, m)
        order = order_of_additions(config)
        if order not in found:
            found[order] = config, KERNELS[name].model(config, x, w)
        by_m[m] = found[order]
    return by_m


def with_stride(x: Bits, config: KernelConfig) -> Bits:
    """x in rows of the length that the kernel reads from; what lies beside it is NaN."""
    stride = getattr(config, "x_stride", config.k)
    return np.concatenate([x, np.full((len(x), stride - config.k), ref.BF16_NAN, np.uint16)], axis=1)


def launch(config: KernelConfig, arch: Arch, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a kernel writes over NaNs, BF16 [m, n], for x [m, k or x_stride] and w [n, k] on the device."""
    import torch

    from kda_lib.runtime import loaded_kernel

    out = torch.full((config.m, config.n), float("nan"), dtype=torch.bfloat16, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    loaded_kernel(config, arch)(x.data_ptr(), w.data_ptr(), out.data_ptr(), stream=stream)
    return out


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many BF16 outputs differ in a bit, as a number on the device."""
    import torch

    return (a.view(torch.int16) != b.view(torch.int16)).sum()


class BitCount(NamedTuple):
    """outputs: compared. differing: in a bit."""

    kernel: str
    m: int
    outputs: int
    differing: int


def bits_against_model(
    arch: Arch, shapes: KdaShapes, tokens: Sequence[int], seed: int, device: torch.device | str
) -> Iterator[BitCount]:
    """Every kernel, every kind of input and each of ``tokens`` that the kernel takes, on the device."""
    rng = np.random.default_rng(seed)
    for name, kernel in KERNELS.items():
        modelled, rows = model_config(name, arch, shapes, 1), kernel.config(arch, 1, shapes).n
        order = np.arange(rows) if rows == modelled.n else rng.integers(modelled.n, size=rows)
        for x, w in input_pairs(rng, modelled.m, modelled.n, modelled.k).values():
            inputs = ref.tensor_of_bits(with_stride(x, modelled), device)
            weight = ref.tensor_of_bits(w, device)[order]
            for m, (_, want) in model_outputs(name, arch, shapes, tokens, x, w).items():
                got = launch(kernel.config(arch, m, shapes), arch, inputs[:m], weight)
                expected = ref.tensor_of_bits(want[:m, order], device)
                yield BitCount(name, m, got.numel(), int(differing(got, expected)))


# --- strategies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Weights of one layer and inputs for 16 tokens, as bits; outputs are near ``scale``."""

    shapes: KdaShapes
    x: Bits
    packed: Bits
    f_b: Bits

    @classmethod
    def random(cls, tp: int, rng: np.random.Generator) -> Layer:
        """Normally distributed, weights divided by the square root of K: outputs are of the inputs' size, 1."""
        shapes = KdaShapes(tp)
        return cls(
            shapes,
            random_bits(rng, MAX_TOKENS, HIDDEN),
            random_bits(rng, shapes.packed_rows, HIDDEN, scale=HIDDEN**-0.5),
            random_bits(rng, shapes.f_b_rows, F_A_ROWS, scale=F_A_ROWS**-0.5),
        )

    def scaled(self, factor: float) -> Layer:
        """The same layer with its packed weight, and hence all outputs, times a power of two."""
        return replace(self, packed=scaled_bits(self.packed, factor))

    @cached_property
    def exact(self) -> Float64s:
        """x @ packed.T, [16, packed_rows]."""
        return ref.project_fp64(self.x, self.packed)

    @cached_property
    def bound(self) -> Float64s:
        """What FP32 sums of K products can lose in any order, [16, packed_rows]."""
        return accumulation_bound(self.x, self.packed, HIDDEN)

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, packed and f_b as new tensors."""
        x, packed, f_b = (ref.tensor_of_bits(bits, device) for bits in (self.x, self.packed, self.f_b))
        return x, packed, f_b

    def qkvg_errors(self, qkvg: torch.Tensor) -> Errors:
        """Of a QKVG output [m, qkvg_rows]."""
        place = (slice(len(qkvg)), self.shapes.qkvg_slice)
        return Errors.of(ref.bits_of_tensor(qkvg), self.exact[place], self.bound[place])

    def errors(self, proj: KdaProjection, x: torch.Tensor, packed: torch.Tensor) -> Errors:
        """Of all outputs of a projection of this layer, f_a among them.

        F_B is judged by the f_a that it was given (:func:`gate_inputs`): an f_a that rounds differently is no error of
        F_B, but moves g1 by more than F_B's own.
        """
        m, shapes = len(x), self.shapes
        f_a = ref.bits_of_tensor(gate_inputs(proj, x, packed))
        place = (slice(m), slice(shapes.qkvg_rows + F_A_ROWS + shapes.heads))
        qkvg, g1, beta = (ref.bits_of_tensor(part) for part in proj(x))
        return Errors.of(
            _flat([np.concatenate([qkvg, f_a, beta], axis=1), g1]),
            _flat([self.exact[place], ref.project_fp64(f_a, self.f_b)]),
            _flat([self.bound[place], accumulation_bound(f_a, self.f_b, F_A_ROWS)]),
        )


def gate_inputs(proj: KdaProjection, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """f_a [m, 128], finite, as the projection's own strategy gives it to F_B: g1 of an F_B that is the identity."""
    import torch

    from kda_lib.projection import KdaProjection

    shapes, plan = proj.shapes, proj.plan(len(x))
    identity = torch.eye(F_A_ROWS, dtype=packed.dtype, device=packed.device).repeat(shapes.heads, 1)
    qkvg = None if plan.qkvg is None else plan.backend
    same = KdaProjection(packed, identity, tp=shapes.tp, strategy=plan.strategy, qkvg=qkvg, table=proj.table)
    return same(x).g1[:, :F_A_ROWS]


def _flat(parts: Sequence[Any]) -> Any:
    return np.concatenate([part.ravel() for part in parts])


def spoiled(proj: KdaProjection, x: torch.Tensor, row: int, special: float) -> tuple[int, int]:
    """Put a NaN or Inf into one row: outputs of other rows that changed, and outputs of its own that stayed finite."""
    others = [i for i in range(len(x)) if i != row]
    clean, bad = proj(x), x.clone()
    bad[row, HIDDEN // 2] = special
    after = proj(bad)
    changed = sum(int(differing(b[others], a[others])) for b, a in zip(clean, after, strict=True))
    return changed, sum(int(part[row].isfinite().sum()) for part in after)
