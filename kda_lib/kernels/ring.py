"""The asynchronous ring in shared memory: mbarriers, and bulk copies that are counted on them.

Each function emits exactly the instructions its docstring names. Shared-memory addresses are 32-bit byte addresses.
"""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32

from kda_lib.kernels.ptx import asm


def init_barrier(barrier: Int32, arrivals: int) -> None:
    """``mbarrier.init`` for this many arrivals a phase. One thread calls it."""
    asm("mbarrier.init.shared::cta.b64 [$0], $1;", [], [barrier, Int32(arrivals)], ordered=True)


def publish_barriers() -> None:
    """Make initialised barriers visible to the asynchronous proxy: ``fence.mbarrier_init``, ``fence.proxy.async``."""
    asm("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", [], [], ordered=True)


def fence_async_proxy() -> None:
    """Order this thread's accesses to shared memory before later ones of the asynchronous proxy."""
    asm("fence.proxy.async.shared::cta;", [], [], ordered=True)


def arrive(barrier: Int32) -> None:
    """``mbarrier.arrive``: what this thread did before is done before the phase ends.

    Each thread arrives for itself. Where one lane did so for its warp, behind a warp barrier, the assembler dropped
    that barrier, as the lanes are together anyway, and compute-sanitizer, which sees machine code, found races.
    """
    code = "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    asm(code, [], [barrier], ordered=True)


def wait_parity(barrier: Int32, parity: Int32) -> None:
    """Wait until the phase of this parity has ended: ``mbarrier.try_wait.parity`` in a loop."""
    code = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }"
    asm(code, [], [barrier, parity], ordered=True)


def evict_first() -> Int64:
    """A cache policy, ``createpolicy.fractional.L2::evict_first.b64``."""
    return asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", [Int64], [])


def copy_bulk(target: Int32, source: Int64, count: int, barrier: Int32, policy: Int64 | None) -> None:
    """``cp.async.bulk`` from global to shared memory, counted on an mbarrier. All but the barrier 16-byte aligned."""
    hint, argument = ("", "") if policy is None else (".L2::cache_hint", ", $4")
    code = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [$0], [$1], $2, [$3]{argument};"
    operands = [target, source, Int32(count), barrier] + ([] if policy is None else [policy])
    asm(code, [], operands, ordered=True)


def load_shared_vector(address: Int32) -> tuple[Uint32, ...]:
    """``ld.shared.v4.b32``."""
    return asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [address], ordered=True)
