"""All projections of one KDA layer in one launch, at the speed at which memory can be read.

``qkvg = x @ packed[qkvg].T``, ``f_a, beta = x @ packed[fa_beta].T``, ``g1 = bf16(f_a) @ f_b.T`` for 1 to 16 tokens.

Work split: clusters of two persistent CTAs, one CTA an SM. A cluster owns blocks of 8 weight rows, each CTA one half of
K of all of them, and keeps that half of x in registers for the whole launch. In a CTA

- the producer copies weights into a ring in shared memory, 7 KB at a time (``cp.async.bulk``), 170 KB ahead;
- eight consumers, an eighth of the CTA's K each, multiply by ``mma.sync`` (tokens are its 16 rows, weight rows its 8
  columns) and leave their sums of a block in shared memory;
- the adder adds these up; the CTAs of a cluster take turns to send their sum to the other, which stores the output;
- the gate waits until all of f_a is in memory, which comes first, and does 16 rows of F_B while the others go on.

Bits: K is divided, and the parts are added, in one fixed order for a row, whatever the number of tokens, the other
tokens and the number of SMs; a token's sums never meet another's. So outputs are deterministic and batch-invariant.

Progress: CTAs wait only for CTAs of their own cluster, which the device starts together, and gates for clusters with
lower numbers, which it starts before them. So not all CTAs need be resident at once.

State: two counters in the workspace, 0 before and after a launch. A launch that was aborted leaves others behind; zero
the workspace then. Launches that may run at the same time need workspaces of their own.

With programmatic dependent launch the first weights, as many as the ring holds, are read before the dependency wait;
x, the counters and f_a after it.

Scope: BF16 in, BF16 out, FP32 accumulation, sm_90 and newer, an even number of heads. Not here: more than 16 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from kda_lib.kernels.config import BF16_BYTES, WARP
from kda_lib.kernels.fragments import STEP_BYTES, Vector, add, add_warps, load_block, multiply, operands
from kda_lib.kernels.lab_config import BARRIER_BYTES, VECTOR_BYTES
from kda_lib.kernels.ptx import cluster_address, expect_bytes, load_weights, wait_bytes
from kda_lib.kernels.ring import (
    arrive,
    copy_bulk,
    evict_first,
    init_barrier,
    publish_barriers,
    wait_parity,
)
from kda_lib.kernels.stream_config import (
    BLOCK_ROWS,
    CONSUMERS,
    F_A_START,
    JOB_ROWS,
    LETTERS,
    PIECE_BYTES,
    ROW_PITCH,
    SPLIT,
    STEP_COLUMNS,
    STEPS,
    SUM_BYTES,
    SUMS,
    StreamConfig,
)
from kda_lib.kernels.stream_ptx import (
    Sums,
    count_if,
    leave,
    load_input_if,
    load_shared_sums,
    mma,
    send_sums,
    store_bf16_if,
    store_pair_if,
    store_shared_sums,
    wait_count,
)
from kda_lib.shapes import F_A_ROWS, HIDDEN

#: The warps after the consumers.
PRODUCER, ADDER, GATE = CONSUMERS, CONSUMERS + 1, CONSUMERS + 2
#: Bytes of a weight row.
ROW_BYTES = HIDDEN * BF16_BYTES
#: Tokens of a fragment's rows: those of its lower and of its upper half.
HALVES = (0, 8)


class Thread(NamedTuple):
    """Where a thread is and what its cluster does, as every role needs it.

    ring, full, ready, arrived: shared memory: the ring; barriers of the ring, of the sums and of the letters. early,
    first, count: blocks of the cluster: so many of F_A/beta, dealt out in turn, then QKVG from ``first`` on, ``count``
    in all.
    """

    ring: Int32
    full: Int32
    ready: Int32
    arrived: Int32
    cluster: Int32
    rank: Int32
    warp: Int32
    lane: Int32
    early: Int32
    first: Int32
    count: Int32
    tokens: Int32


class Stream:
    """The kernel for one :class:`StreamConfig`."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.f_a_blocks = F_A_ROWS // BLOCK_ROWS
        self.jobs = config.shapes.f_b_rows // JOB_ROWS
        self.gates = min(config.ctas - config.first_gate, self.jobs)

    @staticmethod
    def trace_arguments() -> list[cute.Pointer | Int64]:
        """Null pointers for packed, f_b, x, qkvg, g1, beta and the workspace; beta's row stride in elements; M."""
        return [make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=16)] * 7 + [Int64(1), Int64(1)]

    @cute.jit
    def __call__(
        self,
        packed: cute.Pointer,
        f_b: cute.Pointer,
        x: cute.Pointer,
        qkvg: cute.Pointer,
        g1: cute.Pointer,
        beta: cute.Pointer,
        workspace: cute.Pointer,
        beta_stride: Int64,
        m: Int64,
    ):
        launch = self.config.launch
        self.kernel(packed, f_b, x, qkvg, g1, beta, workspace, beta_stride, m).launch(
            grid=[launch.grid, 1, 1],
            block=[launch.block, 1, 1],
            cluster=[launch.cluster, 1, 1],
            smem=launch.smem,
            use_pdl=launch.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        packed: cute.Pointer,
        f_b: cute.Pointer,
        x: cute.Pointer,
        qkvg: cute.Pointer,
        g1: cute.Pointer,
        beta: cute.Pointer,
        workspace: cute.Pointer,
        beta_stride: Int64,
        m: Int64,
    ):
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        t = self.locate(warp, thread % WARP, cta, Int32(m))
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_launch_dependents()

        # The first copies and the loads of x start before the CTA meets: memory should not wait.
        if warp == PRODUCER:
            if t.lane == 0:
                init_barriers(t.full, c.stages, 1)
                publish_barriers()
                self.fill(t, packed)
        elif warp == ADDER:
            if t.lane == 0:
                init_barriers(t.full + c.stages * BARRIER_BYTES, c.stages, CONSUMERS * WARP)
                init_barriers(t.ready, SUMS, CONSUMERS * WARP)
                init_barriers(t.ready + SUMS * BARRIER_BYTES, SUMS, WARP)
                init_barriers(t.arrived, LETTERS, 1)
                publish_barriers()
        elif warp < CONSUMERS:
            if cutlass.const_expr(c.pdl):
                cute.arch.griddepcontrol_wait()
        inputs = self.load_x(t, x)
        meet()

        if warp == PRODUCER:
            if t.lane == 0:
                self.refill(t, packed)
        elif warp == ADDER:
            self.add_up(t, qkvg, beta, beta_stride, workspace)
        elif warp == GATE:
            self.gate(t, cta - c.first_gate, f_b, workspace, g1)
        else:
            self.consume(t, inputs)

    def locate(self, warp: Int32, lane: Int32, cta: Int32, tokens: Int32) -> Thread:
        c = self.config
        ring = cute.arch.get_dyn_smem(Int32, alignment=128).toint()
        full = ring + c.barriers_start
        ready = full + 2 * c.stages * BARRIER_BYTES
        cluster = cta // SPLIT
        blocks = c.qkvg_blocks + c.fa_beta_blocks
        return Thread(
            ring=ring,
            full=full,
            ready=ready,
            arrived=ready + 2 * SUMS * BARRIER_BYTES,
            cluster=cluster,
            rank=cta % SPLIT,
            warp=warp,
            lane=lane,
            early=share(c.fa_beta_blocks, c.clusters, cluster),
            first=before(blocks, c.clusters, cluster) - before(c.fa_beta_blocks, c.clusters, cluster),
            count=share(blocks, c.clusters, cluster),
            tokens=tokens,
        )

    @cute.jit
    def fill(self, t: Thread, packed: cute.Pointer):
        """Start the copies that find the ring empty."""
        c = self.config
        policy = evict_first()
        for part in cutlass.range(cutlass.min(t.count * c.parts, c.stages), unroll=1):
            self.issue(t, part, packed, policy)

    @cute.jit
    def refill(self, t: Thread, packed: cute.Pointer):
        """Start every other copy as soon as all consumers have left its stage."""
        c = self.config
        policy = evict_first()
        for part in cutlass.range(c.stages, t.count * c.parts, unroll=1):
            empty = t.full + (c.stages + part % c.stages) * BARRIER_BYTES
            wait_parity(empty, (part // c.stages - 1) % 2)
            self.issue(t, part, packed, policy)

    @cute.jit
    def issue(self, t: Thread, part: Int32, packed: cute.Pointer, policy: Int64):
        """Copy this CTA's half of the rows of one stage."""
        c = self.config
        j = part // c.parts
        block = t.first + j - t.early
        if j < t.early:
            block = c.qkvg_blocks + t.cluster + j * c.clusters
        row = block * BLOCK_ROWS + part % c.parts * c.rows
        source = packed.toint() + Int64(row) * ROW_BYTES + Int64(t.rank * PIECE_BYTES)
        stage = part % c.stages
        barrier = t.full + stage * BARRIER_BYTES
        expect_bytes(barrier, c.rows * PIECE_BYTES)
        for r in cutlass.range_constexpr(c.rows):
            target = t.ring + stage * c.stage_bytes + r * ROW_PITCH
            copy_bulk(target, source + r * ROW_BYTES, PIECE_BYTES, barrier, policy)

    def load_x(self, t: Thread, x: cute.Pointer) -> list[list[Vector]]:
        """A consumer's part of x as ``mma`` operands ``[step][0 or 1]``; zeros for tokens that are not there.

        Every warp calls it and only consumers load: after a branch what it loads could not be kept past the one place
        where all warps meet, see :func:`meet`.
        """
        token = t.lane // 4
        tokens = t.tokens * Int32(t.warp < CONSUMERS)
        start = x.toint() + Int64(token) * ROW_BYTES + Int64(t.rank * PIECE_BYTES + slice_start(t.warp, t.lane))
        inputs = []
        for step in range(STEPS):
            low, high = (
                load_input_if(token + half < tokens, start + (half * ROW_BYTES + step * STEP_BYTES)) for half in HALVES
            )
            inputs.append(operands(low, high))
        return inputs

    @cute.jit
    def consume(self, t: Thread, inputs: list[list[Vector]]):
        """Multiply every block by this warp's part of x."""
        c = self.config
        row = t.lane // 4
        mine = t.ring + row % c.rows * ROW_PITCH + slice_start(t.warp, t.lane)
        target = t.ring + c.sums_start + t.warp * SUM_BYTES + t.lane * VECTOR_BYTES
        for j in cutlass.range(t.count, unroll=1):
            part = j * c.parts
            for p in cutlass.range_constexpr(c.parts):
                wait_parity(t.full + (part + p) % c.stages * BARRIER_BYTES, (part + p) // c.stages % 2)
            # Each lane has waited for itself, and mma wants them together.
            cute.arch.sync_warp()
            weights = load_block(mine + (part + row // c.rows) % c.stages * c.stage_bytes)
            for p in cutlass.range_constexpr(c.parts):
                arrive(t.full + (c.stages + (part + p) % c.stages) * BARRIER_BYTES)
            sums = multiply(inputs, weights)
            slot = j % SUMS
            barrier = t.ready + slot * BARRIER_BYTES
            if j >= SUMS:
                wait_parity(barrier + SUMS * BARRIER_BYTES, (j // SUMS - 1) % 2)
            store_shared_sums(target + slot * (CONSUMERS * SUM_BYTES), sums)
            arrive(barrier)

    @cute.jit
    def add_up(self, t: Thread, qkvg: cute.Pointer, beta: cute.Pointer, beta_stride: Int64, workspace: cute.Pointer):
        """Add the sums of the warps, then those of the two CTAs; round once and store."""
        c = self.config
        peer = 1 - t.rank
        for j in cutlass.range(t.count, unroll=1):
            slot = j % SUMS
            barrier = t.ready + slot * BARRIER_BYTES
            wait_parity(barrier, j // SUMS % 2)
            mine = add_warps(t.ring + c.sums_start + slot * (CONSUMERS * SUM_BYTES) + t.lane * VECTOR_BYTES)
            arrive(barrier + SUMS * BARRIER_BYTES)
            # Two letters are enough: a CTA sends its next one only after it has read the other's.
            turn = j // SPLIT
            letter = t.ring + c.letters_start + turn % LETTERS * SUM_BYTES + t.lane * VECTOR_BYTES
            come = t.arrived + turn % LETTERS * BARRIER_BYTES
            if j % SPLIT != t.rank:
                send_sums(cluster_address(letter, peer), mine, cluster_address(come, peer))
            else:
                if t.lane == 0:
                    expect_bytes(come, SUM_BYTES)
                wait_bytes(come, turn // LETTERS % 2)
                sums = add(mine, load_shared_sums(letter))
                if j < t.early:
                    self.store_fa_beta(t, sums, t.cluster + j * c.clusters, beta, beta_stride, workspace)
                else:
                    store_rows(t, sums, t.first + j - t.early, qkvg, c.shapes.qkvg_rows)

    def store_fa_beta(
        self, t: Thread, sums: Sums, block: Int32, beta: cute.Pointer, beta_stride: Int64, workspace: cute.Pointer
    ) -> None:
        """f_a into the workspace, and count that; beta to where the caller wants it; the padding nowhere."""
        row = block * BLOCK_ROWS + t.lane % 4 * 2
        is_beta = (row >= F_A_ROWS) & (row < F_A_ROWS + self.config.shapes.heads)
        for k, half in enumerate(HALVES):
            token = t.lane // 4 + half
            low, high = sums[2 * k], sums[2 * k + 1]
            f_a = workspace.toint() + F_A_START + Int64(token * F_A_ROWS + row) * BF16_BYTES
            store_pair_if((token < t.tokens) & (row < F_A_ROWS), f_a, low, high)
            address = beta.toint() + (Int64(token) * beta_stride + Int64(row - F_A_ROWS)) * BF16_BYTES
            store_bf16_if((token < t.tokens) & is_beta, address, low)
            store_bf16_if((token < t.tokens) & is_beta, address + BF16_BYTES, high)
        cute.arch.sync_warp()
        count_if((t.lane == 0) & (block < self.f_a_blocks), workspace.toint())

    @cute.jit
    def gate(self, t: Thread, gate: Int32, f_b: cute.Pointer, workspace: cute.Pointer, g1: cute.Pointer):
        """F_B: the jobs of this CTA, one warp for all of K."""
        c = self.config
        if (gate >= 0) & (gate < self.gates):
            for i in cutlass.range(share(self.jobs, self.gates, gate), unroll=1):
                job = gate + i * self.gates
                weights = load_job(t, f_b, job)
                if i == 0:
                    # Not before: the launch in front of this one may still use the counters.
                    if cutlass.const_expr(c.pdl):
                        cute.arch.griddepcontrol_wait()
                    if t.lane == 0:
                        wait_count(workspace.toint(), self.f_a_blocks)
                cute.arch.sync_warp()
                sums = multiply_job(t, weights, workspace)
                for b in cutlass.range_constexpr(len(weights)):
                    store_rows(t, sums[b], job * len(weights) + b, g1, c.shapes.f_b_rows)
            cute.arch.sync_warp()
            if t.lane == 0:
                leave(workspace.toint(), self.gates - 1)


def meet() -> None:
    """From here on the barriers of both CTAs of the cluster exist. Relaxed: publishing them has released them, and a
    release here would wait for all loads and copies on their way.
    """
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


def init_barriers(start: Int32, count: int, arrivals: int) -> None:
    for i in range(count):
        init_barrier(start + i * BARRIER_BYTES, arrivals)


def slice_start(warp: Int32, lane: Int32) -> Int32:
    """Bytes from the start of a CTA's half of a row to this lane's first vector."""
    return warp * (STEPS * STEP_BYTES) + lane % 4 * VECTOR_BYTES


def store_rows(t: Thread, sums: Sums, block: Int32, out: cute.Pointer, columns: int) -> None:
    """Store one block of an output ``[M, columns]``."""
    column = block * BLOCK_ROWS + t.lane % 4 * 2
    for k, half in enumerate(HALVES):
        token = t.lane // 4 + half
        address = out.toint() + Int64(token * columns + column) * BF16_BYTES
        store_pair_if(token < t.tokens, address, sums[2 * k], sums[2 * k + 1])


def load_job(t: Thread, f_b: cute.Pointer, job: Int32) -> list[list[Vector]]:
    """This lane's vectors of the F_B rows of a job: ``[block][step]``."""
    row_bytes = F_A_ROWS * BF16_BYTES
    start = f_b.toint() + Int64(job * JOB_ROWS + t.lane // 4) * row_bytes + Int64(t.lane % 4 * VECTOR_BYTES)
    return [
        [load_weights(start + (row * row_bytes + step * STEP_BYTES)) for step in range(F_A_ROWS // STEP_COLUMNS)]
        for row in range(0, JOB_ROWS, BLOCK_ROWS)
    ]


def multiply_job(t: Thread, weights: list[list[Vector]], workspace: cute.Pointer) -> list[Sums]:
    """The sums of the blocks of a job."""
    token = t.lane // 4
    start = workspace.toint() + F_A_START + Int64(token * F_A_ROWS * BF16_BYTES + t.lane % 4 * VECTOR_BYTES)
    sums: list[Sums] = [(Float32(0.0),) * 4 for _ in weights]
    for step in range(F_A_ROWS // STEP_COLUMNS):
        low, high = (
            load_input_if(token + half < t.tokens, start + (half * F_A_ROWS * BF16_BYTES + step * STEP_BYTES))
            for half in HALVES
        )
        for i, x in enumerate(operands(low, high)):
            sums = [mma(x, rows[step][2 * i : 2 * i + 2], s) for rows, s in zip(weights, sums, strict=True)]
    return sums


def share(total: int, parts: int, part: Int32) -> Int32:
    """How many of ``total`` things this part gets."""
    return Int32(total // parts) + Int32(part < total % parts)


def before(total: int, parts: int, part: Int32) -> Int32:
    """How many of ``total`` things the parts before this one get."""
    return part * (total // parts) + cutlass.min(part, total % parts)


# The name that profilers and PTX show.
Stream.kernel.set_name_prefix("kda_stream", remove_cutlass_symbol=True, keep_mangled_name=False)
