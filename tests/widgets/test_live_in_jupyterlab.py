"""Live views in a real JupyterLab on a real engine: they grow, stay usable, stop, and say how it ended."""

from __future__ import annotations

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
        not (STATIC / "token_strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

START = """%load_ext nnsight_lab
import nnsight_lab as lab
%engine start demo max_model_len=1024
print("started", engine.alive)"""
LONG = "'Once upon a time', max_tokens=900, ignore_eos=True, temperature=0"
#: However fast the machine, it goes on for longer than the page is looked at.
TRACE = f"""%%trace {LONG}, live=True
norms, streams = [].save(), [].save()
for step in tracer.all():
    __import__("time").sleep(0.05)
    stream = lab.residual(model.model.layers[15].output)
    norms.append(stream[-1].norm())
    streams.append(stream[:, :128])
"""


@pytest.fixture(scope="module")
def page(opened: Any) -> Iterator[Any]:
    with opened("live.ipynb") as page:
        book = Notebook(page)
        book.run(START)
        page.get_by_text("started True").wait_for(timeout=240_000)
        yield page


@pytest.fixture
def notebook(page: Any, problems: list[str]) -> Iterator[Notebook]:
    problems.clear()
    book = Notebook(page)
    yield book
    book.finish(120)
    assert problems == []


class Live:
    """The last live view on the page."""

    def __init__(self, page: Any, strips: int, heatmaps: int) -> None:
        self.page = page
        self.strip = page.locator(".nnl-strip").nth(strips)
        self.heatmaps = page.locator(".nnl-heatmap")
        self._first = heatmaps

    def heatmap(self, number: int) -> Any:
        return self.heatmaps.nth(self._first + number)

    @property
    def count(self) -> int:
        return int(self.strip.evaluate("element => element.dataset.count ?? '0'"))

    def grows(self, past: int, limit_s: float = 60) -> None:
        wait_until(lambda: self.count > past, limit_s, f"more than {past} tokens")


@pytest.fixture
def begin(page: Any, notebook: Notebook) -> Any:
    """Runs a cell, and waits until its view is there."""

    def run(source: str) -> Live:
        live = Live(page, page.locator(".nnl-strip").count(), page.locator(".nnl-heatmap").count())
        notebook.run(source)
        live.strip.wait_for(timeout=60_000)
        return live

    return run


def test_a_trace_is_seen_while_it_runs_and_its_views_stay_usable(
    begin: Any, page: Any, notebook: Notebook, folder: Path
) -> None:
    live = begin(TRACE)
    live.grows(20)
    live.heatmap(1).wait_for()
    rows = "element => Number(element.dataset.rows ?? '0')"
    before = live.heatmap(1).evaluate(rows)
    wait_until(lambda: live.heatmap(1).evaluate(rows) > before, 30, "a growing heatmap")
    # Choose a token while the cell runs: it is marked in the heatmaps, which go on growing.
    live.strip.locator("[data-place='7']").first.evaluate("token => token.click()")
    wait_until(lambda: live.strip.locator(".nnl-chosen").count() == 1, 10, "a chosen token")
    wait_until(lambda: live.heatmap(1).evaluate("e => e.dataset.position") == "7", 10, "a marked row")
    assert live.strip.get_by_role("button", name="Stop").is_visible(), "it was over before"
    for theme in reversed(THEMES):
        notebook.set_theme(theme)
        notebook.photograph(f"live-{theme.split()[-1].lower()}", folder, ".nnl-strip")
    live.strip.get_by_role("button", name="Stop").click()
    page.get_by_text("the request was stopped in its view").wait_for(timeout=30_000)
    wait_until(lambda: "Stopped after" in live.strip.inner_text(), 10, "how it ended")
    assert live.count > 20
    notebook.run("print('chosen', tracer.live.strip.position)")
    page.get_by_text("chosen 7").wait_for(timeout=20_000)


def test_a_run_ends_by_itself_and_its_pictures_are_whole(begin: Any, page: Any, notebook: Notebook) -> None:
    live = begin(TRACE.replace("900", "60"))
    wait_until(lambda: "60 tokens in" in live.strip.inner_text(), 60, "the end")
    assert not live.strip.get_by_role("button", name="Stop").is_visible()
    wait_until(lambda: live.heatmap(1).evaluate("e => e.dataset.state") == "done", 20, "a whole picture")
    assert "Every value is shown." in live.heatmap(1).inner_text()
    notebook.run("print('rows', sum(map(len, streams)), tracer.live.heatmaps['streams'].source.shape)")
    page.get_by_text("rows 63 (63, 128)").wait_for(timeout=20_000)


def test_an_interrupt_leaves_what_came_and_says_so(begin: Any, page: Any, notebook: Notebook) -> None:
    live = begin(f"run = lab.live({LONG})\nawait run")
    live.grows(15)
    page.evaluate("jupyterapp.commands.execute('notebook:interrupt-kernel')")
    notebook.finish(30)
    wait_until(lambda: "Interrupted after" in live.strip.inner_text(), 10, "how it ended")
    assert live.strip.locator(".nnl-token").count() > 15
    saved = [output["data"] for cell in notebook.cells for output in cell["outputs"] if "data" in output]
    assert "Interrupted after" in "".join(saved[-1]["text/html"])


def test_what_is_announced_is_polite_and_not_each_token(begin: Any, page: Any) -> None:
    live = begin(f"run = lab.live({LONG.replace('900', '80')})\nrun")
    said = live.strip.locator("[aria-live]")
    assert said.get_attribute("aria-live") == "polite"
    said.evaluate(
        "e => { window.said = []; new MutationObserver(() => window.said.push(e.textContent))"
        ".observe(e, { childList: true, characterData: true, subtree: true }) }"
    )
    wait_until(lambda: "80 tokens in" in live.strip.inner_text(), 60, "the end")
    assert page.evaluate("window.said.length") < 10
    wait_until(lambda: "80 tokens in" in str(said.text_content()), 10, "how it ended, said aloud")
