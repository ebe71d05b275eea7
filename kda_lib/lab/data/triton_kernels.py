"""Compile public Triton kernels for named targets, without a GPU, and leave their PTX in a folder.

    python triton_kernels.py FOLDER

Runs in a process of its own, with triton and liger-kernel on the path and this library not.
"""

import importlib
import sys
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 89, 90, 100, 120)
WARP_SIZE = 32

BLOCK = {"BLOCK_SIZE": 1024}
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}

#: Module of liger_kernel.ops, kernel, its constants. Pointers are BF16 and integers 32 bits unless named below.
KERNELS = (
    ("rms_norm", "_rms_norm_forward_kernel", {"casting_mode": 0, "elementwise_affine": True, **BLOCK}),
    ("layer_norm", "_layer_norm_forward_kernel", BLOCK),
    ("softmax", "_softmax_single_block_forward_kernel", BLOCK),
    ("swiglu", "_swiglu_forward_kernel_tiled", BLOCK),
    ("geglu", "_geglu_tanh_forward_kernel", {"n_cols": 1024, **BLOCK}),
    (
        "fused_moe_kernels",
        "_fused_down_proj_kernel",
        {"H_dim": 4096, "I_dim": 2048, "stride_post_I": 1, "stride_w_I": 1, "stride_Y_H": 1, **TILE},
    ),
)
FLOATS = ("eps", "offset", "gate_multiplier")
INTEGER_POINTERS = ("expert_start_ptr", "tile_row_start_ptr", "tile_expert_ptr")
POINTERS = ("a", "b", "c")


def kind(name: str) -> str:
    """Type of an argument, by its name."""
    if name in INTEGER_POINTERS:
        return "*i32"
    if name.endswith("_ptr") or name in POINTERS:
        return "*bf16"
    return "fp32" if name in FLOATS else "i32"


def main(folder: Path) -> None:
    for module, name, constants in KERNELS:
        kernel = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
        while not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        signature = {arg: "constexpr" if arg in constants else kind(arg) for arg in kernel.arg_names}
        fixed = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
        for capability in CAPABILITIES:
            source = ASTSource(kernel, signature, constexprs=fixed)
            compiled = compile(source, target=GPUTarget("cuda", capability, WARP_SIZE))
            (folder / f"{name}.{capability}.ptx").write_text(compiled.asm["ptx"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
