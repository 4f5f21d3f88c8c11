from __future__ import annotations

import base64
import copy
import html.parser
import json
import pickle
import re
import struct
import zlib
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
import pytest
import torch

from nnsight_lab.plots import compare, heatmap, lines, logit_lens, sweep
from nnsight_lab.plots.still import still
from tests.plots.fakes import fake_lens

PLOTLY = "application/vnd.plotly.v1+json"
FIGURES = {
    "heatmap": lambda: heatmap([[1, 2], [3, 4]], title="<i>"),
    "log": lambda: heatmap(torch.rand(300, 400), scale="log"),
    "lines": lambda: lines(torch.rand(3, 5), tokens=list("<b>&x"), rows=["<", "b", "c"]),
    "compare": lambda: compare(torch.rand(3, 5), torch.rand(3, 5)),
    "sweep": lambda: sweep(["a", "b"], {"<x>": [[1, 2], [3, np.nan]]}, log_y=True),
    "lens": lambda: logit_lens(fake_lens()),
    "long lens": lambda: logit_lens(fake_lens(60, 500)),
}


def closed(text: str) -> str:
    """The text, if all its elements are closed and none is a script."""

    class Reader(html.parser.HTMLParser):
        inside: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag in {"div", "span", "img", "svg", "path", "table", "tr", "td", "th"}
            if tag not in ("img", "path"):
                self.inside.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag != "path":
                assert self.inside.pop() == tag

    reader = Reader()
    reader.inside = []
    reader.feed(text)
    reader.close()
    assert reader.inside == []
    return text


def pixels(text: str) -> np.ndarray[Any, Any]:
    """The picture in a still, ``[row, column, 4]``."""
    data = base64.b64decode(re.search(r"base64,([^\"]*)", text)[1])  # type: ignore[index]
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    length = struct.unpack(">I", data[33:37])[0]
    lines_ = np.frombuffer(zlib.decompress(data[41 : 41 + length]), dtype=np.uint8).reshape(height, -1)
    return lines_[:, 1:].reshape(height, width, 4)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_still_without_scripts(name: str) -> None:
    figure = FIGURES[name]()
    bundle = figure._repr_mimebundle_()
    assert set(bundle) == {PLOTLY, "text/html", "text/plain"}
    assert len(closed(bundle["text/html"])) < 400_000
    assert re.search("<img|<svg|<table", bundle["text/html"])
    assert bundle["text/plain"].strip()
    json.dumps(bundle, allow_nan=False)


def test_the_picture_has_the_figures_cells_the_right_way_up() -> None:
    values = [[0.0, 1.0], [np.nan, 0.0]]
    down = pixels(still(heatmap(values, scale="sequential")))
    assert down.shape == (2, 2, 4)
    assert down[..., 3].tolist() == [[255, 255], [0, 255]]
    assert down[0, 1, :3].sum() > down[0, 0, :3].sum()
    up = pixels(still(heatmap(values, scale="sequential", dims=("layer", "position"))))
    assert np.array_equal(up, down[::-1])


def test_a_large_picture_is_made_smaller() -> None:
    found = pixels(still(heatmap(torch.rand(500, 500))))
    assert found.shape[0] * found.shape[1] <= 60_000


def test_the_words_of_a_lens_are_in_its_still() -> None:
    text = still(logit_lens(fake_lens(2, 3)))
    assert text.count("<td style") == 6
    assert "&lt;b&gt;" in text


def test_a_still_is_of_what_the_figure_holds_when_it_is_shown() -> None:
    figure = heatmap([[1, 2]])
    figure.update_layout(title_text="<b>Mine</b> & more")
    assert "Mine &amp; more" in figure._repr_html_()
    assert "<b>" not in figure._repr_html_()
    assert figure._repr_mimebundle_()["text/plain"].startswith("Mine & more")
    for other in (copy.deepcopy(figure), pickle.loads(pickle.dumps(figure)), go.Figure(figure)):
        assert other.layout.title.text == "<b>Mine</b> & more"


def test_a_notebook_gets_figure_and_still_and_another_renderer_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    monkeypatch.setattr(pio, "show", lambda figure: shown.append("show"))
    before = pio.renderers.default
    try:
        pio.renderers.default = "plotly_mimetype"
        heatmap([1])._ipython_display_()
        pio.renderers.default = "json"
        heatmap([1])._ipython_display_()
    finally:
        pio.renderers.default = before
    assert set(shown[0]) == {PLOTLY, "text/html", "text/plain"}
    assert shown[1] == "show"


def test_an_html_export_shows_the_still() -> None:
    nbconvert = pytest.importorskip("nbconvert")
    import nbformat

    figure = heatmap([[1, 2]], title="Seen everywhere")
    output = nbformat.v4.new_output("display_data", data=figure._repr_mimebundle_())
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("figure", outputs=[output])])
    nbformat.validate(book)
    body, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(book)
    assert "Seen everywhere" in body
    assert "data:image/png;base64," in body
