"""Arithmetic, conversions and references, against exact integer arithmetic and libm."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_threads import random_bits

from kda_lib import Arch, KdaShapes
from kda_lib import reference as ref
from kda_lib.kernels.config import skinny_n_config

TP8 = KdaShapes(8)

#: Their FP32 counterparts, and some neighbours.
F32_SPECIALS = np.array([s | p for p in (0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000,
                                         0x7FC00000) for s in (0, 0x80000000)], np.uint32).view(np.float32)  # fmt: skip


# --- exact arithmetic, independent of NumPy's -----------------------------------------------------------------------


def round_exact(value: Fraction, precision: int) -> Fraction | float:
    """``value`` rounded to nearest even in a binary format with FP32's exponents and ``precision`` significant bits."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - (precision - 1))
    rounded = round(value / quantum) * quantum
    return rounded if abs(rounded) < 2**128 else float("inf") * (1 if rounded > 0 else -1)


def exact_fma(a: float, b: float, c: float) -> float:
    """``a * b + c`` in integers, rounded once to FP32."""
    if not np.isfinite([a, b, c]).all():
        # Of Inf and NaN, IEEE 754 says the same in every precision, and no product of BF16 numbers is Inf in FP64.
        return a * b + c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value == 0:
        product_sign = np.signbit(a) ^ np.signbit(b)
        return -0.0 if product_sign and np.signbit(c) and (a == 0 or b == 0) else 0.0
    return float(np.copysign(float(round_exact(value, 24)), float(value.numerator)))


def libm_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    return np.fromiter(map(fmaf, a.tolist(), b.tolist(), c.tolist()), np.float32, len(a))


