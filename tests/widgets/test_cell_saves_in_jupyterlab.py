"""What a `%%trace` cell saved, below it: a real engine, a real JupyterLab, a real browser.

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
from tests.notebook.kernels import ENGINE_ENVIRONMENT
from tests.widgets.test_browser_in_jupyterlab import Table, printed

pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(
        not (STATIC / "strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

START = "%load_ext nnsight_lab\nimport nnsight_lab as lab\n%engine start demo max_model_len=1024"
CELL = """%%trace 'The <b>Eiffel</b> Tower is in the city of', max_tokens=1, temperature=0
hidden = lab.residual(model.model.layers[5].output).save()
norm = hidden.float().norm().save()"""
WIDGETS = "__import__('ipywidgets').widgets.widget._instances"
#: What showing a cell's line takes of the kernel's own time.
TIMED = f"""import time, types
from nnsight_lab.magics.looking import CellViews
took = []
for _ in range(5):
    views, began = CellViews({{}}), time.process_time()
    views.show(engine, [tracer.output.request_id], 'cell')
    took.append(time.process_time() - began)
    views.close()
print(sorted(took)[2] < 0.05, len({WIDGETS}))"""

#: Runs the last `%%trace` cell of the notebook again.
AGAIN = """() => {
  const notebook = jupyterapp.shell.currentWidget.content;
  const source = cell => cell.model.sharedModel.source;
  notebook.activeCellIndex = notebook.widgets.findLastIndex(cell => source(cell).startsWith('%%trace'));
  return jupyterapp.commands.execute('notebook:run-cell');
}"""


@pytest.fixture(scope="module")
def page(folder: Path, opened: Any, problems: list[str]) -> Iterator[Any]:
    environment = {**ENGINE_ENVIRONMENT, "XDG_STATE_HOME": str(folder / "state")}
    with opened("cells.ipynb", environment) as page:
        book = Notebook(page)
        book.run(START)
        page.wait_for_selector(".jp-OutputArea-output:has-text('ready in')", timeout=300_000)
        book.finish(60)
        book.run(CELL)
        page.wait_for_selector(".nnl-saved", timeout=60_000)
        book.finish(60)
        yield page
        page.screenshot(path=folder / "last.png")
        # JupyterLab's own splash screen takes itself away twice on some loads.
        assert [one for one in problems if "/static/lab/jlab_core." not in one] == []
        assert book.errors() == []
        book.run("%engine stop")
        book.finish(60)


def test_one_line_says_what_was_saved_and_opens_by_keys(page: Any, folder: Path) -> None:
    strip = page.locator(".nnl-saved").first
    assert strip.inner_text().split("\n")[:3] == ["▸ Saved", "hidden", "bfloat16 [15, 576] 17.28 kB"]
    strip.screenshot(path=folder / "strip.png")
    assert page.locator(".nnl-browser").count() == 0
    strip.get_by_role("button", name="hidden").focus()
    page.keyboard.press("Enter")
    picture = strip.locator(".nnl-heatmap")
    picture.wait_for(timeout=20_000)
    wait_until(lambda: picture.evaluate("element => element.dataset.state") == "done", 30, "the picture")
    table = Table(page)
    table.counts("2 saves")
    assert table.column("Module")[0] == "model.layers[5].output"
    assert printed(page, "browser.selected.name, browser.value.equal(hidden)") == "hidden True"
    # The prompt's tokens stand beside the rows.
    canvas = picture.locator("canvas.nnl-canvas")
    canvas.focus()
    page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Enter")
    detail = picture.locator(".nnl-detail")
    detail.wait_for()
    assert "token 8 '>', hidden" in detail.inner_text()
    page.keyboard.press("Escape")
    book = Notebook(page)
    for theme in (*reversed(THEMES), *THEMES[:1]):
        book.set_theme(theme)
        strip.scroll_into_view_if_needed()
        page.screenshot(path=folder / f"cell-{theme.split()[-1].lower()}.png")


def test_the_code_that_made_it_makes_it_again(page: Any) -> None:
    strip = page.locator(".nnl-saved").first
    strip.locator("summary").click()
    code = strip.locator(".nnl-recipe pre").inner_text()
    Notebook(page).run(f"first = hidden\n{code}")
    assert printed(page, "first.equal(hidden), first is not hidden") == "True True"


def test_closing_leaves_only_the_line(page: Any) -> None:
    strip = page.locator(".nnl-saved").first
    strip.get_by_role("button", name="▾ Saved").focus()
    page.keyboard.press("Enter")
    assert strip.get_attribute("data-open") == "false"
    assert strip.locator(".nnl-browser").count() == 0
    script = f"[type(one).__name__ for one in {WIDGETS}.values()]"
    wait_until(lambda: "SavesBrowser" not in printed(page, script), 20, "the end of the browser", 1)
    assert "CellSaves" in printed(page, script)


def test_a_cell_that_runs_again_has_one_line_and_keeps_no_older_widget(page: Any) -> None:
    book = Notebook(page)
    lines = page.locator(".nnl-saved")
    there = lines.count()
    book.run(CELL)
    wait_until(lambda: lines.count() == there + 1, 30, "the line")
    before = printed(page, f"len({WIDGETS})")
    for _ in range(3):
        page.evaluate(AGAIN)
        book.finish(60)
    assert printed(page, f"len({WIDGETS})") == before
    assert lines.count() == there + 1


def test_it_is_cheap_and_can_be_switched_off(page: Any) -> None:
    book = Notebook(page)
    book.run(TIMED)
    found = page.locator(".jp-Cell.jp-mod-active .jp-OutputArea-output:has-text('True')")
    found.wait_for(timeout=20_000)
    lines = page.locator(".nnl-saved").count()
    book.run(CELL.replace("temperature=0", "temperature=0, show=False"))
    book.run("%saves show off")
    book.run(CELL)
    book.run("%saves show on")
    book.finish(60)
    assert page.locator(".nnl-saved").count() == lines


def test_the_store_as_the_value_of_a_cell_is_the_browser(page: Any) -> None:
    book = Notebook(page)
    book.run("engine.saves")
    table = Table(page)
    wait_until(lambda: page.locator(".jp-Cell.jp-mod-active .nnl-browser").count() == 1, 20, "the browser")
    table.done()
    assert set(table.column("Name")) == {"hidden", "norm"}
    assert "<b>Eiffel</b>" in table.column("Prompt")[0]
    table.root.scroll_into_view_if_needed()


def test_the_saved_notebook_has_a_small_table(page: Any, folder: Path) -> None:
    notebook = Notebook(page)
    notebook.finish(30)
    notebook.save_to(folder / "root" / "cells.ipynb")

    def outputs() -> list[dict[str, Any]]:
        cells = json.loads((folder / "root" / "cells.ipynb").read_text())["cells"]
        return [out["data"] for cell in cells for out in cell.get("outputs", []) if "data" in out]

    wait_until(lambda: any("text/html" in one for one in outputs()), 15, "the saved notebook")
    shown = [one for one in outputs() if "".join(one.get("text/plain", "")).startswith("Saved: hidden")]
    assert shown
    table = "".join(shown[0]["text/html"])
    assert table.count("<tr>") == 3
    assert "<b>Eiffel" not in table
    assert len(json.dumps(shown[0])) < 4_000
