"""What notebook 05 compares, as variants made of the library's own pieces, and the tuning table that its rows give.

``sequential``, ``overlap``, ``overlap_wide_first`` and ``stream`` are a :class:`~kda_lib.projection.KdaProjection` for
each layer.
``side_branch`` is the second stream's work alone, F_A/beta and then F_B, in one stream. ``qkvg_<backend>`` is QKVG
alone as the library runs it, FlashInfer's backends with their heuristics. The stamped graph is the ``overlap`` strategy
on a runtime that marks both branches at the fork and at the join, so it takes the path that is shipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kda_lib.arch import Arch
from kda_lib.autotune import TuningTable
from kda_lib.backends import Backend, detect_installed, run_gemm, runnable
from kda_lib.cache import ArtifactCache
from kda_lib.kernels.config import (
    BF16_BYTES,
    SkinnyKConfig,
    SkinnyNConfig,
    qkvg_gemv_config,
    skinny_k_config,
    skinny_n_config,
)
from kda_lib.lab import peers
from kda_lib.lab.measure import Rows, Variant, capture
from kda_lib.lab.nbtools import replace_text
from kda_lib.lab.stamps import Branch, Interval, Stamps, exposed_us, overlap_us
from kda_lib.lab.workload import Weights, make_inputs
from kda_lib.projection import KdaProjection
from kda_lib.runtime import Runtime, fa_beta_parts
from kda_lib.shapes import F_A_ROWS, HIDDEN
from kda_lib.strategies import STRATEGIES, Facts, Overlap, Plan, Sequential, Strategy, Stream, make_plan

if TYPE_CHECKING:
    from kda_lib.lab.records import Result

#: Variant of a whole projection -> its strategy.
ARRANGEMENTS: Mapping[str, Strategy] = {
    "sequential": Sequential(),
    "overlap": Overlap(),
    "overlap_wide_first": Overlap(fork="wide_first"),
    "stream": Stream(),
}

#: The most tokens of a comparison; only ``sequential`` and ``auto`` take more than 16.
MOST_TOKENS = 64

#: Variant of QKVG alone -> the backend that it measures.
QKVG: Mapping[str, Backend] = {
    "qkvg_gemv": Backend.SKINNY,
    "qkvg_torch_mm": Backend.TORCH,
    "qkvg_cute_dsl": Backend.CUTE_DSL,
    "qkvg_cublaslt": Backend.CUBLASLT,
    "qkvg_tinygemm": Backend.TINYGEMM,
    "qkvg_tinygemm_pdl": Backend.TINYGEMM_PDL,
}

#: Ends the name of a variant that is measured a second time, to see whether the verdicts stay.
REPEAT = "_repeat"
#: Branches of the stamped graph: QKVG, and F_A/beta with F_B.
WIDE, SIDE = "wide", "side"
#: Replays of a stamped graph before those that count: the clocks rise.
WARM_REPLAYS = 3


class StampedRuntime(Runtime):
    """A runtime that stamps the start and the end of both branches of each fork, on the branches' own streams."""

    def __init__(self, stamps: Stamps, layer: int, weights: Weights) -> None:
        super().__init__(weights.shapes, weights.packed[layer], weights.f_b[layer])
        self._stamps, self._layer = stamps, layer

    @contextmanager
    def fork(self) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        with super().fork() as (main, side):
            branches = ((WIDE, main), (SIDE, side))
            for name, stream in branches:
                self._stamps.mark(self._layer, name, "start", stream)
            yield main, side
            for name, stream in branches:
                self._stamps.mark(self._layer, name, "end", stream)


