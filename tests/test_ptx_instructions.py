"""The PTX machine, one instruction and one rule at a time, against plain Python numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from kda_lib.lab.ptx import Buffer, Check, Machine, PtxError, RunReport, UnsupportedPtx
from kda_lib.lab.ptx.alu import fma_f32


def run(body: str, *arrays: NDArray[np.generic], block: int = 32, dependent: bool = False, ctas: int = 1) -> RunReport:
    """Run ``body`` with pointers %a0, %a1, ... to the arrays (the first read-only), and %t = %tid.x; one cluster."""
    buffers = [Buffer(a, f"a{i}", readonly=i == 0, dependent=dependent and i == 0) for i, a in enumerate(arrays)]
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = " ".join(f".reg .b64 %a{i}; ld.param.u64 %a{i}, [p{i}];" for i in range(len(arrays)))
    text = (
        f".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k({parameters})\n"
        "{ .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<16>; .reg .b32 %t; "
        f".shared .align 16 .b8 s[256]; {loads} mov.u32 %t, %tid.x;\n{body}\n}}\n"
    )
    return Machine(text).run(params=buffers, block=block, grid=ctas, cluster=ctas)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def s32(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *values: function(*(signed(v, 32) for v in values))


def prmt(a: int, b: int, selector: int) -> int:
    source, result = (b << 32 | a).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = selector >> 4 * i & 0xF
        byte = source[nibble & 7]
        result |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * i
    return result


def bfe(value: int, start: int, length: int, sign: bool) -> int:
    """The loop of the PTX ISA."""
    start, length = start & 0xFF, length & 0xFF
    fill = value >> min(start + length - 1, 31) & 1 if sign and length else 0
    return sum((value >> start + i & 1 if i < length and start + i <= 31 else fill) << i for i in range(32))


def dot(a: int, b: int, c: int, width: int, terms: int) -> int:
    return c + sum((a >> width * i & (1 << width) - 1) * (b >> 8 * i & 0xFF) for i in range(terms))


#: Result register, opcode, what it computes from three unsigned 32-bit integers (modulo the result's size).
INTEGER: list[tuple[str, str, Callable[[int, int, int], int]]] = [
    ("%r", "add.s32 D, A, B", lambda a, b, c: a + b),
    ("%r", "sub.u32 D, A, B", lambda a, b, c: a - b),
    ("%r", "neg.s32 D, A", lambda a, b, c: -a),
    ("%r", "not.b32 D, A", lambda a, b, c: ~a),
    ("%r", "mul.lo.s32 D, A, B", lambda a, b, c: a * b),
    ("%r", "mul.hi.u32 D, A, B", lambda a, b, c: a * b >> 32),
    ("%r", "mul.hi.s32 D, A, B", s32(lambda a, b, c: a * b >> 32)),
    ("%h", "{ .reg .b16 x, y; mov.b32 {x, _}, A; mov.b32 {y, _}, B; mul.hi.u16 D, x, y; }",
     lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) >> 16),
    ("%r", "{ .reg .b32 x; or.b32 x, B, 1; div.u32 D, A, x; }", lambda a, b, c: a // (b | 1)),
    ("%r", "{ .reg .b32 x; or.b32 x, B, 1; rem.s32 D, A, x; }",
     s32(lambda a, b, c: abs(a) % abs(b | 1) * (1 if a >= 0 else -1))),
    ("%r", "{ .reg .b32 x; or.b32 x, B, 3; div.s32 D, A, x; }",
     s32(lambda a, b, c: abs(a) // abs(b | 3) * (1 if (a >= 0) == (b >= 0) else -1))),
    ("%r", "mad.lo.s32 D, A, B, C", lambda a, b, c: a * b + c),
    ("%d", "mul.wide.u32 D, A, B", lambda a, b, c: a * b),
    ("%d", "mul.wide.s32 D, A, B", s32(lambda a, b, c: a * b)),
    ("%r", "min.u32 D, A, B", lambda a, b, c: min(a, b)),
    ("%r", "max.s32 D, A, B", s32(lambda a, b, c: max(a, b))),
    ("%r", "and.b32 D, A, B", lambda a, b, c: a & b),
    ("%r", "xor.b32 D, A, 0xFFFF0000", lambda a, b, c: a ^ 0xFFFF0000),
    ("%r", "shl.b32 D, A, B", lambda a, b, c: a << b if b < 32 else 0),
    ("%r", "shr.u32 D, A, B", lambda a, b, c: a >> min(b, 32)),
    ("%r", "shr.s32 D, A, B", lambda a, b, c: signed(a, 32) >> min(b, 32)),
    ("%r", "bfe.u32 D, A, B, C", lambda a, b, c: bfe(a, b, c, False)),
    ("%r", "bfe.s32 D, A, B, C", lambda a, b, c: bfe(a, b, c, True)),
    ("%r", "prmt.b32 D, A, B, C", prmt),
    ("%r", "dp2a.lo.u32.u32 D, A, B, C", lambda a, b, c: dot(a, b, c, 16, 2)),
    ("%r", "dp4a.u32.u32 D, A, B, C", lambda a, b, c: dot(a, b, c, 8, 4)),
    ("%d", "cvt.s64.s32 D, A", lambda a, b, c: signed(a, 32)),
    ("%d", "cvt.u64.u32 D, A", lambda a, b, c: a),
    ("%h", "cvt.u16.u32 D, A", lambda a, b, c: a),
    ("%d", "mov.b64 D, {A, B}", lambda a, b, c: b << 32 | a),
    ("%r", "{ .reg .b16 x, y; mov.b32 {x, y}, A; mov.b32 D, {y, x}; }", lambda a, b, c: a >> 16 | a << 16),
    ("%r", "{ .reg .pred p; setp.lt.s32 p, A, B; selp.b32 D, A, C, p; }",
     lambda a, b, c: a if signed(a, 32) < signed(b, 32) else c),
    ("%r", "{ .reg .pred p, q; setp.hi.u32 p, A, B; setp.eq.s32 q, A, C; or.pred p, p, q; selp.b32 D, 1, 0, p; }",
     lambda a, b, c: a > b or a == c),
]  # fmt: skip


@pytest.mark.parametrize(("register", "code", "oracle"), INTEGER, ids=[code for _, code, _ in INTEGER])
def test_integer_instruction(register: str, code: str, oracle: Callable[[int, int, int], int]) -> None:
    rng = np.random.default_rng(5)
    edges = [
        0,
        1,
        2,
        7,
        8,
        16,
        31,
        32,
        33,
        40,
        63,
        64,
        255,
        256,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
    ]
    values = np.where(rng.random((1024, 3)) < 0.6, rng.choice(edges, (1024, 3)), rng.integers(0, 1 << 32, (1024, 3)))
    a, size = values.astype(np.uint32), {"%h": 2, "%r": 4, "%d": 8}[register]
    out = np.zeros(1024, f"u{size}")
    for name, operand in (("D", f"{register}7"), ("A", "%r1"), ("B", "%r2"), ("C", "%r3")):
        code = re.sub(rf"\b{name}\b", operand, code)
    code += "" if code.startswith("{") else ";"
    report = run(
        f"mad.wide.u32 %d1, %t, 12, %a0; ld.global.nc.b32 %r1, [%d1];"
        "ld.global.b32 %r2, [%d1+4]; ld.global.b32 %r3, [%d1+8];"
        f"mad.wide.u32 %d2, %t, {size}, %a1; {code} st.global.b{8 * size} [%d2], {register}7; ret;",
        a, out, block=1024,
    )  # fmt: skip
    assert report.ok, str(report)
    assert out.tolist() == [int(oracle(*row)) % (1 << 8 * size) for row in values.tolist()]


def round_f32(value: Fraction) -> float:
    """Nearest FP32, ties to even, by definition: a whole number of units of the last place (finite results only)."""
    magnitude = abs(value)
    if magnitude == 0:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    return float(round(magnitude / unit) * unit * (1 if value > 0 else -1))


def test_fma_rounds_once() -> None:
    """Against exact fractions: any bits, exponents close to each other, subnormals, and sums just beside a tie."""
    rng = np.random.default_rng(9)
    count = 1500
    bits = rng.integers(0, 1 << 32, (3, count), dtype=np.uint32)
    total = rng.integers(1, 250, count)
    low, shift = total // 2, rng.integers(-30, 31, (2, count))
    fields = [low + 63 + shift[0], total - low + 63 - shift[0], total + shift[1]]
    a, b, c = ((v & 0x807FFFFF | np.clip(e, 0, 254).astype(np.uint32) << 23).view(np.float32)
               for v, e in zip(bits, fields, strict=True))  # fmt: skip
    # Odd products of 25 bits are ties of FP32; what is added is too small for FP64, and decides.
    a[:500] = rng.integers(1 << 11, 1 << 12, 500) * 2 + 1
    b[:500] = (1 << 24) // a[:500] + 1 + ((1 << 24) // a[:500]) % 2
    c[:500] = rng.choice([-1.0, 1.0], 500) * 2.0 ** rng.integers(-149, -31, 500)
    with np.errstate(all="ignore"):
        got = fma_f32(a, b, c)
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    finite = [i for i, value in enumerate(exact) if abs(value) < 2**127]
    assert len(finite) > count * 0.9
    assert [float(got[i]) for i in finite] == [round_f32(exact[i]) for i in finite]
    assert (twice != got)[:500].sum() > 50, "too few cases in which rounding twice differs: the test is weak"


def test_fma_specials() -> None:
    inf, nan, big = np.inf, np.nan, np.float32(3e38)
    cases = [(inf, 0, 1, nan), (inf, 1, -inf, nan), (inf, 2, 1, inf), (big, big, -inf, -inf), (big, 2, -big, 3e38),
             (big, big, 0, inf), (-0.0, 1, -0.0, -0.0), (-0.0, 1, 0.0, 0.0), (nan, 1, 1, nan),
             (1e-30, -1e-30, 0, -0.0)]  # fmt: skip
    a, b, c, expected = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    with np.errstate(all="ignore"):
        got = fma_f32(a, b, c)
    expected[np.isnan(expected)] = np.uint32(0x7FFFFFFF).view(np.float32)
    assert got.view(np.uint32).tolist() == expected.view(np.uint32).tolist()


STORE = "mad.wide.u32 %d9, %t, 4, %a1; st.global.b32 [%d9], %r9; ret;"
FIRST_STORES = "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [s], %t;"
NONE = np.zeros(1, np.uint32)


def test_divergence_and_loops() -> None:
    """Collatz steps of each thread, an early exit for some, and an out-of-line branch that jumps back."""
    out = np.zeros(96, np.uint32)
    report = run(
        """add.u32 %r1, %t, 1; mov.u32 %r9, 0; setp.eq.u32 %p1, %t, 40; @%p1 exit;
        loop: setp.eq.u32 %p2, %r1, 1; @%p2 bra done;
        and.b32 %r2, %r1, 1; setp.ne.u32 %p3, %r2, 0; @%p3 bra odd;
        shr.u32 %r1, %r1, 1;
        next: add.u32 %r9, %r9, 1; bra loop;
        done: bar.sync 0; mad.wide.u32 %d9, %t, 4, %a1; st.global.b32 [%d9], %r9; ret;
        odd: mad.lo.u32 %r1, %r1, 3, 1; bra.uni next;""",
        NONE, out, block=96,
    )  # fmt: skip
    assert report.ok, str(report)

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert out.tolist() == [0 if t == 40 else steps(t + 1) for t in range(96)]
    assert (report.executed["exit"], report.executed["bar.sync"]) == (1, 95)


@pytest.mark.parametrize(
    ("mode", "operand", "control", "source"),
    [
        ("bfly", 3, 31, lambda lane: lane ^ 3),
        ("up", 2, 0, lambda lane: max(lane - 2, lane if lane < 2 else 0)),
        ("down", 5, 31, lambda lane: lane + 5 if lane + 5 <= 31 else lane),
        ("idx", 9, 31, lambda lane: 9),
        ("idx", 9, 0x181F, lambda lane: lane & 24 | 9 & 7),
        ("bfly", 4, 0x1C03, lambda lane: lane ^ 4 if lane & 4 else lane),
    ],
)
def test_shuffle(mode: str, operand: int, control: int, source: Callable[[int], int]) -> None:
    out = np.zeros(64, np.uint32)
    code = f"shfl.sync.{mode}.b32 %r9|%p1, %t, {operand}, {control}, -1; {STORE}"
    report = run(code, NONE, out, block=64)
    assert report.ok, str(report)
    assert out.tolist() == [t // 32 * 32 + source(t % 32) for t in range(64)]


def test_elect_and_special_registers() -> None:
    out = np.zeros(2 * 64, np.uint32)
    report = run(
        "elect.sync %r1|%p1, -1; mov.u32 %r9, 0; mov.u32 %r2, %cluster_ctarank; @%p1 add.u32 %r9, %r2, 7;"
        "mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.u32 %t, %r3, %r4, %t;" + STORE,
        NONE, out, block=64, ctas=2,
    )  # fmt: skip
    assert report.ok, str(report)
    assert {i: int(out[i]) for i in out.nonzero()[0].tolist()} == {0: 7, 32: 7, 64: 8, 96: 8}


def test_element_sizes_and_sign_extension() -> None:
    a = np.array([0x80, 0x7F, 0xFE, 0x01] * 8, np.uint8)
    out = np.zeros(32, np.uint32)
    code = "cvt.u64.u32 %d1, %t; add.u64 %d1, %d1, %a0; ld.global.s8 %r9, [%d1];" + STORE
    assert run(code, a, out).ok
    assert out.view(np.int32).tolist() == a.view(np.int8).tolist()


def test_cluster_barrier_publishes_shared_memory() -> None:
    """Each CTA writes into its neighbour with plain stores; the last barrier keeps the neighbour alive."""
    code = (
        """mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, s; mapa.shared::cluster.u32 %r4, %r3, %r2;
        mad.lo.u32 %r4, %t, 4, %r4; barrier.cluster.arrive; barrier.cluster.wait;
        st.shared::cluster.u32 [%r4], %r1; {arrive}; barrier.cluster.wait;
        mad.lo.u32 %r3, %t, 4, %r3; xor.b32 %r3, %r3, 4; ld.shared.u32 %r9, [%r3]; mad.lo.u32 %t, %r1, 32, %t;"""
        + STORE
    )
    good = np.zeros(64, np.uint32)
    report = run(code.replace("{arrive}", "barrier.cluster.arrive.release"), NONE, good, ctas=2)
    assert report.ok, str(report)
    assert good.tolist() == [1] * 32 + [0] * 32
    relaxed = run(code.replace("{arrive}", "barrier.cluster.arrive.relaxed"), NONE, good.copy(), ctas=2)
    assert [v.check for v in relaxed.violations] == [Check.RACE]
    twice = run(code.replace("{arrive}", "barrier.cluster.arrive; barrier.cluster.arrive"), NONE, good.copy(), ctas=2)
    assert twice.failed(Check.CLUSTER_BARRIER)


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("add.u32 %r9, %r8, 1;", Check.REGISTER),
        ("setp.lt.u32 %p1, %t, 4; @%p1 mov.u32 %r8, 1; mov.u32 %r9, %r8;", Check.REGISTER),
        ("ld.shared.u32 %r9, [s];", Check.INITIALISED),
        ("ld.global.u32 %r9, [%a1+128];", Check.INITIALISED),
        ("st.shared.u32 [s], %t; mov.u32 %r9, 0;", Check.RACE),
        (FIRST_STORES + "bar.sync 0; ld.shared.u32 %r9, [s]; st.shared.u32 [s+4], %r9;",
         Check.RACE),
        (FIRST_STORES + "ld.shared.u32 %r9, [s];", Check.RACE),
        (FIRST_STORES + "bar.sync 0; ld.shared.u32 %r9, [s]; @%p1 st.shared.u32 [s], 1;",
         Check.RACE),
        ("mov.u32 %r1, s; ld.shared.u32 %r9, [%r1+256];", Check.BOUNDS),
        ("mov.u64 %d1, 64; ld.global.u32 %r9, [%d1];", Check.BOUNDS),
        ("st.global.u32 [%a0], %t; mov.u32 %r9, 0;", Check.READ_ONLY),
        ("setp.lt.u32 %p1, %t, 7; mov.u32 %r9, 0; @%p1 shfl.sync.bfly.b32 %r9, %t, 1, 31, -1;", Check.SHUFFLE),
        ("setp.lt.u32 %p1, %t, 7; mov.u32 %r9, 0; @%p1 shfl.sync.bfly.b32 %r9, %t, 1, 31, 0x7F;", Check.SHUFFLE),
        ("ld.global.u32 %r9, [%a0];", Check.DEPENDENT),
        ("barrier.cluster.wait; mov.u32 %r9, 0;", Check.CLUSTER_BARRIER),
    ],
)  # fmt: skip
def test_rule_is_checked(code: str, check: Check) -> None:
    report = run(code + STORE, NONE, np.zeros(33, np.uint32), dependent=check is Check.DEPENDENT)
    assert [v.check for v in report.violations] == [check], str(report)
    assert report.violations[0].line == 6


@pytest.mark.parametrize(
    "code",
    [
        "atom.global.add.u32 %r9, [%a1], 1;", "add.ftz.f32 %r9, %r1, %r2;", "mul.f32 %r9, %r1, %r2;",
        "add.cc.u32 %r9, %r1, %r2;",
        "ld.volatile.global.u32 %r9, [%a0];", "ld.u32 %r9, [%a0];", "ld.shared.nc.u32 %r9, [s];", "bar.arrive 0, 64;",
        "bar.sync 0, 16;", "shfl.sync.bfly.b64 %d1, %d1, 1, 31, -1;", "mov.u32 %r9, %clock;", "fence.sc.gpu;",
        "mbarrier.test_wait.shared::cta.b64 %p1, [s], %d1;", "brx.idx %r1, table;", "cp.async.wait_all;",
    ],
)  # fmt: skip
def test_unsupported_is_an_error_with_its_name_and_line(code: str) -> None:
    with pytest.raises(UnsupportedPtx) as caught:
        run(code + STORE, NONE, np.zeros(32, np.uint32))
    named = "%clock" if "clock" in code else code.split()[0].rstrip(";")
    assert str(caught.value).startswith(f"PTX line 6: {named}")
    assert caught.value.line == 6


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (".version 8.8\n.func f() { ret; }", 2, ".func"),
        (".visible .entry k()\n{ .local .b8 x[4]; }", 2, ".local"),
        (".visible .entry k(.param .align 64 .b8 p[128]) { ret; }", 1, "scalar parameters"),
        (".extern .shared .align 16 .b8 dyn[];", 1, ".extern"),
        (".visible .entry k()\n{\n bra nowhere; }", 3, "no such label"),
        (".visible .entry k()\n{ @%p1 ret; }", 2, "no such register"),
        (".visible .entry k()\n{ .reg .b32 %r<2>; .reg .b64 %d;\n add.u32 %d, %r0, %r1; }", 3, "32 bits"),
        (".visible .entry k()\n{ .reg .b32 %r<2>;\n add.u32 %r0, %r1; }", 3, "expected 3 operands"),
        (".visible .entry k()\n{ ret", 2, "expected"),
        (".visible .entry k()\n{ ` }", 2, "cannot read"),
    ],
)
def test_malformed_text(text: str, line: int, words: str) -> None:
    with pytest.raises(PtxError, match=re.escape(words)) as caught:
        Machine(text)
    assert caught.value.line == line


KERNEL = ".visible .entry k(.param .u64 p, .param .u32 n)\n.reqntid 64, 1, 1\n{ ret; }"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"params": [1]}, ValueError, "expected 2 for k, got 1"),
        ({"params": [1, Buffer(NONE, "x")]}, TypeError, "no pointer fits"),
        ({"params": [1.5, 1]}, TypeError, "got float"),
        ({"entry": "other"}, ValueError, "got 'other'"),
        ({"block": 32}, ValueError, "expected .reqntid"),
        ({"grid": 3, "cluster": 2}, ValueError, "a multiple of the cluster"),
        ({"grid": 0}, ValueError, "positive"),
        ({"grid": "2"}, TypeError, "grid"),
        ({"ctas": [7]}, ValueError, "below 2"),
    ],
)
def test_bad_launch(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    good: dict[str, object] = {"params": [1, 1], "grid": 2, "block": 64}
    assert Machine(KERNEL).run(**good).threads == 128  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        Machine(KERNEL).run(**(good | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [[1, 2], np.zeros((4, 4))[:, ::2]])
def test_bad_buffer(data: object) -> None:
    with pytest.raises((TypeError, ValueError), match="x: expected"):
        Buffer(data, "x")  # type: ignore[arg-type]


def test_bytes_that_nobody_writes_keep_the_callers_value() -> None:
    out = np.full(33, 5, np.uint32)
    run("mov.u32 %r9, %t;" + STORE, NONE, out)
    assert out.tolist() == [*range(32), 5]
