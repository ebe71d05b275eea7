"""Run a compiled kernel of this library on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kda_lib.compile import Artifact
from kda_lib.lab.ptx.machine import Machine
from kda_lib.lab.ptx.memory import Buffer
from kda_lib.lab.ptx.report import RunReport
from kda_lib.reference import Bits


def launch(
    artifact: Artifact[Any],
    inputs: Sequence[NDArray[Any]],
    outputs: Sequence[NDArray[Any]],
    *,
    ptx: str | None = None,
    ctas: Iterable[int] | None = None,
) -> RunReport:
    """Run a kernel whose arguments are its inputs and then its outputs, which are written in place.

    Args:
        ptx: what to run instead of the artifact's own text, with the same launch.
        ctas: as in :meth:`Machine.run`.

    With programmatic dependent launch, the first input and the outputs count as dependent: the previous kernel may
    write the one and read the others until the dependency wait. The other inputs are weights, which nobody writes.

    Raises:
        TypeError, ValueError: an array is no fit argument.
        PtxError, UnsupportedPtx: as :class:`Machine`.
    """
    pdl = artifact.launch.pdl
    read = [
        Buffer(np.ascontiguousarray(array), f"input {i}", dependent=pdl and i == 0) for i, array in enumerate(inputs)
    ]
    written = [Buffer(array, f"output {i}", readonly=False, dependent=pdl) for i, array in enumerate(outputs)]
    return Machine(ptx or artifact.ptx).run(
        artifact.entry,
        [*read, *written],
        grid=artifact.launch.grid,
        block=artifact.launch.block,
        cluster=artifact.launch.cluster,
        ctas=ctas,
    )


def emulate(
    artifact: Artifact, x: Bits, w: Bits, *, ptx: str | None = None, ctas: Iterable[int] | None = None
) -> tuple[Bits, RunReport]:
    """Output bits [m, n] of a GEMM kernel and what was checked.

    Args:
        x: BF16 bits [m, k], or [m, x_stride] for ``skinny_k``, which reads the first k of each row.
        w: BF16 bits [n, k].
        ptx, ctas: as in :func:`launch`; outputs of CTAs that do not run are BF16 NaN (0xFFFF).

    Raises:
        ValueError: an array has another size than the configuration says.
        PtxError, UnsupportedPtx: as :class:`Machine`.
    """
    c = artifact.config
    stride = getattr(c, "x_stride", c.k)
    for name, array, shape in (("x", x, (c.m, stride)), ("w", w, (c.n, c.k))):
        if array.shape != shape or array.dtype != np.uint16:
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{name}: expected uint16 bits {list(shape)}, got {got}; check the configuration")
    out = np.full((c.m, c.n), 0xFFFF, np.uint16)
    return out, launch(artifact, [x, w], [out], ptx=ptx, ctas=ctas)
