"""Widgets in what VS Code's notebook makes views with, as far as a browser without VS Code can show.

The page has VS Code's own widget manager (its package, as published), its way to `anywidget`'s module (the
kernel's nbextensions folder, by requirejs) and its colours; the kernel is a real one. What is not shown is VS
Code itself: its messages between the window and the output's frame, and its list of trusted widget sources.
"""

from __future__ import annotations

import base64
import functools
import http.server
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from nnsight_lab.bench.jupyterlab import FLAGS, wait_until
from nnsight_lab.widgets.base import STATIC
from nnsight_lab.widgets.colours import lookup
from nnsight_lab.widgets.spans import TOP
from tests.widgets import access

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = ROOT / "tests/widgets/vscode/node_modules"
NBEXTENSIONS = Path(sys.prefix) / "share/jupyter/nbextensions"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (STATIC / "heatmap.js").exists() or not (MODULES / "@vscode/jupyter-ipywidgets8").exists(),
        reason="the widgets are not built: scripts/setup.sh widgets",
    ),
]


class Files(http.server.SimpleHTTPRequestHandler):
    """The page, the packages of node, and the kernel's folder of widget modules."""

    def translate_path(self, path: str) -> str:
        name = path.split("?")[0].lstrip("/")
        if name == "vscode.html":
            return str(HERE / name)
        if name.startswith("nbextensions/"):
            return str(NBEXTENSIONS / name.removeprefix("nbextensions/"))
        return str(MODULES / name)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Output:
    """An output of a real kernel in the page."""

    def __init__(self, page: Any, client: Any) -> None:
        self.page = page
        self._client = client
        self._shown: list[str] = []
        self._errors: list[str] = []

    def pump(self) -> None:
        """Carries what both sides have to say."""
        for message in self.page.evaluate("notebook.take()"):
            assert message["buffers"] == 0
            built = self._client.session.msg(message["kind"], message["content"])
            self._client.shell_channel.send(built)
        while self._client.iopub_channel.msg_ready():
            message = self._client.get_iopub_msg(timeout=1)
            kind = message["header"]["msg_type"]
            if kind in ("comm_open", "comm_msg"):
                plain = {"header": {"msg_type": kind}, "content": message["content"]}
                buffers = [base64.b64encode(bytes(one)).decode() for one in message.get("buffers", [])]
                plain |= {"metadata": message["metadata"], "parent_header": {}, "channel": "iopub"}
                self.page.evaluate("both => notebook.receive(...both)", [plain, buffers])
            elif kind in ("execute_result", "display_data"):
                view = message["content"]["data"].get("application/vnd.jupyter.widget-view+json")
                if view:
                    self._shown.append(view["model_id"])
            elif kind == "error":
                self._errors += message["content"]["traceback"]

    def until(self, true: Any, what: str, limit_s: float = 60) -> None:
        def look() -> Any:
            self.pump()
            return true()

        wait_until(look, limit_s, what)
        assert self.page.evaluate("notebook.failures") == []

    def run(self, source: str) -> None:
        """A cell that ends with a widget, whose view is shown."""
        before = len(self._shown)
        self._client.execute(source)
        self.until(lambda: len(self._shown) > before or self._errors, "a widget")
        assert self._errors == []
        # Not awaited: a view may ask the kernel first, which `pump` answers.
        self.page.evaluate("id => { notebook.show(id) }", self._shown[-1])


@pytest.fixture(scope="module")
def output(chromium: str) -> Iterator[Output]:
    from playwright.sync_api import sync_playwright

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    manager, client = start_new_kernel(startup_timeout=60)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
            page = browser.new_page(viewport={"width": 1000, "height": 1400})
            page.goto(f"http://127.0.0.1:{server.server_port}/vscode.html")
            page.wait_for_function("window.notebook")
            yield Output(page, client)
            browser.close()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        server.shutdown()
        server.server_close()


def test_a_heatmap_draws_asks_and_has_the_editors_colours(output: Output, tmp_path: Path) -> None:
    page = output.page
    output.run(
        "import torch\nfrom nnsight_lab.widgets import Heatmap\n"
        "Heatmap(torch.zeros(2000, 3000), name='z', scale='diverging', clip=(-1, 1))"
    )
    root = page.locator(".nnl-heatmap").first
    output.until(lambda: root.count() and root.get_attribute("data-state") == "done", "a drawn heatmap")
    assert int(root.get_attribute("data-bytes")) > 1000  # tiles came
    middle = "canvas => [...canvas.getContext('2d').getImageData(300, 100, 1, 1).data]"
    canvas = root.locator("canvas.nnl-canvas")
    assert canvas.evaluate(middle) == lookup("diverging-dark").tolist()[round(TOP / 2)]
    assert root.evaluate("root => getComputedStyle(root).color") == "rgb(204, 204, 204)"
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    output.until(lambda: " at row " in root.locator(".nnl-readout").inner_text(), "the pointer's value")
    page.screenshot(path=tmp_path / "dark.png")
    access.prepare(page)
    assert access.problems(page, "#output") == []
    assert access.edge_contrast(canvas) >= 4.5
    expected = access.reachable(root)
    assert [stop.name for stop in access.walk(page, root) if stop.seen and stop.contrast >= 3] == expected
    canvas.focus()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "output"
    # As when the reader takes a light theme.
    page.evaluate(
        "document.documentElement.className = 'light'; document.body.className = 'vscode-light';"
        "document.body.dataset.vscodeThemeKind = 'vscode-light'"
    )
    light = lookup("diverging-light").tolist()[round(TOP / 2)]
    output.until(lambda: canvas.evaluate(middle) == light, "light colours")
    assert access.problems(page, "#output") == []
    page.screenshot(path=tmp_path / "light.png")


def test_the_saves_browser_lists_and_opens(output: Output, tmp_path: Path) -> None:
    output.run(
        "from nnsight_lab.saves.store import SavesStore\nfrom nnsight_lab.widgets import SavesBrowser\n"
        "store = SavesStore()\n"
        "saved = {'hidden': torch.randn(12, 64)}\n"
        "_ = store.put('lab-1', [{'trace': saved}], {'prompt': 'The Eiffel Tower'})\n"
        "SavesBrowser(store)"
    )
    root = output.page.locator(".nnl-browser").first
    output.until(lambda: root.count() and root.get_attribute("data-state") == "done", "the rows")
    root.get_by_role("grid").focus()
    output.page.keyboard.press("Enter")
    picture = root.locator(".nnl-pane .nnl-heatmap[data-state=done]")
    output.until(lambda: picture.count() == 1, "the opened save")
    assert "The Eiffel Tower" in root.inner_text()
    output.page.screenshot(path=tmp_path / "browser.png")


def test_no_text_or_page_colour_is_jupyterlabs_where_vs_code_has_its_own() -> None:
    # ipywidgets sets JupyterLab's variables to the light theme's on every page of VS Code, for all outputs.
    asks = re.compile(r"(?:[^-]color|background(?:-color)?|outline[^;{}]*): ?var\(--jp-")
    files = [*(ROOT / "nnsight_lab").rglob("*.py"), *(ROOT / "labextension/src/widgets").rglob("*.css")]
    found = [str(path.relative_to(ROOT)) for path in files if asks.search(path.read_text("utf-8"))]
    assert found == []
    theme = (ROOT / "labextension/src/widgets/theme.css").read_text("utf-8")
    assert re.findall(r"--nnl-\w+: var\(--jp-", theme) == []
