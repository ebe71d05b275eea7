"""Run a compiled kernel of this library on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kda_lib.compile import Artifact
from kda_lib.lab.ptx.machine import Machine
from kda_lib.lab.ptx.memory import Buffer
from kda_lib.lab.ptx.report import RunReport
from kda_lib.reference import Bits


def emulate(
    artifact: Artifact, x: Bits, w: Bits, *, ptx: str | None = None, ctas: Iterable[int] | None = None
) -> tuple[Bits, RunReport]:
    """Output bits [m, n] of a kernel and what was checked.

    Args:
        x: BF16 bits [m, k], or [m, x_stride] for ``skinny_k``, which reads the first k of each row.
        w: BF16 bits [n, k].
        ptx: what to run instead of the artifact's own text, with the same launch.
        ctas: as in :meth:`Machine.run`; outputs of CTAs that do not run are BF16 NaN (0xFFFF).

    With programmatic dependent launch, x and the output count as dependent: the previous kernel may write the one and
    read the other until the dependency wait.

    Raises:
        ValueError: an array has another size than the configuration says.
        PtxError, UnsupportedPtx: as :class:`Machine`.
    """
    c, launch = artifact.config, artifact.launch
    stride = getattr(c, "x_stride", c.k)
    for name, array, shape in (("x", x, (c.m, stride)), ("w", w, (c.n, c.k))):
        if array.shape != shape or array.dtype != np.uint16:
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{name}: expected uint16 bits {list(shape)}, got {got}; check the configuration")
    out = np.full((c.m, c.n), 0xFFFF, np.uint16)
    report = Machine(ptx or artifact.ptx).run(
        artifact.entry,
        [
            Buffer(np.ascontiguousarray(x), "x", dependent=launch.pdl),
            Buffer(np.ascontiguousarray(w), "w"),
            Buffer(out, "out", readonly=False, dependent=launch.pdl),
        ],
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        ctas=ctas,
    )
    return out, report
