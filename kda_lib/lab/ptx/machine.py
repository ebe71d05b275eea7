"""Run PTX on the CPU: every thread of a launch, divergence by masks, with the checks of :mod:`kda_lib.lab.ptx.report`.

Threads run in lockstep where they can: NumPy computes one instruction for all threads of several clusters at once. The
order in which hardware would run them does not matter for a kernel without races, and races are reported.

Scope: see :mod:`kda_lib.lab.ptx.alu` and :mod:`kda_lib.lab.ptx.instructions`. Not here: calls, atomics, bulk copies,
tensor cores, local and dynamic shared memory, partial CTA barriers; each is an error that names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from kda_lib.lab.ptx.cohort import Active, Cohort, Extent, Geometry
from kda_lib.lab.ptx.errors import UnsupportedPtx
from kda_lib.lab.ptx.flow import Block, blocks_of, ends_block
from kda_lib.lab.ptx.instructions import Step, address_of, destination_of, operands_of, shared_addresses, step_of
from kda_lib.lab.ptx.memory import Buffer, GlobalMemory
from kda_lib.lab.ptx.parser import Immediate, Instruction, Kernel, parse
from kda_lib.lab.ptx.report import RunReport

#: Threads that run at once: enough to hide the interpreter, few enough for the registers to stay in cache.
_COHORT_THREADS = 8192
#: Blocks after which a cohort is taken to hang.
_MAX_BLOCKS = 1_000_000

Mask = NDArray[np.bool_]
#: A last instruction of a block: the active threads -> where which of them go on; those named nowhere wait or end.
_End = Callable[[Cohort, Active], Iterable[tuple[int, Mask]]]


class Machine:
    """The kernels of one PTX text.

    Raises:
        PtxError, UnsupportedPtx: the text cannot be read, or has something that cannot be run.
    """

    def __init__(self, ptx: str) -> None:
        self.kernels = {name: _Program(kernel) for name, kernel in parse(ptx).items()}

    def run(
        self,
        entry: str | None = None,
        params: Sequence[Buffer | int] = (),
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        cluster: int | Sequence[int] = 1,
        ctas: Iterable[int] | None = None,
    ) -> RunReport:
        """Run a kernel; buffers that are not read-only are written in place.

        Args:
            entry: name of the kernel; may be left out if there is one.
            params: one for each parameter.
            grid, block, cluster: extents (x, y, z), shorter ones padded with 1. grid counts CTAs.
            ctas: linear numbers of the CTAs to run, with their whole clusters; all by default.

        Raises:
            TypeError, ValueError: an argument does not fit the kernel; nothing ran.
            UnsupportedPtx: an operand cannot be read here.
        """
        if entry is None and len(self.kernels) != 1:
            raise ValueError(f"entry: expected one of {', '.join(self.kernels) or '(none)'}, got None; name the kernel")
        if entry is not None and entry not in self.kernels:
            raise ValueError(f"entry: expected one of {', '.join(self.kernels)}, got {entry!r}; name the kernel")
        program = self.kernels[entry] if entry is not None else next(iter(self.kernels.values()))
        kernel = program.kernel
        geometry = Geometry(_extent("grid", grid), _extent("block", block), _extent("cluster", cluster))
        clusters = _clusters(geometry, ctas)
        if kernel.block is not None and geometry.block != (*kernel.block, 1, 1)[:3]:
            raise ValueError(f"block: expected .reqntid {kernel.block}, got {geometry.block}; pass the launch's own")
        memory = GlobalMemory()
        parameters = _bind(kernel, params, memory)

        report = RunReport(kernel.name)
        at_once = max(1, _COHORT_THREADS // (prod(geometry.block) * prod(geometry.cluster)))
        with np.errstate(all="ignore"):
            for start in range(0, len(clusters), at_once):
                blocks = [cta for members in clusters[start : start + at_once] for cta in members]
                cohort = Cohort(kernel, geometry, blocks, report.blocks, parameters, memory, report)
                program.run(cohort)
                report.blocks += len(blocks)
        report.threads = report.blocks * prod(geometry.block)
        memory.write_back()
        return report


class _Program:
    """A kernel ready to run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.blocks = blocks_of(kernel)
        self.steps: list[Step | None] = [None if ends_block(i) else step_of(i) for i in kernel.instructions]
        self.ends: list[_End | None] = [
            None if block.ends is None else _end_of(number, block, block.ends)
            for number, block in enumerate(self.blocks)
        ]

    def run(self, c: Cohort) -> None:
        ready: dict[int, Mask] = {0: c.live.copy()} if self.blocks else {}
        for _ in range(_MAX_BLOCKS):
            if not ready:
                ready = c.sync.release()
                if not ready:
                    break
            number = min(ready, key=lambda n: self.blocks[n].rank)
            for following, mask in self._run_block(c, number, ready.pop(number)):
                if following == len(self.blocks):
                    c.live &= ~mask
                elif mask.any():
                    ready[following] = ready[following] | mask if following in ready else mask
        else:
            raise RuntimeError(f"{self.kernel.name} still runs after {_MAX_BLOCKS} basic blocks; it seems to hang")
        c.sync.check_end()

    def _run_block(self, c: Cohort, number: int, mask: Mask) -> Iterable[tuple[int, Mask]]:
        block, active = self.blocks[number], Active(mask, c.live)
        code, executed = self.kernel.instructions, c.report.executed
        for i in range(block.start, block.stop):
            step, instruction = self.steps[i], code[i]
            chosen = _guarded(c, active, instruction)
            if chosen.count:
                executed[instruction.opcode] += chosen.count
                if step is not None:
                    step(c, chosen)
        end = self.ends[number]
        if end is None or block.ends is None:
            return [(number + 1, mask)]
        chosen = _guarded(c, active, block.ends)
        passing = [] if chosen is active else [(number + 1, mask & ~chosen.mask)]
        return [*passing, *(end(c, chosen) if chosen.count else ())]


