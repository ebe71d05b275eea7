"""One notebook run: its mode, banner, claims, rows and figures, ending in one result file.

run = notebook.begin("02_portable_fma", profile=profile, results_dir=results_dir, seed=seed)
run.banner()
run.claim("bit-equal", "portable and native agree bit for bit", value=0, unit="differences", bound="== 0", holds=True)
run.finish()
"""

import base64
import io
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import numpy as np

from kda_lib.lab import provenance, records
from kda_lib.lab.device import DeviceInfo, DeviceState, Mode, current_device, resolve_mode, sample_state
from kda_lib.lab.profile import CPU, Profile, load_profile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Origin = Literal["computed", "compiled", "recorded"]

# Okabe-Ito colours, which colour-blind readers tell apart; borders differ too, for grey print.
_BADGES: dict[Origin, str] = {
    "computed": "border:2px solid #0072B2;color:#0072B2",
    "compiled": "border:2px dashed #B34700;color:#B34700",
    "recorded": "border:2px dotted #555555;color:#555555",
}


class ClaimFailed(AssertionError):
    """Required claims of the notebook do not hold; the message lists them. The result file is written nevertheless."""


class Display:
    """An output with a plain-text and an HTML form (inline CSS only), shown by Jupyter as the last value of a cell."""

    def __init__(self, text: str, html: str) -> None:
        self._text = text
        self._html = html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


class Recorded(Display):
    """A result recorded earlier, headed by the GPU, date and commit it belongs to; the content is in `result`."""

    def __init__(self, result: records.Result) -> None:
        self.result = result
        place = f"on {result.gpu.name}" if result.gpu else f"without a GPU, profile {result.profile}"
        where = f"{place}, {result.ended:%Y-%m-%d}, {_commit(result.git)}"
        self.heading = f"recorded {where}"
        super().__init__(self.heading, _badge("recorded", where))


