"""Launch configurations of the side branch, F_A/beta and then F_B, timed against each other on a device.

For each M, the configurations in use (:mod:`kda_lib.kernels.config`) are timed beside every pair that differs from them
in one of the two kernels. ``split`` and ``steps`` of F_A/beta stay, since they fix the order of additions: all give the
same bits, which is checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kda_lib.arch import Arch
from kda_lib.cache import ArtifactCache
from kda_lib.compile import compile_kernel
from kda_lib.kernels.config import WARP, SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.lab import records
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim
from kda_lib.lab.workers import worker_pool
from kda_lib.shapes import MAX_TOKENS, KdaShapes

if TYPE_CHECKING:
    from kda_lib.lab.device import DeviceInfo
    from kda_lib.lab.measure import Variant
    from kda_lib.lab.profile import Profile

Config = TypeVar("Config", SkinnyNConfig, SkinnyKConfig)

NAME = "skinny_sweep"
SHAPES = KdaShapes(tp=8)
M_VALUES = range(1, MAX_TOKENS + 1)
#: Of the weights, the inputs and the order of replays.
SEED = 0
#: Replays of each variant: medians of so few tell apart what differs by 2 % or more.
SAMPLES = 15
#: The pair in use; the others are called by what they change.
IN_USE = "side_branch"
#: The pair in use may be slower than the fastest by this factor before its claim fails: what one rule for all M costs.
TOLERANCE = 1.05


class Pair(NamedTuple):
    """Configurations of F_A/beta and of F_B for one M, and the name of their variant."""

    name: str
    narrow: SkinnyNConfig
    short: SkinnyKConfig


def pairs(arch: Arch, m: int) -> list[Pair]:
    """What is timed for m tokens, the pair in use first: any rows, and each way to share the tokens in one pass."""
    narrow, short = skinny_n_config(arch, m, SHAPES), skinny_k_config(arch, m, SHAPES)
    found = [Pair(IN_USE, narrow, short)]
    for rows, tokens, groups in product((2, 3, 4, 6, 8), (1, 2, 4, 8, 16), range(1, 9)):
        other = _valid(replace(narrow, rows=rows, tokens=tokens, groups=groups), arch)
        if other and other != narrow and m <= tokens * groups < m + tokens:
            found.append(Pair(f"F_A/beta rows={rows} tokens={tokens} groups={groups}", other, short))
    for rows, row_tile, tokens in product((8, 12, 16, 24), (1, 2, 4), (1, 2, 4, 8)):
        candidate = _valid(replace(short, rows=rows, row_tile=row_tile, tokens=tokens), arch)
        if candidate and candidate != short and candidate.launch.block >= 2 * WARP:
            found.append(Pair(f"F_B rows={rows} row_tile={row_tile} tokens={tokens}", narrow, candidate))
    return found


def _valid(config: Config, arch: Arch) -> Config | None:
    try:
        return config.validate(arch)
    except ValueError:
        return None


def run_sweep(root: Path, profile: Profile, device: DeviceInfo, m_values: Sequence[int] = M_VALUES) -> records.Result:
    """Time everything on the current CUDA device and write ``reports/<profile>/results/skinny_sweep.json``, anew after
    each M.

    Raises:
        CompileError: a configuration does not compile.
        Refused, ValueError: as :func:`kda_lib.lab.measure.measure`.
        records.ResultWriteError: the file system refused.
    """

    def outcomes() -> Iterator[Outcome]:
        rows: list[Row] = []
        for found in _sweep(profile, device, m_values):
            rows += found
            yield rows, claims_of(rows)

    return write_script_result(
        NAME,
        outcomes(),
        profile=profile.name,
        root=root,
        device=device,
        seeds={"sweep": SEED},
        timing_method="CUDA events around replays of CUDA graphs of as many layers as exceed the L2 ten times, all "
        "variants of one M interleaved in random order",
    )


def _sweep(profile: Profile, device: DeviceInfo, m_values: Sequence[int]) -> Iterator[list[Row]]:
    """The rows of one M after the other."""
    from kda_lib.lab.comparison import Comparison
    from kda_lib.lab.measure import cold_layers, measure
    from kda_lib.lab.workload import make_weights

    compared = Comparison(make_weights(SHAPES, 1, "cuda", SEED), m_values, SEED)
    _compile_all({config for m in m_values for pair in pairs(compared.arch, m) for config in pair[1:]}, compared.arch)
    layers = cold_layers(compared.side_bytes, device)
    weights = compared.side_weights(layers)
    for m in m_values:
        variants = [compared.side_variant(*pair, *weights) for pair in pairs(compared.arch, m)]
        measured = measure(
            variants, layers=layers, samples=SAMPLES, seed=SEED, device=device, profile=profile, control=IN_USE
        )
        yield rows_of(variants, measured.rows)


def rows_of(variants: Sequence[Variant], measured: Sequence[Row]) -> list[Row]:
    """The measured rows with how many outputs differ from those of the pair in use, the first of the variants.

    Every graph ended with the same layer, so all results must be alike.
    """
    import torch

    from kda_lib.lab.measure import AGAIN

    torch.cuda.synchronize()
    wanted = variants[0].results
    differing = {
        variant.name: sum(int((a != b).sum()) for a, b in zip(variant.results, wanted, strict=True))
        for variant in variants
    }
    return [row | {"samples": SAMPLES, "differing": differing[row["variant"].removesuffix(AGAIN)]} for row in measured]


def _compile_all(configs: set[SkinnyNConfig | SkinnyKConfig], arch: Arch) -> None:
    with worker_pool(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(_compile, configs, [arch] * len(configs), chunksize=8):
            pass


def _compile(config: SkinnyNConfig | SkinnyKConfig, arch: Arch) -> None:
    compile_kernel(config, arch, cache=ArtifactCache.default())


def claims_of(rows: Sequence[Row]) -> list[records.Claim]:
    """What the rows show, of those M that have some."""
    checked = [row for row in rows if not row["variant"].startswith(IN_USE)]
    wrong = sum(row["differing"] > 0 for row in checked)
    # Not the median: a pair can be fast in one graph and slow in the next. Hence the slower one of two graphs, too.
    slower = {}
    for m in {row["M"]: None for row in rows}:
        slow = {row["variant"]: row["p90_us"] for row in rows if row["M"] == m}
        slower[m] = max(us for name, us in slow.items() if name.startswith(IN_USE)) / min(slow.values())
    m = max(slower, key=slower.__getitem__)
    return [
        zero_claim("bits", "every configuration gives the same bits", wrong, f"of {len(checked)} differ"),
        records.Claim(
            id="in-use",
            statement="by the 90th percentile the configurations in use are about the fastest at every M; least so at "
            f"M = {m}",
            value=round(slower[m], 4),
            unit="times the fastest",
            bound=f"<= {TOLERANCE}",
            holds=round(slower[m], 4) <= TOLERANCE,
            required=False,
        ),
    ]
