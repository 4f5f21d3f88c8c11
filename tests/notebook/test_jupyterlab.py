"""A person's way: the quickstart in a real JupyterLab, in a real browser, with the real stop button.

Screenshots of both themes are left in the test's temporary folder; look at them when an output's drawing was
changed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.engine.processes import engine_processes
from tests.notebook.kernels import ENGINE_ENVIRONMENT, ROOT, plain, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.engine]

QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Without these, a headless browser as root does not start, or talks to its maker.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Nothing may ask a question or fetch news before the notebook shows.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
RUN_ALL_LIMIT_S = 400
LONG_CELL = "%%trace 'Once upon a time', max_tokens=1000, ignore_eos=True\npass"


@dataclass(frozen=True)
class Server:
    """A JupyterLab server.

    Attributes:
        url: Its address, up to the path.
        token: What opens it.
        pid: Its process.
    """

    url: str
    token: str
    pid: int


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(QUICKSTART, root)
    settings = tmp_path / "settings"
    for name, values in SETTINGS.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port, token = _free_port(), secrets.token_hex(16)
    environment = {
        **os.environ,
        **ENGINE_ENVIRONMENT,
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += [f"--ServerApp.root_dir={root}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}"]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}", token, process.pid)
            wait_until(lambda: _answers(server), 60, "JupyterLab's first answer")
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    browser_path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser_path is None:
        pytest.skip("no chromium here: scripts/setup.sh browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1400})
            page.set_default_timeout(30_000)
            page.goto(f"{server.url}/lab/tree/{QUICKSTART.name}?token={server.token}")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
            yield page
            page.screenshot(path=tmp_path / "last.png")
        finally:
            browser.close()


@dataclass(frozen=True)
class Notebook:
    """The notebook that is open in the page."""

    page: Any

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Its code cells, with their outputs."""
        content = self.page.evaluate("jupyterapp.shell.currentWidget.content.model.toJSON()")
        return [cell for cell in content["cells"] if cell["cell_type"] == "code"]

    @property
    def idle(self) -> bool:
        status = "jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"
        return bool(self.page.evaluate(status) == "idle")

    def errors(self) -> list[str]:
        """Every error that an output holds, without colours."""
        return [
            plain("\n".join(output["traceback"]))
            for cell in self.cells
            for output in cell["outputs"]
            if output["output_type"] == "error"
        ]

    def run_all(self) -> None:
        """By the menu, and waits for the last cell."""
        self.finish(60)  # the kernel is there
        self.page.click(".lm-MenuBar-itemLabel >> text=Run")
        self.page.click(".lm-Menu-item[data-command='runmenu:run-all']")
        wait_until(
            lambda: self.errors() or self.cells[-1]["execution_count"] is not None,
            RUN_ALL_LIMIT_S,
            "the end of the notebook",
            tick_s=1.0,  # asking takes the page's time
        )

    def run(self, source: str) -> None:
        """In a new cell at the end, by the keyboard; does not wait."""
        page = self.page
        count = len(self.cells)
        page.click(".jp-Notebook-footer")
        wait_until(lambda: len(self.cells) > count, 10, "a new cell")
        page.locator(".jp-Notebook .jp-CodeCell .cm-content").last.click()
        page.keyboard.insert_text(source)
        page.keyboard.press("Control+Enter")

    def finish(self, limit_s: float) -> None:
        wait_until(lambda: self.idle, limit_s, "an idle kernel", tick_s=0.2)

    def photograph(self, name: str, folder: Path, selector: str) -> None:
        """The cell that holds ``selector``, and what is around it."""
        self.page.locator(selector).last.scroll_into_view_if_needed()
        self.page.screenshot(path=folder / f"{name}.png")

    def set_theme(self, theme: str) -> None:
        self.page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: '{theme}'}})")
        light = "true" if "Light" in theme else "false"
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")


def test_the_quickstart_in_jupyterlab_and_its_stop_button(page: Any, server: Server, tmp_path: Path) -> None:
    notebook = Notebook(page)
    notebook.run_all()
    assert notebook.errors() == []
    assert "Paris" in page.inner_text(".jp-Notebook .jp-OutputArea-output:has-text('The Eiffel Tower')")
    assert page.locator(".jp-Notebook .jp-RenderedText[data-mime-type*='error']").count() == 0

    notebook.run("%engine start demo max_model_len=1024")
    last = ".jp-Cell.jp-mod-active"  # a new cell stays the active one when it runs
    page.wait_for_selector(f"{last} .jp-OutputArea-output:has-text('ready in')", timeout=180_000)
    notebook.finish(30)
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


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _answers(server: Server) -> bool:
    request = urllib.request.Request(
        f"{server.url}/api/status", headers={"Authorization": f"token {server.token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
