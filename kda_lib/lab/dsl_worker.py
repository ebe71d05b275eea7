"""The process behind :mod:`kda_lib.lab.dsl_matrix`: one compile of the repro under the DSL that runs this Python.

It needs nothing but nvidia-cutlass-dsl, since it runs in an environment that has nothing else. The working folder
receives the DSL's dumps. The result, one JSON object, goes to the named file, because the compiler may print or crash.
"""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from cutlass import cute
from cutlass.base_dsl.compiler import DumpDir

from kda_lib.arch import Arch
from kda_lib.diagnosis import compiler_errors, explain_failure, gpu_arch, read_dump, trace_ptx
from kda_lib.errors import CompileError, UnknownTarget, UnsupportedInstruction
from kda_lib.lab.data import repro_fma


def compile_repro(target: str, form: str) -> dict[str, Any]:
    """Fields of the matrix row for one compile of the repro."""
    arch, kernel, arguments = Arch.parse(target), repro_fma.Fma(form), repro_fma.arguments()
    folder = Path("dump")
    folder.mkdir()
    started = time.perf_counter()
    try:
        cute.compile[gpu_arch(arch), cute.KeepPTX(), DumpDir(str(folder))](kernel, *arguments)
    except UnknownTarget as error:
        return {"seconds": time.perf_counter() - started, **failed(error)}
    except compiler_errors() as error:
        seconds = time.perf_counter() - started
        explained = explain_failure(error, arch, read_dump(str(folder)), partial(trace_ptx, kernel, arguments))
        return {"seconds": seconds, **failed(explained)}
    return {"seconds": time.perf_counter() - started, "outcome": "ok", "detail": origin(read_dump(str(folder)))}


def failed(error: CompileError) -> dict[str, Any]:
    """What the compiler said, and what the diagnosis makes of it."""
    row: dict[str, Any] = {"detail": first_line(error.log), "error": type(error).__name__}
    match error:
        case UnknownTarget():
            return row | {"outcome": "target unknown"}
        case UnsupportedInstruction():
            names = ("instruction", "lowest_target", "uses", "source", "found_by")
            outcome = "instruction rejected" if error.found_by == "log" else "compiler gave no log"
            return row | {"outcome": outcome} | {name: getattr(error, name) for name in names}
        case _:
            return row | {"outcome": "failed"}


def first_line(log: str) -> str:
    """The first line of a log that says something, without the folders of the file it names."""
    line = log.removeprefix("Failure while executing pass pipeline:\n").partition("\n")[0]
    return re.sub(r'"/[^"]*/', '"', line)


def origin(ptx: str) -> str:
    """Which target and tools an accepted compile went through, from the header of its PTX."""
    found = (re.search(pattern, ptx) for pattern in (r"\.version (\S+)", r"\.target (\w+)", r"tools, (release .*)"))
    version, target, tools = (match[1] if match else "unknown" for match in found)
    return f"PTX ISA {version} for {target}, written by the NVVM compiler of CUDA {tools}"


if __name__ == "__main__":
    target, form, file = sys.argv[1:]
    Path(file).write_text(json.dumps(compile_repro(target, form)))
