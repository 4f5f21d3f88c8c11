"""Logit lens and attention in a real JupyterLab on a real engine: what a cell that ends with one shows.

Screenshots of both themes are left in the test's temporary folder; look at them when the drawing was changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import THEMES, Notebook, wait_until
from nnsight_lab.widgets.base import STATIC

pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(
        not (STATIC / "lens.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

PROMPT = "The Eiffel Tower is in the city of"
START = """import time, torch
import nnsight_lab as lab
from nnsight_lab.lens import LogitLens
engine = lab.start("demo", mode="async", max_model_len=256)"""
#: An engine that a busy machine starts.
START_S = 400
CELLS = "jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.outputArea)"


class View:
    """A view on the page, and what tests ask of it."""

    def __init__(self, page: Any, kind: str, number: int) -> None:
        self.page = page
        self.root = page.locator(f".nnl-{kind}").nth(number)
        self.sheet = self.root.locator(".nnl-sheet")

    def data(self, name: str) -> str:
        return str(self.root.evaluate(f"element => element.dataset.{name} ?? ''"))

    def done(self) -> None:
        """Waits until all of it is drawn."""
        wait_until(lambda: self.data("state") == "done", 30, f"a drawn view: {self.text('error')}")

    def text(self, part: str) -> str:
        return str(self.root.locator(f".nnl-{part}").first.text_content())

    def says(self, part: str, text: str) -> None:
        """Waits for a text."""
        wait_until(lambda: text in self.text(part), 15, f"{text!r} in {self.text(part)!r}")

    def press(self, *keys: str) -> None:
        self.sheet.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def active(self) -> str:
        """What a screen reader reads at the cursor."""
        cell = self.sheet.get_attribute("aria-activedescendant")
        return str(self.root.locator(f"[id='{cell}']").text_content())


@pytest.fixture(scope="module")
def page(opened: Any) -> Iterator[Any]:
    with opened("lenses.ipynb") as page:
        book = Notebook(page)
        book.run(START)
        wait_until(lambda: book.cells[-1]["execution_count"] is not None, START_S, "an engine", tick_s=1)
        assert book.errors() == []
        yield page
        book.run("lab.stop()")
        book.finish(60)


@pytest.fixture
def show(page: Any, notebook: Notebook) -> Any:
    """Runs a cell that ends with a look, and waits until it is drawn."""

    def run(source: str, kind: str) -> View:
        number = page.locator(f".nnl-{kind}").count()
        notebook.run(source)
        view = View(page, kind, number)
        view.root.wait_for(timeout=90_000)
        view.done()
        return view

    return run


def test_a_cell_that_ends_with_a_lens_shows_it(show: Any, page: Any) -> None:
    view = show(f"lens = lab.logit_lens({PROMPT!r}, target=' Paris')\nlens", "lens")
    positions = int(view.sheet.get_attribute("aria-colcount"))
    assert view.sheet.get_attribute("role") == "grid"
    assert view.sheet.get_attribute("aria-rowcount") == "30"
    # The cursor begins where the prompt ends, in the last layer: the pane has what the model says.
    view.says("pane", "layer 29")
    view.says("pane", f"position {positions - 1}")
    assert "·Paris" in view.text("pane")
    assert "rank 0" in view.text("pane")
    assert view.root.locator(".nnl-top tbody tr").count() == 10
    assert "·Paris" in view.active()


def test_keys_walk_zoom_and_choose(page: Any, notebook: Notebook) -> None:
    view = View(page, "lens", 0)
    cells = len(notebook.cells)
    view.press("ArrowDown", "ArrowLeft")
    view.says("pane", "layer 28")
    view.press("Control+End")
    view.says("pane", "layer 0")
    view.press("Control+Home")
    view.says("pane", "position 0")
    high = view.sheet.evaluate("element => element.scrollHeight")
    view.press("-", "-", "-", "-")
    wait_until(lambda: view.sheet.evaluate("element => element.scrollHeight") < high, 5, "smaller cells")
    view.press("0", "+", "+")
    view.press("Enter")
    view.says("hidden[role=status]", "is chosen in every view of this prompt")
    view.press("Escape")
    wait_until(
        lambda: "No position is chosen" in view.root.locator("[aria-live]").text_content(), 5, "let go"
    )
    assert len(notebook.cells) == cells, "no key went to JupyterLab"


def test_colours_and_numbers_can_be_switched(page: Any, notebook: Notebook) -> None:
    view = View(page, "lens", 0)
    colours = view.root.get_by_label("Colours", exact=True)
    names = colours.locator("option").evaluate_all("options => options.map(one => one.value)")
    assert names == [
        "probability", "entropy", "final_rank", "final_probability", "target_rank", "target_probability"
    ]  # fmt: skip
    canvas = view.root.locator("canvas.nnl-sheet-canvas")
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    for name in names[1:]:
        colours.select_option(name)
        wait_until(lambda: canvas.evaluate("canvas => canvas.toDataURL()") != before, 5, name)  # noqa: B023
        before = canvas.evaluate("canvas => canvas.toDataURL()")
    assert "rank" not in view.text("legend")
    colours.select_option("target_rank")
    view.says("legend", "rank 0, the top")
    view.root.get_by_label("Cells", exact=True).select_option("both")
    wait_until(lambda: canvas.evaluate("canvas => canvas.toDataURL()") != before, 5, "numbers")


def test_the_pointer_reads_a_cell_and_a_click_chooses_its_position(page: Any, notebook: Notebook) -> None:
    view = View(page, "lens", 0)
    view.press("Home")
    view.sheet.scroll_into_view_if_needed()
    box = view.sheet.bounding_box()
    page.mouse.move(box["x"] + 62 + 20, box["y"] + 60)
    view.says("pane", "position 0")
    page.mouse.click(box["x"] + 62 + 20, box["y"] + 60)
    wait_until(
        lambda: "Position 0 is chosen" in view.root.locator("[aria-live]").text_content(), 5, "a position"
    )


def test_attention_shows_heads_and_where_a_token_looks(show: Any, page: Any) -> None:
    view = show(f"lab.attention({PROMPT!r})", "attention")
    assert view.sheet.get_attribute("role") == "grid"
    assert view.sheet.get_attribute("aria-colcount") == "9"
    wait_until(lambda: int(view.data("thumbs") or 0) > 0, 20, "thumbnails")
    assert "layer 29, head 0" in view.text("large-head")
    view.press("ArrowDown", "ArrowRight", "ArrowRight", "Enter")
    view.says("large-head", "layer 28, head 2")
    view.done()
    tokens = view.root.locator(".nnl-token")
    assert tokens.all_text_contents()[:3] == ["The", "·E", "iffel"]
    wait_until(lambda: view.root.locator(".nnl-heads-told tr").count() == 9, 15, "every head of the layer")
    # Rows sum to one: the strip's weights are those of the row that was chosen.
    strip = view.root.locator(".nnl-line-of-tokens")
    strip.focus()
    page.keyboard.press("Home")
    wait_until(lambda: view.data("query") == "0", 10, "the first token")
    wait_until(lambda: "100.00" in str(tokens.nth(0).get_attribute("title")), 10, "it looks at itself")
    page.keyboard.press("End")
    last = str(tokens.count() - 1)
    wait_until(lambda: view.data("query") == last, 10, "the last token")
    total = sum(
        float(title.split(": ")[1].removesuffix(" %"))
        for title in tokens.evaluate_all("all => all.map(one => one.title)")
    )
    assert total == pytest.approx(100, abs=0.2)


def test_a_position_chosen_in_one_view_is_chosen_in_the_others(page: Any, notebook: Notebook) -> None:
    lens, attention = View(page, "lens", 0), View(page, "attention", 0)
    # What had been chosen before the second view was there, it knows.
    lens.press("Home", "ArrowRight", "ArrowRight", "Enter")
    chosen = attention.root.locator(".nnl-token[aria-selected='true']")
    wait_until(lambda: chosen.get_attribute("data-at") == "2", 10, "the lens's position in the strip")
    wait_until(lambda: attention.data("query") == "2", 10, "its row")
    attention.root.locator(".nnl-token").nth(4).click()
    wait_until(lambda: "position 4" in lens.text("pane"), 10, "the strip's position in the lens")
    other = page.locator(".nnl-lens").count()
    notebook.run("lab.logit_lens('Another prompt')")
    page.locator(".nnl-lens").nth(other).wait_for(timeout=60_000)
    stranger = View(page, "lens", other)
    stranger.done()
    assert "position 0" not in stranger.text("pane")
    attention.root.locator(".nnl-token").nth(0).click()
    wait_until(lambda: "position 0" in lens.text("pane"), 10, "the position")
    assert "position 0" not in stranger.text("pane"), "another prompt's view hears nothing"


def test_tokens_are_text_whatever_they_hold(show: Any, page: Any) -> None:
    prompt = (
        "<img src=x onerror='window.hacked=1'>\x1b[31m\u200b مرحبا 日本 <script>window.hacked=1</script>\n"
    )
    view = show(f"lab.attention({prompt!r}, layers=[0])", "attention")
    strip = view.text("line-of-tokens")
    assert "<" in strip
    assert "\x1b" not in strip
    assert "⏎" in strip
    show(f"lab.logit_lens({prompt!r})", "lens")
    assert page.evaluate("window.hacked") is None


def test_several_prompts_have_a_picker(show: Any) -> None:
    view = show("lab.logit_lens(['one two three', 'four', 'five <b>six</b>'], top_k=3)", "lens")
    picker = view.root.get_by_label("Prompt", exact=True)
    texts = picker.locator("option").all_text_contents()
    assert [text[:6] for text in texts] == ["0: one", "1: fou", "2: fiv"]
    picker.select_option("1")
    wait_until(lambda: "1 position" in view.text("head"), 10, "the other prompt")
    assert "1 positions" not in view.text("head")
    view.done()


def test_a_stream_that_was_saved_shows_the_same_view(show: Any) -> None:
    view = show(
        "model = engine.model\n"
        f"with lab.trace({PROMPT!r}, max_tokens=1, temperature=0):\n"
        "    stream = lab.residual(model.model.layers[29].output).save()\n"
        "lab.logit_lens(residual=stream, layers=[29])",
        "lens",
    )
    assert view.sheet.get_attribute("aria-rowcount") == "1"
    view.says("pane", "·Paris")


def test_a_lens_of_a_hundred_layers_and_a_thousand_positions_is_scrolled(show: Any) -> None:
    view = show(
        "shape = (100, 1000)\n"
        "ids = torch.arange(100_000).reshape(*shape, 1) % 997\n"
        "texts = {n: f' w{n}' for n in range(997)}\n"
        "prompt = tuple(n % 997 for n in range(1000))\n"
        "LogitLens(tuple(range(100)), tuple(range(1000)), prompt, tuple(texts[n] for n in prompt), ids,\n"
        "    torch.rand(*shape, 1), torch.rand(shape), ids[-1, :, 0], torch.zeros(shape).long(),\n"
        "    torch.rand(shape), None, None, None, texts)",
        "lens",
    )
    assert view.root.locator("*").count() < 200
    assert int(view.data("bytes")) < 600_000
    view.press("Control+Home")
    view.done()
    view.says("pane", "position 0")
    assert "·w" in view.active()
    # Row 0 is layer 99, whose first token is number 99,000.
    assert f"·w{99_000 % 997}" in view.active()
    view.root.get_by_role("button", name="Show all").click()
    view.done()


def test_axes_of_more_tokens_than_are_read_have_numbers(show: Any) -> None:
    view = show(
        "many = torch.ones(1, 1, 700, 700).tril()\n"
        "lab.lens.Attention(many / many.sum(-1, keepdim=True), (0,), (0,), tuple(range(700)),\n"
        "    tuple(range(700)), tuple(f' w{n}' for n in range(700)))",
        "attention",
    )
    canvas = view.root.locator("canvas.nnl-canvas")
    # Ink left of the plot, in each quarter of its height.
    ink = (
        "canvas => [0, 1, 2, 3].map(part => {const high = Math.floor(canvas.height / 4);"
        "const data = canvas.getContext('2d').getImageData(50, part * high, 55, high).data;"
        "return data.some((value, at) => at % 4 === 3 && value > 0)})"
    )
    wait_until(lambda: canvas.evaluate(ink) == [True] * 4, 10, "numbers all the way down")


def test_a_view_is_answered_while_a_cell_runs(page: Any, notebook: Notebook) -> None:
    view = View(page, "lens", 0)
    notebook.run("time.sleep(8)")
    wait_until(lambda: not notebook.idle, 5, "a running cell")
    view.press("Control+Home")
    view.says("pane", "layer 29, position 0")
    view.press("Control+End")
    view.says("pane", "layer 0, ")
    # Not its kernel's status, which the answer itself sets to idle: the cell has no number yet.
    assert notebook.cells[-1]["execution_count"] is None
    wait_until(lambda: notebook.cells[-1]["execution_count"] is not None, 30, "the end of the cell")


def test_in_high_contrast_everything_has_the_systems_colours(page: Any, notebook: Notebook) -> None:
    page.emulate_media(forced_colors="active", reduced_motion="reduce")
    for kind in ("lens", "attention"):
        view = View(page, kind, 0)
        style = "getComputedStyle(element).getPropertyValue"
        assert view.root.evaluate(f"element => {style}('--nnl-accent')").strip() == "Highlight"
        view.press("ArrowUp")
        outline = view.sheet.evaluate("element => getComputedStyle(element).outlineStyle")
        assert outline == "solid", "the focus is seen"
        view.done()
    page.emulate_media(forced_colors="none", reduced_motion="no-preference")


def test_both_themes_are_photographed(page: Any, notebook: Notebook, folder: Path) -> None:
    lens, attention = View(page, "lens", 0), View(page, "attention", 0)
    for theme in (*reversed(THEMES), *THEMES[:1]):
        notebook.set_theme(theme)
        for name, view in (("lens", lens), ("attention", attention)):
            view.root.scroll_into_view_if_needed()
            view.done()
            view.root.screenshot(path=folder / f"{name}-{theme.split()[-1].lower()}.png")
    assert len(list(folder.glob("*.png"))) == 4


def test_a_saved_notebook_reads_without_its_widgets(page: Any, notebook: Notebook) -> None:
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell["outputs"]
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert len(shown) >= 6
    for data in shown:
        assert "<table" in data["text/html"] or "<img" in data["text/html"]
        assert len(json.dumps(data)) < 700_000
    assert any("Eiffel" in data["text/html"] or "iffel" in data["text/html"] for data in shown)


def test_what_cannot_be_shown_is_one_line_in_its_place(page: Any) -> None:
    book = Notebook(page)
    for source, line in (
        ("lab.attention('x', layers=99)", "There is no layer 99: the model has 30 layers."),
        ("lab.logit_lens('x', top=5)", "'top' is not an option of logit_lens. Did you mean 'top_k'?"),
        ("lab.plot.logit_lens([lens, lens])", "a list of 2 lenses; a figure shows one"),
    ):
        before = len(book.errors())
        book.run(source)
        wait_until(lambda: len(book.errors()) > before, 20, line)  # noqa: B023
        assert line in book.errors()[-1]
        assert "\n" not in book.errors()[-1]
        page.evaluate(f"{CELLS}.at(-1).outputArea.model.clear()")
