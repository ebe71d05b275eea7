"""Golden outputs: fixed inputs for each kernel and M, and the hash of the bits that come out.

The same hash must come from the host model, from PTX run on the CPU (:mod:`kda_lib.lab.emulation`) and from a GPU
(:func:`record`). Inputs are made from the raw words of a bit generator with integer operations only, so that every
machine and every NumPy has the same bits (NEP 19 keeps the words of bit generators, not those of distributions).

A new kernel needs one entry of :data:`KERNELS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kda_lib.arch import Arch
from kda_lib.compile import KernelConfig
from kda_lib.kernels.config import SkinnyKConfig, SkinnyNConfig, skinny_k_config, skinny_n_config
from kda_lib.lab import records
from kda_lib.lab.scripted import Outcome, Row, write_script_result, zero_claim
from kda_lib.reference import Bits, model_skinny_k, model_skinny_n
from kda_lib.shapes import MAX_TOKENS, KdaShapes

if TYPE_CHECKING:
    from kda_lib.lab.device import DeviceInfo
    from kda_lib.lab.profile import Profile

NAME = "golden"
SHAPES = KdaShapes(tp=8)
M_VALUES = range(1, MAX_TOKENS + 1)
SEED = 55108

#: Outputs are poisoned with this NaN, which no kernel writes: each makes every NaN 0x7FFF.
POISON = np.uint16(0xFFFF)

#: Kinds of numbers in the order in which rows may have them: zeros, subnormals, the edges of the normal range, a
#: number whose square overflows, infinities, a quiet and a signalling NaN.
ODD = np.array(
    [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x5F80, 0x7F80, 0xFF80, 0x7FC1, 0xFF81], np.uint16
)


class Words:
    """A stream of 64-bit words that is the same everywhere."""

    def __init__(self, *seed: int) -> None:
        self._source = np.random.PCG64(np.random.SeedSequence(seed))

    def bits16(self, *shape: int) -> Bits:
        """Uniform 16-bit numbers."""
        count = int(np.prod(shape))
        words = self._source.random_raw(-(-count // 4)).astype("<u8")
        return words.view("<u2")[:count].reshape(shape).astype(np.uint16)

    def numbers(self, *shape: int) -> Bits:
        """BF16 numbers of both signs with magnitudes from 2**-15 to 2, as activations and weights have them."""
        word = self.bits16(*shape)
        exponent = np.uint16(112) + (word >> np.uint16(7) & np.uint16(15))
        return word & np.uint16(0x807F) | exponent << np.uint16(7)

    def permutation(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.argsort(self._source.random_raw(count), kind="stable").astype(np.int64)


def _ordinary(words: Words, m: int, n: int, k: int) -> tuple[Bits, Bits]:
    return words.numbers(m, k), words.numbers(n, k)


def _cancelling(words: Words, m: int, n: int, k: int) -> tuple[Bits, Bits]:
    """Each product of a sum has its negative somewhere: what is left shows the order of the additions."""
    x, w = _ordinary(words, m, n, k)
    plus, minus = words.permutation(k).reshape(2, -1)
    x[:, minus], w[:, minus] = x[:, plus], w[:, plus] ^ np.uint16(0x8000)
    return x, w


def _specials(words: Words, m: int, n: int, k: int) -> tuple[Bits, Bits]:
    """Half of all numbers are of :data:`ODD`; rows take turns with how many kinds they may have.

    The first rows of w are zero but for one number each, which meets a 1 or 2**-10 in x: it comes out alone.
    """
    made = []
    for rows, turn in ((m, 5), (n, 1)):
        limit = 1 + turn * np.arange(rows) % len(ODD)
        kinds = words.bits16(rows, k) % limit[:, None]
        made.append(np.where(words.bits16(rows, k) < 1 << 15, ODD[kinds], words.numbers(rows, k)))
    x, w = made
    alone = np.arange(2 * len(ODD))
    places = alone * 5 % k
    w[alone] = 0
    w[alone, places] = np.repeat(ODD, 2)
    x[:, places] = np.where(alone % 2, np.uint16(0x3A80), np.uint16(0x3F80))
    return x, w


#: Kinds of inputs: name -> what makes x [m, k] and w [n, k].
VALUES: dict[str, Callable[[Words, int, int, int], tuple[Bits, Bits]]] = {
    "ordinary": _ordinary,
    "cancelling": _cancelling,
    "specials": _specials,
}


def _skinny_inputs(config: SkinnyNConfig | SkinnyKConfig, values: str) -> tuple[Bits, ...]:
    words = Words(SEED, config.m, config.n, config.k, list(VALUES).index(values))
    x, w = VALUES[values](words, config.m, config.n, config.k)
    # What lies between the rows of x is not to be read: a NaN shows if it is.
    wide = np.full((config.m, getattr(config, "x_stride", config.k)), POISON)
    wide[:, : config.k] = x
    return wide, w


def _skinny_n_model(config: SkinnyNConfig, x: Bits, w: Bits) -> tuple[Bits, ...]:
    return (model_skinny_n(config, x, w),)


def _skinny_k_model(config: SkinnyKConfig, x: Bits, w: Bits) -> tuple[Bits, ...]:
    return (model_skinny_k(config, np.ascontiguousarray(x[:, : config.k]), w),)


@dataclass(frozen=True)
class Kernel:
    """A kernel whose arguments are its inputs and then its outputs, all BF16.

    config: target, M, shapes -> configuration. inputs: configuration, kind of values -> arrays. outputs: configuration
    -> shapes. model: configuration, inputs -> the bits that must come out; None where no bit-exact model exists.
    """

    config: Callable[[Arch, int, KdaShapes], Any]
    inputs: Callable[[Any, str], tuple[Bits, ...]]
    outputs: Callable[[Any], Sequence[tuple[int, ...]]]
    model: Callable[..., tuple[Bits, ...]] | None


def _one_output(config: KernelConfig) -> Sequence[tuple[int, ...]]:
    return [(config.m, config.n)]


KERNELS: dict[str, Kernel] = {
    "skinny_n": Kernel(skinny_n_config, _skinny_inputs, _one_output, _skinny_n_model),
    "skinny_k": Kernel(skinny_k_config, _skinny_inputs, _one_output, _skinny_k_model),
}


class Case(NamedTuple):
    """One launch: kernel, M, kind of values."""

    kernel: str
    m: int
    values: str

    def config(self, arch: Arch) -> Any:
        return KERNELS[self.kernel].config(arch, self.m, SHAPES)

    def inputs(self, config: Any) -> tuple[Bits, ...]:
        return KERNELS[self.kernel].inputs(config, self.values)

    def outputs(self, config: Any) -> tuple[Bits, ...]:
        """Arrays for the kernel to write, full of poison."""
        return tuple(np.full(shape, POISON) for shape in KERNELS[self.kernel].outputs(config))

    def expected(self, config: Any, inputs: Sequence[Bits]) -> tuple[Bits, ...] | None:
        """What the host model gives, if there is one."""
        model = KERNELS[self.kernel].model
        return None if model is None else model(config, *inputs)


def cases(kernels: Sequence[str] = tuple(KERNELS), m_values: Sequence[int] = M_VALUES) -> list[Case]:
    """Every kernel, M and kind of values, in the order of result files.

    Raises:
        ValueError: an unknown kernel.
    """
    if unknown := [name for name in kernels if name not in KERNELS]:
        raise ValueError(f"kernels: expected some of {', '.join(KERNELS)}, got {', '.join(unknown)}; see KERNELS")
    return [Case(kernel, m, values) for kernel in kernels for m in m_values for values in VALUES]


def sha256(arrays: Sequence[Bits]) -> str:
    """Hash of shapes and little-endian bits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr(array.shape).encode() + array.astype("<u2").tobytes())
    return digest.hexdigest()