class Comparison:
    """The variants for some numbers of tokens on one set of weights.

    Args:
        weights: of as many layers as the graphs have.
        tokens: each M to compare at, 1 to :data:`MOST_TOKENS`.
        seed: of the inputs.

    Raises:
        TypeError, ValueError: a number of tokens is not legal.
        BrokenBackend: FlashInfer is installed and broken.
    """

    def __init__(self, weights: Weights, tokens: Iterable[int], seed: int) -> None:
        self.weights = weights
        self.arch = Arch.of_device(weights.device)
        self._seed = seed
        self.inputs = {m: make_inputs(m, weights.device, seed + m, MOST_TOKENS) for m in tokens}
        self._runtimes = [Runtime(weights.shapes, *pair) for pair in zip(weights.packed, weights.f_b, strict=True)]
        self._installed = detect_installed()

    def arrangements(self) -> dict[str, Strategy]:
        """Those of :data:`ARRANGEMENTS` that run on this device for every M."""
        sms = torch.cuda.get_device_properties(self.weights.device).multi_processor_count
        facts = Facts(self.arch, self.weights.shapes, sms=sms)
        return {
            name: strategy
            for name, strategy in ARRANGEMENTS.items()
            if all(strategy.refusal(facts, m) is None for m in self.inputs)
        }

    def projections(
        self, strategy: Strategy | str, table: TuningTable, tokens: Iterable[int] | None = None
    ) -> list[KdaProjection]:
        """One for each layer, warmed up for every M, or for ``tokens``; nothing is tuned, the table decides.

        Raises:
            ValueError, CompileError, BrokenBackend: as :meth:`KdaProjection.warmup`.
        """
        tp = self.weights.shapes.tp
        pairs = zip(self.weights.packed, self.weights.f_b, strict=True)
        made = [KdaProjection(packed, f_b, tp=tp, strategy=strategy, table=table) for packed, f_b in pairs]
        for projection in made:
            projection.warmup(self.inputs if tokens is None else tokens)
        return made

    def arrangement(self, name: str, projections: Sequence[KdaProjection]) -> list[Variant]:
        """A variant for every M that calls each layer's projection. Its outputs are the graph's own."""

        def enqueue(x: torch.Tensor, layer: int, stream: torch.cuda.Stream) -> None:
            projections[layer](x)

        size = self.weights.shapes.weight_bytes
        return [
            self._variant(name, partial(enqueue, x), size, m, pdl=_all_pdl(projections[0].plan(m)))
            for m, x in self.inputs.items()
        ]

    def side_weights(self, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights of F_A/beta and of F_B for this many layers, for :meth:`side_branch`.

        This branch's part of a few layers would stay in L2: see :func:`kda_lib.lab.measure.cold_layers`.
        """
        shapes, device = self.weights.shapes, self.weights.device
        generator = torch.Generator(device).manual_seed(self._seed)

        def matrices(rows: int, k: int) -> torch.Tensor:
            values = torch.randn(layers, rows, k, generator=generator, device=device, dtype=torch.bfloat16)
            return values / math.sqrt(k)

        return matrices(shapes.fa_beta_rows, HIDDEN), matrices(shapes.f_b_rows, F_A_ROWS)

    def side_branch(self, fa_beta: torch.Tensor, f_b: torch.Tensor) -> list[Variant]:
        """F_A/beta, then F_B, for every M, as configured. Results: as :meth:`side_variant`."""
        arch, shapes = self.arch, self.weights.shapes
        return [
            self.side_variant("side_branch", skinny_n_config(arch, m, shapes), skinny_k_config(arch, m, shapes),
                              fa_beta, f_b)
            for m in self.inputs
        ]  # fmt: skip

    def side_variant(
        self, name: str, narrow: SkinnyNConfig, short: SkinnyKConfig, w_fa_beta: torch.Tensor, w_f_b: torch.Tensor
    ) -> Variant:
        """F_A/beta by ``narrow``, then F_B by ``short``, both of the same M, with weights as from
        :meth:`side_weights`. Results: F_A/beta ``[m, fa_beta_rows]``, g1 ``[m, f_b_rows]``.
        """
        shapes, runtime, x = self.weights.shapes, self._runtimes[0], self.inputs[narrow.m]
        fa_beta, g1 = x.new_empty(narrow.m, narrow.n), x.new_empty(narrow.m, short.n)
        f_a, _ = fa_beta_parts(shapes, fa_beta)

        def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
            runtime.launch(narrow, x, w_fa_beta[layer], fa_beta, stream)
            runtime.launch(short, f_a, w_f_b[layer], g1, stream)

        return self._variant(name, enqueue, self.side_bytes, narrow.m, pdl=narrow.pdl, results=(fa_beta, g1))

    @property
    def side_bytes(self) -> int:
        """What the side branch of one layer reads."""
        shapes = self.weights.shapes
        return BF16_BYTES * (shapes.fa_beta_rows * HIDDEN + shapes.f_b_rows * F_A_ROWS)

    def qkvg(self) -> list[Variant]:
        """QKVG alone by each backend that runs here, for every M. Results: qkvg ``[m, qkvg_rows]``."""
        return [
            self._qkvg(name, backend, m, x)
            for m, x in self.inputs.items()
            for name, backend in QKVG.items()
            if backend in runnable(self.arch, m, self._installed)
        ]

    def whole_peers(self) -> list[Variant]:
        """The whole projection by the libraries' GEMMs, for every M: ``torch_packed`` and ``<gemm>_split``.

        cuBLASLt runs with its heuristic: tuning it here would also change the projections that are captured later.
        """
        absent = peers.absent(self.arch)
        gemms = {name: gemm for name, gemm in peers.GEMMS.items() if name not in absent and name != "tinygemm_pdl"}
        return [
            variant
            for x in self.inputs.values()
            for variant in (
                peers.torch_packed(self.weights, x),
                *(peers.split(name, gemm, self.weights, x) for name, gemm in gemms.items()),
            )
        ]

    def tuned_peers(self) -> list[Variant]:
        """What FlashInfer's autotuner makes of cuBLASLt, for every M; none where it is absent. It tunes when called,
        for this whole process.
        """
        if "cublaslt" in peers.absent(self.arch):
            return []
        for x in self.inputs.values():
            peers.tune_cublaslt(self.weights, x)
        gemm = peers.GEMMS["cublaslt"]
        return [
            make("cublaslt_tuned", gemm, self.weights, x)
            for x in self.inputs.values()
            for make in (peers.qkvg_alone, peers.split)
        ]

    def largest_error(self, projections: Sequence[KdaProjection]) -> float:
        """Largest absolute difference of the first layer's outputs from fp64, over every M and all three outputs."""
        shapes = self.weights.shapes
        packed, f_b = self.weights.packed[0].double(), self.weights.f_b[0].double()
        errors = []
        for x in self.inputs.values():
            exact = x.double() @ packed.T
            f_a, beta = fa_beta_parts(shapes, exact[:, shapes.fa_beta_slice])
            wanted = (exact[:, shapes.qkvg_slice], f_a.bfloat16().double() @ f_b.T, beta)
            errors += [
                (got.double() - right).abs().max().item() for got, right in zip(projections[0](x), wanted, strict=True)
            ]
        return float(np.max(errors))

    def branch_rows(self, table: TuningTable, replays: int) -> Rows:
        """When the two branches of ``overlap`` ran, for every M, from time stamps in graphs of their own.

        Raises:
            ValueError, CompileError, BrokenBackend: as :func:`kda_lib.strategies.make_plan` and a first launch.
        """
        layers = self.weights.layers
        stamps = Stamps(4 * layers, self.weights.device, ArtifactCache.default())
        runtimes = [StampedRuntime(stamps, layer, self.weights) for layer in range(layers)]
        stream: torch.cuda.Stream = torch.cuda.Stream(self.weights.device)  # type: ignore[no-untyped-call]

        def enqueue(plan: Plan, x: torch.Tensor, layer: int, stream: torch.cuda.Stream) -> None:
            plan.strategy.run(runtimes[layer], plan, x, None)

        rows: Rows = []
        for m, x in self.inputs.items():
            plan = make_plan(Facts(self.arch, self.weights.shapes, table), m, ARRANGEMENTS["overlap"])
            size = self.weights.shapes.weight_bytes
            graph = capture(self._variant("stamped", partial(enqueue, plan, x), size, m), layers, stream)
            found = []
            for _ in range(WARM_REPLAYS + replays):
                graph.replay()
                found.append(stamps.read())
            rows += timeline_rows(found[WARM_REPLAYS:], self.weights.shapes.tp, m)
        return rows

    def _qkvg(self, name: str, backend: Backend, m: int, x: torch.Tensor) -> Variant:
        shapes, runtimes = self.weights.shapes, self._runtimes
        qkvg = x.new_empty(m, shapes.qkvg_rows)
        gemv = qkvg_gemv_config(self.arch, m, shapes) if backend is Backend.SKINNY else None

        def enqueue(layer: int, stream: torch.cuda.Stream) -> None:
            if gemv is not None:
                runtimes[layer].launch(gemv, x, runtimes[layer].qkvg, qkvg, stream)
            else:
                run_gemm(backend, x, runtimes[layer].qkvg, qkvg)

        pdl = backend is Backend.TINYGEMM_PDL if gemv is None else gemv.pdl
        return self._variant(name, enqueue, BF16_BYTES * shapes.qkvg_rows * HIDDEN, m, pdl=pdl, results=(qkvg,))

    def _variant(self, name: str, enqueue: Any, size: int, m: int, **fields: Any) -> Variant:
        return Variant(name, enqueue, size, tp=self.weights.shapes.tp, m=m, **fields)


def _all_pdl(plan: Plan) -> bool:
    """Whether every kernel of a layer is launched with PDL; those of libraries are not."""
    return plan.qkvg is None and bool(plan.kernels) and all(config.launch.pdl for _, config in plan.kernels)


def repeated(variants: Iterable[Variant]) -> list[Variant]:
    """The same variants under names of their own, for a second measurement."""
    return [replace(variant, name=variant.name + REPEAT) for variant in variants]


def timeline_rows(replays: Sequence[Mapping[Branch, Interval]], tp: int, m: int) -> Rows:
    """Stamps as rows, one sample for each layer of each replay, in microseconds.

    ``stamp_<branch>_start`` and ``_end`` count from the earlier of a layer's two starts, ``stamp_overlap`` is how long
    both branches ran, ``stamp_exposed`` how long the side branch went on alone after the wide one.
    """
    samples: dict[str, list[float]] = {}
    for found in replays:
        for layer in sorted({branch.layer for branch in found}):
            wide, side = found[Branch(layer, WIDE)], found[Branch(layer, SIDE)]
            zero = min(wide.start_ns, side.start_ns)
            layer_us = {
                "stamp_wide_start": (wide.start_ns - zero) / 1000,
                "stamp_wide_end": (wide.end_ns - zero) / 1000,
                "stamp_side_start": (side.start_ns - zero) / 1000,
                "stamp_side_end": (side.end_ns - zero) / 1000,
                "stamp_overlap": overlap_us(wide, side),
                "stamp_exposed": exposed_us(side, wide),
            }
            for name, us in layer_us.items():
                samples.setdefault(name, []).append(us)
    rows: Rows = []
    for name, values in samples.items():
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        spread = {"median_us": median, "p10_us": p10, "p90_us": p90, "min_us": min(values)}
        rows.append({"variant": name, "M": m, "tp": tp, **spread, "samples": len(values)})
    return rows


def tuning_table(rows: Iterable[Mapping[str, Any]], tp: int) -> TuningTable:
    """The table that these rows give for one TP degree: medians of ``qkvg_*`` and of every strategy by its name.

    The overlap limit is the largest measured M up to which overlap was nowhere slower than sequential; without both,
    it stays the default.
    """
    qkvg: dict[int, dict[Backend, float]] = {}
    strategies: dict[int, dict[str, float]] = {}
    for row in rows:
        name, m = row.get("variant"), row.get("M")
        if name is None or m is None or row.get("tp") != tp:
            continue
        if name in QKVG:
            qkvg.setdefault(m, {})[QKVG[name]] = round(row["median_us"], 3)
        elif name in STRATEGIES:
            strategies.setdefault(m, {})[name] = round(row["median_us"], 3)
    table = TuningTable(qkvg, strategies)
    both = {m: us for m, us in sorted(strategies.items()) if {"overlap", "sequential"} <= us.keys()}
    compared = {m: us["overlap"] <= us["sequential"] for m, us in both.items()}
    if not compared:
        return table
    slower = [m for m, keeps_up in compared.items() if not keeps_up]
    return replace(table, overlap_limit=max((m for m in compared if not slower or m < slower[0]), default=0))


def write_tuning(result: Result, path: Path) -> TuningTable:
    """Write the tuning table that ships with the library from the recorded rows of a full run; returns it.

    Args:
        result: of notebook 05. path: ``kda_lib/tuning/<profile>.json``; replaced whole.

    Raises:
        ValueError: nothing was measured on a GPU, not for exactly one TP degree, or a required claim failed; nothing
            was written.
        OSError: the file cannot be written.
    """
    if result.gpu is None or result.status != "ok":
        raise ValueError(
            f"result: expected a full run that ended well, got {result.mode}, {result.status}; run notebook 05 on a GPU"
        )
    degrees = sorted({row["tp"] for row in result.rows if row.get("variant") in QKVG}, key=str)
    if len(degrees) != 1 or not isinstance(tp := degrees[0], int):
        raise ValueError(
            f"result: expected qkvg_* rows of one TP degree, got {degrees}; give the result of notebook 05"
        )
    table = tuning_table(result.rows, tp)
    data = {"device": result.gpu.name, "tp": tp, "table": table.to_json()}
    replace_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    return table
