"""Launch configurations of the kernels: frozen, validated before anything is compiled, importable without the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from kda_lib.arch import Arch
from kda_lib.kernels.fma import FmaForm, default_form
from kda_lib.shapes import F_A_ROWS, HIDDEN, KdaShapes, check_tokens

#: BF16 values in the widest global load, ``ld.global.v4.b32``.
VECTOR = 8
BF16_BYTES = 2
WARP = 32
#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads of a block, and the largest
#: cluster that every device with clusters supports.
MAX_THREADS = 1024
MAX_CLUSTER = 8
#: Most tokens for which QKVG has a skinny kernel, a candidate that is measured; above, tensor cores are faster.
GEMV_TOKENS = 4


def _require(holds: bool, name: str, expected: str, got: object, advice: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}; {advice}")


def _require_counts(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}; pass a whole number")
        _require(value >= 1, name, "at least 1", value, "use a positive number")


@dataclass(frozen=True)
class Launch:
    """Grid, block, cluster (CTAs along x), programmatic dependent launch or not, bytes of dynamic shared memory."""

    grid: int
    block: int
    cluster: int
    pdl: bool
    smem: int = 0


@dataclass(frozen=True)
class SkinnyNConfig:
    """``out[m, n] = x[m, k] @ w[n, k].T``, long k. See :mod:`kda_lib.kernels.skinny_n`.

    rows: weight rows of a CTA. split: CTAs of a cluster that divide K. steps: 16-byte vectors of K a thread takes.
    tokens: tokens a thread takes in one pass. groups: groups of K-threads in a block, each with its own tokens.
    """

    m: int
    n: int
    k: int
    rows: int
    split: int
    steps: int
    tokens: int
    groups: int
    fma: FmaForm
    pdl: bool

    @property
    def k_threads(self) -> int:
        """Threads that divide a CTA's share of K among them."""
        return self.k // (self.split * self.steps * VECTOR)

    @property
    def passes(self) -> int:
        """How often each thread goes through its K, with other tokens each time."""
        return -(-self.m // (self.tokens * self.groups))

    @property
    def warps(self) -> int:
        """Warps of one group."""
        return self.k_threads // WARP

    @property
    def launch(self) -> Launch:
        return Launch(self.n // self.rows * self.split, self.k_threads * self.groups, self.split, self.pdl)

    def validate(self, arch: Arch) -> SkinnyNConfig:
        """Return self.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: the target lacks something, or the numbers do not divide.
        """
        check_tokens(self.m)
        _require_counts(self, "n", "k", "rows", "split", "steps", "tokens", "groups")
        _require(self.n % self.rows == 0, "rows", f"a divisor of n = {self.n}", self.rows, "every CTA owns whole rows")
        _require(self.k % VECTOR == 0, "k", f"a multiple of the vector, {VECTOR}", self.k, "pad K")
        unit = self.split * self.steps * VECTOR * WARP
        _require(self.k % unit == 0, "k", f"a multiple of split x steps x {VECTOR} x {WARP} = {unit}", self.k,
                 "choose split and steps so that whole warps share K")  # fmt: skip
        _require(self.tokens < 2 * self.m, "tokens", f"less than 2 m = {2 * self.m}", self.tokens, "lower tokens")
        _require(self.launch.block <= MAX_THREADS, "threads of a block", f"at most {MAX_THREADS}", self.launch.block,
                 "lower groups or raise steps or split")  # fmt: skip
        _require(self.rows * self.tokens <= 128, "rows x tokens", "at most 128 accumulators a thread",
                 self.rows * self.tokens, "lower one of them or registers spill")  # fmt: skip
        _require(self.rows * self.steps <= 16, "rows x steps", "at most 16 vectors in flight a thread",
                 self.rows * self.steps, "lower one of them or registers spill")  # fmt: skip
        _validate_target(arch, self.fma, self.pdl)
        _require(self.split == 1 or arch.has_clusters, "split", f"1 on {arch}, which has no clusters", self.split,
                 "use split=1")  # fmt: skip
        _require(self.split <= MAX_CLUSTER, "split", f"at most {MAX_CLUSTER}", self.split, "use a smaller cluster")
        return self


@dataclass(frozen=True)
class SkinnyKConfig:
    """``out[m, n] = x[m, k] @ w[n, k].T``, short k. See :mod:`kda_lib.kernels.skinny_k`.

    x has a row stride of ``x_stride`` elements. rows: weight rows of a CTA. row_tile, tokens: rows and tokens of a
    thread; the block has one group of threads for each ``tokens`` tokens.
    """

    m: int
    n: int
    k: int
    x_stride: int
    rows: int
    row_tile: int
    tokens: int
    fma: FmaForm
    pdl: bool

    @property
    def lanes(self) -> int:
        """Lanes that divide K among them, one 16-byte vector each."""
        return self.k // VECTOR

    @property
    def groups(self) -> int:
        return -(-self.m // self.tokens)

    @property
    def launch(self) -> Launch:
        return Launch(self.n // self.rows, self.rows // self.row_tile * self.lanes * self.groups, 1, self.pdl)

    def validate(self, arch: Arch) -> SkinnyKConfig:
        """Return self.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: the target lacks something, or the numbers do not divide.
        """
        check_tokens(self.m)
        _require_counts(self, "n", "k", "x_stride", "rows", "row_tile", "tokens")
        _require(self.n % self.rows == 0, "rows", f"a divisor of n = {self.n}", self.rows, "every CTA owns whole rows")
        _require(self.k % VECTOR == 0, "k", f"a multiple of the vector, {VECTOR}", self.k, "pad K")
        _require(self.lanes <= WARP and self.lanes & (self.lanes - 1) == 0, "k", "8, 16, 32, 64, 128 or 256", self.k,
                 "the lanes of a row must divide a warp")  # fmt: skip
        _require(self.rows % self.row_tile == 0 and self.rows // self.row_tile * self.lanes % WARP == 0, "rows",
                 f"a multiple of {self.row_tile * WARP // self.lanes}", self.rows, "fill whole warps")  # fmt: skip
        _require(self.x_stride >= self.k and self.x_stride % VECTOR == 0, "x_stride",
                 f"a multiple of {VECTOR}, at least k = {self.k}", self.x_stride, "16-byte loads need it")  # fmt: skip
        _require(self.tokens < 2 * self.m, "tokens", f"less than 2 m = {2 * self.m}", self.tokens, "lower tokens")
        _require(self.launch.block <= MAX_THREADS, "threads of a block", f"at most {MAX_THREADS}", self.launch.block,
                 "lower rows or raise tokens")  # fmt: skip
        _validate_target(arch, self.fma, self.pdl)
        return self


def _validate_target(arch: Arch, form: FmaForm, pdl: bool) -> None:
    # Whether the target has the instruction of this form is left to the assembler: compiling says it best.
    if not isinstance(form, FmaForm):
        raise TypeError(f"fma: expected an FmaForm, got {type(form).__name__}; use FmaForm.SHIFT")
    _validate_pdl(arch, pdl)


def _validate_pdl(arch: Arch, pdl: bool) -> None:
    if not isinstance(pdl, bool):
        raise TypeError(f"pdl: expected a bool, got {type(pdl).__name__}; pass True or False")
    _require(not pdl or arch.has_pdl, "pdl", f"False on {arch}, which has no griddepcontrol", pdl, "use pdl=False")


def skinny_n_config(arch: Arch, m: int, shapes: KdaShapes, form: FmaForm | None = None) -> SkinnyNConfig:
    """The configuration of F_A/beta for m tokens (1 to 16) on this target.

    Chosen by :mod:`kda_lib.lab.sweep` on an H200 (``reports/h200/results/skinny_sweep.json``).

    Targets with clusters: seven CTAs share K; above 4 tokens they take more rows and two groups share the tokens.
    Others: one CTA reads all of K for 2 rows. ``split`` and ``steps``, which fix the order of additions, are the same
    for every m: that is what makes the kernel batch-invariant.
    """
    check_tokens(m)
    clusters = arch.has_clusters
    groups = 1 if m <= 4 else 2
    rows = 4 if m <= 4 else 6 if shapes.fa_beta_rows % 6 == 0 else 5
    return SkinnyNConfig(
        m=m,
        n=shapes.fa_beta_rows,
        k=HIDDEN,
        rows=rows if clusters else 2,
        split=7 if clusters else 1,
        steps=2 if clusters else 4,
        tokens=_power_of_two(-(-m // groups)),
        groups=groups,
        fma=form or default_form(arch),
        pdl=arch.has_pdl,
    ).validate(arch)


def skinny_k_config(arch: Arch, m: int, shapes: KdaShapes, form: FmaForm | None = None) -> SkinnyKConfig:
    """The configuration of F_B for m tokens (1 to 16) on this target.

    Chosen as :func:`skinny_n_config`, by the 90th percentile: beside F_A/beta some shapes are fast in one graph and
    slow in the next.

    x is f_a inside the F_A/beta output. The order of additions depends on K alone.
    """
    check_tokens(m)
    return SkinnyKConfig(
        m=m,
        n=shapes.f_b_rows,
        k=F_A_ROWS,
        x_stride=shapes.fa_beta_rows,
        rows=16,
        row_tile=1 if m == 1 else 2 if m <= 4 else 4,
        tokens=8 if m > 12 else min(_power_of_two(m), 4),
        fma=form or default_form(arch),
        pdl=arch.has_pdl,
    ).validate(arch)


def qkvg_gemv_config(arch: Arch, m: int, shapes: KdaShapes, form: FmaForm | None = None) -> SkinnyNConfig:
    """The configuration of QKVG for 1 to :data:`GEMV_TOKENS` tokens on this target.

    Chosen by sweeps on an H200 of which no result file was kept.

    Targets with clusters: a few CTAs share K. Others: one CTA reads all of K, so that no cluster is needed.

    Raises:
        ValueError: m is above :data:`GEMV_TOKENS`, where tensor cores are faster.
    """
    check_tokens(m, GEMV_TOKENS)
    rows, split, steps = (4, 2, 1) if m == 1 else (8, 4, 1) if m <= 3 else (4, 1, 2)
    if not arch.has_clusters:
        rows, split, steps = 4, 1, 2
    return SkinnyNConfig(
        m=m,
        n=shapes.qkvg_rows,
        k=HIDDEN,
        rows=rows,
        split=split,
        steps=steps,
        tokens=_power_of_two(m),
        groups=1,
        fma=form or default_form(arch),
        pdl=arch.has_pdl,
    ).validate(arch)


def _power_of_two(m: int) -> int:
    """The smallest power of two that is at least m."""
    return 1 << (m - 1).bit_length()
