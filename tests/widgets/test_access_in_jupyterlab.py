"""Every output by keyboard, by screen reader and in every look, in a real JupyterLab in a real browser.

Screenshots of every look are left in the test's temporary folder; look at them when a drawing was changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import Notebook, open_page, serve, wait_until
from nnsight_lab.widgets.base import STATIC
from tests.widgets import access
from tests.widgets.access import LOOKS, Look
from tests.widgets.views import SETUP, VIEWS, View

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (STATIC / "heatmap.js").exists() or not access.AXE.exists(),
        reason="the widgets are not built: scripts/setup.sh widgets",
    ),
]

OUTPUTS = ".jp-Notebook .jp-OutputArea-output"
WIDGETS = [view for view in VIEWS if view.root]
#: All of the notebook at once: axe-core judges colours of what is in sight only.
VIEWPORT = {"width": 1200, "height": 10500}


def notebook_of(views: tuple[View, ...], path: Path) -> Path:
    """A notebook with a cell for each view, after the one that sets up."""
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for number, source in enumerate([SETUP, *(view.source for view in views)])
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


class Lab:
    """The notebook of all views, drawn."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.notebook = Notebook(page)

    def output(self, view: View) -> Any:
        """Where a view is."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(VIEWS.index(view) + 1).locator(".jp-OutputArea")

    def root(self, view: View) -> Any:
        return self.output(view).locator(view.root).first

    def drawn(self, view: View) -> None:
        self.output(view).locator(view.selector).first.wait_for(state="attached")

    def main(self, view: View) -> Any:
        """The control that a widget's keys work in."""
        return self.root(view).locator(view.main).first

    def open(self, view: View) -> None:
        """Presses the view's keys, so that what they open is there."""
        if view.opens and not self.root(view).locator(view.opened).is_visible():
            self.main(view).focus()
            for key in view.opens:
                self.page.keyboard.press(key)
            self.root(view).locator(view.opened).wait_for()
            wait_until(
                lambda: self.root(view).locator("[data-state=busy]").count() == 0, 20, "what is opened"
            )

    def shut(self, view: View) -> None:
        """And away again."""
        for _ in range(3):
            if view.opens and self.root(view).locator(view.opened).is_visible():
                self.main(view).focus()
                self.page.keyboard.press("Escape")

    def look(self, look: Look) -> None:
        access.wear(self.page, look)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def complaints() -> list[str]:
    """What the browser complained about."""
    return []


@pytest.fixture(scope="module")
def lab(folder: Path, chromium: str, complaints: list[str]) -> Iterator[Lab]:
    path = notebook_of(VIEWS, folder / "views.ipynb")
    with serve(folder, path) as server, open_page(server, path.name, chromium, viewport=VIEWPORT) as page:
        page.on("pageerror", lambda error: complaints.append(str(error)))
        lab = Lab(page)
        lab.notebook.run_all(120)
        lab.notebook.finish(120)
        assert lab.notebook.errors() == []
        for view in VIEWS:
            lab.drawn(view)
        access.prepare(page)
        yield lab
        page.screenshot(path=folder / "last.png")
        assert complaints == []


@pytest.mark.parametrize("name", LOOKS)
def test_axe_finds_nothing_serious(lab: Lab, name: str, folder: Path) -> None:
    lab.look(LOOKS[name])
    for view in WIDGETS:
        lab.open(view)
    lab.page.screenshot(path=folder / f"{name}.png")
    found = access.problems(lab.page, OUTPUTS)
    assert found == [], "\n".join(found)
    for view in WIDGETS:
        for canvas in lab.root(view).locator("canvas.nnl-canvas").all():
            # axe-core does not look into pictures, and the numbers along their edges are text too.
            assert access.edge_contrast(canvas) >= 4.5, view.name
        for canvas in lab.root(view).locator("canvas.nnl-sheet-canvas").all():
            assert access.head_contrast(canvas) >= 4.5, view.name


