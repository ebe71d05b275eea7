"""The kernels on a device: bit for bit against the host model, and behind a predecessor that writes its output late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_tools import GPU_ONLY, LateCopy, device, from_ptx, launched
from kernel_threads import random_bits, special_bits

from kda_lib import Arch, KdaShapes
from kda_lib import reference as ref
from kda_lib.compile import KernelConfig
from kda_lib.kernels.config import (
    GEMV_TOKENS,
    SkinnyNConfig,
    qkvg_gemv_config,
    skinny_k_config,
    skinny_n_config,
)
from kda_lib.runtime import loaded_kernel
from kda_lib.shapes import HIDDEN, MAX_TOKENS

pytestmark = GPU_ONLY

ALL_M = range(1, MAX_TOKENS + 1)
TP8 = KdaShapes(8)


@pytest.fixture(scope="module")
def arch() -> Arch:
    return Arch.of_device()


@pytest.fixture
def late_copy(arch: Arch) -> LateCopy:
    if not arch.has_pdl:
        pytest.skip(f"{arch} has no programmatic dependent launch")
    return LateCopy()


def input_pairs(rng: np.random.Generator, m: int, n: int, k: int) -> Iterator[tuple[ref.Bits, ref.Bits]]:
    """x and w: plain; with sums that cancel, which shows the order of additions; with specials in x, then in both."""
    yield random_bits(rng, m, k), random_bits(rng, n, k, scale=k**-0.5)
    cancelling, w = ref.cancelling_inputs(rng, m, n, k)
    yield cancelling, w
    yield special_bits(rng, m, k), w
    yield special_bits(rng, m, k, share=1e-4), special_bits(rng, n, k, share=1e-5)


def check_bits(arch: Arch, shapes: KdaShapes, tokens: range | tuple[int, ...], seed: int) -> None:
    """F_A/beta and F_B. The model is run for 16 tokens: its order of additions is the same for every M."""
    rng = np.random.default_rng(seed)
    most = max(tokens)
    wide = skinny_n_config(arch, most, shapes)
    for x, w in input_pairs(rng, most, wide.n, wide.k):
        want, on_device, weight = ref.model_skinny_n(wide, x, w), device(x), device(w)
        for m in tokens:
            got = launched(skinny_n_config(arch, m, shapes), arch, on_device[:m], weight)
            np.testing.assert_array_equal(got, want[:m], err_msg=f"skinny_n, M = {m}, seed {seed}")
    short = skinny_k_config(arch, most, shapes)
    for x, w in input_pairs(rng, most, short.n, short.k):
        want, weight = ref.model_skinny_k(short, x, w), device(w)
        beside = np.full((most, short.x_stride - short.k), ref.BF16_NAN, np.uint16)
        on_device = device(np.concatenate([x, beside], axis=1))
        for m in tokens:
            got = launched(skinny_k_config(arch, m, shapes), arch, on_device[:m], weight)
            np.testing.assert_array_equal(got, want[:m], err_msg=f"skinny_k, M = {m}, seed {seed}")


@pytest.mark.parametrize("seed", range(20))
def test_skinny_kernels_equal_the_host_model(arch: Arch, seed: int) -> None:
    check_bits(arch, TP8, ALL_M, seed)


@pytest.mark.parametrize("tp", [4, 16])
def test_skinny_kernels_of_other_degrees(arch: Arch, tp: int) -> None:
    for seed in range(3):
        check_bits(arch, KdaShapes(tp), (1, 2, 3, 8, 14, 16), seed)


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("seed", range(20))
def test_the_gemv_equals_the_host_model(arch: Arch, seed: int, tp: int) -> None:
    """96 rows are modelled; the weight repeats them in an order of its own, and every row of the output is checked."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(96, size=KdaShapes(tp).qkvg_rows)
    for x, few in input_pairs(rng, GEMV_TOKENS, 96, HIDDEN):
        on_device, weight = device(x), device(few)[torch.from_numpy(rows).cuda()]
        for m in range(1, GEMV_TOKENS + 1):
            config = qkvg_gemv_config(arch, m, KdaShapes(tp))
            want = ref.model_skinny_n(replace(config, n=96), x[:m], few)[:, rows]
            np.testing.assert_array_equal(launched(config, arch, on_device[:m], weight), want)


def hazard_configs(arch: Arch) -> Iterator[KernelConfig]:
    for m in (1, 2, 8, 14, 16):
        yield skinny_n_config(arch, m, TP8)
        yield skinny_k_config(arch, m, TP8)
    yield from (qkvg_gemv_config(arch, m, TP8) for m in range(1, GEMV_TOKENS + 1))


@pytest.mark.parametrize("waits", [True, False], ids=["as built", "wait removed"])
def test_kernels_wait_for_their_input(arch: Arch, late_copy: LateCopy, waits: bool) -> None:
    """And without their wait they read too early: so this test can fail."""
    for config in hazard_configs(arch):
        kernel = loaded_kernel(config, arch)
        if not waits:
            artifact = kernel.artifact
            assert "griddepcontrol.wait;" in artifact.ptx
            kernel = from_ptx(artifact.entry, artifact.ptx.replace("griddepcontrol.wait;", ""), config)
        stride = config.k if isinstance(config, SkinnyNConfig) else config.x_stride
        source = torch.randn(config.m, stride, device="cuda").bfloat16()
        w = torch.randn(config.n, config.k, device="cuda").bfloat16()
        want = launched(config, arch, source, w)
        x, out = torch.zeros_like(source), torch.empty(config.m, config.n, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        # The first launch loads the kernel, which waits for the device.
        kernel(x.data_ptr(), w.data_ptr(), out.data_ptr(), stream=stream)
        torch.cuda.synchronize()
        late_copy(source, x)
        kernel(x.data_ptr(), w.data_ptr(), out.data_ptr(), stream=stream)
        assert np.array_equal(ref.bits_of_tensor(out), want) is waits, config
