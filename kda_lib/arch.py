"""Compile targets and what each can do: the one place that answers "does this chip have that instruction?".

Every predicate is decided from the compile *target*, never from the device that happens to be present, so that a
laptop without a GPU gives the same answer as the server it compiles for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Capability = tuple[int, int]

#: Targets that this project compiles for, in the order that tables show them.
TARGETS: tuple[str, ...] = (
    "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a",
)  # fmt: skip

#: Capabilities whose instruction set is known here. (8, 7) is Orin, (10, 7) is in nvidia-cutlass-dsl 4.8.1's
#: ``Arch`` enumeration; anything else gets the portable path.
KNOWN_CAPABILITIES: frozenset[Capability] = frozenset(
    {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)}
)

#: Product names that ``Arch.parse`` takes, with the target that uses the whole chip
#: (developer.nvidia.com/cuda-gpus lists each product's compute capability).
PRODUCTS: dict[str, str] = {
    "a100": "sm_80", "l40s": "sm_89", "h100": "sm_90a", "h200": "sm_90a", "h20": "sm_90a", "b200": "sm_100a",
    "b300": "sm_103a", "rtx5090": "sm_120a", "thor": "sm_110a", "dgx_spark": "sm_121a",
}  # fmt: skip

_TARGET = re.compile(r"(?:sm_)?(\d{1,2})(\d)([af]?)")
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")


@dataclass(frozen=True, order=True)
class Arch:
    """A compile target such as ``sm_90a``.

    ``suffix`` is ``""`` (forward-compatible code), ``"a"`` (this chip only) or ``"f"`` (this family).
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str | Arch) -> Arch:
        """Read ``"sm_90a"``, ``"90a"``, ``"9.0"`` or a product name such as ``"h100"``.

        A bare capability of 9.0 or more (``"9.0"``) becomes the ``a`` target, because that is what runs there fastest.

        Raises:
            TypeError: ``text`` is neither a string nor an ``Arch``.
            ValueError: ``text`` names no target; the message lists what is accepted.
        """
        if isinstance(text, Arch):
            return text
        if not isinstance(text, str):
            raise TypeError(f"target: expected a string such as 'sm_90a', got {type(text).__name__}; pass a string")
        word = text.strip().lower()
        word = PRODUCTS.get(word, word)
        if match := _CAPABILITY.fullmatch(word):
            return cls.of_capability((int(match[1]), int(match[2])))
        if match := _TARGET.fullmatch(word):
            return cls(int(match[1]), int(match[2]), match[3])
        raise ValueError(
            f"target: expected one of {', '.join(TARGETS)} or a product ({', '.join(PRODUCTS)}), got {text!r}; "
            "name the compute capability of your GPU"
        )

    @classmethod
    def of_capability(cls, capability: Capability) -> Arch:
        """The target for a device of this compute capability (``a`` from 9.0 on)."""
        major, minor = capability
        return cls(major, minor, "a" if capability >= (9, 0) else "")

    @classmethod
    def of_device(cls, device: Any = None) -> Arch:
        """The target for a CUDA device (the current one by default). Imports torch.

        Raises:
            RuntimeError: there is no CUDA device (torch's own error).
        """
        import torch

        return cls.of_capability(torch.cuda.get_device_capability(device))

    @property
    def target(self) -> str:
        """The name that compilers take, e.g. ``"sm_90a"``."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def capability(self) -> Capability:
        return (self.major, self.minor)

    @property
    def known(self) -> bool:
        """Whether this project knows the instruction set of this capability."""
        return self.capability in KNOWN_CAPABILITIES

    @property
    def has_mixed_bf16_fma(self) -> bool:
        """``fma.rn.f32.bf16`` (BF16 x BF16 + FP32, PTX ISA 8.6).

        ptxas accepts it for sm_100, 103, 107, 110, 120, 121 and rejects it below ("requires .target sm_100 or higher").
        """
        return self.known and self.capability >= (10, 0)

    @property
    def has_cvt_f32_bf16(self) -> bool:
        """``cvt.f32.bf16`` (BF16 to FP32). The ptxas of nvidia-cutlass-dsl 4.8.1 accepts it for every target here."""
        return self.known

    @property
    def has_pdl(self) -> bool:
        """``griddepcontrol`` (programmatic dependent launch, PTX ISA 7.8). ptxas accepts it from sm_90 on."""
        return self.known and self.capability >= (9, 0)

    @property
    def has_clusters(self) -> bool:
        """``barrier.cluster`` and ``mapa`` (thread-block clusters, PTX ISA 7.8). ptxas accepts them from sm_90 on."""
        return self.known and self.capability >= (9, 0)

    def __str__(self) -> str:
        return self.target