class Run:
    """One execution of a notebook, made by `begin`.

    Attributes: `name`, `profile`, `device` (None in compile-only mode), `mode`, `rng` (numpy generator seeded with the
    run's seed), `results_dir`, `figures_dir` (the folder `figures` beside `results_dir`), and `timing_method`, to be
    set by notebooks that measure time.
    """

    def __init__(
        self,
        name: str,
        *,
        profile: Profile,
        device: DeviceInfo | None,
        mode: Mode,
        results_dir: Path,
        seed: int,
        parameters: dict[str, Any],
    ) -> None:
        self.name = name
        self.profile = profile
        self.device = device
        self.mode = mode
        self.results_dir = results_dir
        self.figures_dir = results_dir.parent / "figures"
        self.rng = np.random.default_rng(seed)
        self.timing_method: str | None = None
        self._started = datetime.now(UTC)
        self._seeds = _seed_everything(seed)
        self._parameters = parameters
        self._root = provenance.repo_root()
        # Hashed now, not at the end: these are the inputs that the run starts from.
        self._inputs = provenance.inputs_sha256(_notebook_path(self._root, name), profile.name, self._root)
        self._git = records.Git(**provenance.git_state(self._root))
        self._claims: dict[str, records.Claim] = {}
        self._rows: list[dict[str, Any]] = []

    @property
    def arch_name(self) -> str:
        """The compile target of the profile, for example "sm_90a"."""
        return self.profile.target

    def banner(self) -> Display:
        """What this page was made with: profile, mode, device, date, commit.

        The date and the commit change from run to run: do not tag its cell `nbval-check-output`.
        """
        if self.device is None:
            mode = f"compile-only for {self.arch_name}: nothing on this page was run on a GPU"
        else:
            mode = f"full: run on {_describe(self.device, self.profile)}"
        facts = {
            "profile": f"{self.profile.name} ({self.profile.title})",
            "mode": mode,
            "date": f"{self._started:%Y-%m-%d} (UTC)",
            "commit": _commit(self._git),
        }
        text = "\n".join(f"{key:<8} {value}" for key, value in facts.items())
        cells = "".join(f"<dt><b>{key}</b></dt><dd>{escape(value)}</dd>" for key, value in facts.items())
        return Display(text, f'<dl style="border-left:4px solid #0072B2;padding-left:1em">{cells}</dl>')

    def label(self, origin: Origin, text: str) -> Display:
        """A badge that says where the output below it comes from: computed here, compiled here, or recorded earlier.

        Raises:
            ValueError: `origin` is none of the three.
        """
        if origin not in _BADGES:
            raise ValueError(f"origin: expected one of {', '.join(_BADGES)}; got {origin!r}")
        return Display(f"[{origin}] {text}", _badge(origin, text))

    def claim(
        self,
        id: str,
        statement: str,
        *,
        value: Any,
        unit: str = "",
        bound: Any = None,
        holds: bool | np.bool_,
        required: bool = True,
    ) -> None:
        """Record one claim; `finish` fails if a required one does not hold. Running a cell again replaces its claim.

        Raises:
            ValueError: another claim has this id, a number is not finite, or `holds` contradicts `bound`.
        """
        fields = {"value": value, "unit": unit, "bound": bound, "holds": holds, "required": required}
        claim = records.Claim(id=id, statement=statement, **{key: _plain(field) for key, field in fields.items()})
        earlier = self._claims.get(id)
        if earlier and earlier.statement != statement:
            raise ValueError(f"claim id: expected a new one; {id!r} already states {earlier.statement!r}")
        self._claims[id] = claim

    def row(self, **fields: Any) -> None:
        """Record one measurement or compilation; numpy scalars become plain numbers.

        Raises:
            ValueError: a key that `records.ROW_FIELDS` does not document, a value that is not JSON, NaN or infinity.
        """
        self._rows.append(records.ROW.validate_python(_plain(fields)))

    def rows(self, rows: "Iterable[Mapping[str, Any]] | pd.DataFrame") -> None:
        """Record many rows, given as mappings or as a DataFrame. Raises as `row` does."""
        mappings = rows.to_dict("records") if hasattr(rows, "to_dict") else rows
        for fields in mappings:
            self.row(**{str(key): value for key, value in fields.items()})

    def recorded(self, name: str, profile: str) -> Recorded | None:
        """The committed result of notebook `name` for another profile, or None where there is none.

        Raises:
            records.ResultReadError: the file is there and is not valid.
        """
        path = self._root / "reports" / load_profile(profile).name / "results" / f"{name}.json"
        return Recorded(records.read_result(path)) if path.is_file() else None

    def figure(self, figure: "Figure", name: str, alt: str) -> Display:
        """Save a figure as PNG in `figures_dir` and return it for display with its alternative text.

        Raises:
            ValueError: no alternative text, or a name that is not a plain file stem.
        """
        import matplotlib.pyplot as plt

        if not alt.strip():
            raise ValueError(f"alt of figure {name!r}: expected what the figure shows, in words; got an empty text")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"figure name: expected letters, digits, '-' and '_'; got {name!r}")
        buffer = io.BytesIO()
        # Without the Software entry the file does not change with the version of matplotlib.
        figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
        self.figures_dir.mkdir(parents=True, exist_ok=True)
        (self.figures_dir / f"{name}.png").write_bytes(buffer.getvalue())
        # Closed, or Jupyter shows it a second time, without its alternative text.
        plt.close(figure)
        image = base64.b64encode(buffer.getvalue()).decode()
        html = f'<figure><img style="max-width:100%" alt="{escape(alt)}" src="data:image/png;base64,{image}"></figure>'
        return Display(f"[figure {name}] {alt}", html)

    def finish(self) -> Display:
        """Write `<results_dir>/<name>.json`, then return the table of claims.

        Raises:
            ClaimFailed: required claims do not hold (the result is written first, with status "failed").
            records.ResultWriteError: the file system refused.
        """
        claims = list(self._claims.values())
        broken = [claim for claim in claims if claim.required and not claim.holds]
        result = records.Result(
            notebook=self.name,
            run_id=f"{self._started:%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}",
            started=self._started,
            ended=datetime.now(UTC),
            status="failed" if broken else "ok",
            mode=self.mode,
            inputs_sha256=self._inputs,
            git=self._git,
            parameters=self._parameters,
            environment=provenance.environment(),
            gpu=self._gpu(),
            seeds=self._seeds,
            timing_method=self.timing_method,
            claims=claims,
            rows=self._rows,
        )
        records.write_result(result, self.results_dir / f"{self.name}.json")
        if broken:
            listed = "\n".join(f"  {claim.id}: {claim.statement}; {_measured(claim)}" for claim in broken)
            raise ClaimFailed(f"{len(broken)} required claims do not hold:\n{listed}")
        return _claims_table(claims)

    def _gpu(self) -> records.Gpu | None:
        if self.device is None:
            return None
        kept = self.device.model_dump(include=set(records.Gpu.model_fields))
        before = DeviceState(clocks=self.device.clocks, throttle_reasons=self.device.throttle_reasons)
        return records.Gpu(**kept, before=before, after=DeviceState(**sample_state()))


