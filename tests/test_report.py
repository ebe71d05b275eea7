"""Pages and the index: self-contained, accessible, true to the result files."""

import itertools
import re
from pathlib import Path

import html5lib
import nbformat
import pytest
from browser import CHROMIUM, chromium
from bs4 import BeautifulSoup
from conftest import NotebookMaker, example_result, reproduce

from kda_lib.lab import report
from kda_lib.lab.records import read_result

FIGURE = """import matplotlib.pyplot as plt
figure, axes = plt.subplots()
shown = run.figure(figure, "line", alt="A line <that> rises")
plt.close(figure)
shown"""
CLAIMS = """run.claim("holds-1", "one is one", value=1, bound="== 1", holds=True)
run.claim("fails-1", "two is one", value=2, bound="== 1", holds=False, required=False)"""
WIDE = "print('wide ' * 400)"
NAME = "01_pages"


@pytest.fixture
def reports(workspace: Path, make_notebook: NotebookMaker) -> Path:
    """The reports/ folder after one good and one failing notebook."""
    make_notebook(NAME, FIGURE, CLAIMS, WIDE, "import pandas\npandas.DataFrame({'M': range(3)})")
    make_notebook("02_fails", "raise ValueError('<b>no</b>')")
    reproduce(workspace)
    return workspace / "reports"


def test_page_and_index(reports: Path, tmp_path: Path) -> None:
    page, index = reports / "cpu" / f"{NAME}.html", reports / "index.html"
    check_static(page)
    check_static(index)

    for file in (page, index):
        assert str(reports.parent) not in file.read_text(), "a page names no folder of the machine that made it"
    text = BeautifulSoup(page.read_text(), "html.parser").get_text(" ")
    result = read_result(reports / "cpu" / "results" / f"{NAME}.json")
    assert "nothing on this page was run on a GPU" in text
    assert f"{result.ended:%Y-%m-%d %H:%M}" in text
    assert "1 of 2 hold" in text

    rows = BeautifulSoup(index.read_text(), "html.parser").select("tbody tr")
    good, bad = (" ".join(row.get_text(" ").split()) for row in rows[-2:])
    assert "fresh" in good
    assert "compile-only" in good
    assert "1 of 2" in good
    assert "fails-1 : two is one (not required)" in good
    assert "last run failed : cell 4, ValueError: <b>no</b>" in bad
    assert "h100" in index.read_text()

    if CHROMIUM is None:
        pytest.skip("the static checks passed; no Chromium to open the pages in")
    with chromium(tmp_path / "browser") as tab:
        for path in (page, index):
            tab.requests.clear()
            tab.open(path)
            assert tab.errors == []
            assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
        tab.open(page)
        assert tab.evaluate("document.images[0].naturalWidth") > 100
        assert tab.evaluate("document.querySelectorAll('details.code')[0].open") is False
        tab.send("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
        for path in (page, index):
            tab.open(path)
            assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_browser_notices_errors_and_requests(tmp_path: Path) -> None:
    """The control of the test above: a page that does wrong is seen to do so."""
    bad = tmp_path / "bad.html"
    bad.write_text("<title>x</title><img src='http://host.invalid/a.png'><script>console.error('boom')</script>")
    with chromium(tmp_path / "browser") as tab:
        tab.open(bad)
    assert "http://host.invalid/a.png" in tab.requests
    assert any("boom" in error for error in tab.errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in tab.errors)


def check_static(path: Path) -> None:
    """Valid HTML, no resource but itself, every link leads somewhere, images described, headings in order."""
    html = path.read_text(encoding="utf-8")
    html5lib.HTMLParser(strict=True).parse(html)
    soup = BeautifulSoup(html, "html.parser")
    assert soup.select("html[lang=en]")
    assert not soup.find_all(["script", "link", "iframe"])
    assert "@import" not in html
    assert not re.findall(r"url\((?!['\"]?data:)", html)
    for element in soup.select("[src]"):
        assert str(element["src"]).startswith("data:")
    for image in soup.find_all("img"):
        assert str(image["alt"]).strip()
    for link in soup.select("a[href]"):
        target, _, anchor = str(link["href"]).partition("#")
        assert target.startswith("https://") or (path.parent / target).exists(), link
        assert not anchor or soup.find(id=anchor), link
    levels = [int(heading.name[1]) for heading in soup.find_all(re.compile("^h[1-6]$"))]
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


@pytest.mark.parametrize(
    ("mime", "content", "reason"),
    [
        ("text/html", "<script>1</script>", "script"),
        ("application/javascript", "1", "script"),
        ("text/html", "<img alt='x' src='https://host.invalid/x.png'>", "https://host.invalid"),
        ("text/html", "<link rel='stylesheet' href='style.css'>", "style.css"),
        ("text/html", "<img src='data:image/png;base64,AA=='>", "no alternative text"),
        ("image/png", "AA==", "no alternative text"),
    ],
)
def test_page_is_refused(mime: str, content: str, reason: str) -> None:
    output = nbformat.v4.new_output("display_data", {mime: content})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[output])])
    with pytest.raises(report.ReportError, match=reason):
        report.render_page(notebook, example_result())


def test_a_published_figure_is_smaller_and_looks_the_same() -> None:
    """Hundreds of shades become at most 64, none far from what it was; what is small already stays."""
    from io import BytesIO

    import numpy as np
    from PIL import Image

    shades = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    picture = Image.fromarray(np.repeat(shades[:, :, None], 3, axis=2))
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    small = Image.open(BytesIO(report.smaller_png(buffer.getvalue())))
    assert small.size == picture.size
    assert len(small.getcolors() or ()) <= report.COLOURS
    assert np.abs(np.asarray(small.convert("RGB"), int) - np.asarray(picture, int)).max() <= 16
    one = BytesIO()
    Image.new("RGB", (1, 1)).save(one, "PNG", optimize=True)
    assert len(report.smaller_png(one.getvalue())) <= len(one.getvalue())
