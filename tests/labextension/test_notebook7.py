"""The same extension in Notebook 7: one document, no tabs, no status bar, side panels that menus open.

One page and one engine. Screenshots of both themes are left in the test's temporary folder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import (
    LABEXTENSION,
    THEMES,
    Notebook,
    empty_notebook,
    open_page,
    serve,
    wait_until,
)
from tests.notebook.kernels import ENGINE_ENVIRONMENT

pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("notebook") is None, reason="no notebook here: make setup"),
    pytest.mark.skipif(
        not (LABEXTENSION / "package.json").exists(),
        reason="the JupyterLab extension is not built: scripts/setup.sh widgets",
    ),
]

START_LIMIT_S = 400
BLOCK = (
    "%%edit probe\nhidden = model.model.layers[3].output[0].save()",
    "output = __import__('nnsight_lab').generate('The Eiffel Tower is in the city of', max_tokens=4, temperature=0)[0]\n"
    "print('text:', output.outputs[0].text)",
)


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the browser's console was told of us."""
    return []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, chromium: str, said: list[str]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("notebook7")
    environment = {**ENGINE_ENVIRONMENT, "XDG_STATE_HOME": str(folder / "state")}
    document = empty_notebook(folder / "seven.ipynb")

    def listen(page: Any) -> None:
        page.on("console", lambda message: said.append(message.text) if "nnsight" in message.text else None)

    with (
        serve(folder, document, environment, app="notebook") as server,
        open_page(server, "seven.ipynb", chromium, under="notebooks", before=listen) as page,
    ):
        page.set_viewport_size({"width": 1300, "height": 900})
        Notebook(page).finish(60)
        yield page
        for theme in THEMES:
            Notebook(page).set_theme(theme)
            page.screenshot(path=folder / f"{theme.split()[-1].lower()}.png")


@pytest.fixture(scope="module")
def panel(page: Any) -> Any:
    """The side panel, opened by the View menu."""
    page.click(".lm-MenuBar-itemLabel >> text=View")
    page.click(".lm-Menu-item[data-command='nnsight-lab:show']")
    found = page.locator("#nnsight-lab-panel")
    found.wait_for()
    return found


def test_every_plugin_of_ours_starts(page: Any, said: list[str]) -> None:
    ours = page.evaluate(
        "jupyterapp.listPlugins().filter(id => id.startsWith('nnsight-lab:'))"
        ".map(id => [id, jupyterapp.isPluginActivated(id)])"
    )
    assert len(ours) >= 5
    assert [name for name, active in ours if not active] == []
    assert said == []


def test_the_view_menu_opens_the_panel_and_the_panel_starts_an_engine(page: Any, panel: Any) -> None:
    wait_until(lambda: "is not loaded" in panel.inner_text(), 15, "what the panel says of a new kernel")
    panel.get_by_text("Start an engine").click()
    panel.get_by_role("button", name="Start", exact=True).click()
    ready = panel.locator(".nnlab-engine[data-state='ready']")
    wait_until(ready.count, START_LIMIT_S, "an engine that is ready", tick_s=0.2)
    assert "demo · async" in ready.inner_text()


def test_edits_and_saves_of_the_notebook_show(page: Any, panel: Any) -> None:
    notebook = Notebook(page)
    for source in BLOCK:
        notebook.run(source)
        wait_until(lambda: notebook.cells[-1]["execution_count"], 60, "the cell's end", tick_s=0.2)
    assert notebook.errors() == []
    assert "Paris" in notebook.cells[-1]["outputs"][0]["text"]
    wait_until(lambda: "1 request" in panel.locator(".nnlab-edit").inner_text(), 15, "the edit's request")
    panel.locator(".nnlab-saves summary").first.click()
    wait_until(lambda: "hidden" in panel.locator(".nnlab-save").inner_text(), 15, "what was saved")
    assert page.locator(".nnlab-badge").inner_text() == "probe v1 · on"


def test_the_log_and_the_saves_open_below_the_notebook(page: Any, panel: Any) -> None:
    panel.get_by_role("button", name="Log").first.click()
    log = page.locator(".nnlab-log")
    wait_until(lambda: "vllm" in log.inner_text().lower(), 15, "the engine's log")
    assert log.bounding_box()["height"] > 100
    page.evaluate("jupyterapp.commands.execute('nnsight-lab:saves')")
    tab = page.locator(".nnlab-saves-tab")
    wait_until(lambda: tab.is_visible() and "hidden" in tab.inner_text(), 30, "the saves")
    assert tab.bounding_box()["height"] > 100
    assert page.locator(".jp-Notebook").is_visible()


def test_the_panel_stops_the_engine(page: Any, panel: Any) -> None:
    panel.get_by_role("button", name="Stop engine main").first.click()
    ready = panel.locator(".nnlab-engine[data-state='ready']")
    wait_until(lambda: ready.count() == 0, 60, "an engine that is gone", tick_s=0.2)
