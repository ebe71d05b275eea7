"""The variants of notebook 06 on a device: right, with and without PDL, in the graphs that they should have."""

import pytest
import torch
from gpu_tools import GPU_ONLY

from kda_lib import Arch
from kda_lib.autotune import TuningTable
from kda_lib.lab import memory_limit
from kda_lib.lab.comparison import Comparison
from kda_lib.lab.graphs import lanes, node_counts, topology
from kda_lib.lab.measure import capture
from kda_lib.lab.workload import make_weights
from kda_lib.shapes import KdaShapes

pytestmark = GPU_ONLY

TABLE = TuningTable()


def test_variants() -> None:
    if not Arch.of_device().has_clusters:
        pytest.skip("the device has no bulk copies")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    compared = Comparison(make_weights(KdaShapes(8), 8, "cuda", seed=0), (1, 16), seed=0)
    stream = memory_limit.stream_projections(compared, TABLE)
    assert all(compared.largest_error(made) < 2**-5 for made in stream.values())
    assert memory_limit.bits_that_pdl_changes(compared, stream) == 0
    for variant in memory_limit.stream_and_floors(compared, stream, sms):
        graph = topology(capture(variant, 8, torch.cuda.Stream()))
        counts = node_counts(graph)
        assert (counts.kernels, counts.other, lanes(graph)) == (8, 0, 1)
        assert counts.programmatic == (7 if variant.pdl else 0)
    larger = Comparison(compared.weights, (17, 32), seed=0)
    for variant in memory_limit.crossing(larger, TABLE)[0]:
        kernels = node_counts(topology(capture(variant, 8, torch.cuda.Stream()))).kernels
        assert kernels == 16 if variant.name == "stream_split" else kernels >= 16
    first, idle = memory_limit.first_and_idle(stream[True][0], compared.inputs[16], idle_s=0.1)
    assert first["differing"] == idle["differing"] == 0
