"""Result files that a command makes, without a notebook: hash the inputs, run, write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from kda_lib.lab import provenance, records
from kda_lib.lab.device import DeviceInfo, DeviceState, sample_state

Row = dict[str, Any]
Outcome = tuple[Sequence[Row], Sequence[records.Claim]]


def zero_claim(name: str, statement: str, value: int, unit: str, *, required: bool = True) -> records.Claim:
    """A claim that a count is 0."""
    return records.Claim(
        id=name, statement=statement, value=value, unit=unit, bound="== 0", holds=value == 0, required=required
    )


def write_script_result(
    name: str,
    make: Callable[[], Outcome],
    *,
    profile: str,
    root: Path,
    device: DeviceInfo | None = None,
    parameters: dict[str, Any] | None = None,
    seeds: dict[str, int] | None = None,
) -> records.Result:
    """Call ``make`` for rows and claims, and write ``reports/<profile>/results/<name>.json``.

    Args:
        name: a key of :data:`provenance.SCRIPTS`.
        device: where ``make`` measures; ``None`` if nothing runs on a GPU.

    Raises:
        records.ResultWriteError: the file system refused; nothing is half-written.
    """
    started = datetime.now(UTC)
    inputs = provenance.inputs_sha256(Path(f"{name}.ipynb"), profile, root)
    rows, claims = make()
    gpu = None
    if device is not None:
        before = DeviceState(clocks=device.clocks, throttle_reasons=device.throttle_reasons)
        kept = device.model_dump(include=set(records.Gpu.model_fields))
        gpu = records.Gpu(**kept, before=before, after=DeviceState(**sample_state()))
    result = records.Result(
        notebook=name,
        run_id=f"{started:%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}",
        started=started,
        ended=datetime.now(UTC),
        status="ok" if all(claim.holds or not claim.required for claim in claims) else "failed",
        mode="compile-only" if gpu is None else "full",
        inputs_sha256=inputs,
        git=records.Git(**provenance.git_state(root)),
        parameters={"profile": profile, **(parameters or {})},
        environment=provenance.environment(),
        gpu=gpu,
        seeds=seeds or {},
        claims=list(claims),
        rows=list(rows),
    )
    records.write_result(result, root / "reports" / profile / "results" / f"{name}.json")
    return result