def test_axe_sees_what_is_wrong(lab: Lab) -> None:
    planted = """() => {
      const bad = document.createElement('div');
      bad.id = 'planted';
      bad.innerHTML = '<p style="color:#ccc;background:#fff">pale text</p><button></button>';
      document.querySelector('.jp-OutputArea-output').append(bad);
    }"""
    lab.page.evaluate(planted)
    try:
        found = access.problems(lab.page, OUTPUTS)
    finally:
        lab.page.evaluate("document.getElementById('planted').remove()")
    assert {line.split(":")[0] for line in found} == {"serious color-contrast", "critical button-name"}


@pytest.mark.parametrize("view", WIDGETS, ids=lambda view: view.name)
def test_the_tab_key_reaches_every_control_in_order_and_comes_out(lab: Lab, view: View) -> None:
    lab.look(LOOKS["light"])
    for opened in (False, True):
        (lab.open if opened else lab.shut)(view)
        expected = access.reachable(lab.root(view))
        stops = access.walk(lab.page, lab.root(view))
        assert [stop.name for stop in stops] == expected
        assert [stop.name for stop in access.walk(lab.page, lab.root(view), backward=True)] == expected[::-1]
    lab.shut(view)


@pytest.mark.parametrize("name", ["light", "dark", "high-contrast", "forced-light", "forced-dark"])
def test_the_focus_is_seen_wherever_it_is(lab: Lab, name: str) -> None:
    lab.look(LOOKS[name])
    for view in VIEWS:
        lab.open(view)
        root = lab.root(view) if view.root else lab.output(view)
        for stop in access.walk(lab.page, root):
            assert stop.seen, f"{view.name}: {stop.name}"
            # WCAG 2.2, 1.4.11. Plotly's own buttons have plotly's own black line.
            assert stop.contrast >= 3 or "plotly" in view.selector, f"{view.name}: {stop}"
        lab.shut(view)


@pytest.mark.parametrize("view", WIDGETS, ids=lambda view: view.name)
def test_escape_leaves_a_widget_for_its_cell(lab: Lab, view: View) -> None:
    lab.look(LOOKS["light"])
    lab.open(view)
    expected = access.reachable(lab.root(view))
    if not expected:
        pytest.skip("it has no control")
    (lab.main(view) if lab.main(view).count() else lab.root(view).locator("button, input").first).focus()
    for number in range(4):
        lab.page.keyboard.press("Escape")
        if number == 0 and view.opened:
            # It shuts what is open, and the widget still has the keys.
            assert lab.root(view).evaluate("root => root.contains(document.activeElement)")
        if not lab.root(view).evaluate("root => root.contains(document.activeElement)"):
            break
    # JupyterLab's own keys work there.
    assert lab.root(view).evaluate("root => root.closest('.jp-Cell') === document.activeElement")
    assert view.opened == "" or not lab.root(view).locator(view.opened).is_visible()


def test_a_pan_is_one_step_where_motion_is_not_wanted(lab: Lab) -> None:
    view = VIEWS[0]
    lab.shut(view)
    root, canvas = lab.root(view), lab.main(view)
    readout = root.locator(".nnl-readout")
    for name, glides in (("light", True), ("reduced-motion", False)):
        lab.look(LOOKS[name])
        canvas.focus()
        for key in ("Home", "+", "+", "+", "+"):
            lab.page.keyboard.press(key)
        seen = []
        # The first is read in the same turn as the key, the other when all frames it asked for were drawn.
        for script in (
            "canvas.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))",
            "for (let n = 0; n < 9; n++) await new Promise(requestAnimationFrame)",
        ):
            readout.evaluate("element => element.textContent = ''")
            click = "canvas.parentElement.querySelector('[aria-label^=\"Copy slice\"]').click()"
            canvas.evaluate(f"async canvas => {{ {script}; {click} }}")
            wait_until(lambda: "wild[" in readout.inner_text(), 10, "an expression")
            seen.append(readout.inner_text())
        assert (seen[0] != seen[1]) == glides, (name, seen)
        canvas.focus()
        lab.page.keyboard.press("Home")
