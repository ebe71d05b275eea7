"""Golden outputs on the device that is there."""

from __future__ import annotations

from gpu_tools import GPU_ONLY

from kda_lib.lab import golden
from kda_lib.lab.golden import Case

pytestmark = GPU_ONLY


def test_the_device_gives_the_bits_of_the_model() -> None:
    cases = [Case(kernel, m, values) for kernel in golden.KERNELS for m in (1, 8, 16) for values in golden.VALUES]
    rows = list(golden.launch_all(cases))
    assert [golden.key_of(row) for row in rows] == cases
    assert [row["differing"] for row in rows] == [0] * len(cases)


def test_a_wrong_output_would_be_seen() -> None:
    (row,) = golden.launch_all([Case("skinny_k", 1, "ordinary")])
    (other,) = golden.launch_all([Case("skinny_k", 1, "cancelling")])
    assert row["outputs_sha256"] != other["outputs_sha256"]
