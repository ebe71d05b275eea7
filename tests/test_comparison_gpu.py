"""The variants of notebook 05 on a device: right, in the lanes that they should have, with branches that overlap."""

import torch
from gpu_tools import GPU_ONLY

from kda_lib.autotune import TuningTable
from kda_lib.lab.comparison import Comparison
from kda_lib.lab.graphs import lanes, topology
from kda_lib.lab.measure import capture
from kda_lib.lab.workload import make_weights
from kda_lib.shapes import KdaShapes

pytestmark = GPU_ONLY


def test_variants() -> None:
    compared = Comparison(make_weights(KdaShapes(8), 8, "cuda", seed=0), (1, 8), seed=0)
    for name, strategy in compared.arrangements().items():
        projections = compared.projections(strategy, TuningTable())
        assert compared.largest_error(projections) < 2**-5
        for variant in compared.arrangement(name, projections):
            graph = topology(capture(variant, 8, torch.cuda.Stream()))
            assert lanes(graph) == (2 if name.startswith("overlap") else 1)
    for variant in (*compared.side_branch(*compared.side_weights(8)), *compared.qkvg()):
        assert lanes(topology(capture(variant, 8, torch.cuda.Stream()))) == 1
        assert all(result.isfinite().all() for result in variant.results)
    median = {(row["variant"], row["M"]): row["median_us"] for row in compared.branch_rows(TuningTable(), replays=10)}
    for m in compared.inputs:
        assert median["stamp_overlap", m] > 1, "the branches did not run at the same time"
        assert median["stamp_wide_end", m] < 1000
