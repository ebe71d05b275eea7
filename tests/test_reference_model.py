"""The host model, bit for bit: against the kernels thread by thread, and within rounding of fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_threads
import numpy as np
import pytest
from kernel_threads import random_bits, special_bits

from kda_lib import Arch, KdaShapes
from kda_lib import reference as ref
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.kernels.fma import FmaForm

HOPPER, AMPERE = Arch.parse("sm_90a"), Arch.parse("sm_80")
TP8 = KdaShapes(8)


def config_n(m: int, **fields: Any) -> SkinnyNConfig:
    """A small F_A/beta: 8 rows, K of 2048."""
    small: dict[str, Any] = {"n": 8, "k": 2048, "rows": 2, "split": 2, "steps": 1, "tokens": 1, "groups": 1}
    return replace(skinny_n_config(HOPPER, m, TP8), m=m, **{**small, **fields}).validate(HOPPER)


def config_k(m: int, **fields: Any) -> SkinnyKConfig:
    return replace(skinny_k_config(HOPPER, m, TP8), m=m, **fields).validate(HOPPER)


@pytest.mark.parametrize(("m", "rows", "split", "steps", "tokens", "groups"), [
    (1, 1, 1, 1, 1, 1), (3, 2, 2, 2, 2, 2), (5, 4, 4, 1, 4, 2), (5, 2, 1, 4, 3, 1), (7, 1, 2, 1, 5, 2),
    (4, 4, 8, 1, 4, 1), (9, 8, 2, 2, 2, 2), (6, 8, 4, 1, 1, 2), (16, 4, 4, 1, 8, 1),
])  # fmt: skip
def test_model_of_skinny_n_equals_its_threads(
    m: int, rows: int, split: int, steps: int, tokens: int, groups: int
) -> None:
    """Many ways of dividing the work, with groups and passes that are part empty and rows that lanes swap."""
    c = config_n(m, rows=rows, split=split, steps=steps, tokens=tokens, groups=groups)
    rng = np.random.default_rng(m)
    cancelling, w = ref.cancelling_inputs(rng, m, c.n, c.k)
    for x in (cancelling, special_bits(rng, m, c.k)):
        np.testing.assert_array_equal(ref.model_skinny_n(c, x, w), kernel_threads.skinny_n(c, x, w))


@pytest.mark.parametrize(("m", "k", "rows", "row_tile", "tokens"), [
    (1, 128, 12, 1, 1), (5, 128, 4, 2, 3), (16, 128, 12, 2, 8), (3, 256, 4, 4, 2), (2, 64, 32, 8, 1), (3, 128, 6, 3, 2),
])  # fmt: skip
def test_model_of_skinny_k_equals_its_threads(m: int, k: int, rows: int, row_tile: int, tokens: int) -> None:
    c = config_k(m, n=2 * rows, k=k, x_stride=k + 16, rows=rows, row_tile=row_tile, tokens=tokens)
    rng = np.random.default_rng(m)
    cancelling, w = ref.cancelling_inputs(rng, m, c.n, k)
    beside = random_bits(rng, m, c.x_stride - k)
    for x in (cancelling, special_bits(rng, m, k, share=0.01)):
        fa_beta = np.concatenate([x, beside], axis=1)
        np.testing.assert_array_equal(ref.model_skinny_k(c, fa_beta[:, :k], w), kernel_threads.skinny_k(c, fa_beta, w))


def test_bits_do_not_depend_on_tokens_rows_groups_or_batch() -> None:
    """By thread, the kernel gives a token the same bits in any batch and however tokens and rows are dealt out."""
    rng = np.random.default_rng(6)
    c = config_n(5, tokens=5)
    x, w = ref.cancelling_inputs(rng, 5, c.n, c.k)
    want = ref.model_skinny_n(c, x, w)
    for tokens, rows, groups in ((1, 1, 5), (2, 8, 1), (3, 4, 2), (1, 4, 2)):
        other = replace(c, tokens=tokens, rows=rows, groups=groups)
        np.testing.assert_array_equal(kernel_threads.skinny_n(other, x, w), want)
    alone = replace(c, m=1, tokens=1)
    for token in range(5):
        np.testing.assert_array_equal(ref.model_skinny_n(alone, x[[token]], w), want[[token]])
        np.testing.assert_array_equal(kernel_threads.skinny_n(alone, x[[token]], w), want[[token]])


def test_bits_do_not_depend_on_the_fma_form() -> None:
    rng = np.random.default_rng(7)
    c = skinny_k_config(HOPPER, 4, TP8)
    x, w = special_bits(rng, 4, c.k), random_bits(rng, c.n, c.k)
    want = ref.model_skinny_k(c, x, w)
    for form in FmaForm:
        np.testing.assert_array_equal(ref.model_skinny_k(replace(c, fma=form), x, w), want)


def test_the_order_of_additions_shows_in_the_bits() -> None:
    """With sums that cancel, a kernel that adds in another order is noticed even if only one row or token has it.

    With other sums it is not: what those runs show is that the bits are right, not that the order is.
    """
    rng = np.random.default_rng(8)
    c = skinny_n_config(HOPPER, 16, TP8)
    cancelling = ref.cancelling_inputs(rng, c.m, c.n, c.k)
    plain = random_bits(rng, c.m, c.k), random_bits(rng, c.n, c.k)

    def changed(x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
        """Which outputs [m, n] differ: K reversed, and divided among CTAs and threads in other ways."""
        want = ref.model_skinny_n(c, x, w)
        divided = [(1, 4), (2, 2), (4, 1), (7, 1), (7, 4)]
        outputs = [ref.model_skinny_n(replace(c, split=split, steps=steps), x, w) for split, steps in divided]
        return [output != want for output in (ref.model_skinny_n(c, x[:, ::-1], w[:, ::-1]), *outputs)]

    for differs in changed(*cancelling):
        assert differs.any(axis=0).all(), "a weight row whose outputs are the same for all tokens"
        assert differs.any(axis=1).all(), "a token whose outputs are the same"
    for differs in changed(*plain):
        assert not differs.any(axis=0).all()


def test_slots_are_added_in_order() -> None:
    """2**24 first, -2**24 last, ones between: each 1 is lost to a tie at 2**24, unless both come before it."""
    c = config_n(1, n=1, k=1024, rows=1, split=4)
    x = np.zeros((1, c.k), np.uint16)
    w = np.zeros((1, c.k), np.uint16)
    for slot, value in enumerate((2.0**24, 1.0, 1.0, -(2.0**24))):
        x[0, slot * 256], w[0, slot * 256] = 0x3F80, ref.f32_to_bf16(np.array(value, np.float32))
    assert ref.model_skinny_n(c, x, w).tolist() == [[0]]
    w[0, 0], w[0, 256] = w[0, 256], w[0, 0]
    assert ref.model_skinny_n(c, x, w).tolist() == [[0]]
    w[0, 256], w[0, 512] = w[0, 512], w[0, 256]
    assert ref.model_skinny_n(c, x, w).tolist() == [[0x4000]]


# --- the model against the references -------------------------------------------------------------------------------


def accumulation_bound(x: np.ndarray, w: np.ndarray, additions: int) -> np.ndarray:
    """Most that ``additions`` FP32 roundings in a row can add up to (Higham, Accuracy and Stability, section 3.1)."""
    unit = 2.0**-24
    return additions * unit / (1 - additions * unit) * ref.project_fp64(x & np.uint16(0x7FFF), w & np.uint16(0x7FFF))


def check_against_fp64(got: np.ndarray, x: np.ndarray, w: np.ndarray, additions: int) -> None:
    exact = ref.project_fp64(x, w)
    distance = ref.ulp_distance_bf16(got, ref.f64_to_bf16(exact))
    # Where products cancel, a BF16 ulp of the small result is less than what FP32 sums must lose.
    bound = accumulation_bound(x, w, additions)
    half_ulp = 2.0**-8 * np.abs(exact)
    error = np.abs(ref.bf16_to_f32(got).astype(np.float64) - exact)
    assert (error <= half_ulp + bound * (1 + 2.0**-8)).all()
    assert ((distance <= 1) | (bound > half_ulp)).all()
    assert (distance == 0).mean() > 0.999


@pytest.mark.parametrize("arch", [HOPPER, AMPERE], ids=str)
@pytest.mark.parametrize("tp", [4, 8, 16])
def test_models_are_within_an_ulp_of_fp64(arch: Arch, tp: int) -> None:
    rng = np.random.default_rng(tp)
    shapes = KdaShapes(tp)
    n, k = skinny_n_config(arch, 16, shapes), skinny_k_config(arch, 16, shapes)
    x, w = random_bits(rng, 16, n.k), random_bits(rng, n.n, n.k, scale=0.02)
    fa_beta = ref.model_skinny_n(n, x, w)
    check_against_fp64(fa_beta, x, w, n.steps * 8 + 5 + n.split * n.warps)
    f_a, f_b = fa_beta[:, : k.k], random_bits(rng, k.n, k.k, scale=0.1)
    check_against_fp64(ref.model_skinny_k(k, f_a, f_b), f_a, f_b, 8 + 4)


@pytest.mark.parametrize("special", [0x7FC0, 0x7F80, 0xFF80], ids=["nan", "inf", "-inf"])
def test_a_special_changes_its_own_row_only(special: int) -> None:
    rng = np.random.default_rng(9)
    c = skinny_n_config(HOPPER, 4, TP8)
    x, w = random_bits(rng, 4, c.k), random_bits(rng, c.n, c.k)
    want = ref.model_skinny_n(c, x, w)
    x[2, 4321] = special
    got = ref.model_skinny_n(c, x, w)
    np.testing.assert_array_equal(got[[0, 1, 3]], want[[0, 1, 3]])
    sign = (w[:, 4321] ^ special) & 0x8000
    np.testing.assert_array_equal(got[2], np.full(c.n, 0x7FFF) if special == 0x7FC0 else 0x7F80 | sign)


def test_zeros_subnormals_and_overflow() -> None:
    """Sums start from +0; a product that underflows keeps its sign; the largest finite numbers overflow to Inf."""
    c = config_k(1, n=4, rows=4, row_tile=2)
    x, w = np.full((1, 128), 0x8000, np.uint16), np.full((4, 128), 0x3F80, np.uint16)
    assert ref.model_skinny_k(c, x, w).tolist() == [[0] * 4], "-0 + +0 is +0"
    x[:], w[:] = 0x8001, 0x0001
    assert ref.model_skinny_k(c, x, w).tolist() == [[0x8000] * 4], "-2**-266 rounds to -0"
    x[:], w[:] = 0x0001, 0x3F80
    assert ref.model_skinny_k(c, x, w).tolist() == [[0x0080] * 4], "128 * 2**-133 is the smallest normal"
    x[:], w[:] = 0x7F7F, 0x7F7F
    assert ref.model_skinny_k(c, x, w).tolist() == [[0x7F80] * 4]
    w[:, 64:] = 0xFF7F
    assert ref.model_skinny_k(c, x, w).tolist() == [[0x7FFF] * 4], "Inf - Inf"
