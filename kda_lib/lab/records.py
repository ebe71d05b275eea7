"""Result files: schema `kda-lib/result/v1`, validated on write and on read.

A result file is strict JSON (no NaN, no infinity), holds no host name and no absolute path of the machine that made
it, and appears whole or not at all.
"""

import json
import math
import operator
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from kda_lib.lab import provenance
from kda_lib.lab.device import DeviceState, Mode
from kda_lib.lab.profile import profile_names

INPUTS = ("notebook", "kda_lib", "profile", "lock")
"""Kinds of input that a result file holds a hash of, see `provenance.inputs_sha256`."""

MEASUREMENT_FIELDS = {
    "variant": "what was measured",
    "M": "tokens in the step",
    "tp": "tensor-parallel degree",
    "pdl": "whether programmatic dependent launch was on",
    "median_us": "median time, microseconds",
    "p10_us": "10th percentile, microseconds",
    "p90_us": "90th percentile, microseconds",
    "min_us": "fastest sample, microseconds",
    "samples": "number of samples, or the samples in microseconds",
    "bytes": "bytes the operation must move",
    "floor_us": "time of reading the same bytes in the same run, microseconds",
    "max_ulp": "largest error, BF16 units in the last place",
}
COMPILE_FIELDS = {
    "kernel": "kernel name",
    "fma": "form of the FMA: native or portable",
    "target": "compile target, for example sm_90a",
    "M": "tokens in the step",
    "outcome": "ok, or what the compiler refused",
    "registers": "registers per thread",
    "spills": "bytes spilled per thread",
    "smem_bytes": "static and dynamic shared memory per CTA, bytes",
    "seconds": "compile time, seconds",
}
VALIDATION_FIELDS = {
    "outputs": "number of outputs compared",
    "differing": "outputs that differ in a bit",
    "over_one_ulp": "outputs more than one BF16 unit in the last place from the fp64 result rounded once",
    "beyond_bound": "outputs further from fp64 than half a BF16 unit in the last place and what FP32 sums can lose",
    "max_abs_error": "largest absolute error against the fp64 result",
    "max_abs_error_rounded": "largest absolute error against the fp64 result rounded once to BF16",
    "cosine": "cosine with the fp64 result rounded once to BF16",
    "output_scale": "largest magnitude of the outputs compared",
    "seeds": "number of seeds that inputs were drawn with",
    "replays": "number of graph replays, each with another input",
    "layers": "layers in the graph",
    "kernel_nodes": "kernel nodes of the graph",
    "lanes": "most kernels of the graph of which none waits for another",
}
PROOF_FIELDS = {
    "inputs_sha256": "hash of a kernel's input arrays",
    "outputs_sha256": "hash of a kernel's output arrays, bit for bit",
    "ptx_sha256": "hash of the PTX",
    "instructions": "PTX instructions executed, counted for each thread",
    "executed": "PTX opcode -> executions, counted for each thread",
    "checks": "accesses and synchronisations checked, counted for each thread",
    "violations": "instructions that broke a rule",
    "ctas": "CTAs of the grid that were looked at, from the first",
    "grid": "CTAs of the grid",
    "pairs": "operand pairs of a kind, of the 2**32 there are",
}
EXTRA_FIELDS = {
    "cubin_sha256": "hash of the compiled cubin",
    "code_bytes": "size of the kernel's code, bytes",
    "stack_bytes": "stack frame per thread, bytes",
    "sass": "SASS opcode -> count",
    "cvt_per_fma": "SASS conversion instructions per FMA",
    "instruction": "PTX instruction that was refused",
    "lowest_target": "lowest target that has the instruction",
    "uses": "number of places of the PTX that use the instruction",
    "source": "file:line of the kernel code that emits it",
    "found_by": "log or probe: how the instruction was found",
    "dsl": "nvidia-cutlass-dsl version",
    "error": "exception class",
    "config": "tuning configuration of the kernel",
    "detail": "anything else in words",
}
ROW_FIELDS = MEASUREMENT_FIELDS | COMPILE_FIELDS | VALIDATION_FIELDS | PROOF_FIELDS | EXTRA_FIELDS
"""Every key that a row may have, with its meaning and unit."""

_COMPARISONS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_BOUND = re.compile(r"(<=|>=|==|!=|<|>)\s*(-?[\d.]+(?:[eE][-+]?\d+)?)")


class ResultWriteError(OSError):
    """The result could not be written; the message is one line and no partial file is left."""


class ResultReadError(ValueError):
    """The file is missing, unreadable or not a valid result; the message names the file and the fault."""


def _known_keys(row: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if unknown := sorted(row.keys() - ROW_FIELDS.keys()):
        raise ValueError(f"expected keys of records.ROW_FIELDS; got {', '.join(unknown)}; document them there first")
    return row


def _finite(data: Any) -> Any:
    for place, value in _leaves(data):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"expected a finite number at {place or 'top'}; got {value}; leave it out or use None")
    return data


