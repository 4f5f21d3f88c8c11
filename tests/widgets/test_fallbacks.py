"""What is read of every output where no widget and no script runs: exports, GitHub, notebooks not trusted.

nbconvert's html keeps a widget for a script from the network, whatever else the output holds; so there a
notebook is read once `nnsight-lab freeze` was at it.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bleach
import nbclient
import nbconvert
import nbformat
import pytest
import torch

from nnsight_lab.bench.jupyterlab import open_page, serve
from nnsight_lab.cli.frozen import frozen
from nnsight_lab.lens.shown import Several
from nnsight_lab.plots.token_strip import token_strip
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets.attention import AttentionView
from nnsight_lab.widgets.base import STATIC, LabWidget
from nnsight_lab.widgets.browser import SavesBrowser
from nnsight_lab.widgets.cell_saves import CellSaves
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.lens import LensView
from nnsight_lab.widgets.prompts import MAX_LISTED
from nnsight_lab.widgets.token_strip import TokenStrip
from tests.widgets.comms import mock_comms
from tests.widgets.test_attention import some
from tests.widgets.test_lens import some_lens
from tests.widgets.views import SETUP, VIEWS, View

pytestmark = pytest.mark.skipif(
    not (STATIC / "heatmap.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)

#: Without the code, which has a bound of its own.
MAX_STATE_BYTES = 50_000
MAX_CODE_BYTES = 60_000
#: As GitHub's sanitizer lets pass: neither styles nor scripts, and pictures by address alone.
GITHUB_TAGS = {
    *("a", "b", "br", "caption", "code", "dd", "del", "details", "div", "dl", "dt", "em", "h1", "h2", "h3"),
    *("hr", "i", "img", "ins", "kbd", "li", "ol", "p", "pre", "q", "s", "samp", "small", "span", "strong"),
    *("sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "tt", "ul", "var"),
}
GITHUB_ATTRIBUTES = [
    *("alt", "align", "aria-label", "colspan", "headers", "height", "href", "role", "rowspan", "scope"),
    *("src", "title", "valign", "width"),
]


class _Words(HTMLParser):
    """What stands on a page: its text, and what stands in a picture's place."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._found: list[str] = []
        self._silent = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("style", "script"):
            self._silent += 1
        if tag == "img":
            self._found.append(f" {dict(attrs).get('alt') or ''} ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("style", "script"):
            self._silent -= 1

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._found.append(data)

    @property
    def text(self) -> str:
        return plain("".join(self._found))


def plain(text: str) -> str:
    """With every run of spaces as one, and dots for spaces of tokens taken away."""
    return " ".join(text.replace("·", " ").split())


def data_of(output: Any) -> dict[str, Any]:
    return dict(output.get("data", {}))


def missing(view: View, text: str) -> list[str]:
    return [word for word in view.says if plain(word) not in text]


@pytest.fixture(scope="module")
def book() -> Any:
    """The notebook of all views as it is saved."""
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, *(view.source for view in VIEWS))]
    made = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(made, timeout=120, kernel_name="python3").execute()
    nbformat.validate(made)
    return made


@pytest.fixture(params=VIEWS, ids=lambda view: view.name)
def view(request: pytest.FixtureRequest) -> View:
    found: View = request.param
    return found


@pytest.fixture
def data(book: Any, view: View) -> dict[str, Any]:
    outputs = [data_of(output) for output in book.cells[VIEWS.index(view) + 1].outputs]
    (found,) = [data for data in outputs if data]
    return found


def test_every_output_has_html_and_text(data: dict[str, Any], view: View) -> None:
    assert view.says, "say in `views.py` what must be readable of it"
    assert data["text/plain"].strip()
    assert missing(view, _Words(data["text/html"]).text) == []
    assert not re.search(r"<script|\son\w+=|javascript:", data["text/html"], re.IGNORECASE)


def test_it_is_read_where_styles_and_pictures_are_taken_away(data: dict[str, Any], view: View) -> None:
    page = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
    clean = bleach.clean(
        page, tags=GITHUB_TAGS, attributes={"*": GITHUB_ATTRIBUTES}, protocols={"https"}, strip=True
    )
    assert "style=" not in clean
    assert "data:" not in clean
    assert missing(view, _Words(clean).text) == []


@pytest.mark.parametrize("kind", ["html", "markdown"])
def test_exports_can_be_read(book: Any, view: View, kind: str) -> None:
    number = VIEWS.index(view) + 1
    alone = nbformat.v4.new_notebook(cells=[book.cells[number]], metadata=book.metadata)
    exporter: Any = nbconvert.MarkdownExporter(exclude_input=True)
    if kind == "html":
        exporter = nbconvert.HTMLExporter(exclude_input=True, template_name="basic")
        alone = nbformat.reads(frozen(nbformat.writes(alone)).text, as_version=4)
    body, _ = exporter.from_notebook_node(alone)
    assert missing(view, _Words(body).text) == []


def test_a_strips_largest_scores_are_said_in_words() -> None:
    import nnsight_lab as lab

    page = lab.token_strip(["a", " b", "c"], [0.5, -2.0, 3.0])._repr_html_()
    assert "highest score 3 at token 2 'c', lowest −2 at token 1 ' b'" in html.unescape(_Words(page).text)