def same_bits(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Equal bit for bit, all NaNs alike."""
    return (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))


def fma_cases(count: int, rng: np.random.Generator) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Triples (a, b as BF16 bits, c as FP32), by what is hard about them."""

    def bf16(low: int, high: int) -> np.ndarray:
        """Finite, with exponents in [low, high)."""
        exponent = rng.integers(low + 127, high + 127, count)
        return (rng.integers(0, 2, count) << 15 | exponent << 7 | rng.integers(0, 128, count)).astype(np.uint16)

    def scaled(values: np.ndarray, shift: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.ldexp(values, shift).astype(np.float32)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return ref.bf16_to_f32(a).astype(np.float64) * ref.bf16_to_f32(b)

    def any_f32() -> np.ndarray:
        return rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)

    cases = {"any bits": (*rng.integers(0, 1 << 16, (2, count)).astype(np.uint16), any_f32())}
    a, b = bf16(-30, 30), bf16(-30, 30)
    steps = rng.integers(-3, 4, count).astype(np.int32)
    near = (-product(a, b)).astype(np.float32)
    cases["cancellation"] = a, b, (near.view(np.int32) + steps).view(np.float32)
    # c next to a tie of the product with it: c has 24 random bits and the product's top bit falls on or below its last.
    cases["c far above the product"] = a, b, scaled(rng.uniform(-2, 2, count), np.frexp(product(a, b))[1] +
                                                    rng.integers(20, 64, count))  # fmt: skip
    cases["c far below the product"] = a, b, scaled(rng.uniform(-2, 2, count), np.frexp(product(a, b))[1] -
                                                    rng.integers(0, 64, count))  # fmt: skip
    one = ref.f32_to_bf16(scaled(rng.choice([-1.0, 1.0], count), rng.integers(-20, 20, count)))
    c = scaled(rng.uniform(1, 2, count), rng.integers(-60, 60, count))
    half_ulp = scaled(np.spacing(c).astype(np.float64) / 2 / ref.bf16_to_f32(one), np.zeros(count, int))
    cases["exact tie"] = one, ref.f32_to_bf16(half_ulp), c
    a, b = bf16(-100, -30), bf16(-100, -30)
    cases["subnormal result"] = a, b, scaled(rng.uniform(-1, 1, count), rng.integers(-149, -120, count))
    cases["product alone underflows"] = a, b, np.zeros(count, np.float32) * np.where(a & 1, np.float32(-1), 1)
    cases["subnormal factors"] = rng.integers(0, 0x80, count).astype(np.uint16), bf16(-20, 20), scaled(
        rng.uniform(-1, 1, count), rng.integers(-149, -110, count))  # fmt: skip
    a, b = bf16(50, 78), bf16(50, 78)
    top = np.uint32(0x7F7FFFFF) - rng.integers(0, 4, count).astype(np.uint32)
    cases["near overflow"] = a, b, (top | rng.integers(0, 2, count).astype(np.uint32) << np.uint32(31)).view(np.float32)
    cases["around FP32 max"] = bf16(60, 66), bf16(60, 66), any_f32()
    return cases


def test_fma_equals_exact_arithmetic() -> None:
    for name, (a, b, c) in fma_cases(3000, np.random.default_rng(1)).items():
        got = ref.fma_f32_bf16(a, b, c)
        floats = zip(ref.bf16_to_f32(a).tolist(), ref.bf16_to_f32(b).tolist(), c.tolist(), strict=True)
        want = np.array([exact_fma(*abc) for abc in floats], np.float32)
        assert same_bits(got, want).all(), name
        assert same_bits(libm_fma(ref.bf16_to_f32(a), ref.bf16_to_f32(b), c), want).all(), f"libm, {name}"


def test_fma_equals_libm_on_millions() -> None:
    for name, (a, b, c) in fma_cases(250_000, np.random.default_rng(2)).items():
        want = libm_fma(ref.bf16_to_f32(a), ref.bf16_to_f32(b), c)
        assert same_bits(ref.fma_f32_bf16(a, b, c), want).all(), name


def test_fma_equals_exact_arithmetic_on_all_specials() -> None:
    grid = np.array(
        list(itertools.product(range(len(ref.BF16_SPECIALS)), range(len(ref.BF16_SPECIALS)), range(len(F32_SPECIALS))))
    )
    a, b, c = ref.BF16_SPECIALS[grid[:, 0]], ref.BF16_SPECIALS[grid[:, 1]], F32_SPECIALS[grid[:, 2]]
    floats = zip(ref.bf16_to_f32(a).tolist(), ref.bf16_to_f32(b).tolist(), c.tolist(), strict=True)
    want = np.array([exact_fma(*abc) for abc in floats], np.float32)
    assert same_bits(ref.fma_f32_bf16(a, b, c), want).all()


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def test_fma_cases_tell_fused_from_unfused() -> None:
    """The cases would notice an FMA that rounds its product, flushes subnormals, or is one FP32 step off at a tie."""
    seen = {}
    for name, (a, b, c) in fma_cases(20_000, np.random.default_rng(3)).items():
        fused = ref.fma_f32_bf16(a, b, c)
        unfused = ref.bf16_to_f32(a) * ref.bf16_to_f32(b) + c
        seen[name] = np.mean(~same_bits(fused, unfused)), np.mean((fused != 0) & (abs(fused) < 2.0**-126))
    assert seen["near overflow"][0] > 0.01
    assert seen["subnormal result"][1] > 0.1
    a, b, c = fma_cases(20_000, np.random.default_rng(3))["exact tie"]
    exact = ref.bf16_to_f32(a).astype(np.float64) * ref.bf16_to_f32(b) + c
    assert np.mean(abs(exact - ref.fma_f32_bf16(a, b, c)) == np.spacing(c) / 2) > 0.9


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF))
@example(0x8000, 0x3F80, 0x80000000)  # -0 * 1 + -0 is -0
@example(0x8001, 0x0001, 0)  # a product that underflows to -0
@example(0x7F7F, 0x7F7F, 0xFF800000)  # finite product beyond FP32, minus Inf
@example(0x7F80, 0, 0)  # Inf * 0
def test_fma_equals_exact_arithmetic_on_any_bits(a: int, b: int, c: int) -> None:
    a_bits, b_bits = np.array([a], np.uint16), np.array([b], np.uint16)
    addend = np.array([c], np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        want = exact_fma(float(ref.bf16_to_f32(a_bits)[0]), float(ref.bf16_to_f32(b_bits)[0]), float(addend[0]))
    assert same_bits(ref.fma_f32_bf16(a_bits, b_bits, addend), np.array([want], np.float32)).all()


# --- conversions and distances --------------------------------------------------------------------------------------


def test_every_bf16_survives_the_round_trip() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    want = np.where((bits & 0x7FFF) > 0x7F80, ref.BF16_NAN, bits)
    values = ref.bf16_to_f32(bits)
    np.testing.assert_array_equal(ref.f32_to_bf16(values), want)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(ref.f64_to_bf16(values.astype(np.float64)), want)
    assert float(ref.bf16_to_f32(np.array([1], np.uint16))[0]) == 2.0**-133, "subnormals are flushed in this process"


def test_rounding_to_bf16_equals_exact_arithmetic() -> None:
    """FP64 values on, and a hair beside, every kind of BF16 midpoint: where rounding twice goes wrong."""
    rng = np.random.default_rng(4)
    patterns = np.concatenate([rng.integers(0, 0x7F80, 500), [0, 1, 0x7E, 0x7F, 0x80, 0x7F7E, 0x7F7F]])
    points = np.concatenate([(patterns.astype(np.uint32) << 16 | 0x8000).astype(np.uint32).view(np.float32)] * 2)
    middle = points.astype(np.float64)
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), rng.normal(size=500),
                             np.ldexp(rng.normal(size=500), rng.integers(-160, 140, 500))])  # fmt: skip
    values = np.concatenate([values, -values])
    rounded = np.array([float(round_exact(Fraction(v), 8)) for v in values.tolist()], np.float64)
    want = (np.copysign(rounded, values).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(ref.f64_to_bf16(values), want)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    twice = ref.f32_to_bf16(single)
    assert (twice != want).sum() > 500, "the cases must include those that double rounding gets wrong"
    np.testing.assert_array_equal(ref.f32_to_bf16(single), ref.f64_to_bf16(single.astype(np.float64)))


def test_every_nan_becomes_7fff() -> None:
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (ref.f32_to_bf16(nans) == 0x7FFF).all()
    with np.errstate(invalid="ignore"):
        assert (ref.f64_to_bf16(nans.astype(np.float64)) == 0x7FFF).all()


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [(0, 0x8000, 0), (1, 0x8001, 2), (0x3F80, 0x3F81, 1), (0x7F7F, 0x7F80, 1), (0xFF80, 0x7F80, 2 * 0x7F80),
     (0x7FFF, 0xFFC0, 0), (0x7FFF, 0x7F80, ref.NAN_DISTANCE), (0, 0x7FC0, ref.NAN_DISTANCE), (0x3F7F, 0x3F80, 1)],
)  # fmt: skip
def test_ulp_distance(a: int, b: int, distance: int) -> None:
    left, right = np.array([a], np.uint16), np.array([b], np.uint16)
    assert ref.ulp_distance_bf16(left, right).tolist() == [distance]
    assert ref.ulp_distance_bf16(right, left).tolist() == [distance]


