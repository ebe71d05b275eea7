"""Launch configuration of the stream kernel: frozen, validated before any compile, importable without the DSL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kda_lib.arch import Arch
from kda_lib.kernels.config import BF16_BYTES, WARP, Launch, _require, _require_counts, _validate_pdl
from kda_lib.kernels.lab_config import BARRIER_BYTES, shared_bytes
from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS, KdaShapes

#: Weight rows of a block: ``mma.sync.m16n8k16`` has tokens as its 16 rows and weight rows as its 8 columns (PTX ISA,
#: "Matrix Fragments for mma.m16n8k16").
BLOCK_ROWS = 8
#: CTAs of a cluster and warps of a CTA that divide K among them. Their numbers fix the order of additions.
SPLIT = 2
CONSUMERS = 8
#: Columns of a CTA, which a stage holds whole, and of two ``mma``: four lanes with a 16-byte vector each.
COLUMNS = HIDDEN // SPLIT
STEP_COLUMNS = 32
#: Steps of a warp in a block.
STEPS = COLUMNS // (CONSUMERS * STEP_COLUMNS)
#: Bytes of one bulk copy, a row of a stage, and from one row to the next: eight lanes that read two rows with 16 bytes
#: each then meet all banks once.
PIECE_BYTES = COLUMNS * BF16_BYTES
ROW_PITCH = PIECE_BYTES + 64
#: Bytes that a warp's sums of one block take: four FP32 a lane.
SUM_BYTES = 4 * 4 * WARP
#: Blocks whose sums may wait to be added up, and messages with sums that may lie in the inbox.
SUMS = 3
LETTERS = 2
#: F_B rows that a CTA does at a time.
JOB_ROWS = 16
#: The workspace: two 32-bit counters, and behind them, on a line of its own, f_a ``[16, 128]`` BF16.
F_A_START = 128
WORKSPACE_BYTES = F_A_START + MAX_TOKENS * F_A_ROWS * BF16_BYTES
#: Rows and number of stages, the best first: those that fit are taken. Both hold about the bytes that are in flight
#: between memory and one SM (bandwidth x latency is some 35 KB on an H200) several times over.
RINGS = ((8, 3), (2, 5))


@dataclass(frozen=True)
class StreamConfig:
    """All projections of one layer in one launch, for 1 to 16 tokens. See :mod:`kda_lib.kernels.stream`.

    ctas: persistent CTAs, as many as there are SMs, even. rows, stages: the ring: rows of a stage.
    """

    tp: int
    ctas: int
    rows: int
    stages: int
    pdl: bool

    @property
    def shapes(self) -> KdaShapes:
        return KdaShapes(self.tp)

    @property
    def clusters(self) -> int:
        return self.ctas // SPLIT

    @property
    def parts(self) -> int:
        """Stages that a block takes."""
        return BLOCK_ROWS // self.rows

    @property
    def stage_bytes(self) -> int:
        return self.rows * ROW_PITCH

    @property
    def qkvg_blocks(self) -> int:
        return self.shapes.qkvg_rows // BLOCK_ROWS

    @property
    def fa_beta_blocks(self) -> int:
        return self.shapes.fa_beta_rows // BLOCK_ROWS

    @property
    def first_gate(self) -> int:
        """The first CTA that does F_B: no cluster waits for one that the device may start later."""
        return SPLIT * (min(self.fa_beta_blocks, self.clusters) - 1)

    @property
    def sums_start(self) -> int:
        """Where the sums lie in shared memory, then the letters, then the barriers."""
        return self.stages * self.stage_bytes

    @property
    def letters_start(self) -> int:
        return self.sums_start + SUMS * CONSUMERS * SUM_BYTES

    @property
    def barriers_start(self) -> int:
        return self.letters_start + LETTERS * SUM_BYTES

    @property
    def launch(self) -> Launch:
        smem = self.barriers_start + (2 * self.stages + 2 * SUMS + LETTERS) * BARRIER_BYTES
        return Launch(self.ctas, (CONSUMERS + 3) * WARP, SPLIT, self.pdl, smem=smem)

    def validate(self, arch: Arch) -> StreamConfig:
        """Return self.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: the target lacks something, or the numbers do not divide.
        """
        _require_counts(self, "tp", "ctas", "rows", "stages")
        _require(arch.has_clusters, "target", "sm_90 or higher", arch, "it has no cp.async.bulk; use overlap")
        _validate_pdl(arch, self.pdl)
        _require(self.shapes.heads % 2 == 0, "tp", "one with an even number of heads", self.tp, "use 4, 8 or 16")
        _require(self.ctas % SPLIT == 0, "ctas", f"a multiple of {SPLIT}", self.ctas, "leave one SM out")
        blocks = self.qkvg_blocks + self.fa_beta_blocks
        _require(self.clusters <= blocks, "ctas", f"at most {SPLIT * blocks}", self.ctas, "every CTA needs work")
        _require(BLOCK_ROWS % self.rows == 0, "rows", f"a divisor of {BLOCK_ROWS}", self.rows, "use 2, 4 or 8")
        _require(self.stages > self.parts, "stages", f"more than the {self.parts} of a block", self.stages,
                 "some are filled while others are read")  # fmt: skip
        _require(self.launch.smem <= shared_bytes(arch), "shared memory of a block",
                 f"at most {shared_bytes(arch)} bytes on {arch}", self.launch.smem,
                 "lower stages")  # fmt: skip
        return self


def stream_config(
    arch: Arch, shapes: KdaShapes, sms: int, *, pdl: bool, rings: Sequence[tuple[int, int]] = RINGS
) -> StreamConfig:
    """The configuration for a device with this many SMs.

    rings: at least one, as :data:`RINGS`; ``RINGS[-1:]`` asks for the ring of targets with less shared memory.

    Raises:
        ValueError: the target has no clusters or bulk copies (below sm_90), or no ring fits.
    """
    _require(sms >= SPLIT, "sms", f"at least {SPLIT}", sms, "use overlap")
    *better, last = [StreamConfig(shapes.tp, sms // SPLIT * SPLIT, *ring, pdl) for ring in rings]
    fitting = [config for config in better if config.launch.smem <= shared_bytes(arch)]
    return (*fitting, last)[0].validate(arch)
