"""A person's way: the quickstart in a real JupyterLab, in a real browser, with the real stop button.

Screenshots of both themes are left in the test's temporary folder; look at them when an output's drawing was
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import Notebook, Server, open_page, serve, wait_until
from nnsight_lab.engine.processes import engine_processes
from tests.notebook.kernels import ENGINE_ENVIRONMENT, ROOT

pytestmark = [pytest.mark.browser, pytest.mark.engine]

QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
RUN_ALL_LIMIT_S = 400
LONG_CELL = "%%trace 'Once upon a time', max_tokens=1000, ignore_eos=True\npass"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path, QUICKSTART, ENGINE_ENVIRONMENT) as server:
        yield server


@pytest.fixture
def page(server: Server, tmp_path: Path, chromium: str) -> Iterator[Any]:
    with open_page(server, QUICKSTART.name, chromium) as page:
        yield page
        page.screenshot(path=tmp_path / "last.png")


def test_the_quickstart_in_jupyterlab_and_its_stop_button(page: Any, server: Server, tmp_path: Path) -> None:
    notebook = Notebook(page)
    notebook.run_all(RUN_ALL_LIMIT_S)
    assert notebook.errors() == []
    assert "Paris" in page.inner_text(".jp-Notebook .jp-OutputArea-output:has-text('The Eiffel Tower')")
    assert page.locator(".jp-Notebook .jp-RenderedText[data-mime-type*='error']").count() == 0

    notebook.run("%engine start demo max_model_len=1024")
    last = ".jp-Cell.jp-mod-active"  # a new cell stays the active one when it runs
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('ready in')", timeout=180_000)
    notebook.finish(30)
    _look_at_help(notebook, tmp_path)
    notebook.run(LONG_CELL)
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('Once upon a time')")
    page.click(".jp-NotebookPanel-toolbar [data-jp-item-name='interrupt']")
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('Interrupted')", timeout=3_000)
    notebook.finish(10)
    (error,) = notebook.errors()
    assert "\n" not in error
    assert error.endswith("the requests of this cell were aborted; the engine is still loaded.")

    notebook.run(
        "[again] = lab.generate('The Eiffel Tower is in the city of', max_tokens=1, temperature=0)\n"
        "print(again.outputs[0].text)"
    )
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('Paris')")

    notebook.run("%%edit probe\nhidden = model.logits")
    notebook.run("%%trace [f'The number after {n} is' for n in range(20)], max_tokens=8, temperature=0\npass")
    notebook.run("%%trace 'One'\n# a comment\nmodel.logits.nope()")
    for line in ("%edits", "%engine list", "%engine status", "%edits off prob"):
        notebook.run(line)
    notebook.finish(30)
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        notebook.set_theme(theme)
        name = theme.split()[-1].lower()
        notebook.photograph(f"{name}-start", tmp_path, ".jp-OutputArea-output:has-text('ready in')")
        notebook.photograph(f"{name}-trace", tmp_path, ".jp-OutputArea-output:has-text('The Eiffel Tower')")
        notebook.photograph(f"{name}-end", tmp_path, ".jp-CodeCell >> nth=-1")
    notebook.run("%engine stop")
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('stopped in')")
    assert [found for found in engine_processes() if str(tmp_path) in found.log] == []


def _seen_or_tab(page: Any) -> bool:
    seen = bool(page.locator(".jp-Completer-item").first.is_visible())
    if not seen:
        page.locator(".jp-Notebook .jp-CodeCell").last.locator(".cm-line").last.click()
        page.keyboard.press("Control+End")
        page.keyboard.press("Tab")
    return seen


def _look_at_help(notebook: Notebook, folder: Path, width: int = 576) -> None:
    """Tab and Shift+Tab in a cell that is not finished, in both themes; the cell is deleted again."""
    page = notebook.page
    notebook.write(
        "%%trace 'One', max_tokens=(\nlayer = model.model.layers[3]\nhidden = layer.output[0].save()\nlayer."
    )
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        notebook.set_theme(theme)
        name = theme.split()[-1].lower()
        item = page.locator(".jp-Completer-item", has_text="self_attn")
        # JupyterLab gives a kernel one second, which a busy machine may take.
        wait_until(lambda: _seen_or_tab(page), 30, "completion of a path", tick_s=2)
        assert f"llamaattention → [tokens, {width}] " in item.inner_text().replace("\u00a0", " ")
        # The first of them are seen without scrolling, and each on one line.
        assert page.locator(".jp-Completer-item").count() <= 10
        output = page.locator(".jp-Completer-item[data-value$='output']")
        assert f"(hidden, residual) [tokens, {width}] " in output.inner_text().replace("\u00a0", " ")
        page.screenshot(path=folder / f"{name}-completer.png")
        page.locator(".jp-Notebook .jp-CodeCell").last.locator(".cm-line").nth(2).click()  # closes it
        page.keyboard.press("Home")
        for _ in range(len("hidden = layer.out")):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+Tab")
        page.locator(".jp-Tooltip", has_text="lab.residual(layer.output)").wait_for()
        page.screenshot(path=folder / f"{name}-tooltip.png")
        page.keyboard.press("Escape")
    page.locator(".jp-Notebook .jp-CodeCell").last.locator(".cm-line").last.click()
    page.evaluate("jupyterapp.commands.execute('notebook:delete-cell')")
    notebook.set_theme("JupyterLab Light")
