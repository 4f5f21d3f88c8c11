"""The saves browser in a real JupyterLab in a real browser: rows, search, sort, pictures, keys, what changes.

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
        not (STATIC / "browser.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

SETUP = """import math, torch
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import SavesBrowser
engine_saves = store = SavesStore(max_requests=3000)
prompts = ['The Eiffel Tower is in the city of', '<b>bold</b> & "quoted"\\n\\x1b[31m', 'Straße 北京 שלום']
for n in range(40):
    hidden = torch.randn(12, 64) * (n + 1)
    saved = {'hidden': hidden, 'logits': torch.randn(300), 'loss': 0.5, 'note': '<i>text</i>\\nsecond line',
             'stack': torch.randn(3, 8, 16), 'steps': [torch.full((4,), float(s)) for s in range(3)]}
    if n % 10 == 3:
        hidden[2, 5], hidden[3, 6] = math.nan, math.inf
    _ = store.put(f'lab-{n}', [{'trace': saved, 'probe': {'norm': torch.tensor(float(n))}}],
                  {'prompt': prompts[n % 3], 'edits': (('probe', 1, ''),)},
                  module_paths={('trace', 'hidden'): f'model.layers.{n % 12}'})
browser = SavesBrowser(store, name='store', height=280)
browser"""


class Table:
    """The saves browser on the page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.root = page.locator(".nnl-browser").last
        self.grid = self.root.get_by_role("grid")

    def done(self) -> None:
        wait_until(lambda: self.root.evaluate("element => element.dataset.state") == "done", 20, "the rows")

    def column(self, name: str) -> list[str]:
        """The texts of a column in sight."""
        script = """(grid, name) => {
          const heads = [...grid.querySelectorAll('[role=columnheader]')].map(head => head.textContent);
          const at = heads.indexOf(name);
          return [...grid.querySelectorAll('[data-place]')].map(row => row.children[at].textContent);
        }"""
        return list(self.grid.evaluate(script, name))

    def search(self, words: str) -> None:
        """And waits for what is found."""
        self.root.get_by_role("searchbox").fill(words)
        self.found(words)

    def found(self, words: str) -> None:
        script = "element => element.dataset.state === 'done' && element.dataset.words"
        wait_until(lambda: self.root.evaluate(script) == words, 10, f"what is found of {words!r}")

    def counts(self, text: str) -> None:
        count = self.root.locator(".nnl-count")
        wait_until(lambda: count.inner_text().startswith(text), 10, f"{text} in {count.inner_text()}")

    def press(self, *keys: str) -> None:
        self.grid.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def active(self) -> int:
        """The place that the keys are at, as a screen reader is told."""
        place = self.grid.evaluate(
            "grid => document.getElementById(grid.getAttribute('aria-activedescendant'))?.ariaRowIndex"
        )
        return int(place) - 2

    def open_row(self, words: str) -> Any:
        """Searches, and opens the first row."""
        self.search(words)
        self.grid.locator("[data-place='0']").click()
        pane = self.root.locator(".nnl-pane")
        pane.wait_for()
        return pane


@pytest.fixture(scope="module")
def page(folder: Path, opened: Any) -> Iterator[Any]:
    with opened("saves.ipynb") as page:
        book = Notebook(page)
        book.run(SETUP)
        page.wait_for_selector(".nnl-browser", timeout=60_000)
        yield page
        page.screenshot(path=folder / "last.png")


@pytest.fixture
def table(page: Any, problems: list[str]) -> Iterator[Table]:
    problems.clear()
    table = Table(page)
    table.search("")
    table.counts("360 saves")
    yield table
    assert Notebook(page).errors() == []
    assert problems == []
    assert table.root.locator(".nnl-error:visible").count() == 0


def printed(page: Any, source: str) -> str:
    """What a cell prints."""
    book = Notebook(page)
    book.run(f"print({source})")
    found = page.locator(".jp-Cell.jp-mod-active .jp-OutputArea-output")
    found.wait_for()
    return str(found.inner_text()).strip()


def test_the_newest_are_shown_first_and_numbers_come_for_what_is_in_sight(table: Table) -> None:
    assert table.column("Request")[0] == "lab-39"
    assert table.grid.get_attribute("aria-rowcount") == "361"
    wait_until(lambda: table.column("Max")[0] not in ("", "…"), 10, "statistics")
    assert table.column("Mean")[2] == ""  # a number has none
    assert len(table.column("Name")) < 40


def test_search_finds_words_anywhere(table: Table) -> None:
    table.search("eiffel hidden")
    table.counts("14 of 360")
    assert set(table.column("Name")) == {"hidden"}
    table.search("layers.3")
    table.counts("4 of 360")
    table.search("nothing like it")
    table.counts("0 of 360")
    assert "No save has all of these words." in table.root.inner_text()


def test_columns_sort_by_hand_and_by_the_list(table: Table) -> None:
    table.search("hidden")
    table.counts("40 of")
    table.grid.get_by_role("columnheader", name="Std").click()
    wait_until(lambda: table.column("Request")[0] == "lab-0", 10, "the smallest deviation")
    table.grid.get_by_role("columnheader", name="Std").click()
    wait_until(lambda: table.column("Request")[0] != "lab-0", 10, "the largest deviation")
    assert table.grid.get_by_role("columnheader", name="Std").get_attribute("aria-sort") == "descending"
    table.root.get_by_label("Sort").select_option("special")
    table.root.get_by_role("button", name="turn around").click()
    wait_until(lambda: table.column("NaN, inf")[0] == "1 NaN, 1 +inf", 10, "flags")
    table.root.get_by_label("Sort").select_option("")
    wait_until(lambda: table.column("Request")[0] == "lab-39", 10, "the newest")


