"""Reports: an executed notebook becomes one HTML page that needs nothing but itself; all results become the index.

What a page or the index says about a run is read from its result file. A page carries the run id of its result, so a
page and a result that do not belong together are noticed.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from kda_lib.lab.nbtools import replace_text, source_notebooks
from kda_lib.lab.profile import UnknownProfile, load_profile, profile_names
from kda_lib.lab.provenance import SCRIPTS, git_state
from kda_lib.lab.records import Git, Result, ResultReadError, read_result, stale_inputs

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from nbformat import NotebookNode

TEMPLATES = Path(__file__).parent / "templates"

State = Literal["fresh", "stale", "failed", "invalid", "not run"]

_RUN = re.compile(r'(?<= data-run=")[^"]*(?=")')
_NOTICE = "<!-- notice -->"
#: Colours of a published figure.
COLOURS = 64
_INLINE_PNG = re.compile(r"(data:image/png;base64,)([A-Za-z0-9+/=\s]+)")
_NO_ALT = "No description has been provided for this image"  # nbconvert.exporters.html.HTMLExporter


class ReportError(ValueError):
    """An executed notebook cannot become a self-contained, accessible page; the message says what is in the way."""


class Failure(BaseModel):
    """Why the last run of a notebook failed. `cell` counts the source notebook's cells from 1; None is outside them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    notebook: str
    cell: int | None
    error: str
    ended: AwareDatetime

    def __str__(self) -> str:
        place = f"cell {self.cell}, " if self.cell else ""
        return f"{place}{self.error} ({self.ended:%Y-%m-%d %H:%M} UTC)"


@dataclass(frozen=True)
class Places:
    """Where the files of a profile's reports lie: `Places(root, "h100").page("01_nvvm_failure")`."""

    root: Path
    profile: str

    @property
    def folder(self) -> Path:
        """`reports/<profile>` of the repository at `root`."""
        return self.root / "reports" / self.profile

    def page(self, notebook: str) -> Path:
        """The HTML page."""
        return self.folder / f"{notebook}.html"

    def result(self, notebook: str) -> Path:
        """The result file."""
        return self.folder / "results" / f"{notebook}.json"

    def figures(self, notebook: str) -> list[Path]:
        """The figures there are; their names begin with the notebook's number."""
        return sorted((self.folder / "figures").glob(f"{notebook[:2]}_*.png"))

    def executed(self, notebook: str) -> Path:
        """The executed copy of the last run that succeeded."""
        return self.folder / "executed" / f"{notebook}.ipynb"

    def failed(self, notebook: str) -> Path:
        """The executed copy of the last run, if that failed."""
        return self.folder / "failed" / f"{notebook}.ipynb"

    def marker(self, notebook: str) -> Path:
        """Why the last run failed, as `Failure`; absent after a run that succeeded."""
        return self.folder / "failed" / f"{notebook}.json"

    def log(self, notebook: str) -> Path:
        """What papermill and the kernel wrote in the last run."""
        return self.folder / "logs" / f"{notebook}.log"


@dataclass(frozen=True)
class Entry:
    """Where one notebook stands for one profile. `why` gives the reasons of a state other than fresh."""

    profile: str
    notebook: str
    state: State
    why: tuple[str, ...] = ()
    result: Result | None = None
    has_page: bool = False


def load_result(path: Path, notebook: str, profile: str) -> Result:
    """Read a result file and check that it is that of `notebook` for `profile`.

    Raises:
        ResultReadError: missing, not valid, or of another notebook or profile; the message is one line.
    """
    result = read_result(path)
    if (result.notebook, result.profile) != (notebook, profile):
        raise ResultReadError(f"{path}: holds a result of {result.notebook} for profile {result.profile}")
    return result


def entry(places: Places, notebook: str) -> Entry:
    """Compare the report of `notebook` with the repository."""
    page = places.page(notebook)
    entry_of = partial(Entry, places.profile, notebook, has_page=page.is_file())
    failure = _failure(places, notebook)
    failed = (f"{failure}",) if failure else ()
    if not places.result(notebook).is_file():
        leftover = ("a page without a result file",) if page.is_file() else ()
        return entry_of(
            "failed" if failed else "stale" if leftover else "not run",
            failed + leftover,
        )
    try:
        result = load_result(places.result(notebook), notebook, places.profile)
    except ResultReadError as error:
        return entry_of("invalid", (*failed, str(error).replace(f"{places.root}/", "")))
    changed = stale_inputs(result, places.root)
    faults = () if notebook in SCRIPTS else _page_faults(page, result)
    why = failed + ((f"{', '.join(changed)} changed",) if changed else ()) + faults
    return entry_of("failed" if failed else "stale" if why else "fresh", why, result)


def entries(root: Path, profile: str) -> list[Entry]:
    """Where every notebook of the repository, and every result without a notebook, stands for a profile."""
    places = Places(root, profile)
    names = {path.stem for path in source_notebooks(root / "notebooks")}
    names |= {path.stem for path in (places.folder / "results").glob("*.json")}
    names |= {path.stem for path in places.folder.glob("*.html")}
    return [entry(places, name) for name in sorted(names)]


def reported_profiles(root: Path) -> list[str]:
    """Profiles with a result, a page or a failed run under reports/; folders of unknown profiles come last."""
    folders = {path.name for path in (root / "reports").glob("*") if any(_traces(path))}
    known = [name for name in profile_names() if name in folders]
    return known + sorted(folders - set(known))


def _traces(folder: Path) -> Iterator[Path]:
    for pattern in ("results/*.json", "*.html", "failed/*.json"):
        yield from folder.glob(pattern)


