"""The real assembler: ptxas of the package nvidia-cuda-nvcc, or of an installed CUDA toolkit."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property

from kda_lib.errors import KdaError
from kda_lib.lab.tools import packaged

PACKAGE = "nvidia-cuda-nvcc"

LIMIT_S = 60.0
"""Seconds that one probe may take; they take about 0.02."""

_RELEASE = re.compile(r"release [\d.]+, V([\d.]+)")
_BUILD = re.compile(r"Build (\S+)")
_TARGETS = re.compile(r"'(sm_\d+[af]?)'")
_PTX_VERSION = re.compile(r"current version is '(\d+\.\d+)'")
_COMPLAINT = re.compile(r"(?:error|fatal)\s*: (.*)")


class AssemblerMissing(KdaError):
    """There is no ptxas on this machine."""


@dataclass(frozen=True)
class Assembler:
    """One ptxas. Safe to use from several threads; every call is a process."""

    path: str

    @classmethod
    def find(cls) -> Assembler:
        """The ptxas of the installed package nvidia-cuda-nvcc, else the one on the PATH.

        Raises:
            AssemblerMissing: there is neither.
        """
        path = packaged(PACKAGE, "ptxas") or shutil.which("ptxas")
        if path is None:
            raise AssemblerMissing(
                f"ptxas: expected the package {PACKAGE} or a CUDA toolkit; run: pip install {PACKAGE}"
            )
        return cls(path)

    @cached_property
    def version(self) -> str:
        """Such as ``"13.5.37"``."""
        return self._said(_RELEASE, "--version")

    @cached_property
    def build(self) -> str:
        """Such as ``"cuda_13.5.r13.5/compiler.39125733_0"``."""
        return self._said(_BUILD, "--version")

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Every real target that it compiles for, from the lowest to the highest."""
        help_text = re.sub(r"\s+", "", self._run("--help").stdout)
        return tuple(sorted(set(_TARGETS.findall(help_text)), key=target_key))

    @cached_property
    def newest_ptx(self) -> str:
        """The highest PTX ISA ``.version`` that it takes, such as ``"9.5"``."""
        complaint = self.complaint(".version 99.9\n.target sm_80\n", "sm_80")
        found = _PTX_VERSION.search(complaint or "")
        if found is None:
            raise AssemblerMissing(f"ptxas: {self.path} does not say which .version it takes; it said: {complaint}")
        return found[1]

    def complaint(self, ptx: str, target: str) -> str | None:
        """None where it takes this PTX text for this target, else the first thing that it says against it."""
        said = self.log(ptx, target)
        if said is None:
            return None
        first = _COMPLAINT.search(said)
        return first[1].strip() if first else said.strip() or "nothing"

    def log(self, ptx: str, target: str) -> str | None:
        """None where it takes this PTX text for this target, else all that it says.

        Args:
            target: real (``"sm_90a"``) or virtual (``"compute_90a"``), for which no code is generated.

        Raises:
            subprocess.TimeoutExpired: it was still busy after :data:`LIMIT_S`.
        """
        with tempfile.NamedTemporaryFile("w", prefix="kda_lib-", suffix=".ptx", encoding="utf-8") as file:
            file.write(ptx)
            file.flush()
            done = self._run("-arch", target, file.name, "-o", "/dev/null")
        return None if done.returncode == 0 else done.stderr

    def _said(self, pattern: re.Pattern[str], option: str) -> str:
        found = pattern.search(self._run(option).stdout)
        if found is None:
            raise AssemblerMissing(f"ptxas: {self.path} does not answer {option}; reinstall {PACKAGE}")
        return found[1]

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def installed() -> Assembler | None:
    """As :meth:`Assembler.find`, or None where there is none."""
    try:
        return Assembler.find()
    except AssemblerMissing:
        return None


def version_key(version: str) -> tuple[int, ...]:
    """Orders versions such as ``"8.10"`` after ``"8.9"``."""
    return tuple(map(int, version.split(".")))


def target_key(target: str) -> tuple[int, int]:
    """Orders targets such as ``"sm_90a"``: by capability, then plain, family (``f``), this chip only (``a``)."""
    number = target.removeprefix("sm_").rstrip("af")
    return int(number), ["", "f", "a"].index(target[len("sm_") + len(number) :])
