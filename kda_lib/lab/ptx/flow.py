"""Basic blocks, and the order in which divergent threads run them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kda_lib.lab.ptx.errors import PtxError
from kda_lib.lab.ptx.parser import Instruction, Kernel, Symbol

#: First word of the opcodes that end a block, beside ``mbarrier.try_wait``. ``barrier.cluster.arrive`` does not.
_ENDS = {"bra", "ret", "exit", "bar", "barrier"}


@dataclass(frozen=True)
class Block:
    """Instructions ``start`` to ``stop``; if ``ends`` the last of them branches, exits or may block.

    target: block of a branch. rank: of the blocks with threads to run, the one of lowest rank goes first.
    """

    start: int
    stop: int
    ends: Instruction | None
    target: int | None
    rank: int


def blocks_of(kernel: Kernel) -> list[Block]:
    """The basic blocks in program order; block i falls through to block i + 1.

    Raises:
        PtxError: a branch names no label of this kernel.
    """
    code = kernel.instructions
    cuts = {0, len(code), *kernel.labels.values()}
    cuts |= {i + 1 for i, instruction in enumerate(code) if ends_block(instruction)}
    starts = sorted(cuts)
    number = {start: i for i, start in enumerate(starts)}
    spans = list(pairwise(starts))
    ends = [code[stop - 1] if ends_block(code[stop - 1]) else None for _, stop in spans]
    targets = [number[_target(kernel, end)] if end and end.opcode.startswith("bra") else None for end in ends]

    successors: list[list[int]] = []
    for i, (end, target) in enumerate(zip(ends, targets, strict=True)):
        leaves = end is not None and end.guard is None and end.opcode.split(".")[0] in ("bra", "ret", "exit")
        following = [] if leaves else [i + 1]
        following += [] if target is None else [target]
        successors.append([s for s in following if s < len(spans)])
    order = _topological(successors, range(len(spans)))
    rank = {block: position for position, block in enumerate(order)}
    return [Block(*span, ends[i], targets[i], rank[i]) for i, span in enumerate(spans)]


def ends_block(instruction: Instruction) -> bool:
    """Whether an instruction branches, exits or may block."""
    first = instruction.opcode.split(".")[0]
    waits = instruction.opcode.startswith("mbarrier.try_wait")
    return waits or (first in _ENDS and not instruction.opcode.startswith("barrier.cluster.arrive"))


def _target(kernel: Kernel, branch: Instruction) -> int:
    (label,) = branch.operands
    if not isinstance(label, Symbol) or label.name not in kernel.labels:
        raise PtxError(f"{branch.text}: no such label in {kernel.name}", branch.line)
    return kernel.labels[label.name]


def _topological(successors: Sequence[Sequence[int]], blocks: Collection[int]) -> list[int]:
    """Blocks so that every one comes after its predecessors, and a loop's blocks are all before what follows the loop.

    Running the lowest-ranked block first then brings threads together again at the first block that all of them reach,
    wherever the compiler placed it (Bourdoncle's weak topological order, 1993).
    """
    order: list[int] = []
    for component in _components(successors, blocks):
        head, *others = component
        order.append(head)
        if others:
            order += _topological(successors, others)
    return order


def _components(successors: Sequence[Sequence[int]], blocks: Collection[int]) -> list[list[int]]:
    """Strongly connected components of the sub-graph in topological order, entry block first (Tarjan)."""
    inside = set(blocks)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []

    def visit(block: int) -> None:
        index[block] = low[block] = len(index)
        stack.append(block)
        for following in successors[block]:
            if following not in inside:
                continue
            if following not in index:
                visit(following)
                low[block] = min(low[block], low[following])
            elif following in stack:
                low[block] = min(low[block], index[following])
        if low[block] == index[block]:
            cut = stack.index(block)
            found.append(stack[cut:])
            del stack[cut:]

    for block in blocks:
        if block not in index:
            visit(block)
    return found[::-1]
