"""Kernels and evidence for Kimi Delta Attention decode projections on NVIDIA GPUs.

Importing this package loads neither torch nor the CuTe DSL; each loads when first used.
"""

from kda_lib.arch import Arch
from kda_lib.shapes import KdaShapes

__all__ = ["Arch", "KdaShapes"]
__version__ = "0.1.0"