def _guarded(c: Cohort, active: Active, instruction: Instruction) -> Active:
    """Those of the threads whose guard is true."""
    if instruction.guard is None:
        return active
    return Active(active.mask & c.read(instruction.guard, "pred", active, instruction), c.live)


def _end_of(number: int, block: Block, instruction: Instruction) -> _End:
    opcode = instruction.opcode
    if opcode in ("bra", "bra.uni") and block.target is not None:
        target = block.target
        return lambda c, active: [(target, active.mask)]
    if opcode in ("ret", "exit"):
        return _exit
    if opcode in (f"barrier.cluster.wait{a}{b}" for a in ("", ".acquire") for b in ("", ".aligned")):
        return lambda c, active: [(number + 1, c.sync.wait_cluster(instruction, active.mask, number + 1))]
    if opcode in ("bar.sync", "barrier.sync", "barrier.sync.aligned"):
        return _cta_barrier(number, instruction)
    if opcode == "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64":
        return _mbarrier_wait(number, instruction)
    raise UnsupportedPtx(opcode, instruction.line)


def _mbarrier_wait(number: int, instruction: Instruction) -> _End:
    """``try_wait`` may block as long as it likes: here until it can give true."""
    to, where, parity = operands_of(instruction, 3)
    done, address = destination_of(to, 1, instruction), address_of(where, instruction)

    def end(c: Cohort, active: Active) -> Iterable[tuple[int, Mask]]:
        addresses = shared_addresses(c, address, active, instruction)
        found, numbers, _ = c.shared.mbarriers(c, instruction, active.threads, addresses, cluster=False)
        parities = active.take(c.read(parity, "b32", active, instruction)).astype(np.int64)
        c.write(done, np.ones(1, bool), active)
        c.sync.wait_mbarrier(instruction, active.threads[found], numbers, parities[found], number + 1)
        lost = np.zeros_like(active.mask)
        lost[active.threads[~found]] = True
        return [(number + 1, lost)]

    return end


def _exit(c: Cohort, active: Active) -> Iterable[tuple[int, Mask]]:
    c.live &= ~active.mask
    return ()


def _cta_barrier(number: int, instruction: Instruction) -> _End:
    counts = instruction.operands[1:]
    barrier, *_ = operands_of(instruction, 2 if counts else 1)
    if not isinstance(barrier, Immediate) or not all(isinstance(count, Immediate) for count in counts):
        raise UnsupportedPtx(instruction.text, instruction.line, "only numbered barriers are run here")

    def end(c: Cohort, active: Active) -> Iterable[tuple[int, Mask]]:
        if any(isinstance(count, Immediate) and count.bits != c.block_size for count in counts):
            raise UnsupportedPtx(instruction.text, instruction.line, "a barrier for a part of the CTA")
        c.sync.wait_cta(instruction, active.mask, barrier.bits, number + 1)
        return ()

    return end


def _extent(name: str, value: int | Sequence[int]) -> Extent:
    try:
        numbers = [operator.index(value)] if not isinstance(value, Sequence) else [operator.index(v) for v in value]
    except TypeError as error:
        raise TypeError(f"{name}: expected an integer or up to three, got {value!r}; pass the launch's own") from error
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise ValueError(f"{name}: expected one to three positive integers, got {value!r}; pass the launch's own")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _clusters(geometry: Geometry, ctas: Iterable[int] | None) -> list[list[int]]:
    """The CTAs of each cluster to run, in rank order."""
    grid, cluster = geometry.grid, geometry.cluster
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ValueError(f"grid: expected a multiple of the cluster {cluster}, got {grid}; a cluster is whole")
    numbers = np.arange(prod(grid)).reshape(grid[::-1])
    z, y, x = (g // c for g, c in zip(grid[::-1], cluster[::-1], strict=True))
    tiles = numbers.reshape(z, cluster[2], y, cluster[1], x, cluster[0]).transpose(0, 2, 4, 1, 3, 5)
    members = tiles.reshape(-1, prod(cluster)).tolist()
    if ctas is None:
        return members
    wanted = set(ctas)
    if not wanted <= set(range(prod(grid))):
        raise ValueError(f"ctas: expected numbers below {prod(grid)}, got {sorted(wanted)}; number CTAs linearly")
    return [cluster for cluster in members if wanted & set(cluster)]


def _bind(kernel: Kernel, params: Sequence[Buffer | int], memory: GlobalMemory) -> dict[str, int]:
    if len(params) != len(kernel.parameters):
        raise ValueError(
            f"params: expected {len(kernel.parameters)} for {kernel.name}, got {len(params)}; pass them all"
        )
    values = {}
    for variable, value in zip(kernel.parameters, params, strict=True):
        if isinstance(value, Buffer) and variable.bytes != 8:
            raise TypeError(f"params: {variable.name} has {variable.bytes} bytes, no pointer fits; pass an int")
        if not isinstance(value, Buffer | int):
            raise TypeError(f"params: expected a Buffer or an int for {variable.name}, got {type(value).__name__}")
        values[variable.name] = memory.place(value) if isinstance(value, Buffer) else value
    return values