def _failure(places: Places, notebook: str) -> Failure | None:
    marker = places.marker(notebook)
    return Failure.model_validate_json(marker.read_bytes()) if marker.is_file() else None


def _page_faults(page: Path, result: Result) -> tuple[str, ...]:
    if not page.is_file():
        return ("the page is missing",)
    found = _RUN.search(page.read_text(encoding="utf-8"))
    return () if found and found[0] == result.run_id else ("the page does not show the result file's run",)


def commit_name(git: Git) -> str:
    """Short commit and whether the tree differed from it, in words."""
    if git.commit is None:
        return "no commit"
    return f"{git.commit[:10]}{' with uncommitted changes' if git.dirty else ''}"


def render_page(notebook: "NotebookNode", result: Result) -> str:
    """The HTML page of an executed notebook: no script, no request, offline from a file.

    Raises:
        ReportError: an output needs a script, a file or the network, or an image has no alternative text.
    """
    from bs4 import BeautifulSoup
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    # What the runner injected names folders of this machine; the header says which profile it was.
    injected = {"enabled": True, "remove_cell_tags": ["injected-parameters"]}
    exporter = HTMLExporter(
        config=Config(TagRemovePreprocessor=injected),
        template_name="report",
        extra_template_basedirs=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    page = {
        "title": _title(notebook) or result.notebook,
        "profile": result.profile,
        "run_id": result.run_id,
        "result_href": f"results/{result.notebook}.json",
        "facts": _facts(result),
        "highlight_css": _highlight_css(),
    }
    html, _ = exporter.from_notebook_node(notebook, resources={"page": page})
    _reject_requests(BeautifulSoup(html, "html.parser"))
    return _INLINE_PNG.sub(lambda match: match[1] + b64encode(smaller_png(b64decode(match[2]))).decode(), str(html))


def smaller_png(data: bytes) -> bytes:
    """The same picture with at most :data:`COLOURS` colours, which is enough for figures and a third of the size."""
    from PIL import Image

    buffer = BytesIO()
    picture = Image.open(BytesIO(data)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(buffer, "PNG", optimize=True)
    return min(data, buffer.getvalue(), key=len)


def mark_stale(page: Path, failure: Failure) -> None:
    """Say on an existing page that a later run failed, and take away its run id; without a page nothing happens."""
    if not page.is_file():
        return
    html = _RUN.sub(
        '<meta name="kda-run" content="superseded by a failed run">',
        page.read_text(encoding="utf-8"),
    )
    text = f"This page is stale: a later run of the notebook failed at {failure}."
    notice = f'{_NOTICE}<p class="notice" role="alert">{escape(text)}</p>{_NOTICE}'
    html = re.sub(rf"{_NOTICE}(?:.*?{_NOTICE})?", lambda _: notice, html, count=1, flags=re.DOTALL)
    replace_text(page, html)


def write_index(root: Path) -> Path:
    """Write `reports/index.html` from the result files.

    Raises:
        OSError: it cannot be written; the old index is left as it was.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    profiles = reported_profiles(root)
    table = {profile: {e.notebook: e for e in entries(root, profile)} for profile in profiles}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    html = environment.get_template("index.html.j2").render(
        profiles=profiles,
        notebooks=sorted({name for row in table.values() for name in row}),
        table=table,
        titles={profile: _profile_title(profile) for profile in profiles},
        never_run=[name for name in profile_names() if name not in profiles],
        commit=commit_name(Git(**git_state(root))),
        commit_name=commit_name,
        now=datetime.now(UTC),
    )
    path = root / "reports" / "index.html"
    path.parent.mkdir(exist_ok=True)
    replace_text(path, html + "\n")
    return path


def _profile_title(name: str) -> str:
    try:
        return load_profile(name).title
    except UnknownProfile:
        return ""


def _title(notebook: "NotebookNode") -> str:
    for cell in notebook.cells:
        heading = re.match(r"#\s+(.+)", cell.source) if cell.cell_type == "markdown" else None
        if heading:
            return heading[1].strip()
    return ""


def _facts(result: Result) -> dict[str, str]:
    profile = load_profile(result.profile)
    gpu = result.gpu
    return {
        "Profile": f"{profile.name} ({profile.title})",
        "Mode": result.mode if gpu else f"{result.mode}, for {profile.target}",
        "GPU": f"{gpu.name}, compute capability {gpu.capability}, {gpu.sms} SMs"
        if gpu
        else "nothing on this page was run on a GPU",
        "Date": f"{result.ended:%Y-%m-%d %H:%M} UTC",
        "Commit": commit_name(result.git),
        "Parameters": ", ".join(f"{name} {value}" for name, value in result.parameters.items() if name != "profile"),
        "Claims": f"{sum(claim.holds for claim in result.claims)} of {len(result.claims)} hold",
    }


def _highlight_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # The page's own panel is the background in both.
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n.highlight {{ background: none !important; }}"


def _reject_requests(soup: "BeautifulSoup") -> None:
    if soup.find("script"):
        raise ReportError("an output holds a script (widget or JavaScript), expected text, HTML or an image")
    for element in soup.select("[src], link[href]"):
        address = str(element.get("src") or element.get("href"))
        if not address.startswith("data:"):
            raise ReportError(f"an output loads {address[:80]!r}, expected a page that needs no other file")
    if any(_NO_ALT in (image.get("alt") or "") or not image.get("alt") for image in soup.find_all("img")):
        raise ReportError(
            "an image has no alternative text; show it with run.figure(figure, name, alt=...) and close the figure"
        )
