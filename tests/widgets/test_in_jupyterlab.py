"""Heatmaps in a real JupyterLab in a real browser: what is drawn, read, pressed and sent.

Screenshots of both themes are left in the test's temporary folder; look at them when the drawing was changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import THEMES, Notebook, wait_until
from nnsight_lab.widgets.base import MAX_BUFFER_BYTES, STATIC
from nnsight_lab.widgets.colours import SPECIAL, lookup
from nnsight_lab.widgets.spans import CODE_NAN, CODE_NEGINF, CODE_POSINF, TOP

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (STATIC / "heatmap.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

IMPORTS = """import math, time, torch
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import Heatmap"""
#: As `axes.ts` has them.
LEFT, TOP_ROOM = 62, 4
SHOT_MARK = ".nnl-heatmap"


class View:
    """One heatmap on the page."""

    def __init__(self, page: Any, number: int) -> None:
        self.page = page
        self.root = page.locator(".nnl-heatmap").nth(number)
        self.canvas = self.root.locator("canvas.nnl-canvas")

    def data(self, name: str) -> str:
        return str(self.root.evaluate(f"element => element.dataset.{name} ?? ''"))

    def done(self, limit_s: float = 30) -> None:
        """Waits until all of it is drawn."""
        wait_until(lambda: self.data("state") == "done", limit_s, "a drawn heatmap")

    def text(self, part: str) -> str:
        return str(self.root.locator(f".nnl-{part}").first.inner_text())

    def colour(self, x: float, y: float) -> list[int]:
        """Of a pixel of the plot."""
        at = f"context.getImageData({LEFT + x}, {TOP_ROOM + y}, 1, 1).data"
        return list(
            self.canvas.evaluate(f"canvas => {{const context = canvas.getContext('2d'); return [...{at}]}}")
        )

    def point(self, x: float, y: float) -> None:
        """Moves the pointer there."""
        self.canvas.scroll_into_view_if_needed()
        box = self.canvas.bounding_box()
        self.page.mouse.move(box["x"] + LEFT + x - 2, box["y"] + TOP_ROOM + y)
        self.page.mouse.move(box["x"] + LEFT + x, box["y"] + TOP_ROOM + y)

    def reads(self, text: str) -> None:
        """Waits for what is read out at the pointer."""
        wait_until(lambda: text in self.text("readout"), 10, f"{text!r} in {self.text('readout')!r}")

    def press(self, *keys: str) -> None:
        self.canvas.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def slice(self) -> str:
        """The expression of what is in sight."""
        self.root.locator(".nnl-readout").evaluate("element => element.textContent = ''")
        self.root.get_by_role("button", name="Copy slice").click()
        wait_until(lambda: "[" in self.text("readout"), 5, "an expression")
        return self.text("readout").removeprefix("Copied ")


@pytest.fixture(scope="module")
def page(opened: Any) -> Iterator[Any]:
    with opened("widgets.ipynb") as page:
        book = Notebook(page)
        book.run(IMPORTS)
        book.finish(60)
        yield page


@pytest.fixture
def show(page: Any, notebook: Notebook) -> Any:
    """Runs a cell that ends with a heatmap, and waits until it is drawn."""

    def run(source: str) -> View:
        number = page.locator(".nnl-heatmap").count()
        notebook.run(source)
        view = View(page, number)
        view.root.wait_for()
        view.done()
        return view

    return run


def test_values_are_drawn_in_their_colours_at_their_places(show: Any) -> None:
    view = show(
        "t = torch.linspace(0, 1, 40).reshape(4, 10)\n"
        "t[1, 2], t[2, 3], t[3, 4] = math.nan, math.inf, -math.inf\n"
        "Heatmap(t, name='t', scale='sequential', clip=(0, 1))"
    )
    wide, high = 64, 28
    colours = lookup("sequential").tolist()
    codes = {(0, 0): 0, (3, 9): TOP, (0, 9): round(9 / 39 * TOP)}
    codes |= {(1, 2): CODE_NAN, (2, 3): CODE_POSINF, (3, 4): CODE_NEGINF}
    for (row, column), code in codes.items():
        found = view.colour(column * wide + 5, row * high + 5)
        assert found == pytest.approx(colours[code], abs=1), (row, column)
    for text in ("1 NaN", "1 +inf", "1 −inf"):
        assert text in view.text("legend")
    assert view.text("words") == "Every value is shown."
    assert len(set(SPECIAL.values())) == 3


def test_the_pointer_reads_exact_values_and_a_click_has_the_detail(show: Any, page: Any) -> None:
    view = show(
        "u = torch.full((4, 10), 0.1)\nu[2, 7] = -1234.5678\nHeatmap(u, name='u', axes=['token', 'hidden'])"
    )
    view.point(7 * 64 + 9, 2 * 28 + 9)
    view.reads("-1234.5677  at token 2, hidden 7")
    view.point(9, 9)
    view.reads("0.1  at token 0, hidden 0")
    page.mouse.down()
    page.mouse.up()
    detail = view.root.locator(".nnl-detail")
    detail.wait_for()
    assert "u[0, 0]" in detail.inner_text()
    detail.get_by_role("button", name="Close the detail").click()
    assert detail.is_hidden()


def test_a_huge_tensor_is_walked_with_few_bytes(show: Any) -> None:
    # 100,000 x 8,192 without memory: every row is the same. Read through as it is, all of it.
    view = show(
        "huge = torch.arange(8192, dtype=torch.float32).expand(100_000, 8192)\n"
        "Heatmap(huge, name='huge', scale='sequential')"
    )
    words = view.text("words")
    assert words.startswith("Shown 1 of ")
    assert "mean of" in words
    before = int(view.data("bytes"))
    assert before <= MAX_BUFFER_BYTES
    for _ in range(14):
        view.press("+")
        view.done()
    assert view.text("words") == "Every value is shown."
    assert int(view.data("bytes")) - before <= 14 * MAX_BUFFER_BYTES
    expression = view.slice()
    assert expression.startswith("huge[")
    rows, columns = (
        [int(end) for end in part.split(":")]
        for part in expression.removeprefix("huge[").rstrip("]").split(",")
    )
    assert rows[0] <= 50_000 <= rows[1]
    view.point(20, 20)
    wait_until(lambda: " at row" in view.text("readout"), 10, "a value")
    value, _, place = view.text("readout").partition("  at row ")
    assert float(value) == float(place.rpartition("column ")[2].replace(",", ""))
    assert columns[1] - columns[0] < 100


def test_keys_do_all_that_hands_do(show: Any, page: Any, notebook: Notebook) -> None:
    cells = len(notebook.cells)
    view = show("Heatmap(torch.arange(4_000_000.).reshape(2000, 2000), name='k')")
    assert view.slice() == "k[0:2000, 0:2000]"
    legend = view.text("legend")
    view.press("+", "+", "+", "+")
    view.done()
    wait_until(lambda: view.text("legend") != legend, 5, "other ends of the colours")
    zoomed = view.slice()
    assert zoomed != "k[0:2000, 0:2000]"
    view.press("ArrowRight", "ArrowDown")
    wait_until(lambda: view.slice() != zoomed, 5, "a pan")
    view.press("Home")
    assert view.slice() == "k[0:2000, 0:2000]"
    wait_until(lambda: view.text("legend") == legend, 5, "the same ends of the colours as at first")
    view.press("Shift+ArrowRight", "Shift+ArrowDown")
    wait_until(lambda: "mean" in view.root.locator(".nnl-hidden").inner_text(), 5, "the cursor's value")
    view.press("Enter")
    detail = view.root.locator(".nnl-detail")
    detail.wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Copy"
    page.keyboard.press("Escape")
    assert detail.is_hidden()
    assert page.evaluate("document.activeElement.className") == "nnl-canvas"
    assert view.canvas.get_attribute("role") == "application"
    assert "2,000" in str(view.canvas.get_attribute("aria-label"))
    # None of these keys went to JupyterLab.
    assert len(notebook.cells) == cells + 1
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.textContent") == "Copy slice"


def test_sliders_and_choices_draw_anew(show: Any) -> None:
    view = show(
        "n = torch.stack([torch.full((4, 10), float(k)) for k in range(3)])\n"
        "n[:, 0, 0] = 100\n"
        "Heatmap(n, name='n', axes=['layer', 'token', 'hidden'], scale='sequential', clip=(0, 2))"
    )
    colours = lookup("sequential").tolist()
    assert view.colour(200, 50) == pytest.approx(colours[0], abs=1)
    view.root.get_by_role("slider", name="layer").fill("2")
    wait_until(lambda: view.colour(200, 50) == pytest.approx(colours[TOP], abs=1), 10, "the third layer")
    assert view.slice() == "n[2, 0:4, 0:10]"
    view.root.get_by_label("Colours").select_option("diverging")
    wait_until(lambda: view.colour(200, 50) == lookup("diverging-light").tolist()[TOP], 10, "other colours")


def test_errors_are_shown_in_the_view(show: Any, page: Any, notebook: Notebook) -> None:
    view = show(
        "store = SavesStore()\n"
        "_ = store.put('r', [{'trace': {'h': torch.ones(9, 9)}}])\n"
        "Heatmap(store, store.labels()[0])"
    )
    notebook.run("store.drop('r')")
    notebook.finish(10)
    view.point(30, 30)
    wait_until(lambda: view.root.locator(".nnl-error").is_visible(), 10, "the error")
    assert "Nothing is kept of request 'r'" in view.text("error")


def test_a_view_is_answered_while_a_cell_runs(show: Any, page: Any, notebook: Notebook) -> None:
    view = show("Heatmap(torch.full((4, 10), 0.25), name='busy')")
    notebook.run("time.sleep(6)")
    wait_until(lambda: not notebook.idle, 5, "a running cell")
    view.point(10, 10)
    view.reads("0.25  at row 0, column 0")
    # Not its kernel's status, which the answer itself sets to idle: the cell has no number yet.
    assert notebook.cells[-1]["execution_count"] is None
    wait_until(lambda: notebook.cells[-1]["execution_count"] is not None, 20, "the end of the cell")


def test_a_view_that_is_gone_says_so(show: Any, page: Any, notebook: Notebook) -> None:
    show("gone = Heatmap(torch.randn(500, 500))\ngone")
    last = page.locator(".jp-OutputArea-output").last
    notebook.run("print(len(gone._views), gone._tiles.cached_bytes > 0)")
    wait_until(lambda: last.inner_text().strip() == "1 True", 10, "a view")
    cells = "jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.outputArea)"
    page.evaluate(f"{cells}.at(-2).outputArea.model.clear()")
    notebook.run("print(len(gone._views), gone._tiles.cached_bytes)\ngone.close()")
    wait_until(lambda: last.inner_text().strip() == "0 0", 10, f"no view: {last.inner_text()}")


def test_both_themes_have_their_colours(show: Any, page: Any, notebook: Notebook, folder: Path) -> None:
    view = show("Heatmap(torch.zeros(4, 10), name='z', scale='diverging', clip=(-1, 1))")
    middle = round(TOP / 2)
    for theme in (*reversed(THEMES), *THEMES[:1]):
        notebook.set_theme(theme)
        name = theme.split()[-1].lower()
        expected = lookup(f"diverging-{name}").tolist()[middle]
        wait_until(lambda: view.colour(200, 50) == expected, 10, f"colours of {theme}")  # noqa: B023
        notebook.photograph(name, folder, SHOT_MARK)


def test_a_saved_notebook_reads_without_its_widgets(page: Any, notebook: Notebook) -> None:
    outputs = [output for cell in notebook.cells for output in cell["outputs"] if "data" in output]
    shown = [
        output["data"] for output in outputs if "application/vnd.jupyter.widget-view+json" in output["data"]
    ]
    assert shown
    for data in shown:
        assert "text/html" in data
        assert len(json.dumps(data)) < 120_000


def test_a_picture_whose_kernel_is_gone_says_so(show: Any, page: Any, notebook: Notebook) -> None:
    view = show("Heatmap(torch.zeros(4, 10), name='last')")
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    wait_until(
        lambda: page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session?.kernel == null"),
        20,
        "no kernel",
    )
    view.point(10, 10)
    wait_until(lambda: "The kernel is gone" in view.text("error"), 10, "a word of it")