@pytest.mark.browser
def test_a_notebook_of_somebody_else_is_read_in_jupyterlab(book: Any, tmp_path: Path, chromium: str) -> None:
    path = tmp_path / "theirs.ipynb"
    nbformat.write(book, path)
    with (
        serve(tmp_path, path) as server,
        open_page(server, path.name, chromium, viewport={"width": 1200, "height": 6000}) as page,
    ):
        page.wait_for_function("jupyterapp.shell.currentWidget.content.model.cells.length > 1")
        cells_of = "[...jupyterapp.shell.currentWidget.content.model.cells]"
        assert page.evaluate(f"{cells_of}.every(cell => !cell.trusted)")
        words = """cells => cells.map(cell => {
          const output = cell.querySelector('.jp-OutputArea');
          return [output.innerText, ...[...output.querySelectorAll('img')].map(one => one.alt)].join(' ');
        })"""
        cells = page.locator(".jp-Notebook .jp-CodeCell")
        cells.nth(len(VIEWS)).wait_for()
        texts = [plain(text) for text in cells.evaluate_all(words)][1:]
        page.screenshot(path=tmp_path / "theirs.png")
        assert page.locator(".jp-OutputArea-output iframe, .jp-OutputArea-output script").count() == 0
    unread = {view.name: missing(view, text) for view, text in zip(VIEWS, texts, strict=True)}
    assert {name: words for name, words in unread.items() if words} == {}


# -- how much of a widget is saved -------------------------------------------------------------


@pytest.fixture
def comms() -> Iterator[Any]:
    with mock_comms() as comms:
        yield comms


#: A result's html has as many of its numbers as can be read: thousands of cells, each with its own words.
MAX_HTML_BYTES: dict[type[LabWidget], int] = {
    LensView: 1_000_000,
    AttentionView: 200_000,
    TokenStrip: 5_000_000,
}


def largest() -> dict[type[LabWidget], Any]:
    """Each widget with the largest that it takes; a new widget belongs here."""
    many = SavesStore(max_requests=2000)
    for number in range(1500):
        many.put(f"lab-{number}", [{"trace": {"x" * 200: torch.ones(2)}}], {"prompt": "word " * 5000})
    deep = torch.randn(*[1] * 14, 1000, 1000)
    deep[..., 3, 4] = torch.nan
    names = [f"an axis with quite a long name, {number}" for number in range(16)]
    labels = ["a label " * 20] * 1000
    named = SavesStore()
    named.put("lab-0", [{f"block {n}" * 30: {f"{n}" * 200: torch.ones(2)} for n in range(200)}])
    # Letters of three bytes each, so many that their ids are no shorter.
    words = tuple("北京的街道" * 20 for _ in range(3000))
    rows = [f"layer {number} of the model" for number in range(60)]
    lenses = Several([replace(some_lens(60, 300), tokens=words[:300])] * MAX_LISTED)
    patterns = Several([replace(some(30, 9, 100), tokens=words[:100])] * MAX_LISTED)
    return {
        Heatmap: lambda: Heatmap(deep, name="n" * 300, axes=names, rows=labels, columns=labels),
        SavesBrowser: lambda: SavesBrowser(many, name="n" * 300),
        CellSaves: lambda: CellSaves(named, ["lab-0"], name="n" * 300),
        LensView: lambda: LensView(lenses),
        AttentionView: lambda: AttentionView(patterns),
        TokenStrip: lambda: TokenStrip(
            token_strip(words, torch.randn(60, 3000), rows=rows, title="t" * 300), prompt=range(3000)
        ),
    }


def test_every_widget_is_measured() -> None:
    def all_of(kind: type[LabWidget]) -> set[type[LabWidget]]:
        return {kind, *(each for sub in kind.__subclasses__() for each in all_of(sub))}

    ours = {kind for kind in all_of(LabWidget) if kind.__module__.startswith("nnsight_lab.")}
    # By name: anywidget makes a class of its own, of the same name, of each widget that there is.
    assert {kind.__name__ for kind in largest()} == {kind.__name__ for kind in ours if kind.module}


@pytest.mark.parametrize("kind", [Heatmap, SavesBrowser, CellSaves, LensView, AttentionView, TokenStrip])
def test_what_is_synced_and_saved_of_a_widget_is_small(kind: type[LabWidget], comms: Any) -> None:
    widget = largest()[kind]()
    try:
        bundle = widget._repr_mimebundle_()
        state = widget.get_state()
        code = {name: state.pop(name) for name in ("_esm", "_css")}
        size = len(json.dumps(state, default=str).encode())
        assert size <= MAX_STATE_BYTES, f"{size:,} bytes: {_sizes(state)}"
        packed = len(gzip.compress("".join(code.values()).encode()))
        assert packed <= MAX_CODE_BYTES, f"{packed:,} bytes of code"
        html_bytes = len(json.dumps(bundle, ensure_ascii=False).encode())
        assert html_bytes <= MAX_HTML_BYTES.get(kind, 2 * MAX_STATE_BYTES), f"{html_bytes:,} bytes of html"
    finally:
        widget.close()


def _sizes(state: dict[str, Any]) -> dict[str, int]:
    """Of the largest parts."""
    found = {name: len(json.dumps(value, default=str)) for name, value in state.items()}
    return dict(sorted(found.items(), key=lambda one: -one[1])[:3])