def begin(name: str, *, profile: str, results_dir: str = "", seed: int = 0, **parameters: Any) -> Run:
    """Start the run of notebook `name` (the stem of its file in notebooks/) for a profile.

    `results_dir` is where the result file goes; "" means a temporary folder. `parameters` are the notebook's other
    papermill parameters, recorded in the result.

    Raises:
        profile.UnknownProfile: no such profile.
        device.WrongDevice: the device is not one of the profile's.
        ValueError: no notebook of that name, a seed out of range, or parameters that are not JSON values.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer from 0 to 2**32 - 1; got {seed!r}")
    chosen = load_profile(profile)
    device = None if chosen.name == CPU else current_device()
    mode = resolve_mode(chosen, device)
    folder = Path(results_dir) if results_dir else Path(tempfile.mkdtemp(prefix="kda_lib-")) / "results"
    recorded = records.PARAMETERS.validate_python({"profile": profile, "seed": seed, **_plain(parameters)})
    return Run(name, profile=chosen, device=device, mode=mode, results_dir=folder, seed=seed, parameters=recorded)


def _notebook_path(root: Path, name: str) -> Path:
    path = root / "notebooks" / f"{name}.ipynb"
    if not path.is_file():
        raise ValueError(f"name: expected the stem of a file in notebooks/; got {name!r}")
    return path


def _seed_everything(seed: int) -> dict[str, int]:
    """Seed numpy, and torch where the notebook has imported it already; says which."""
    np.random.seed(seed)
    seeds = {"numpy": seed}
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
        seeds["torch"] = seed
    return seeds


def _plain(value: Any) -> Any:
    """The value with numpy scalars and arrays as Python numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _describe(device: DeviceInfo, profile: Profile) -> str:
    """Device in words, with what differs from its profile."""
    facts = [f"{device.name} (compute capability {device.capability}", f"{device.sms} SMs"]
    if profile.sms not in (None, device.sms):
        facts.append(f"the profile has {profile.sms}")
    if device.mig:
        facts.append("MIG on")
    return ", ".join(facts) + ")"


def _commit(git: records.Git) -> str:
    if git.commit is None:
        return "no git commit"
    return f"commit {git.commit[:10]}{' with uncommitted changes' if git.dirty else ''}"


def _badge(origin: Origin, text: str) -> str:
    style = f"{_BADGES[origin]};border-radius:4px;padding:1px 6px;font-weight:bold"
    return f'<span><span style="{style}">{origin}</span> {escape(text)}</span>'


def _measured(claim: records.Claim) -> str:
    bound = "" if claim.bound is None else f" (bound: {claim.bound})"
    return f"{claim.value}{' ' if claim.unit else ''}{claim.unit}{bound}"


def _verdict(claim: records.Claim) -> str:
    return "holds" if claim.holds else "does not hold"


def _claims_table(claims: list[records.Claim]) -> Display:
    lines = [f"{_verdict(claim):<13}  {claim.id}: {claim.statement}; {_measured(claim)}" for claim in claims]
    cells = [(_verdict(claim), claim.id, claim.statement, _measured(claim)) for claim in claims]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("verdict", "claim", "statement", "value"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Display("\n".join(lines) or "no claims", table)
