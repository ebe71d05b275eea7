"""How the three projections of one layer are arranged: what each arrangement needs, and how it runs.

A strategy makes a frozen :class:`Plan` as a pure function of :class:`Facts`, M and its own options, and runs it on a
:class:`~kda_lib.runtime.Runtime`. New ones are added with :func:`register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from kda_lib.arch import Arch
from kda_lib.autotune import TuningTable
from kda_lib.backends import (
    Backend,
    Choice,
    Installed,
    detect_installed,
    has_kernels,
    run_gemm,
    runnable,
    select_backend,
)
from kda_lib.compile import kernel_name
from kda_lib.kernels.config import qkvg_gemv_config, skinny_k_config, skinny_n_config
from kda_lib.kernels.stream_config import StreamConfig, stream_config
from kda_lib.runtime import LayerKernel, Outputs, Runtime, fa_beta_parts, packed_parts
from kda_lib.shapes import MAX_TOKENS, KdaShapes, check_tokens

Fork: TypeAlias = Literal["wide_first", "side_first"]


@dataclass(frozen=True)
class Facts:
    """What a plan depends on beside M and the strategy.

    qkvg: the backend to use whatever the table says, or ``None``. detect: asked only by strategies that choose a
    backend, so that a broken FlashInfer does not stop those that do without. sms: multiprocessors of the device;
    ``None`` where they are not known, which rules out ``stream``.
    """

    arch: Arch
    shapes: KdaShapes
    table: TuningTable = field(default_factory=TuningTable)
    qkvg: Backend | None = None
    detect: Callable[[], Installed] = detect_installed
    sms: int | None = None


@dataclass(frozen=True)
class Plan:
    """What a call with m tokens does.

    qkvg: backend of a separate QKVG, ``None`` where another launch includes it. kernels: this library's kernels that
    are launched, by part. reason: why this strategy.
    """

    m: int
    strategy: Strategy
    reason: str
    qkvg: Choice | None = None
    kernels: tuple[tuple[str, LayerKernel], ...] = ()

    def kernel(self, part: str) -> LayerKernel:
        """The configuration for a part. Raises KeyError where none is planned."""
        return dict(self.kernels)[part]

    @property
    def backend(self) -> Backend:
        """Of the separate QKVG. Raises ValueError where there is none."""
        if self.qkvg is None:
            raise ValueError(f"plan: expected one with a QKVG backend, got {self.strategy}; use Overlap")
        return self.qkvg.backend

    def __str__(self) -> str:
        lines = [f"M = {self.m}: {self.strategy}, because {self.reason}."]
        if self.qkvg is not None:
            lines.append(f"QKVG: {self.qkvg.backend}, because {self.qkvg.reason}.")
        for part, config in self.kernels:
            launch = config.launch
            shape = f"{launch.grid} CTAs of {launch.block} threads" + (
                f" in clusters of {launch.cluster}" if launch.cluster > 1 else ""
            )
            pdl = "with" if launch.pdl else "without"
            fma = "" if isinstance(config, StreamConfig) else f" ({config.fma} FMA)"
            lines.append(f"{part}: kernel {kernel_name(config)}{fma}, {shape}, {pdl} PDL.")
        return "\n".join(lines)


class Strategy(ABC):
    """An arrangement. Instances are frozen and compare by value."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def refusal(self, facts: Facts, m: int) -> str | None:
        """Why it cannot run there, in words, or ``None``. Pure."""

    @abstractmethod
    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        """Pure: no device is asked, nothing is compiled."""

    @abstractmethod
    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        """Launch everything on the current stream and streams joined to it. All arguments are checked."""


@dataclass(frozen=True)
class Sequential(Strategy):
    """Full disable of the overlap: one GEMM over all packed rows, then F_B; both ``torch.mm``. Any M, any device.

    f_a is what the packed GEMM rounded to BF16. With ``out``, qkvg and beta are copied from the packed output.
    """

    name = "sequential"

    def refusal(self, facts: Facts, m: int) -> str | None:
        return None

    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        return Plan(m, self, reason)

    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        qkvg, f_a, beta = packed_parts(runtime.shapes, torch.mm(x, runtime.packed.T))
        if out is None:
            return Outputs(qkvg, torch.mm(f_a, runtime.f_b.T), beta)
        torch.mm(f_a, runtime.f_b.T, out=out.g1)
        out.qkvg.copy_(qkvg)
        out.beta.copy_(beta)
        return out