def test_a_save_is_opened_as_a_picture_and_known_in_python(table: Table, page: Any) -> None:
    pane = table.open_row("lab-3 hidden")
    picture = pane.locator(".nnl-heatmap")
    wait_until(lambda: picture.evaluate("element => element.dataset.state") == "done", 20, "the picture")
    assert "float32 [12, 64]" in pane.inner_text()
    assert printed(page, "browser.selected.name, browser.selected.shape") == "hidden (12, 64)"
    expression = pane.locator("code").first.inner_text()
    assert printed(page, f"tuple({expression}.shape)") == "(12, 64)"


def test_values_of_every_kind_are_shown(table: Table) -> None:
    pane = table.open_row("lab-7 logits")
    pane.get_by_role("application").wait_for()
    pane = table.open_row("lab-7 norm")
    pane.locator(".nnl-one").wait_for()
    wait_until(lambda: pane.locator(".nnl-one").inner_text() == "7.0", 10, "the number")
    pane = table.open_row("lab-7 note")
    wait_until(lambda: "second line" in pane.locator("pre").inner_text(), 10, "the text")
    assert pane.locator("pre").inner_text().startswith("<i>text</i>\n")
    pane = table.open_row("lab-7 stack")
    pane.get_by_role("slider", name="dim 0").wait_for()


def test_keys_do_all_that_hands_do(table: Table, page: Any) -> None:
    cells = len(Notebook(page).cells)
    table.press("Home")
    assert table.active() == 0
    table.press("ArrowDown", "ArrowDown", "ArrowUp", "PageDown")
    assert table.active() > 5
    table.press("End")
    assert table.active() == 359
    wait_until(lambda: table.column("Request")[-1] == "lab-0", 10, "the last page")
    table.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.insert_text("lab-12 hidden")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"
    table.found("lab-12 hidden")
    page.keyboard.press("Enter")
    pane = table.root.locator(".nnl-pane")
    wait_until(lambda: "lab-12" in pane.inner_text(), 10, "the opened save")
    page.keyboard.press("Escape")
    assert pane.is_hidden()
    assert len(Notebook(page).cells) == cells


def test_two_pinned_are_compared(table: Table, page: Any) -> None:
    for words in ("lab-20 hidden", "lab-21 hidden"):
        table.search(words)
        table.press("Home", "p")
    pane = table.root.locator(".nnl-pane")
    wait_until(lambda: "cosine per row" in pane.inner_text(), 10, "the comparison")
    wait_until(lambda: pane.locator(".nnl-heatmap[data-state=done]").count() == 3, 20, "three pictures")
    table.search("lab-21 stack")
    table.counts("1 of")
    table.press("Home", "p")
    wait_until(lambda: "shapes must match" in pane.inner_text(), 10, "why not")
    for chip in table.root.locator(".nnl-chip").all():
        table.root.locator(".nnl-chip").first.click()
        del chip
    assert table.root.locator(".nnl-pins").is_hidden()


def test_new_requests_come_without_moving_what_is_in_sight(table: Table, page: Any) -> None:
    table.press("Home")
    for _ in range(8):
        table.press("PageDown")
    table.done()
    before = table.column("Request")[10], table.column("Name")[10]
    top = table.grid.evaluate("grid => grid.scrollTop")
    active = table.active()
    printed(page, "store.put('fresh', [{'trace': {'hidden': torch.zeros(3)}}]).request_id")
    table.counts("361 saves")
    table.done()
    wait_until(lambda: table.grid.evaluate("grid => grid.scrollTop") == top + 24, 10, "one row more above")
    assert table.active() == active + 1
    assert before in list(zip(table.column("Request"), table.column("Name"), strict=True))
    pane = table.open_row("fresh hidden")
    table.press("Delete")
    pane.get_by_role("group", name="Drop?").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Drop"
    page.keyboard.press("Enter")
    table.search("")
    table.counts("360 saves")
    wait_until(lambda: "This save was dropped." in pane.inner_text(), 10, "a word of it")
    assert printed(page, "browser.selected") == "None"


def test_a_save_is_written_to_a_file(table: Table, page: Any) -> None:
    pane = table.open_row("lab-5 hidden")
    pane.get_by_role("button", name="Write …").click()
    pane.get_by_label("Path").fill("out/one")
    page.keyboard.press("Enter")
    says = pane.locator(".nnl-says")
    wait_until(says.inner_text, 10, "where it is")
    assert "out/one.safetensors" in says.inner_text()
    pane.get_by_role("button", name="Keep request").click()
    pane.get_by_role("button", name="✓ Request kept").wait_for()


def test_both_themes(table: Table, page: Any, folder: Path) -> None:
    table.search("")
    table.counts("360 saves")
    table.press("Home", "ArrowDown", "Enter")
    pane = table.root.locator(".nnl-pane")
    wait_until(lambda: pane.locator(".nnl-heatmap[data-state=done]").count() == 1, 20, "the picture")
    wait_until(lambda: "…" not in table.column("Max")[:5], 10, "statistics")
    book = Notebook(page)
    for theme in (*reversed(THEMES), *THEMES[:1]):
        book.set_theme(theme)
        name = theme.split()[-1].lower()
        table.root.scroll_into_view_if_needed()
        table.root.screenshot(path=folder / f"browser-{name}.png")
        page.screenshot(path=folder / f"page-{name}.png")
        text, field = (
            table.grid.evaluate(f"grid => getComputedStyle(grid).{part}")
            for part in ("color", "backgroundColor")
        )
        assert text != field