def test_torch_agrees_on_conversions() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(5).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(ref.bits_of_tensor(torch.from_numpy(values).bfloat16()), ref.f32_to_bf16(values))
    bits = random_bits(np.random.default_rng(5), 4, 6)
    strided = bits[:, ::2]
    tensor = ref.tensor_of_bits(strided)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(ref.bits_of_tensor(tensor), strided)
    np.testing.assert_array_equal(ref.bits_of_tensor(tensor.T), strided.T)
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16, got torch\.float32"):
        ref.bits_of_tensor(tensor.float())


# --- references and bad input ---------------------------------------------------------------------------------------


def test_fp64_projection_is_exact_where_fp32_is_not() -> None:
    x, w = np.array([[0x4B80, 0x3F80, 0xCB80]], np.uint16), np.full((1, 3), 0x3F80, np.uint16)  # 2**24, 1, -2**24
    assert ref.project_fp64(x, w).tolist() == [[1.0]]
    assert ref.project_fp32(x, w).dtype == np.float32
    rng = np.random.default_rng(10)
    x, w = random_bits(rng, 2, 7168), random_bits(rng, 3, 7168)
    fractions = [[sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(u, v, strict=True))
                  for v in ref.bf16_to_f32(w)] for u in ref.bf16_to_f32(x)]  # fmt: skip
    want = np.array(fractions, np.float64)
    assert np.abs(ref.project_fp64(x, w) - want).max() < 1e-12
    assert 1e-12 < np.abs(ref.project_fp32(x, w) - want).max() < 1e-2


def test_kda_reference() -> None:
    rng = np.random.default_rng(11)
    hidden = random_bits(rng, 2, 7168)
    packed = random_bits(rng, TP8.packed_rows, 7168, scale=0.02)
    f_b = random_bits(rng, TP8.f_b_rows, 128, scale=0.1)
    out = ref.kda_reference(hidden, packed, f_b, TP8)
    assert [field.shape for field in out] == [(2, 6144), (2, 128), (2, 12), (2, 1536)]
    assert {field.dtype for field in out} == {np.dtype(np.float64)}
    np.testing.assert_allclose(out.beta, ref.project_fp64(hidden, packed[6272:6284]), rtol=0, atol=1e-12)
    rounded = ref.f64_to_bf16(out.f_a)
    np.testing.assert_array_equal(out.g1, ref.project_fp64(rounded, f_b))
    unrounded = out.f_a @ ref.bf16_to_f32(f_b).astype(np.float64).T
    assert np.abs(unrounded - out.g1).max() > 1e-4
    judged = ref.kda_reference(hidden, packed, f_b, TP8, f_a=rounded ^ np.uint16(0x8000))
    np.testing.assert_array_equal(judged.g1, -out.g1)
    single = ref.kda_reference(hidden, packed, f_b, TP8, project=ref.project_fp32)
    for wide, narrow in zip(out, single, strict=True):
        assert narrow.dtype == np.float32
        assert ref.ulp_distance_bf16(ref.f64_to_bf16(wide), ref.f32_to_bf16(narrow)).mean() < 0.01


X, W = np.zeros((4, 7168), np.uint16), np.zeros((144, 7168), np.uint16)


@pytest.mark.parametrize(("x", "w", "error", "message"), [
    (X.astype(np.float32), W, TypeError, "x: expected a uint16 array of BF16 bit patterns, got float32 array"),
    (X.tolist(), W, TypeError, "x: expected a uint16 array of BF16 bit patterns, got list"),
    (X[:3], W, ValueError, r"x: expected shape \[4, 7168\], got \[3, 7168\]"),
    (X, W[0], ValueError, r"w: expected shape \[144, 7168\], got \[7168\]"),
])  # fmt: skip
def test_bad_input_is_named(x: Any, w: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ref.model_skinny_n(skinny_n_config(Arch.parse("sm_90a"), 4, TP8), x, w)


def test_hidden_casts_are_refused() -> None:
    with pytest.raises(TypeError, match="expected float32 values, got float64"):
        ref.f32_to_bf16(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected float64 values, got float32"):
        ref.f64_to_bf16(np.zeros(2, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"packed_weight: expected shape \[6288, 7168\], got \[144, 7168\]"):
        ref.kda_reference(X, W, W, TP8)