@dataclass(frozen=True)
class Overlap(Strategy):
    """QKVG on the current stream; F_A/beta, then F_B, on a second one. Up to 16 tokens.

    fork: which branch is launched first, ``"side_first"`` or ``"wide_first"`` (QKVG). With ``out``, beta is copied.
    Side first is the default because it has the lower median for 1 to 8 tokens on an H200 (notebook 05).
    """

    fork: Fork = "side_first"

    name = "overlap"

    def __post_init__(self) -> None:
        if self.fork not in get_args(Fork):
            raise ValueError(f"fork: expected one of {', '.join(get_args(Fork))}, got {self.fork!r}; choose one")

    def __str__(self) -> str:
        return f"{self.name} ({self.fork.replace('_', ' ')})"

    def refusal(self, facts: Facts, m: int) -> str | None:
        if not has_kernels(facts.arch):
            return f"its kernels are not built for {facts.arch}"
        if m > MAX_TOKENS:
            return f"its kernels take up to {MAX_TOKENS} tokens"
        try:
            skinny_n_config(facts.arch, m, facts.shapes)
            skinny_k_config(facts.arch, m, facts.shapes)
        except ValueError as error:
            return f"its kernels are not configured for TP{facts.shapes.tp} ({error})"
        return None

    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        choice = _qkvg_choice(facts, m)
        kernels: list[tuple[str, LayerKernel]] = [
            ("F_A/beta", skinny_n_config(facts.arch, m, facts.shapes)),
            ("F_B", skinny_k_config(facts.arch, m, facts.shapes)),
        ]
        if choice.backend is Backend.SKINNY:
            kernels.append(("QKVG", qkvg_gemv_config(facts.arch, m, facts.shapes)))
        return Plan(m, self, reason, choice, tuple(kernels))

    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        shapes = runtime.shapes
        qkvg = runtime.empty(plan.m, shapes.qkvg_rows) if out is None else out.qkvg
        g1 = runtime.empty(plan.m, shapes.f_b_rows) if out is None else out.g1
        fa_beta = runtime.empty(plan.m, shapes.fa_beta_rows)
        f_a, beta = fa_beta_parts(shapes, fa_beta)
        with runtime.fork() as (main, side):

            def wide_branch() -> None:
                if (backend := plan.backend) is Backend.SKINNY:
                    runtime.launch(plan.kernel("QKVG"), x, runtime.qkvg, qkvg, main)
                else:
                    run_gemm(backend, x, runtime.qkvg, qkvg)

            def side_branch() -> None:
                runtime.launch(plan.kernel("F_A/beta"), x, runtime.fa_beta, fa_beta, side)
                runtime.launch(plan.kernel("F_B"), f_a, runtime.f_b, g1, side)

            branches = (wide_branch, side_branch)
            for branch in branches if self.fork == "wide_first" else reversed(branches):
                branch()
        if out is None:
            return Outputs(qkvg, g1, beta)
        out.beta.copy_(beta)
        return out


@dataclass(frozen=True)
class Stream(Strategy):
    """Everything in one launch of a kernel that reads each weight once (:mod:`kda_lib.kernels.stream`).

    Up to 16 tokens, from sm_90 on. A row has the same bits whatever M, the other rows and the number of SMs are.
    ``out`` is written directly. pdl: launch with programmatic dependent launch, so that the first weights are read
    while the kernel in front ends.
    """

    pdl: bool = True

    name = "stream"

    #: The one part of its plans.
    PART: ClassVar[str] = "QKVG, F_A/beta and F_B"

    def __str__(self) -> str:
        return self.name if self.pdl else f"{self.name} (without PDL)"

    def refusal(self, facts: Facts, m: int) -> str | None:
        arch = facts.arch
        if not has_kernels(arch):
            return f"its kernel is not built for {arch}"
        if not arch.has_clusters:
            return f"{arch} lacks bulk copies to shared memory, which begin with sm_90"
        if m > MAX_TOKENS:
            return f"its kernel takes up to {MAX_TOKENS} tokens"
        if facts.qkvg is not None:
            return f"it computes QKVG itself, and {facts.qkvg} was asked for"
        try:
            self._config(facts)
        except ValueError as error:
            return f"its kernel is not configured for TP{facts.shapes.tp} ({error})"
        return None

    def plan(self, facts: Facts, m: int, reason: str) -> Plan:
        return Plan(m, self, reason, kernels=((self.PART, self._config(facts)),))

    def run(self, runtime: Runtime, plan: Plan, x: torch.Tensor, out: Outputs | None) -> Outputs:
        shapes = runtime.shapes
        if out is None:
            out = Outputs(*(runtime.empty(plan.m, rows) for rows in (shapes.qkvg_rows, shapes.f_b_rows, shapes.heads)))
        runtime.launch_stream(plan.kernel(self.PART), x, out, torch.cuda.current_stream(runtime.device))
        return out

    def _config(self, facts: Facts) -> StreamConfig:
        """The same for every M, so that one kernel serves all."""
        if facts.sms is None:
            raise ValueError("sms: expected the number of SMs, got None; ask the device")
        return stream_config(facts.arch, facts.shapes, facts.sms, pdl=self.pdl)


