"""Faults to plant in the PTX of our kernels, to see that they are reported.

Each is a regular expression and what takes its place; line numbers stay. A text without the expression is an error:
a fault that is not planted would pass for one that is not found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kda_lib.lab.ptx.report import Check

#: Targets whose kernels divide K over a cluster: portable and native.
CLUSTERED = ("sm_90a", "sm_100a")
#: And one whose kernels use a single CTA.
ALL = (*CLUSTERED, "sm_80")


class FaultNotPlanted(ValueError):
    """The PTX has nothing that the fault would change; the pattern must follow the kernel."""


@dataclass(frozen=True)
class Mutation:
    """A fault in one kernel for ``m`` tokens.

    expected: checks that must report it; none if it breaks no rule and shows in the output's bits alone.
    targets: for which the kernel has what it changes. verifiable: static race checkers can see it (order and barriers).
    """

    name: str
    pattern: str
    replacement: str
    expected: frozenset[Check]
    kernel: str = "skinny_n"
    m: int = 8
    targets: tuple[str, ...] = CLUSTERED
    verifiable: bool = False

    def apply(self, ptx: str) -> str:
        """The PTX with the fault at every place that has the pattern.

        Raises:
            FaultNotPlanted: there is none.
        """
        text, changes = re.subn(self.pattern, self.replacement, ptx)
        if not changes:
            raise FaultNotPlanted(f"{self.name}: expected {self.pattern!r} in the PTX, got none; adapt the fault")
        return text


def _only(threads: str, statement: str) -> str:
    """``statement`` (a group of the pattern) for some threads of a CTA only."""
    return rf"{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; {threads} @p {statement} }}"


_LATER_WARPS = "setp.ge.u32 p, t, 32;"
_X_LOAD = r"(ld\.global)(\.v4\.b32 \{[^}]*\}, \[%rd\d+)\]"
_EXPECT = r"(mbarrier\.arrive\.expect_tx[^;]*, )(%r\d+);"
_SEND = r"(st\.async[^[]*\[)(%r\d+)(\][^;]*;)"
_BAR = r"bar\.sync \s*0;"


def _fault(name: str, pattern: str, replacement: str, *expected: Check, **fields: object) -> Mutation:
    return Mutation(name, pattern, replacement, frozenset(expected), **fields)  # type: ignore[arg-type]


MUTATIONS = (
    _fault("removed barrier", _BAR, "", Check.RACE, targets=ALL, verifiable=True),
    _fault("barrier for half a warp", _BAR,
           "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.lt.u32 p, t, 16; @p bar.sync 0; }",
           Check.BARRIER, targets=ALL, verifiable=True),
    _fault("barrier that a warp misses", _BAR,
           "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; @p bar.sync 0; @!p bar.sync 1; }",
           Check.BARRIER, targets=ALL, verifiable=True),
    _fault("dropped warp in the reduction", r"(st\.shared\.f32[^;]*;)", _only(_LATER_WARPS, r"\1"),
           Check.INITIALISED, targets=ALL),
    _fault("wrong shuffle mask", r"(shfl\.sync\.bfly\.b32[^;]*), -1;", r"\1, 65535;", Check.SHUFFLE, targets=ALL),
    _fault("wrong shuffle mask in skinny_k", r"(shfl\.sync\.bfly\.b32[^;]*), -1;", r"\1, 65535;", Check.SHUFFLE,
           kernel="skinny_k", targets=ALL),
    _fault("missing griddepcontrol.wait", r"griddepcontrol\.wait;", "", Check.DEPENDENT),
    _fault("missing griddepcontrol.wait in skinny_k", r"griddepcontrol\.wait;", "", Check.DEPENDENT,
           kernel="skinny_k"),
    _fault("x by the non-coherent path", _X_LOAD, r"\1.nc\2]", Check.COHERENT),
    _fault("load off by one vector", _X_LOAD, r"\1\2+16]", Check.BOUNDS, m=1, targets=ALL),
    _fault("load off by one element", _X_LOAD, r"\1\2+2]", Check.ALIGNMENT, targets=ALL),
    _fault("load before the buffer", _X_LOAD, r"\1\2+-16]", Check.BOUNDS, targets=ALL),
    _fault("output into the weights", r"st\.global\.b16 \[%rd\d+\]",
           "{ .reg .b64 a; ld.param.u64 a, [kda_skinny_n_0_param_1]; } st.global.b16 [%rd1]", Check.READ_ONLY),
    _fault("no cluster barrier", r"barrier\.cluster\.(arrive\.relaxed|wait);", "", Check.PEER_ALIVE, Check.RACE,
           verifiable=True),
    _fault("no cluster arrive", r"barrier\.cluster\.arrive\.relaxed;", "", Check.CLUSTER_BARRIER, verifiable=True),
    _fault("cluster wait that the sending warp does not make", r"(barrier\.cluster\.wait;)",
           _only(_LATER_WARPS, r"\1"), Check.PEER_ALIVE, verifiable=True),
    _fault("swapped cluster rank", r"(mapa\.shared::cluster\.u32[^;]*), %r\d+;", r"\1, 1;", Check.INITIALISED,
           verifiable=True),
    _fault("missing fence after mbarrier.init", r"fence\.mbarrier_init\.release\.cluster;", "", Check.RACE),
    _fault("no mbarrier", r"mbarrier\.init\.shared::cta\.b64 [^;]*;", "", Check.INITIALISED, verifiable=True),
    _fault("mbarrier that awaits two arrivals", r"(mbarrier\.init\.shared::cta\.b64 [^,]*), (?:%r\d+|1);", r"\1, 2;",
           Check.BARRIER, verifiable=True),
    _fault("wait for the wrong parity", r"(mbarrier\.try_wait\.parity[^;]*), (?:%r\d+|0);", r"\1, 1;", Check.PEER_ALIVE,
           verifiable=True),
    _fault("no wait for the partial sums", r"again: mbarrier.*bra again;", "", Check.RACE, Check.PEER_ALIVE,
           verifiable=True),
    _fault("too few bytes expected", _EXPECT, r"{ .reg .b32 n; sub.u32 n, \2, 4; \1n; }", Check.BARRIER,
           verifiable=True),
    _fault("too many bytes expected", _EXPECT, r"{ .reg .b32 n; add.u32 n, \2, 4; \1n; }", Check.BARRIER,
           verifiable=True),
    _fault("warp that does not send", r"(st\.async[^;]*;)", _only(_LATER_WARPS, r"\1"), Check.BARRIER,
           verifiable=True),
    _fault("partial sums on top of each other", _SEND, r"{ .reg .b32 a; and.b32 a, \2, -128; \1a\3 }", Check.RACE,
           verifiable=True),
    _fault("st.async past the end", _SEND, r"{ .reg .b32 a; add.u32 a, \2, 0x10000; \1a\3 }", Check.BOUNDS),
    _fault("operand order of the FMA", r"(fma\.rn\.f32) (%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"\1 \2, \3, \5, \4;",
           targets=("sm_90a", "sm_80")),
    _fault("shuffle distance", r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*), 8,", r"\1, 4,", targets=ALL),
    _fault("subtraction for addition", r"add(\.rn)?\.f32", "sub.rn.f32", targets=ALL),
    _fault("lost mantissa bit", r"and\.b32 (.*), -65536;", r"and.b32 \1, -131072;", targets=("sm_90a", "sm_80")),
    _fault("one operand of the FMA twice", r"(fma\.rn\.f32\.bf16) (%\w+), (%\w+), (%\w+),", r"\1 \2, \3, \3,",
           targets=("sm_100a",)),
    _fault("truncation instead of rounding", r"cvt\.rn\.bf16\.f32 (%rs\d+), (%r\d+);",
           r"{ .reg .b16 t; mov.b32 {t, \1}, \2; }", targets=ALL),
)  # fmt: skip