def differing(got: Sequence[Bits], wanted: Sequence[Bits]) -> int:
    """Outputs that differ in a bit, NaN payloads included."""
    return sum(int(np.count_nonzero(a != b)) for a, b in zip(got, wanted, strict=True))


def row_of(case: Case, config: Any, target: str, inputs: Sequence[Bits], outputs: Sequence[Bits]) -> Row:
    """What result files say about one launch; ``differing`` is None where no model exists."""
    expected = case.expected(config, inputs)
    return {
        "kernel": case.kernel,
        "fma": str(config.fma),
        "target": target,
        "M": case.m,
        "tp": SHAPES.tp,
        "variant": case.values,
        "outputs": sum(array.size for array in outputs),
        "differing": None if expected is None else differing(outputs, expected),
        "inputs_sha256": sha256(inputs),
        "outputs_sha256": sha256(outputs),
    }


def launch_all(chosen: Sequence[Case]) -> Iterator[Row]:
    """Launch on the current CUDA device, compiled for it, one row a case."""
    import torch

    from kda_lib.runtime import loaded_kernel

    arch = Arch.of_device()

    def on_device(bits: Bits) -> torch.Tensor:
        return torch.from_numpy(bits.view(np.int16)).cuda()

    for case in chosen:
        config = case.config(arch)
        inputs = case.inputs(config)
        outputs = [on_device(array) for array in case.outputs(config)]
        arguments = [*map(on_device, inputs), *outputs]
        stream = torch.cuda.current_stream()
        kernel = loaded_kernel(config, arch)
        kernel(*(tensor.data_ptr() for tensor in arguments), stream=stream.cuda_stream)
        got = [tensor.cpu().numpy().view(np.uint16) for tensor in outputs]
        row = row_of(case, config, arch.target, inputs, got)
        yield row | {"cubin_sha256": kernel.artifact.cubin_sha256}


def record(root: Path, profile: Profile, device: DeviceInfo) -> records.Result:
    """Launch every case on the device that is there, and write ``reports/<profile>/results/golden.json``.

    Raises:
        records.ResultWriteError: the file system refused.
    """

    def make() -> Iterator[Outcome]:
        rows = list(launch_all(cases()))
        yield rows, claims_of(rows)

    return write_script_result(NAME, make(), profile=profile.name, root=root, device=device, seeds={"inputs": SEED})


def claims_of(rows: Sequence[Row]) -> list[records.Claim]:
    modelled = [row for row in rows if row["differing"] is not None]
    wrong = sum(row["differing"] > 0 for row in modelled)
    return [zero_claim("model", "the device gives the bits of the host model", wrong, f"of {len(modelled)} launches")]


Key = tuple[str, int, str]


def key_of(row: Row) -> Key:
    """What a row of golden outputs is about, whatever made it."""
    return row["kernel"], row["M"], row["variant"]


def recorded(root: Path) -> dict[str, list[Row]]:
    """Golden rows of every profile that has a result file.

    Raises:
        records.ResultReadError: a file is not a valid result.
    """
    files = sorted((root / "reports").glob(f"*/results/{NAME}.json"))
    return {path.parent.parent.name: records.read_result(path).rows for path in files}


def disagreements(rows: Sequence[Row], golden: Sequence[Row]) -> list[Key]:
    """Launches of ``rows`` whose inputs or outputs have other hashes in ``golden``, or that are missing there."""
    known = {key_of(row): (row["inputs_sha256"], row["outputs_sha256"]) for row in golden}
    return [key_of(row) for row in rows if known.get(key_of(row)) != (row["inputs_sha256"], row["outputs_sha256"])]
