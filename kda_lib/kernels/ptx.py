"""PTX instructions that CuTe DSL has no operation for, or whose modifiers the kernels rely on.

Each function emits exactly the instruction its docstring names. Addresses are byte addresses in 64-bit registers
(32-bit for shared memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int16, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_CONSTRAINT = {Int16: "h", Int32: "r", Uint32: "r", Int64: "l", Float32: "f"}


@dsl_user_op
def asm(
    code: str,
    results: Sequence[type],
    operands: Sequence[Any],
    *,
    ordered: bool = False,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Emit ``code``, where ``$0``, ``$1``, ... are the results and then the operands, by the types of both.

    ``ordered`` keeps it in place relative to other ordered instructions, and clobbers memory: for everything that
    touches memory or synchronises.
    """
    constraints = [f"={_CONSTRAINT[t]}" for t in results] + [_CONSTRAINT[type(o)] for o in operands]
    if ordered:
        constraints.append("~{memory}")
    types = [t.mlir_type for t in results]
    result_type = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        result_type,
        [o.ir_value(loc=loc, ip=ip) for o in operands],
        code,
        ",".join(constraints),
        has_side_effects=ordered,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](out)
    return tuple(
        t(llvm.extractvalue(m, out, [i], loc=loc, ip=ip)) for i, (t, m) in enumerate(zip(results, types, strict=True))
    )


def load_weights(address: Int64) -> tuple[Uint32, ...]:
    """16 bytes that this launch reads once and nobody writes: ``ld.global.nc.L1::no_allocate.v4.b32``."""
    return asm("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [address], ordered=True)


def load_inputs(address: Int64) -> tuple[Uint32, ...]:
    """16 bytes that the previous kernel may have written: ``ld.global.v4.b32``.

    Never the non-coherent path: with programmatic dependent launch the writer may still run when this kernel starts.
    """
    return asm("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [address], ordered=True)


def store_bf16(address: Int64, value: Float32) -> None:
    """Round to nearest even and store: ``cvt.rn.bf16.f32`` (NaN becomes 0x7FFF), ``st.global.b16``."""
    half = asm("cvt.rn.bf16.f32 $0, $1;", [Int16], [value])
    asm("st.global.b16 [$0], $1;", [], [address, half], ordered=True)


def cluster_address(shared_address: Int32, rank: Int32) -> Int32:
    """The same shared-memory offset in another CTA of the cluster: ``mapa.shared::cluster.u32``."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [shared_address, rank])


def store_async(address: Int32, value: Float32, barrier: Int32) -> None:
    """Store into a CTA of the cluster and count the 4 bytes on its mbarrier (both addresses from ``mapa``):
    ``st.async.shared::cluster.mbarrier::complete_tx::bytes.b32``. The sender need not stay alive.
    """
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"
    asm(code, [], [address, value.bitcast(Uint32), barrier], ordered=True)


def init_barrier(barrier: Int32) -> None:
    """Make an mbarrier that one thread arrives on, visible to the whole cluster: ``mbarrier.init``,
    ``fence.mbarrier_init.release.cluster``. One thread calls it.
    """
    asm("mbarrier.init.shared::cta.b64 [$0], 1;", [], [barrier], ordered=True)
    asm("fence.mbarrier_init.release.cluster;", [], [], ordered=True)


def expect_bytes(barrier: Int32, count: int | Int32) -> None:
    """Arrive, and let the phase end when ``count`` bytes have arrived as well, before or after:
    ``mbarrier.arrive.expect_tx``. One thread calls it.
    """
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [], [barrier, Int32(count)], ordered=True)


def wait_bytes(barrier: Int32, parity: int | Int32 = 0) -> None:
    """Wait until the phase of this parity has ended, what other CTAs of the cluster sent included:
    ``mbarrier.try_wait.parity.acquire.cluster`` in a loop.
    """
    asm(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
        "@!done bra again; }",
        [],
        [barrier, Int32(parity)],
        ordered=True,
    )


def store_shared(address: Int32, value: Float32) -> None:
    """``st.shared.f32``."""
    asm("st.shared.f32 [$0], $1;", [], [address, value], ordered=True)


def load_shared(address: Int32) -> Float32:
    """``ld.shared.f32``."""
    return asm("ld.shared.f32 $0, [$1];", [Float32], [address], ordered=True)
