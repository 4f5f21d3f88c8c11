"""A real JupyterLab in a real browser, driven as a person drives it; the tests use it too.

Everything of it lives in one folder and ends with the `with`. A page is asked for conditions, never slept
for. It needs Debian's chromium and playwright's Python package, and not playwright's own browsers.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
#: Without these, a headless browser as root does not start, or talks to its maker.
FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: Nothing may ask a question or fetch news before the notebook shows.
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}
#: Where a checkout has it built; where it was installed, JupyterLab finds it by itself.
LABEXTENSION: Final = Path(__file__).parents[1] / "labextension"
#: And its server extension, as an install enables it.
SERVER_CONFIG: Final = {"ServerApp": {"jpserver_extensions": {"nnsight_lab.jupyter_server": True}}}
THEMES: Final = ("JupyterLab Light", "JupyterLab Dark")
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def find_chromium() -> str | None:
    """Where the browser is; None where there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def wait_until(true: Callable[[], object], limit_s: float, what: str, tick_s: float = 0.05) -> None:
    """Waits for a condition, asked every ``tick_s``.

    Raises:
        TimeoutError: It did not come true.
    """
    deadline_s = time.monotonic() + limit_s
    tick = threading.Event()
    while not true():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {limit_s} s")
        tick.wait(tick_s)


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

    def answers(self) -> bool:
        """Whether it is up."""
        request = urllib.request.Request(
            f"{self.url}/api/status", headers={"Authorization": f"token {self.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def write_settings(folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """A user's settings of JupyterLab: ``{"plugin": {"name": value}}``."""
    for name, values in settings.items():
        file = folder / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))


