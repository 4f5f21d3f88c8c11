"""What is odd about a save has its own right picture: dropped, spilled, all NaN, empty, huge, full of markup.

In a real JupyterLab in a real browser. Screenshots of both themes are left in the test's temporary folder;
look at them when the drawing was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import THEMES, Notebook, wait_until
from nnsight_lab.widgets.base import STATIC
from tests.widgets.test_browser_in_jupyterlab import Table, printed

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (STATIC / "browser.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

MARKUP = "<img src=x onerror='window.pwned = 1'><script>window.pwned = 1</script>"
SETUP = f"""import logging, math, resource, torch
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import Heatmap, SavesBrowser
logged = []
class Kept(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger('nnsight_lab.widgets').addHandler(Kept())
markup = {MARKUP!r}
odd = markup + '\\x1b[31m\\x00\\u202eשלום 北京\\n\\ttwo'
tokens = [odd, ' Paris', '\\n', 'ة']
store = SavesStore(budget_bytes=40 * 10**9)
huge = torch.ones(1, 1).expand(50_000, 50_000)
_ = store.put('huge', [{{'trace': {{'expanded': huge}}}}])
_ = store.put('odd', [{{'trace': {{
    'nans': torch.full((6, 8), math.nan), 'zero': torch.tensor(2.5), 'empty': torch.zeros(0, 4),
    'row': torch.arange(40.0), 'pattern': torch.rand(3, 4, 4), odd: torch.eye(4), 'text': odd,
}}}}], {{'prompt': odd, 'block_source': 'x = model.y.save()  # ' + markup}})
_ = store.put('spilled', [{{'trace': {{'hidden': torch.arange(12.0).reshape(3, 4)}}}}])
_ = store.put('going', [{{'trace': {{'hidden': torch.ones(300, 400)}}}}])
store.keep('huge')
kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
browser = SavesBrowser(store, name='store', height=280, tokens=lambda label: tokens if label.prompt else None)
browser"""


@pytest.fixture(scope="module")
def page(folder: Path, opened: Any, problems: list[str]) -> Iterator[Any]:
    with opened("odd.ipynb") as page:
        book = Notebook(page)
        book.run(SETUP)
        page.wait_for_selector(".nnl-browser", timeout=60_000)
        yield page
        assert problems == []
        page.screenshot(path=folder / "last.png")


@pytest.fixture
def table(page: Any) -> Iterator[Table]:
    table = Table(page)
    table.search("")
    yield table
    assert page.evaluate("window.pwned") is None
    assert Notebook(page).errors() == []


def drawn(pane: Any) -> Any:
    picture = pane.locator(".nnl-heatmap").last
    wait_until(lambda: picture.evaluate("element => element.dataset.state") == "done", 60, "the picture")
    return picture


def statistics(table: Table, *columns: str) -> list[str]:
    """Of the first row, once they came."""
    wait_until(lambda: table.column("Max")[0] != "…", 30, "statistics")
    return [table.column(name)[0] for name in columns]


def test_nothing_but_nan_is_said_and_hatched(table: Table, folder: Path) -> None:
    pane = table.open_row("odd nans")
    picture = drawn(pane)
    assert statistics(table, "Min", "Max", "Mean", "Std", "NaN, inf") == ["", "", "", "", "48 NaN"]
    assert table.column("Values")[0] == "not finite"
    legend = picture.locator(".nnl-legend")
    assert legend.inner_text().split("\n") == ["× 48 NaN", "no finite value"]  # and no colours' ends
    picture.screenshot(path=folder / "nans.png")


def test_a_number_and_an_empty_tensor_are_not_drawn_but_said(table: Table) -> None:
    pane = table.open_row("odd zero")
    wait_until(lambda: pane.locator(".nnl-one").inner_text() == "2.5", 10, "the number")
    assert statistics(table, "Shape", "Min", "Values") == ["0-d", "2.5", ""]
    pane = table.open_row("odd empty")
    wait_until(lambda: "It is empty: there is nothing to draw." in pane.inner_text(), 10, "a word of it")
    assert statistics(table, "Shape", "Min", "Values") == ["0×4", "", ""]


def test_a_row_of_values_is_a_line_there_and_in_the_table(table: Table) -> None:
    pane = table.open_row("odd row")
    drawn(pane)
    assert statistics(table, "Min", "Max") == ["0", "39"]
    line = table.grid.locator("[data-place='0'] .nnl-spark")
    assert line.get_attribute("aria-label") == "means of 40 values in 32 pieces"
    heights = [
        float(point.split(",")[1]) for point in line.locator("polyline").get_attribute("points").split()
    ]
    assert heights == sorted(heights, reverse=True)


def test_heads_are_picked_by_name_and_tokens_stand_beside_them(table: Table, page: Any) -> None:
    pane = table.open_row("odd pattern")
    picture = drawn(pane)
    heads = pane.get_by_role("slider", name="head")
    heads.focus()
    page.keyboard.press("ArrowRight")
    assert heads.input_value() == "1"
    drawn(pane)
    canvas = picture.locator("canvas.nnl-canvas")
    canvas.focus()
    page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Enter")
    detail = picture.locator(".nnl-detail")
    detail.wait_for()
    wait_until(lambda: "query 1 ' Paris'" in detail.inner_text(), 10, "where it is")
    assert "[1, 1, " in detail.locator("code").inner_text()
    page.keyboard.press("Escape")


def test_markup_and_control_characters_are_text_wherever_they_stand(table: Table, folder: Path) -> None:
    table.search("img src")
    table.done()
    assert "<script>" in table.column("Name")[0] or "<script>" in table.column("Prompt")[0]
    pane = table.open_row("odd text")
    wait_until(lambda: "two" in pane.locator("pre.nnl-text").last.inner_text(), 10, "the text")
    text = pane.inner_text()
    assert MARKUP in text
    assert "\\x1b[31m\\x00\\u202e" in text
    assert "\x00" not in text
    pane.locator("summary").click()
    assert f"# {MARKUP}" in pane.locator(".nnl-recipe pre").inner_text()
    pane = table.open_row("odd onerror")
    drawn(pane).screenshot(path=folder / "markup.png")
    assert table.page.locator("img[src=x], .nnl-browser script").count() == 0


def test_a_spilled_save_is_drawn_like_any_other(table: Table, page: Any) -> None:
    assert printed(page, "store.spill(), store.bytes_on_disk > 0") == "None True"
    pane = table.open_row("spilled hidden")
    drawn(pane)
    assert statistics(table, "Min", "Max", "Mean") == ["0", "11", "5.5"]


def test_a_dropped_save_says_so_in_its_row_and_in_its_picture(table: Table, page: Any) -> None:
    pane = table.open_row("going hidden")
    picture = drawn(pane)
    table.search("")
    assert printed(page, "store.drop('going')") == "None"
    wait_until(lambda: "This save was dropped." in pane.inner_text(), 10, "a word of it")
    canvas = picture.locator("canvas.nnl-canvas")
    canvas.focus()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Enter")
    error = picture.locator(".nnl-error")
    wait_until(lambda: "Nothing is kept of request 'going'" in error.inner_text(), 10, "the error")
    assert "Nothing is kept of request 'going'" in printed(page, "logged[-1]")
    assert printed(page, "browser.selected") == "None"
    pane.get_by_role("button", name="Close what is opened").click()


def test_ten_gigabytes_are_drawn_without_a_copy(table: Table, page: Any) -> None:
    pane = table.open_row("huge expanded")
    picture = pane.locator(".nnl-heatmap")
    wait_until(lambda: bool(picture.evaluate("element => element.dataset.firstMs")), 20, "a first picture")
    assert "10 GB" in pane.inner_text()
    reading = table.root.get_by_text("Reading the 10 GB of expanded for its statistics")
    reading.wait_for(timeout=20_000)
    # Which takes a while, and nobody waits for it.
    table.search("spilled hidden")
    assert statistics(table, "Max") == ["11"]
    page.evaluate("document.querySelector('.nnl-pane .nnl-close').click()")
    assert int(picture.evaluate("element => element.dataset.bytes") if picture.count() else 0) < 4 * 2**20
    grown = int(printed(page, "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kept"))
    assert grown < 1_200_000  # kB, torch's own buffers and the picture's base; the tensor is ten times that


def test_what_a_view_cannot_do_is_said_there_and_logged(table: Table, page: Any) -> None:
    pane = table.open_row("spilled hidden")
    drawn(pane)
    pane.get_by_role("button", name="Write …").click()
    pane.get_by_label("Path").fill("/proc/nowhere/x")
    page.keyboard.press("Enter")
    says = pane.locator(".nnl-says")
    wait_until(lambda: "/proc/nowhere/x cannot be written" in says.inner_text(), 10, "why not")
    assert "/proc/nowhere/x cannot be written" in printed(page, "logged[-1]")


def test_keys_belong_to_whatever_has_the_focus(table: Table) -> None:
    """JupyterLab asks the focused element itself whether its shortcuts are wanted, and takes them else."""
    drawn(table.open_row("odd pattern"))
    script = """root => [...root.querySelectorAll('button, input, select, textarea, summary, [tabindex]')]
      .filter(one => !one.hasAttribute('data-lm-suppress-shortcuts')).map(one => one.outerHTML)"""
    assert table.root.evaluate(script) == []


def test_both_themes_and_then_a_kernel_that_is_gone(table: Table, page: Any, folder: Path) -> None:
    pane = table.open_row("odd pattern")
    drawn(pane)
    table.search("")
    book = Notebook(page)
    for theme in (*reversed(THEMES), *THEMES[:1]):
        book.set_theme(theme)
        table.root.scroll_into_view_if_needed()
        page.screenshot(path=folder / f"odd-{theme.split()[-1].lower()}.png")
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    wait_until(
        lambda: (
            page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session?.kernel ?? null") is None
        ),
        20,
        "the end of the kernel",
    )
    words = table.root.get_by_text("The kernel has not answered yet", exact=False)
    assert words.count() == 0 or not words.first.is_visible()
    table.root.get_by_role("searchbox").fill("anything")
    words.first.wait_for(timeout=15_000)
    assert "if it is gone, run the cell again" in words.first.inner_text()
    assert len(table.column("Name")) > 0  # what was there stays to be read
