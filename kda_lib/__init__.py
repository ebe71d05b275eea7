"""Kernels and evidence for Kimi Delta Attention decode projections on NVIDIA GPUs.

Importing this package loads neither torch nor the CuTe DSL; each loads when first used.
"""

from typing import TYPE_CHECKING, Any

from kda_lib.arch import Arch
from kda_lib.shapes import KdaShapes

if TYPE_CHECKING:
    from kda_lib.projection import KdaProjection

__all__ = ["Arch", "KdaProjection", "KdaShapes"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "KdaProjection":
        from kda_lib.projection import KdaProjection

        return KdaProjection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
