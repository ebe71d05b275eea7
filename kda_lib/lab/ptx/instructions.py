"""What each instruction does to a cohort, except for those that end a block (:mod:`kda_lib.lab.ptx.machine`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kda_lib.lab.ptx.alu import OPERATIONS, Array, Operation
from kda_lib.lab.ptx.cohort import STORAGE, WARP, Active, Cohort
from kda_lib.lab.ptx.errors import PtxError, UnsupportedPtx
from kda_lib.lab.ptx.memory import PEER_SHIFT
from kda_lib.lab.ptx.parser import BITS, Address, Instruction, Operand, Pair, Register, Symbol, Vector
from kda_lib.lab.ptx.report import Check

Step: TypeAlias = Callable[[Cohort, Active], None]

_SPACES = {"param", "global", "shared", "shared::cta", "shared::cluster"}
#: Modifiers that decide where data is cached, not what it is.
_CACHE_HINTS = {
    "weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
    "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B",
}  # fmt: skip


def step_of(instruction: Instruction) -> Step:
    """The effect of an instruction on the threads that execute it.

    Raises:
        UnsupportedPtx: the opcode, a modifier or an operand is unknown here.
        PtxError: the operands do not fit the opcode.
    """
    vectors = any(isinstance(operand, Vector) for operand in instruction.operands)
    if instruction.opcode.startswith("mov.") and vectors:
        return _move_vector(instruction)
    operation = OPERATIONS.get(instruction.opcode)
    if operation is not None:
        return _arithmetic(instruction, operation)
    build = _OTHERS.get(instruction.opcode) or _FAMILIES.get(instruction.opcode.split(".")[0])
    if build is None:
        raise UnsupportedPtx(instruction.opcode, instruction.line)
    return build(instruction)


def operands_of(instruction: Instruction, count: int) -> tuple[Operand, ...]:
    if len(instruction.operands) != count:
        got = len(instruction.operands)
        raise PtxError(f"{instruction.text}: expected {count} operands, got {got}", instruction.line)
    return instruction.operands


def destination_of(operand: Operand, bits: int, instruction: Instruction) -> Register:
    if not isinstance(operand, Register) or operand.bits != bits:
        raise PtxError(f"{instruction.text}: the destination must be a register of {bits} bits", instruction.line)
    return operand


def _arithmetic(instruction: Instruction, operation: Operation) -> Step:
    first, *sources = operands_of(instruction, len(operation.operands) + 1)
    destination = destination_of(first, BITS[operation.result], instruction)
    typed = list(zip(sources, operation.operands, strict=True))

    def step(c: Cohort, active: Active) -> None:
        values = [c.read(source, kind, active, instruction) for source, kind in typed]
        c.write(destination, operation.compute(*values), active)

    return step


def _move_vector(instruction: Instruction) -> Step:
    """``mov.b32 {low, high}, r`` and ``mov.b32 r, {low, high}``; the first item holds the lowest bits."""
    to, source = operands_of(instruction, 2)
    kind = instruction.opcode.removeprefix("mov.")
    if kind not in ("b32", "b64"):
        raise UnsupportedPtx(instruction.opcode, instruction.line, "vectors are moved as b32 or b64")
    bits = BITS[kind]
    items = to.items if isinstance(to, Vector) else source.items if isinstance(source, Vector) else ()
    part = bits // len(items)
    if part not in STORAGE or (isinstance(to, Vector) and isinstance(source, Vector)):
        raise UnsupportedPtx(instruction.text, instruction.line)
    shifts = [np.dtype(STORAGE[bits]).type(part * i) for i in range(len(items))]

    def unpack(c: Cohort, active: Active) -> None:
        value = c.read(source, kind, active, instruction)
        for item, shift in zip(items, shifts, strict=True):
            if item != Symbol("_"):
                c.write(destination_of(item, part, instruction), (value >> shift).astype(STORAGE[part]), active)

    def pack(c: Cohort, active: Active) -> None:
        value: Array = np.zeros(1, STORAGE[bits])
        for item, shift in zip(items, shifts, strict=True):
            value = value | c.read(item, f"b{part}", active, instruction).astype(STORAGE[bits]) << shift
        c.write(destination_of(to, bits, instruction), value, active)

    return unpack if isinstance(to, Vector) else pack


@dataclass(frozen=True)
class _Access:
    """space: state space. kind: element type. items: registers. coherent: not ``.nc``."""

    space: str
    kind: str
    items: tuple[Operand, ...]
    address: Address
    coherent: bool

    @property
    def width(self) -> int:
        """Bytes that a thread accesses."""
        return BITS[self.kind] // 8 * len(self.items)

    def addresses(self, c: Cohort, active: Active, instruction: Instruction) -> Array:
        if self.space == "global":
            return _addresses(c, self.address, "u64", active, instruction)
        return shared_addresses(c, self.address, active, instruction)


def _addresses(c: Cohort, address: Address, kind: str, active: Active, instruction: Instruction) -> Array:
    values = c.read(address.base, kind, active, instruction)
    return active.take(values + np.array([address.offset]).astype(values.dtype))


def shared_addresses(c: Cohort, address: Address, active: Active, instruction: Instruction) -> Array:
    """Addresses in shared memory, held in registers of 32 or 64 bits."""
    wide = isinstance(address.base, Register) and address.base.bits == 64
    return _addresses(c, address, "u64" if wide else "u32", active, instruction)


def address_of(operand: Operand, instruction: Instruction) -> Address:
    if not isinstance(operand, Address):
        raise PtxError(f"{instruction.text}: expected an address in brackets", instruction.line)
    return operand


def _access(instruction: Instruction, where: Operand, what: Operand) -> _Access:
    *modifiers, kind = instruction.opcode.split(".")[1:]
    items = what.items if isinstance(what, Vector) else (what,)
    spaces = [m for m in modifiers if m in _SPACES]
    rest = [m for m in modifiers if m not in _SPACES and m not in _CACHE_HINTS]
    coherent = True
    if "nc" in rest and spaces == ["global"] and instruction.opcode.startswith("ld"):
        rest.remove("nc")
        coherent = False
    if len(items) > 1 and f"v{len(items)}" in rest:
        rest.remove(f"v{len(items)}")
    if rest or len(spaces) != 1 or BITS.get(kind, 0) < 8:
        reason = f"{', '.join(rest)} is unknown here" if rest else "one state space and a type are needed"
        raise UnsupportedPtx(instruction.opcode, instruction.line, reason)
    return _Access(spaces[0], kind, items, address_of(where, instruction), coherent)


def _load(instruction: Instruction) -> Step:
    to, where = operands_of(instruction, 2)
    access = _access(instruction, where, to)
    for item in access.items:
        if not isinstance(item, Register) or item.bits < BITS[access.kind]:
            raise PtxError(f"{instruction.text}: the destination is no register of that size", instruction.line)
    registers = [item for item in access.items if isinstance(item, Register)]
    sign = "i" if access.kind.startswith("s") else "u"
    element = f"{sign}{BITS[access.kind] // 8}"

    def parameter(c: Cohort, active: Active) -> None:
        name = getattr(access.address.base, "name", "")
        if name not in c.parameters or access.address.offset or len(registers) > 1:
            raise UnsupportedPtx(instruction.text, instruction.line, "only whole parameters are read here")
        mask = (1 << BITS[access.kind]) - 1
        c.write(
            registers[0], np.array([c.parameters[name] & mask], np.uint64).astype(STORAGE[registers[0].bits]), active
        )

    def step(c: Cohort, active: Active) -> None:
        addresses = access.addresses(c, active, instruction)
        if access.space == "global":
            data = c.memory.load(c, instruction, active.threads, addresses, access.width, access.coherent)
        else:
            cluster = access.space == "shared::cluster"
            data = c.shared.load(c, instruction, active.threads, addresses, access.width, cluster)
        for register, column in zip(registers, data.view(element).T, strict=True):
            # Widening a signed element extends its sign, an unsigned one zeros.
            values = column.astype(f"{sign}{register.bits // 8}").view(STORAGE[register.bits])
            if active.count < c.threads:
                spread = np.zeros(c.threads, values.dtype)
                spread[active.threads] = values
                values = spread
            c.write(register, values, active)

    return parameter if access.space == "param" else step


def _store(instruction: Instruction) -> Step:
    where, source = operands_of(instruction, 2)
    access = _access(instruction, where, source)
    if access.space == "param":
        raise UnsupportedPtx(instruction.opcode, instruction.line)
    size = BITS[access.kind] // 8

    def step(c: Cohort, active: Active) -> None:
        addresses = access.addresses(c, active, instruction)
        data = np.empty((active.count, len(access.items)), f"u{size}")
        for i, item in enumerate(access.items):
            kind = f"b{item.bits}" if isinstance(item, Register) else f"b{8 * size}"
            data[:, i] = active.take(c.read(item, kind, active, instruction))
        raw = data.view(np.uint8).reshape(active.count, access.width)
        if access.space == "global":
            c.memory.store(c, instruction, active.threads, addresses, raw)
        else:
            cluster = access.space == "shared::cluster"
            c.shared.store(c, instruction, active.threads, addresses, raw, cluster)

    return step


def _shuffle(instruction: Instruction) -> Step:
    """PTX ISA, "shfl.sync"."""
    mode = instruction.opcode.removeprefix("shfl.sync.").removesuffix(".b32")
    if instruction.opcode not in (f"shfl.sync.{mode}.b32",) or mode not in ("up", "down", "bfly", "idx"):
        raise UnsupportedPtx(instruction.opcode, instruction.line)
    to, a, b, clamp_and_segments, members = operands_of(instruction, 5)
    value_to, valid_to = (to.first, to.second) if isinstance(to, Pair) else (to, None)
    destination = destination_of(value_to, 32, instruction)
    predicate = None if valid_to is None else destination_of(valid_to, 1, instruction)

    def step(c: Cohort, active: Active) -> None:
        value, by, control, mask = (
            np.broadcast_to(c.read(o, "b32", active, instruction), c.threads)
            for o in (a, b, clamp_and_segments, members)
        )
        lane, by = c.lane, by.astype(np.int64) & 31
        segment, clamp = control.astype(np.int64) >> 8 & 31, control.astype(np.int64) & 31
        low = lane & segment
        last = low | (clamp & ~segment & 31)
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (by & ~segment & 31)}[mode]
        valid = source >= last if mode == "up" else source <= last
        source = np.where(valid, source, lane)
        _check_members(c, instruction, active, mask)
        from_thread = np.arange(c.threads) - lane + source
        here = active.threads
        named = mask[here] >> source[here].astype(np.uint32) & 1 == 1
        c.check(Check.SHUFFLE, instruction, here, ~(named & active.mask[from_thread[here]]),
                "its source lane does not take part")  # fmt: skip
        c.write(destination, value[from_thread], active)
        if predicate is not None:
            c.write(predicate, valid, active)

    return step


def _check_members(c: Cohort, instruction: Instruction, active: Active, mask: Array) -> None:
    """Each executing thread must be named, by a mask that is the same in its warp and names executing threads only."""
    rows = active.mask.reshape(-1, WARP)
    executing = (rows * (1 << np.arange(WARP, dtype=np.int64))).sum(1)
    there = np.repeat(executing, WARP)[active.threads]
    named, lane = mask[active.threads].astype(np.int64), c.lane[active.threads]
    bad = (named >> lane & 1 == 0) | (named & ~there != 0)
    c.check(
        Check.SHUFFLE,
        instruction,
        active.threads,
        bad,
        "the member mask does not name exactly the lanes that execute it",
    )


def _elect(instruction: Instruction) -> Step:
    """``elect.sync d|p, members``: the hardware may choose any executing lane; here it is the lowest."""
    pair, members = operands_of(instruction, 2)
    if not isinstance(pair, Pair):
        raise PtxError(f"{instruction.text}: expected d|p", instruction.line)
    predicate = destination_of(pair.second, 1, instruction)
    lane_to = None if pair.first == Symbol("_") else destination_of(pair.first, 32, instruction)

    def step(c: Cohort, active: Active) -> None:
        mask = np.broadcast_to(c.read(members, "b32", active, instruction), c.threads)
        _check_members(c, instruction, active, mask)
        leader = np.repeat(active.mask.reshape(-1, WARP).argmax(1), WARP)
        c.write(predicate, c.lane == leader, active)
        if lane_to is not None:
            c.write(lane_to, leader.astype(np.uint32), active)

    return step


def _map_address(instruction: Instruction) -> Step:
    to, address, rank = operands_of(instruction, 3)
    destination = destination_of(to, 32, instruction)

    def step(c: Cohort, active: Active) -> None:
        offset = c.read(address, "u32", active, instruction) & np.uint32((1 << PEER_SHIFT) - 1)
        window = c.read(rank, "u32", active, instruction) + np.uint32(1)
        c.write(destination, window << np.uint32(PEER_SHIFT) | offset, active)

    return step


def _arrive(instruction: Instruction) -> Step:
    operands_of(instruction, 0)
    words = instruction.opcode.split(".")[3:]
    release = "relaxed" not in words

    def step(c: Cohort, active: Active) -> None:
        if "aligned" in words:
            partial = c.with_absent_lanes(active.mask)[active.mask]
            c.check(Check.BARRIER, instruction, active.threads, partial, "only a part of the warp reached it")
        c.sync.arrive_cluster(instruction, active.mask, release)

    return step


def _mbarrier_init(instruction: Instruction) -> Step:
    where, count = operands_of(instruction, 2)
    address = address_of(where, instruction)

    def step(c: Cohort, active: Active) -> None:
        addresses = shared_addresses(c, address, active, instruction)
        counts = active.take(c.read(count, "b32", active, instruction)).astype(np.int64)
        c.shared.make_mbarriers(c, instruction, active.threads, addresses, counts)

    return step


def _mbarrier_fence(instruction: Instruction) -> Step:
    operands_of(instruction, 0)
    return lambda c, active: c.sync.mbarriers.fence(active.threads)


def _mbarrier_arrive(instruction: Instruction) -> Step:
    state, where, count = operands_of(instruction, 3)
    address = address_of(where, instruction)
    if state != Symbol("_"):
        raise UnsupportedPtx(instruction.text, instruction.line, "the state of an mbarrier is not given out here")

    def step(c: Cohort, active: Active) -> None:
        addresses = shared_addresses(c, address, active, instruction)
        found, numbers, _ = c.shared.mbarriers(c, instruction, active.threads, addresses, cluster=False)
        counts = active.take(c.read(count, "b32", active, instruction)).astype(np.int64)
        c.sync.mbarriers.expect_and_arrive(active.threads[found], numbers, counts[found])

    return step


def _store_async(instruction: Instruction) -> Step:
    where, source, barrier = operands_of(instruction, 3)
    address, mbarrier = address_of(where, instruction), address_of(barrier, instruction)

    def step(c: Cohort, active: Active) -> None:
        addresses, mbarriers = (shared_addresses(c, a, active, instruction) for a in (address, mbarrier))
        data = active.take(c.read(source, "b32", active, instruction)).view(np.uint8).reshape(-1, 4)
        c.shared.store_async(c, instruction, active.threads, addresses, data, mbarriers)

    return step


def _dependency_wait(instruction: Instruction) -> Step:
    operands_of(instruction, 0)

    def step(c: Cohort, active: Active) -> None:
        c.dependency_met[active.mask] = True

    return step


def _nothing(instruction: Instruction) -> Step:
    operands_of(instruction, 0)
    return lambda c, active: None


_FAMILIES: dict[str, Callable[[Instruction], Step]] = {"ld": _load, "st": _store, "shfl": _shuffle}
_OTHERS: dict[str, Callable[[Instruction], Step]] = {
    "elect.sync": _elect,
    "mbarrier.init.shared::cta.b64": _mbarrier_init,
    "mbarrier.arrive.expect_tx.shared::cta.b64": _mbarrier_arrive,
    "fence.mbarrier_init.release.cluster": _mbarrier_fence,
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32": _store_async,
    "mapa.shared::cluster.u32": _map_address,
    "griddepcontrol.wait": _dependency_wait,
    "griddepcontrol.launch_dependents": _nothing,
    **{f"barrier.cluster.arrive{o}{a}": _arrive for o in ("", ".release", ".relaxed") for a in ("", ".aligned")},
}
