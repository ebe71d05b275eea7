"""Result files that a command makes, without a notebook: hash the inputs, run, write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    outcomes: Iterable[Outcome],
    *,
    profile: str,
    root: Path,
    device: DeviceInfo | None = None,
    parameters: Mapping[str, Any] | None = None,
    environment: Mapping[str, str | None] | None = None,
    seeds: dict[str, int] | None = None,
    timing_method: str | None = None,
) -> records.Result:
    """Write ``reports/<profile>/results/<name>.json`` with each of the outcomes, in place of the one before.

    Args:
        name: a key of :data:`provenance.SCRIPTS`.
        outcomes: rows and claims, at least once, made as they are asked for. More than one where the work is long:
            what was found stays if it is cut short, and a claim that does not hold yet says that it is not all.
        device: where the outcomes are measured; ``None`` if nothing runs on a GPU.
        environment: versions of what makes them; this process's own by default, see :func:`provenance.environment`.

    Raises:
        records.ResultWriteError: the file system refused; nothing is half-written.
    """
    started = datetime.now(UTC)
    run_id = f"{started:%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
    inputs = provenance.inputs_sha256(Path(f"{name}.ipynb"), profile, root)
    for rows, claims in outcomes:
        result = records.Result(
            notebook=name,
            run_id=run_id,
            started=started,
            ended=datetime.now(UTC),
            status="ok" if all(claim.holds or not claim.required for claim in claims) else "failed",
            mode="compile-only" if device is None else "full",
            inputs_sha256=inputs,
            git=records.Git(**provenance.git_state(root)),
            parameters={"profile": profile, **(parameters or {})},
            environment=dict(environment or provenance.environment()),
            gpu=None if device is None else _gpu(device),
            seeds=seeds or {},
            timing_method=timing_method,
            claims=list(claims),
            rows=list(rows),
        )
        records.write_result(result, root / "reports" / profile / "results" / f"{name}.json")
    return result


def _gpu(device: DeviceInfo) -> records.Gpu:
    """The device as it was before, and its state now."""
    kept = device.model_dump(include=set(records.Gpu.model_fields))
    before = DeviceState(clocks=device.clocks, throttle_reasons=device.throttle_reasons)
    return records.Gpu(**kept, before=before, after=DeviceState(**sample_state()))