def empty_notebook(path: Path) -> Path:
    """A notebook with one empty cell."""
    cell: dict[str, Any] = {
        "cell_type": "code",
        "id": "first",
        "metadata": {},
        "source": "",
        "outputs": [],
        "execution_count": None,
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.write_text(
        json.dumps({"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


@contextmanager
def serve(
    folder: Path,
    notebook: Path,
    environment: Mapping[str, str] | None = None,
    app: str = "jupyterlab",
    *,
    extension: bool = True,
) -> Iterator[Server]:
    """A server with a copy of one notebook.

    Args:
        folder: Where all of it lives.
        notebook: Which one.
        environment: On top of this process's.
        app: The module that serves: ``jupyterlab``, or ``notebook`` for Notebook 7.
        extension: Whether JupyterLab has this package's own extension.
    """
    root = folder / "root"
    root.mkdir()
    shutil.copy(notebook, root)
    settings = folder / "settings"
    write_settings(settings, SETTINGS)
    # This package's own extensions, whatever is installed here or is not.
    extensions = folder / "jupyter" / "labextensions"
    extensions.mkdir(parents=True)
    if extension and LABEXTENSION.is_dir():
        (extensions / "nnsight-lab").symlink_to(LABEXTENSION)
    if not extension:
        page = folder / "config" / "labconfig" / "page_config.json"
        page.parent.mkdir(parents=True)
        page.write_text(json.dumps({"disabledExtensions": {"nnsight-lab": True}}))
    config = folder / "config" / "jupyter_server_config.d" / "nnsight-lab.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(SERVER_CONFIG))
    jupyter_path = [str(extensions.parent), *filter(None, [os.environ.get("JUPYTER_PATH")])]
    port, token = free_port(), secrets.token_hex(16)
    variables = {
        **os.environ,
        **(environment or {}),
        "JUPYTER_PATH": os.pathsep.join(jupyter_path),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    command = [sys.executable, "-m", app, "--no-browser", "--allow-root", "--expose-app-in-browser"]
    command += [f"--ServerApp.root_dir={root}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--IdentityProvider.token={token}"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}", token, process.pid)
            wait_until(server.answers, 60, "JupyterLab's first answer")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:  # it waits for a kernel that does not end
                process.kill()
                process.wait()


@contextmanager
def open_page(
    server: Server,
    notebook: str,
    browser_path: str,
    *,
    under: str = "lab/tree",
    before: Callable[[Any], None] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """The notebook in a headless browser; a playwright page.

    Args:
        server: Where it is served.
        notebook: Its file's name.
        browser_path: The browser.
        under: The path before it; ``notebooks`` in Notebook 7.
        before: Called with the page before it shows anything.
        **options: Of playwright's ``new_page``.
    """
    # Local: only who drives a browser needs playwright.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=list(FLAGS))
        try:
            page = browser.new_page(**{"viewport": {"width": 1200, "height": 1400}, **options})
            page.set_default_timeout(30_000)
            # "Leave site?", of a notebook that changed since it was saved: a reload means it.
            page.on("dialog", lambda dialog: dialog.accept())
            if before is not None:
                before(page)
            page.goto(f"{server.url}/{under}/{notebook}?token={server.token}")
            page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
            yield page
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
        """Whether its kernel is, and no cell is on its way to it, of which the page hears later."""
        return bool(
            self.page.evaluate(
                """(() => {
                    const notebook = jupyterapp.shell.currentWidget;
                    return notebook.sessionContext.session?.kernel?.status === 'idle' &&
                        ![...notebook.content.model.cells].some(cell => cell.executionState === 'running');
                })()"""
            )
        )

    def errors(self) -> list[str]:
        """Every error that an output holds, without colours."""
        return [
            _ANSI.sub("", "\n".join(output["traceback"]))
            for cell in self.cells
            for output in cell["outputs"]
            if output["output_type"] == "error"
        ]

    def run_all(self, limit_s: float) -> None:
        """By the menu, and waits for the last cell."""
        self.finish(60)  # the kernel is there
        self.page.click(".lm-MenuBar-itemLabel >> text=Run")
        self.page.click(".lm-Menu-item[data-command='runmenu:run-all']")
        wait_until(
            lambda: self.errors() or self.cells[-1]["execution_count"] is not None,
            limit_s,
            "the end of the notebook",
            tick_s=1.0,  # asking takes the page's time
        )

    def run(self, source: str) -> None:
        """In a new cell at the end, by the keyboard; waits until it is sent, not for its end."""
        self.write(source)
        self.page.keyboard.press("Control+Enter")
        sent = """(() => {
            const cell = [...jupyterapp.shell.currentWidget.content.model.cells].at(-1);
            return cell.executionState === 'running' || cell.executionCount !== null;
        })()"""
        wait_until(lambda: self.page.evaluate(sent), 20, "the cell on its way")

    def write(self, source: str) -> None:
        """A new cell at the end."""
        page = self.page
        count = len(self.cells)
        page.click(".jp-Notebook-footer")
        wait_until(lambda: len(self.cells) > count, 10, "a new cell")
        page.locator(".jp-Notebook .jp-CodeCell .cm-content").last.click()
        page.keyboard.insert_text(source)

    def finish(self, limit_s: float) -> None:
        """Waits for an idle kernel."""
        wait_until(lambda: self.idle, limit_s, "an idle kernel", tick_s=0.2)

    def save_to(self, file: Path, limit_s: float = 30) -> None:
        """Save it; waits for its file to be written.

        Not for JupyterLab's promise of it, which is also of a checkpoint and is not always kept; and nothing
        limits how long an evaluation of a page may take.
        """
        before = file.stat().st_mtime_ns

        def written() -> bool:
            # The server writes into the file itself: for a moment it is new and empty, or half there.
            if file.stat().st_mtime_ns == before:
                return False
            try:
                json.loads(file.read_text())
            except ValueError:
                return False
            return True

        self.page.evaluate("void jupyterapp.commands.execute('docmanager:save')")
        wait_until(written, limit_s, f"a saved {file.name}")

    def photograph(self, name: str, folder: Path, selector: str) -> None:
        """The cell that holds ``selector``, and what is around it."""
        self.page.locator(selector).last.scroll_into_view_if_needed()
        self.page.screenshot(path=folder / f"{name}.png")

    def set_theme(self, theme: str) -> None:
        """One of `THEMES`, or another that JupyterLab has."""
        self.page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: '{theme}'}})")
        self.page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
