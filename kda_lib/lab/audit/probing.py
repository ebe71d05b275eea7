"""Ask the assembler which targets take which probes, from which ``.version`` on.

Many probes travel in one text, each a kernel on a line of its own, because the assembler reports every instruction that
it rejects with its line. What it takes has been assembled without any complaint, code generation included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kda_lib.lab.audit.assembler import Assembler, version_key
from kda_lib.lab.audit.probes import FIRST_LINE, module

#: Name in ``.target`` -> lowest ``.version`` with which the assembler takes something; what lacks it is left out.
Takes = dict[str, str]

BATCH = 2000
"""Probes in one text at most: what one process assembles in about a second."""

# Not what it says against a line of "<macro util>": some instructions are macros of its own.
_REPORT = re.compile(r"^ptxas [^<\n]+, line (\d+);\s+(?:error|fatal)\s*: (.*)", re.MULTILINE)
_EMPTY = ".visible .entry kernel() { ret; }\n"


def runs_on(assembler: Assembler, names: Sequence[str], workers: int) -> dict[str, list[str]]:
    """Name in ``.target`` -> targets that a module without any instruction then assembles for; none without one."""

    def ask(name: str) -> list[str]:
        text = f".version {assembler.newest_ptx} .target {name} .address_size 64\n{_EMPTY}"
        return [target for target in assembler.targets if assembler.complaint(text, target) is None]

    with ThreadPoolExecutor(workers) as pool:
        return {name: targets for name, targets in zip(names, pool.map(ask, names), strict=True) if targets}


def versions(assembler: Assembler, name: str, first: int = 4) -> list[str]:
    """Every PTX ISA version from ``first`` on that the assembler takes with this ``.target``, in order."""
    last, _ = version_key(assembler.newest_ptx)
    candidates = [f"{major}.{minor}" for major in range(first, last + 1) for minor in range(10)]
    text = f".target {name}\n{_EMPTY}"
    return [v for v in candidates if assembler.complaint(f".version {v} {text}", assembler.targets[0]) is None]


class Prober:
    """One name in ``.target``, and a target that such modules run on.

    Args:
        versions: the PTX ISA versions to tell apart, in order; the last one decides whether a probe is taken.
    """

    def __init__(self, assembler: Assembler, name: str, target: str, versions: Sequence[str]) -> None:
        self.assembler = assembler
        self.name = name
        self.target = target
        self.newest = versions[-1]
        self.versions = [name for name in versions if not self._run([], name, generate=True)]

    def since(self, probes: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Lowest version of each probe that the target takes, and why it refuses each other."""
        refused: dict[str, str] = {}
        for start in range(0, len(probes), BATCH):
            refused |= self.refuses(probes[start : start + BATCH], self.newest)
        waiting = [probe for probe in probes if probe not in refused]
        found: dict[str, str] = {}
        for version in self.versions[:-1]:
            late = self.refuses(waiting, version, generate=False)
            found |= {probe: version for probe in waiting if probe not in late}
            waiting = list(late)
        return found | dict.fromkeys(waiting, self.newest), refused

    def refuses(self, probes: Sequence[str], version: str, *, generate: bool = True) -> dict[str, str]:
        """The probes that the target does not take with this version, and what the assembler says.

        Args:
            generate: whether code is generated as well, or the text is only checked.
        """
        refused: dict[str, str] = {}
        left = list(probes)
        while left and (complaints := self._run(left, version, generate=generate)):
            here = {left[index]: complaint for index, complaint in complaints.items() if index in range(len(left))}
            if not here:
                # It names no line of a probe, as in the generation of code: halve until one is left to blame.
                if len(left) == 1:
                    return refused | {left[0]: next(iter(complaints.values()))}
                middle = len(left) // 2
                for half in (left[:middle], left[middle:]):
                    refused |= self.refuses(half, version, generate=generate)
                return refused
            refused |= here
            left = [probe for probe in left if probe not in here]
        return refused

    def _run(self, probes: Sequence[str], version: str, *, generate: bool) -> dict[int, str]:
        """Index of each probe that is complained about -> the first complaint; -1 for what names none. Empty: taken."""
        target = self.target if generate else self.target.replace("sm_", "compute_")
        said = self.assembler.log(module(probes, version, self.name), target)
        if said is None:
            return {}
        found: dict[int, str] = {}
        for line, complaint in _REPORT.findall(said):
            found.setdefault(int(line) - FIRST_LINE, complaint.strip())
        return found or {-1: said.strip().splitlines()[0] if said.strip() else "nothing"}


def probe_all(
    assembler: Assembler,
    probes: Sequence[str],
    names: Mapping[str, str],
    versions: Sequence[str],
    workers: int,
    report: Callable[[str], None] = lambda name: None,
) -> tuple[dict[str, Takes], dict[str, str]]:
    """Which names in ``.target`` take each probe, and why the last of them refuses each that none takes.

    Args:
        names: with a target that such modules run on.
    """

    def ask(name: str) -> tuple[dict[str, str], dict[str, str]]:
        answer = Prober(assembler, name, names[name], versions).since(probes)
        report(name)
        return answer

    with ThreadPoolExecutor(workers) as pool:
        answers = list(zip(names, pool.map(ask, names), strict=True))
    taken = {probe: {name: found[probe] for name, (found, _) in answers if probe in found} for probe in probes}
    _, (_, last) = answers[-1]
    return {p: takes for p, takes in taken.items() if takes}, {p: last[p] for p, takes in taken.items() if not takes}
