"""What GPU tests share: when they run, launching one kernel, and a predecessor that lets its dependents start early."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kda_lib import Arch
from kda_lib import reference as ref
from kda_lib.backends import has_kernels
from kda_lib.compile import Artifact, KernelConfig
from kda_lib.kernels.config import Launch
from kda_lib.launch import LoadedKernel
from kda_lib.runtime import loaded_kernel

GPU_ONLY = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_kernels(Arch.of_device()), reason="no kernels for this capability"
    ),
]
POISON = float("nan")


def device(bits: ref.Bits) -> torch.Tensor:
    return ref.tensor_of_bits(bits, "cuda")


def launched(config: KernelConfig, arch: Arch, x: torch.Tensor, w: torch.Tensor) -> ref.Bits:
    """What the kernel writes over NaNs."""
    out = torch.full((config.m, config.n), POISON, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream()
    loaded_kernel(config, arch)(x.data_ptr(), w.data_ptr(), out.data_ptr(), stream=stream.cuda_stream)
    return ref.bits_of_tensor(out)


#: Lets dependents start, waits, then copies: what it writes is there only for those who wait for its end.
LATE_COPY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry late_copy(.param .u64 from, .param .u64 to, .param .u64 vectors, .param .u64 nanoseconds)
{
    .reg .pred %p;
    .reg .b32 %r<2>;
    .reg .b64 %d<8>;
    .reg .b32 %v<4>;
    griddepcontrol.launch_dependents;
    mov.u64 %d0, %globaltimer;
    ld.param.u64 %d1, [nanoseconds];
    add.u64 %d1, %d0, %d1;
WAIT:
    mov.u64 %d0, %globaltimer;
    setp.lt.u64 %p, %d0, %d1;
    @%p bra WAIT;
    ld.param.u64 %d2, [from];
    ld.param.u64 %d3, [to];
    ld.param.u64 %d4, [vectors];
    mov.u32 %r0, %tid.x;
    cvt.u64.u32 %d5, %r0;
COPY:
    setp.ge.u64 %p, %d5, %d4;
    @%p bra DONE;
    shl.b64 %d6, %d5, 4;
    add.u64 %d7, %d2, %d6;
    ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%d7];
    add.u64 %d7, %d3, %d6;
    st.global.v4.b32 [%d7], {%v0, %v1, %v2, %v3};
    add.u64 %d5, %d5, 256;
    bra COPY;
DONE:
    ret;
}
"""
LATE_NS = 200_000


@dataclass(frozen=True)
class OneCta:
    """Stands for a kernel configuration."""

    launch: Launch = field(default_factory=lambda: Launch(grid=1, block=256, cluster=1, pdl=False))


def from_ptx(entry: str, ptx: str, config: Any) -> LoadedKernel:
    """The driver assembles the PTX, which must not claim a newer ISA than the driver knows; the kernels use none."""
    ptx = re.sub(r"\.version \S+", ".version 8.8", ptx)
    return LoadedKernel(Artifact(entry, config, "", entry, ptx, ptx.encode() + b"\0", 0.0, cached=False))


class LateCopy:
    """``copy(source, target)``: enqueued on the current stream, done long after its dependents may start."""

    def __init__(self) -> None:
        self.kernel = from_ptx("late_copy", LATE_COPY, OneCta())

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel(source.data_ptr(), target.data_ptr(), source.numel() // 8, LATE_NS, stream=stream)
