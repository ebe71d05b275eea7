"""The three decode projections of one KDA layer as one call: eager, or captured in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kda_lib.autotune import TuningStore, TuningTable, shipped_table, tune
from kda_lib.backends import Backend, naming, run_gemm
from kda_lib.compile import kernel_name
from kda_lib.errors import NotWarmedUp
from kda_lib.runtime import Outputs, Runtime, check_input, check_out, check_tensor, loaded_kernel
from kda_lib.shapes import F_A_ROWS, HIDDEN, MAX_TOKENS, KdaShapes
from kda_lib.strategies import AUTO, Facts, Plan, Strategy, find_strategy, make_plan


class KdaProjection:
    """QKVG, F_A/beta and F_B of one layer on one tensor-parallel rank; H = 96 / tp heads.

    The weights are kept, not copied: what is written into them later counts. A kernel with programmatic dependent
    launch reads them before it waits for the kernel in front of it, so work that writes them must be complete, not
    just enqueued, before a call.

    One call at a time for each projection, because its second stream, its events and the stream kernel's workspace are
    reused: not two threads at once, and not two CUDA streams at once, replays of captured graphs included. Different
    projections may run side by side, also on the same weights. A captured graph holds addresses inside the projection,
    which must live as long as the graph. Tensors may be on a device other than the current one.

    Args:
        packed_weight: BF16 [packed_rows, 7168], row-major, 16-byte aligned, on a CUDA device: QKVG, F_A, beta, padding.
        f_b_weight: BF16 [128*H, 128], likewise, on the same device.
        tp: tensor-parallel degree, a divisor of 96.
        strategy: ``"auto"``, a name in :data:`kda_lib.strategies.STRATEGIES`, or a strategy such as
            ``Overlap(fork="wide_first")``.
        qkvg: the backend of a separate QKVG (a name of :class:`kda_lib.backends.Backend`); it rules out ``"stream"``.
            ``None`` lets :func:`kda_lib.backends.select_backend` choose.
        table: the measured times to choose by; nothing is then tuned. ``None`` starts from what came with the library
            for this device, and :meth:`warmup` measures what is missing.

    Raises:
        TypeError, ValueError: an argument is not as described. Nothing was launched.
    """

    def __init__(
        self,
        packed_weight: torch.Tensor,
        f_b_weight: torch.Tensor,
        *,
        tp: int = 8,
        strategy: str | Strategy = AUTO,
        qkvg: Backend | str | None = None,
        table: TuningTable | None = None,
    ) -> None:
        shapes = KdaShapes(tp)
        self._strategy = find_strategy(strategy)
        backend = _find_backend(qkvg)
        packed = check_tensor("packed_weight", packed_weight, shapes.packed_rows, HIDDEN)
        f_b = check_tensor("f_b_weight", f_b_weight, shapes.f_b_rows, F_A_ROWS, packed.device)
        self._runtime = Runtime(shapes, packed, f_b)
        self._tunes = table is None and backend is None
        if table is None:
            table = shipped_table(shapes, torch.cuda.get_device_name(packed.device))
        sms = torch.cuda.get_device_properties(packed.device).multi_processor_count
        self._facts = Facts(self._runtime.arch, shapes, table, backend, sms=sms)
        self._ready: dict[int, Plan] = {}
        self._warming = threading.Lock()

    @property
    def shapes(self) -> KdaShapes:
        return self._facts.shapes

    @property
    def table(self) -> TuningTable:
        """The measured times that plans are made from."""
        return self._facts.table

    def plan(self, m: int) -> Plan:
        """What a call with m tokens does, as things stand. Warm-up may measure an M that is not ready and change it.

        Raises:
            TypeError, ValueError, BrokenBackend: as in :func:`kda_lib.strategies.make_plan`.
        """
        return self._ready.get(m) or make_plan(self._facts, m, self._strategy)

    def explain(self, m: int) -> str:
        """:meth:`plan` in words. Errors likewise."""
        return f"{self._facts.arch}, TP{self.shapes.tp}, {self.plan(m)}"

    def warmup(self, tokens: Iterable[int] = range(1, MAX_TOKENS + 1)) -> None:
        """Tune, compile, load and run once for each number of tokens; afterwards a call only launches.

        Raises:
            TypeError, ValueError: a number of tokens is illegal, or the strategy or backend does not take it.
            NotWarmedUp: a CUDA graph is being captured, and not all of these are ready.
            CompileError: a kernel does not compile for this device.
            BrokenBackend: a backend is installed, needed and fails.
        """
        wanted = list(tokens)
        with torch.cuda.device(self._runtime.device), torch.no_grad(), self._warming:
            plans = {m: self.plan(m) for m in wanted if m not in self._ready}
            if not plans:
                return
            if torch.cuda.is_current_stream_capturing():
                raise NotWarmedUp([_outline(plan) for plan in plans.values()])
            if self._tunes:
                self._tune([m for m, plan in plans.items() if plan.qkvg is not None])
            for m in plans:
                self._ready[m] = self._prepare(make_plan(self._facts, m, self._strategy))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> Outputs:
        """Project M hidden states on the current stream of the weights' device.

        Args:
            hidden_states: BF16 [M, 7168], contiguous, 16-byte aligned, on the weights' device.
            out: qkvg, g1 (contiguous, aligned) and beta to write to, which must not overlap other arguments. Parts
                that a strategy computes inside a larger tensor are copied, one more kernel each.

        Returns:
            qkvg [M, 4*128*H], g1 [M, 128*H] and beta [M, H]: ``out``, or new tensors, of which qkvg and beta may be
            views with a longer row stride. No gradients.

        Raises:
            TypeError, ValueError: an argument is not as described. Nothing was launched.
            NotWarmedUp: a CUDA graph is being captured and this M is not ready; the capture goes on. Outside capture
                an M that is not ready is warmed up by the call, with the errors of :meth:`warmup`.
        """
        x = check_input(hidden_states, self._runtime.device)
        m = x.shape[0]
        outputs = None if out is None else check_out(out, self.shapes, x, self._runtime.weights)
        if m not in self._ready:
            self.warmup([m])
        plan = self._ready[m]
        with torch.cuda.device(self._runtime.device), torch.no_grad():
            return plan.strategy.run(self._runtime, plan, x, outputs)

    def armed(self) -> bool:
        """Whether the stream kernel can be launched: its counters are 0, as every launch that ends leaves them.

        Waits for the current stream. ``True`` where no launch was ever made.
        """
        with torch.cuda.device(self._runtime.device):
            return self._runtime.armed()

    def rearm(self) -> None:
        """Clear the counters of the stream kernel, on the current stream, after a launch that was aborted half-way.

        No launch of this projection may be running. The launches that follow, and the graphs that were captured, are
        right again. Without effect for other strategies.
        """
        with torch.cuda.device(self._runtime.device):
            self._runtime.rearm()

    def _tune(self, tokens: list[int]) -> None:
        facts, device = self._facts, self._runtime.device
        if tokens:
            table = tune(facts.arch, facts.shapes, tokens, device, facts.detect(), facts.table, TuningStore.default())
            self._facts = replace(facts, table=table)

    def _prepare(self, plan: Plan) -> Plan:
        runtime = self._runtime
        for _, config in plan.kernels:
            loaded_kernel(config, runtime.arch)
        x = torch.zeros(plan.m, HIDDEN, dtype=torch.bfloat16, device=runtime.device)
        # What a launch does wrong shows up at the synchronisation, not in somebody's capture.
        if plan.qkvg is not None and plan.backend is not Backend.SKINNY:
            with naming(plan.backend):
                run_gemm(plan.backend, x, runtime.qkvg, runtime.empty(plan.m, self.shapes.qkvg_rows))
                torch.cuda.current_stream().synchronize()
        plan.strategy.run(runtime, plan, x, None)
        torch.cuda.current_stream().synchronize()
        return plan


def _find_backend(name: Any) -> Backend | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"qkvg: expected the name of a backend, got {type(name).__name__}; pass 'torch.mm' or None")
    if name not in list(Backend):
        raise ValueError(f"qkvg: expected one of {', '.join(Backend)}, got {name!r}; pass one of these or None")
    return Backend(name)


def _outline(plan: Plan) -> str:
    """Such as ``M = 3 (overlap: QKVG by torch.mm, F_A/beta by skinny_n, F_B by skinny_k)``."""
    parts = [f"QKVG by {plan.backend}"] if plan.qkvg is not None and plan.backend is not Backend.SKINNY else []
    parts += [f"{part} by {kernel_name(config)}" for part, config in plan.kernels]
    return f"M = {plan.m} ({plan.strategy.name}" + (f": {', '.join(parts)})" if parts else ")")
