"""Token strips in a real JupyterLab in a real browser: read, walked by keys, and chosen everywhere.

Screenshots of both themes are left in the test's temporary folder; look at them when the drawing was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import THEMES, Notebook, wait_until
from nnsight_lab.widgets.base import STATIC

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (STATIC / "token_strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

IMPORTS = "import math, torch\nimport nnsight_lab as lab\nfrom nnsight_lab.widgets import Heatmap"
NASTY = r"""nasty = ["<img src=x onerror='window.boom=1'>", " cat", "\n", "\x1b[31m", "\u202eevil"]
nasty += ["👩\u200d👧", "é"]
strip = lab.token_strip(
    nasty, [0.5, -1, 2, math.nan, 3, -3, 0], token_ids=range(100, 107), score_name="logit"
)
strip"""


class Strip:
    """One strip on the page."""

    def __init__(self, page: Any, number: int) -> None:
        self.page = page
        self.root = page.locator(".nnl-strip").nth(number)

    def token(self, place: int, row: int = 0) -> Any:
        return self.root.locator(f"[data-place='{place}'][data-row='{row}']:not([role='columnheader'])")

    @property
    def chosen(self) -> list[str]:
        return list(
            self.root.locator(".nnl-chosen:not([role='columnheader'])").evaluate_all(
                "cells => [...new Set(cells.map(cell => cell.dataset.place))]"
            )
        )

    def text(self, part: str) -> str:
        return str(self.root.locator(f".nnl-{part}").first.inner_text())

    def chooses(self, *places: str) -> None:
        wait_until(lambda: self.chosen == list(places), 10, f"{places}, not {self.chosen}")


@pytest.fixture(scope="module")
def page(opened: Any) -> Iterator[Any]:
    with opened("strips.ipynb") as page:
        book = Notebook(page)
        book.run(IMPORTS)
        book.finish(60)
        yield page


@pytest.fixture
def show(page: Any, notebook: Notebook) -> Any:
    """Runs a cell that ends with a strip, and waits until it is drawn."""

    def run(source: str) -> Strip:
        number = page.locator(".nnl-strip").count()
        notebook.run(source)
        strip = Strip(page, number)
        strip.root.locator(".nnl-token").first.wait_for()
        notebook.finish(20)
        return strip

    return run


def printed(page: Any, notebook: Notebook, expression: str) -> str:
    outputs = page.locator(".jp-OutputArea-output")
    before = outputs.count()
    notebook.run(f"print({expression})")
    wait_until(lambda: outputs.count() > before, 20, "what is printed")
    return str(outputs.last.inner_text()).strip()


def test_tokens_are_shown_and_not_executed(show: Any, page: Any) -> None:
    strip = show(NASTY)
    texts = strip.root.locator(".nnl-token > span").all_inner_texts()
    assert texts == [
        *("<img·src=x·onerror='window.boom=1'>", "·cat", "⏎", "\\x1b[31m", "\\u202eevil"),
        *("👩\\u200d👧", "é"),
    ]
    assert page.evaluate("window.boom") is None
    assert strip.root.locator("img").count() == 0
    assert strip.token(1).get_attribute("aria-label") == "token 1, id 101, ' cat', logit −1"
    assert strip.token(3).get_attribute("aria-label") == "token 3, id 103, '\\x1b[31m', no logit"
    strip.root.get_by_role("button", name="Ids").click()
    assert strip.root.locator(".nnl-token small").all_inner_texts() == [str(n) for n in range(100, 107)]


def test_keys_walk_and_choose_and_the_cell_reads_it(show: Any, page: Any, notebook: Notebook) -> None:
    cells = len(notebook.cells)
    strip = show(NASTY)
    assert strip.root.locator("[tabindex='0']").count() == 1
    strip.token(0).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    strip.chooses("1")
    assert strip.token(1).get_attribute("aria-selected") == "true"
    assert "Chosen: token 1, id 101" in strip.root.locator(".nnl-hidden").inner_text()
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.place") == "6"
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.place") == "0"
    assert len(notebook.cells) == cells + 1  # none of these keys went to JupyterLab
    assert printed(page, notebook, "strip.position") == "1"
    notebook.run("strip.position = 5")
    strip.chooses("5")
    strip.token(5).focus()
    page.keyboard.press("Escape")
    strip.chooses()
    assert printed(page, notebook, "strip.position") == "None"


def test_a_token_chosen_is_chosen_in_every_view_of_the_sequence(
    show: Any, page: Any, notebook: Notebook
) -> None:
    rows = show(
        "ids = list(range(40, 60))\nwords = [f' w{n}' for n in ids]\n"
        "layers = {f'layer {n}': torch.randn(20) for n in range(4)}\n"
        "rows = lab.token_strip(words, layers, token_ids=ids)\nrows"
    )
    flow = show("flow = lab.token_strip(words, torch.rand(20), token_ids=ids)\nflow")
    other = show("other = lab.token_strip(words[:3], [1, 2, 3], token_ids=ids[:3])\nother")
    number = page.locator(".nnl-heatmap").count()
    notebook.run("heatmap = Heatmap(torch.randn(20, 64), token_ids=ids, tokens=words)\nheatmap")
    heatmap = page.locator(".nnl-heatmap").nth(number)
    heatmap.wait_for()
    wait_until(lambda: heatmap.evaluate("e => e.dataset.state") == "done", 20, "a heatmap")
    rows.token(7, 2).click()
    rows.chooses("7")
    flow.chooses("7")
    wait_until(lambda: heatmap.evaluate("e => e.dataset.position") == "7", 5, "the heatmap")
    assert other.chosen == []
    assert printed(page, notebook, "(rows.position, flow.position, heatmap.position, other.position)") == (
        "(7, 7, 7, None)"
    )
    # And from the heatmap: its fourth row.
    canvas = heatmap.locator("canvas.nnl-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + 110 + 30, box["y"] + 4 + 3.5 * (box["height"] - 24) / 20)
    rows.chooses("3")
    flow.chooses("3")
    # A view made later shows it at once, and a cell chooses for all.
    late = show("late = lab.token_strip(words, torch.rand(20), token_ids=ids)\nlate")
    late.chooses("3")
    notebook.run("heatmap.position = 11")
    for strip in (rows, flow, late):
        strip.chooses("11")


def test_rows_are_a_grid_that_keys_walk(show: Any, page: Any) -> None:
    strip = show("lab.token_strip(['a', 'b', 'c'], {'head 0': [1, 2, 3], 'head 1': [4, 5, 6]})")
    assert strip.root.get_by_role("grid").count() == 1
    assert strip.root.get_by_role("rowheader").all_inner_texts() == ["head 0", "head 1"]
    strip.token(0).focus()
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert strip.text("readout") == "head 1, token 1, 'b', score 5"


def test_ten_thousand_tokens_come_in_pages(show: Any, page: Any, notebook: Notebook) -> None:
    strip = show("many = lab.token_strip([f' {n}' for n in range(10_000)], torch.arange(10_000.))\nmany")
    wait_until(lambda: strip.root.locator(".nnl-token").count() == 1000, 10, "a thousand tokens")
    assert "Tokens 0 to 999 of 10,000." in strip.root.inner_text()
    strip.root.get_by_role("button", name="Later").click()
    strip.token(1_500).wait_for()
    notebook.run("many.position = 9_876")
    strip.token(9_876).wait_for()
    strip.chooses("9876")


def test_both_themes_are_readable(show: Any, page: Any, notebook: Notebook, folder: Path) -> None:
    strip = show(NASTY)
    seen = []
    for theme in reversed(THEMES):
        notebook.set_theme(theme)
        colours = "e => { const s = getComputedStyle(e); return s.backgroundColor + ' ' + s.color }"
        wait_until(lambda: strip.token(6).evaluate(colours) not in seen[-1:], 10, theme)  # noqa: B023
        seen.append(strip.token(6).evaluate(colours))
        notebook.photograph(theme.split()[-1].lower(), folder, ".nnl-strip")
    assert seen[0] != seen[1]