def _leaves(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar of a JSON-like value, keys included, with its place such as `.rows[3].variant`."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield place, key
            yield from _leaves(value, f"{place}.{key}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, data


FiniteJson = Annotated[JsonValue, AfterValidator(_finite)]
Scalar = Annotated[str | bool | int | float | None, AfterValidator(_finite)]
Row = Annotated[dict[str, FiniteJson], AfterValidator(_known_keys)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

ROW: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(Row)
"""Validates one row; raises pydantic.ValidationError (a ValueError)."""

PARAMETERS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, FiniteJson])
"""Validates notebook parameters; raises pydantic.ValidationError (a ValueError)."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="constants")


class Claim(_Record):
    """One statement a notebook asserts, with the number behind it.

    `bound` is what the value is held against. Written as a comparison with a number ("<= 2", "== 0") it is checked:
    `holds` must then agree with the value. A claim that is not `required` may fail without failing its notebook.
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    statement: Annotated[str, Field(min_length=1)]
    value: Scalar
    unit: str = ""
    bound: Scalar = None
    holds: bool
    required: bool = True

    @model_validator(mode="after")
    def _holds_agrees_with_bound(self) -> "Claim":
        comparison = _BOUND.fullmatch(self.bound) if isinstance(self.bound, str) else None
        if comparison and isinstance(self.value, int | float):
            truth = _COMPARISONS[comparison[1]](self.value, float(comparison[2]))
            if truth != self.holds:
                raise ValueError(f"claim {self.id}: {self.value} {self.bound} is {truth}; got holds={self.holds}")
        return self


class Git(_Record):
    """Commit and dirty flag of the checkout, see `provenance.git_state`."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40,64}$")] | None
    dirty: bool | None


class Gpu(_Record):
    """The device a result was measured on, with its state before and after the notebook."""

    name: str
    capability: str
    sms: int
    memory_bytes: int
    l2_bytes: int
    power_limit_w: float | None
    mig: bool | None
    before: DeviceState
    after: DeviceState


class Result(_Record):
    """One notebook run: what it claims, what it measured, and everything that decided it.

    Raises:
        pydantic.ValidationError: unknown or missing field, wrong type, a status or mode that the content contradicts.
    """

    schema_: Annotated[Literal["kda-lib/result/v1"], Field(alias="schema")] = "kda-lib/result/v1"
    notebook: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    run_id: Annotated[str, Field(min_length=1)]
    started: AwareDatetime
    ended: AwareDatetime
    status: Literal["ok", "failed"]
    mode: Mode
    inputs_sha256: dict[str, Sha256]
    git: Git
    parameters: dict[str, FiniteJson]
    environment: dict[str, str | None]
    gpu: Gpu | None
    seeds: dict[str, int]
    timing_method: str | None = None
    claims: list[Claim]
    rows: list[Row]

    @property
    def profile(self) -> str:
        """Name of the profile the notebook ran for."""
        return str(self.parameters["profile"])

    @model_validator(mode="after")
    def _content_is_coherent(self) -> "Result":
        if set(self.inputs_sha256) != set(INPUTS):
            raise ValueError(f"inputs_sha256: expected the keys {', '.join(INPUTS)}; got {sorted(self.inputs_sha256)}")
        if self.parameters.get("profile") not in profile_names():
            raise ValueError(f"parameters.profile: expected a known profile; got {self.parameters.get('profile')!r}")
        if (self.gpu is None) != (self.mode == "compile-only"):
            raise ValueError(f"gpu must be given in mode full and null in compile-only; mode is {self.mode}")
        if self.ended < self.started:
            raise ValueError(f"ended ({self.ended}) is before started ({self.started})")
        ids = [claim.id for claim in self.claims]
        if repeated := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"claim ids must be unique; repeated: {', '.join(repeated)}")
        broken = [claim.id for claim in self.claims if claim.required and not claim.holds]
        if (self.status == "failed") != bool(broken):
            raise ValueError(f"status {self.status!r} contradicts the required claims that do not hold: {broken}")
        return self


def write_result(result: Result, path: Path) -> None:
    """Write a result so that `path` holds either all of it or what it held before.

    Raises:
        ValueError: the result is not valid, or a string in it holds the host name, the home directory or the path of
            the repository.
        ResultWriteError: the file system refused (read-only, disk full); no temporary file is left.
    """
    data = result.model_dump(mode="json", by_alias=True)
    _reject_machine_details(data)
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    Result.model_validate_json(text, strict=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResultWriteError(f"cannot write {path}: {error.strerror or error}") from error


def read_result(path: Path) -> Result:
    """Read and validate a result file.

    Raises:
        ResultReadError: the file is missing, unreadable, not strict JSON, or not a valid result.
    """
    try:
        return Result.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ResultReadError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ResultReadError(f"{path}: not a valid result: {place + ': ' if place else ''}{first['msg']}") from error


def stale_inputs(result: Result, root: Path) -> list[str]:
    """Which of the result's inputs (`INPUTS`) differ now from those it was made with; a deleted one counts.

    A result that a command makes has its own files in the notebook's place, and they are called so.
    """
    notebook = root / "notebooks" / f"{result.notebook}.ipynb"
    profile = root / "kda_lib" / "lab" / "profiles" / f"{result.profile}.yaml"
    script = provenance.SCRIPTS.get(result.notebook)
    made_by = [root / name for name in script.own_files(root)] if script else [notebook]
    needed = [("profile", profile), *(("notebook", path) for path in made_by)]
    changed = list(dict.fromkeys(kind for kind, path in needed if not path.is_file()))
    if not changed:
        now = provenance.inputs_sha256(notebook, result.profile, root)
        changed = [kind for kind in INPUTS if now[kind] != result.inputs_sha256[kind]]
    return ["own files" if script and kind == "notebook" else kind for kind in changed]


def _reject_machine_details(data: Any) -> None:
    host = socket.gethostname()
    # A host may be called after its GPU; the profile's name in a result says nothing about the host then.
    hosts = {host, host.split(".")[0]} - {"", "localhost", *profile_names()}
    paths = {str(Path.home()): "home directory", str(provenance.repo_root()): "repository path"}
    secrets = dict.fromkeys(hosts, "host name") | {path: what for path, what in paths.items() if path != "/"}
    for place, value in _leaves(data):
        for secret, what in secrets.items():
            # Whole words only: the host "vm" is not in "nvvm", nor the home "/root" in "kernels/root".
            if isinstance(value, str) and re.search(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", value):
                raise ValueError(f"result{place}: expected no trace of this machine; got the {what} in it; remove it")