def _qkvg_choice(facts: Facts, m: int) -> Choice:
    installed = facts.detect()
    if facts.qkvg is None:
        return select_backend(facts.arch, facts.shapes, m, installed, facts.table)
    if facts.qkvg not in (possible := runnable(facts.arch, m, installed)):
        raise ValueError(
            f"qkvg: expected a backend that runs on {facts.arch} for M = {m} ({', '.join(possible)}), "
            f"got {facts.qkvg}; choose one of these or None"
        )
    return Choice(facts.qkvg, "it was asked for")


#: What a strategy's name stands for.
STRATEGIES: dict[str, Strategy] = {}


def register(strategy: Strategy) -> None:
    """Make a strategy known by its name: to ``KdaProjection``, and to ``auto`` where it has been measured.

    Raises:
        ValueError: the name is taken.
    """
    if strategy.name in (*STRATEGIES, AUTO):
        raise ValueError(f"strategy: expected a new name, got {strategy.name!r}; choose another name")
    STRATEGIES[strategy.name] = strategy


#: The strategy that is chosen anew for every M.
AUTO = "auto"

register(Sequential())
register(Overlap())
register(Stream())


def find_strategy(strategy: str | Strategy) -> Strategy | None:
    """The strategy of this name, or itself; ``None`` for ``"auto"``.

    Raises:
        TypeError: neither a name nor a strategy.
        ValueError: an unknown name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(f"strategy: expected a name or a Strategy, got {type(strategy).__name__}; pass 'auto'")
    if strategy != AUTO and strategy not in STRATEGIES:
        raise ValueError(
            f"strategy: expected one of {', '.join((AUTO, *STRATEGIES))}, got {strategy!r}; pass one of these names"
        )
    return STRATEGIES.get(strategy)


def make_plan(facts: Facts, m: int, strategy: Strategy | None) -> Plan:
    """The plan for m tokens: by this strategy, or by the one that ``auto`` chooses (``None``).

    Raises:
        TypeError: m is not an int.
        ValueError: m is below 1, or the strategy or the backend asked for cannot run there.
        BrokenBackend: FlashInfer is installed, needed and broken.
    """
    check_tokens(m, max(m, MAX_TOKENS) if isinstance(m, int) else MAX_TOKENS)
    if strategy is None:
        strategy, reason = _choose(facts, m)
    elif refusal := strategy.refusal(facts, m):
        raise ValueError(
            f"strategy: expected one that runs on {facts.arch} for M = {m}, got {strategy.name}: {refusal}; use "
            f"'{AUTO}' or '{Sequential.name}'"
        )
    else:
        reason = "it was asked for"
    return strategy.plan(facts, m, reason)


def _choose(facts: Facts, m: int) -> tuple[Strategy, str]:
    """The fastest measured strategy that can run; where fewer than two were measured, a rule.

    The rule: stream wherever it can run, since it reads every weight once and nothing else; overlap up to its limit
    otherwise.
    """
    times = {
        name: us
        for name, us in facts.table.strategy_us.get(m, {}).items()
        if name in STRATEGIES and STRATEGIES[name].refusal(facts, m) is None
    }
    if len(times) > 1:
        ranked = sorted(times, key=lambda name: times[name])
        listed = ", ".join(f"{name} {times[name]:.1f} us" for name in ranked)
        return STRATEGIES[ranked[0]], f"it is the fastest measured: {listed}"
    stream, overlap, sequential = (STRATEGIES[kind.name] for kind in (Stream, Overlap, Sequential))
    unmeasured = "no strategies were measured against each other"
    if (no_stream := stream.refusal(facts, m)) is None:
        return stream, f"it reads every weight once, in one launch, and {unmeasured}"
    if no_overlap := overlap.refusal(facts, m):
        return sequential, f"stream cannot run here ({no_stream}), nor can overlap ({no_overlap})"
    limit = facts.table.overlap_limit
    if m <= limit:
        return (
            overlap,
            f"stream cannot run here ({no_stream}), overlap is the default up to M = {limit}, and {unmeasured}",
        )
    return sequential, f"stream cannot run here ({no_stream}), and M is above the overlap limit, {limit}"
