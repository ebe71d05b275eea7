"""What to write instead of an instruction that a target lacks, in words.

Every instruction in backquotes exists on sm_80; a test holds that against the table.
"""

from __future__ import annotations

import re

_CLUSTERS = "use one CTA instead of a cluster, and leave it out"
_BULK = "copy with `cp.async.cg.shared.global` and `cp.async.wait_group`, or with plain loads and `st.shared.b32`"
_TENSOR_CORES = "use `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32` and the like, fed by `ldmatrix`"
_HINT = "leave it out: it is a hint"

#: Start of a form -> what does the same on older targets; the first that fits counts.
REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"fma\.\w+(\.sat)?\.f32\.bf16", "shift both BF16 operands into the upper half (`shl.b32`), then `fma.rn.f32`"),
    (r"fma\.\w+(\.sat)?\.f32\.f16", "convert both operands with `cvt.f32.f16` (exact), then `fma.rn.f32`"),
    (r"(add|sub)(\.r\w)?(\.sat)?\.f32\.bf16", "shift the BF16 operand up by 16 (`shl.b32`), then `add.rn.f32`"),
    (r"(add|sub)(\.r\w)?(\.sat)?\.f32\.f16", "convert the FP16 operand with `cvt.f32.f16` (exact), then `add.rn.f32`"),
    (r"cvt\.f32\.bf16", "BF16 is the upper half of FP32: `shl.b32` by 16 converts exactly"),
    (r"cvt\.rn\.bf16(x2)?\.f32", "round in integers: `add.u32` of 0x7FFF and the last bit kept, then `shr.u32`"),
    (r"(add|sub|mul)(\.rn)?\.bf16(x2)?", "write it as `fma.rn.bf16` (`fma.rn.bf16x2`) with 1.0 or -0.0"),
    (r"(add|sub|mul|fma)(\.r\w)?(\.ftz)?\.f32x2", "two scalar instructions, `fma.rn.f32` and the like"),
    (r"(min|max)\S*\.f32 r,r,r,r", "two instructions of two operands, `max.f32` and the like"),
    (r"(tanh|ex2)\S*\.b?f16", "compute in FP32: `ex2.approx.ftz.f32`, `tanh.approx.f32`"),
    (r"griddepcontrol", "leave it out, and launch without programmatic dependent launch"),
    (r"elect\.sync", "let lane 0 of the converged warp do it: `setp.eq.u32` on the lane number"),
    (r"(barrier\.cluster|mapa|getctarank|mov\S* r,%(n?cluster|is_explicit))", _CLUSTERS),
    (r"\.(reqnctapercluster|maxclusterrank|explicitcluster|blocksareclusters)", _CLUSTERS),
    (r"fence\.mbarrier_init", _CLUSTERS),
    (r"fence\.(sc|acq_rel|acquire|release)", "`fence.acq_rel.gpu`, which orders more"),
    (r"fence\.proxy\.async", "leave it out with the bulk copies that it orders"),
    (r"cp\.(reduce\.)?async\.bulk\.(commit_group|wait_group)", _BULK),
    (r"cp\.async\.bulk\.prefetch", _HINT),
    (r"cp\.reduce\.async\.bulk", "`red.global.add.f32` and the like from registers"),
    (r"cp\.async\.bulk", _BULK),
    (r"cp\.async", "load into registers, then `st.shared.b32`"),
    (r"mbarrier\.try_wait", "`mbarrier.test_wait.shared.b64` in a loop"),
    (r"mbarrier\.\S*(expect_tx|complete_tx)", "wait for the copies themselves: `cp.async.wait_group`, then `bar.sync`"),
    (r"mbarrier", "`bar.sync`"),
    (r"(st|red)\.async", "exchange the value through global memory: `st.global.b32`, `fence.acq_rel.gpu`"),
    (r"(wgmma|tcgen05)", _TENSOR_CORES),
    (r"ldmatrix", "`ldmatrix.sync.aligned.m8n8.x4.shared.b16`, then `prmt.b32`"),
    (r"mma\.(sync|sp)", "convert the operands, then `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`"),
    (r"stmatrix", "`st.shared.b32` from each lane"),
    (r"movmatrix", "`shfl.sync.idx.b32`"),
    (r"redux\.sync", "a tree of `shfl.sync.bfly.b32`"),
    (r"(ld|st)\.\S*(\.v8\.|\.v4\.[bu]64)", "two accesses of 16 bytes: `ld.global.v4.b32`, `st.global.v4.b32`"),
    (r"(ld|st)\.\S*L2::", f"{_HINT}: `ld.global.v4.b32`, `st.global.v4.b32`"),
    (r"(ld|st|atom|red)\S*shared::cluster", _CLUSTERS),
    (r"(ld|st|atom|red)\.\S*\.cluster\.", "the same with scope .gpu, which orders more: `atom.acq_rel.gpu`"),
    (r"st\.bulk", "a loop of `st.shared.v4.b32`"),
    (r"tensormap", _BULK),
    (r"(atom|red)\S*\.add\S*\.b?f16", "`atom.cas.b32` in a loop"),
    (r"(atom|red)\.\S*\.v[248]\.", "one atomic for each element: `red.global.add.f32`"),
    (r"multimem", "loop over the peers' addresses: `ld.global.v4.b32` or `red.global.add.f32`"),
    (r"setmaxnreg", f"{_HINT} about registers"),
    (r"(createpolicy|applypriority|discard|prefetch)", _HINT),
    (r"clusterlaunchcontrol", "give each CTA its tiles by number"),
)  # fmt: skip

_PATTERNS = tuple((re.compile(pattern), words) for pattern, words in REPLACEMENTS)


def replacement(form: str) -> str:
    """What does the same on older targets, in words; ``""`` where nothing is known."""
    return next((words for pattern, words in _PATTERNS if pattern.match(form)), "")
