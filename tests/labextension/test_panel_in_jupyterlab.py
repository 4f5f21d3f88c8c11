"""The side panel in a real JupyterLab with a real engine: started, watched, edited, interrupted, killed, reloaded.

One page and one engine go through all of it, in the order a person would. Screenshots of both themes are left
in the test's temporary folder; look at them when the drawing was changed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import (
    LABEXTENSION,
    THEMES,
    Notebook,
    Server,
    empty_notebook,
    open_page,
    serve,
    wait_until,
)
from nnsight_lab.engine.processes import EngineProcess, engine_processes
from tests.notebook.kernels import ENGINE_ENVIRONMENT

pytestmark = [
    pytest.mark.browser,
    pytest.mark.engine,
    pytest.mark.skipif(
        not (LABEXTENSION / "package.json").exists(),
        reason="the JupyterLab extension is not built: scripts/setup.sh widgets",
    ),
]

START_LIMIT_S = 400
PANEL = "#nnsight-lab-panel"
#: An edit whose effect is seen in the text.
EDIT = "%%edit mute\nmodel.model.layers[2].output[1][:] = 0\nhidden = model.model.layers[3].output[0].save()"
GENERATE = (
    "print('text:', lab.generate('The Eiffel Tower is in the city of', max_tokens=4, temperature=0)"
    "[0].outputs[0].text)"
)


#: A Python that does not have this package, whatever way it was installed here.
BARE_KERNEL = {
    "argv": [
        sys.executable,
        "-c",
        "import os, sys, runpy\n"
        "sys.path[:] = [p for p in sys.path if not os.path.isdir(os.path.join(p or '.', 'nnsight_lab'))]\n"
        "runpy.run_module('ipykernel_launcher', run_name='__main__')",
        "-f",
        "{connection_file}",
    ],
    "display_name": "Bare",
    "language": "python",
}


#: A machine with one GPU, and on it whoever the test says.
NVIDIA = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "0, GPU-aaa, NVIDIA H200, 20480, 143771" ;;
--query-compute-apps=*) cat {apps} 2>/dev/null ;;
esac
"""


class Panel:
    """The side panel."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.root = page.locator(PANEL)

    def show(self) -> None:
        self.page.evaluate("jupyterapp.shell.activateById('nnsight-lab-panel')")
        self.root.wait_for()

    @property
    def text(self) -> str:
        return str(self.root.inner_text())

    def says(self, words: str, limit_s: float = 15) -> float:
        """Waits for words; returns how long it took."""
        began_s = time.monotonic()
        wait_until(lambda: words in self.text, limit_s, f"{words!r} in the panel", tick_s=0.1)
        return time.monotonic() - began_s

    def engine_is(self, state: str, limit_s: float = 15) -> float:
        """Waits for the state of the engine `main`; returns how long it took."""
        began_s = time.monotonic()
        engine = self.root.locator(".nnlab-engine[aria-label='Engine main']")
        wait_until(
            lambda: engine.count() and engine.first.get_attribute("data-state") == state,
            limit_s,
            f"an engine that is {state}",
            tick_s=0.1,
        )
        return time.monotonic() - began_s

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name).first.click()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("panel")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    notebook = empty_notebook(folder / "panel.ipynb")
    bare = folder / "jupyter" / "kernels" / "bare"
    bare.mkdir(parents=True)
    (bare / "kernel.json").write_text(json.dumps(BARE_KERNEL))
    state = {"XDG_STATE_HOME": str(folder / "state"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    (folder / "bin").mkdir()
    nvidia = folder / "bin" / "nvidia-smi"
    nvidia.write_text(NVIDIA.format(apps=folder / "apps"))
    nvidia.chmod(0o755)
    with serve(folder, notebook, {**ENGINE_ENVIRONMENT, **state}) as server:
        yield server
    wait_until(lambda: not own_processes(folder), 30, "engine processes outlive their server", tick_s=0.5)


@pytest.fixture(scope="module")
def problems() -> list[str]:
    """What the browser complained about."""
    return []


@pytest.fixture(scope="module")
def page(server: Server, folder: Path, chromium: str, problems: list[str]) -> Iterator[Any]:
    viewport = {"width": 1300, "height": 1000}
    with open_page(server, "panel.ipynb", chromium, viewport=viewport) as page:
        page.on("pageerror", lambda error: problems.append(str(error)))
        Notebook(page).finish(60)
        yield page
        page.screenshot(path=folder / "last.png")


@pytest.fixture
def notebook(page: Any, problems: list[str]) -> Iterator[Notebook]:
    problems.clear()
    yield Notebook(page)
    assert problems == []


@pytest.fixture
def panel(page: Any) -> Panel:
    found = Panel(page)
    found.show()
    return found


def own_processes(folder: Path) -> list[EngineProcess]:
    return [found for found in engine_processes() if str(folder) in found.log]


def last_text(notebook: Notebook) -> str:
    """What the last cell printed, once it is done."""
    wait_until(lambda: notebook.cells[-1]["execution_count"] is not None, 60, "the cell's end", tick_s=0.2)
    return "".join(str(output.get("text", "")) for output in notebook.cells[-1]["outputs"])


def run_in_front(page: Any, source: str) -> None:
    """In the first cell of the notebook in front, of several; does not wait."""
    cell = "jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel"
    page.evaluate(f"source => {cell}.setSource(source)", source)
    page.evaluate("void jupyterapp.commands.execute('notebook:run-cell')")


def new_notebook(page: Any, kernel: str) -> None:
    """One more, in front, once its kernel answers."""
    page.evaluate(
        "kernelName => jupyterapp.commands.execute('notebook:create-new', {kernelName, activate: true})", kernel
    )
    status = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    wait_until(lambda: page.evaluate(status) == "idle", 90, "the new notebook's kernel", tick_s=0.3)


def photograph(page: Any, folder: Path, name: str) -> None:
    notebook = Notebook(page)
    for theme in reversed(THEMES):
        notebook.set_theme(theme)
        page.wait_for_selector("#jupyterlab-splash", state="detached")
        page.screenshot(path=folder / f"{name}-{theme.split()[-1].lower()}.png")


def test_without_an_engine_the_panel_says_why_it_is_empty(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    panel.says("nnsight-lab is not loaded in this notebook’s kernel.")
    assert panel.root.get_by_role("button", name="Run %load_ext nnsight_lab").is_visible()
    photograph(panel.page, folder, "empty")


def test_an_engine_is_started_from_the_panel_by_the_keyboard(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    page.evaluate("jupyterapp.commands.execute('nnsight-lab:start')")
    form = panel.root.get_by_role("form", name="Start an engine")
    wait_until(
        lambda: form.locator("input").first.evaluate("input => input === document.activeElement"),
        5,
        "the keyboard in the form",
    )
    page.keyboard.press("Tab")
    page.keyboard.insert_text("max_model_len=")
    page.keyboard.press("Enter")
    wait_until(lambda: form.locator(".nnlab-error").inner_text(), 60, "a word about what was typed")
    assert form.locator("input").last.get_attribute("aria-invalid") == "true"
    page.keyboard.insert_text("1024")
    wait_until(lambda: not form.locator(".nnlab-error").inner_text(), 15, "the form's consent")
    page.keyboard.press("Enter")
    panel.engine_is("starting", 120)
    photograph(page, folder, "starting")
    panel.engine_is("ready", START_LIMIT_S)
    panel.says("max_model_len=1024")
    wait_until(
        lambda: "main: ready" in page.locator(".nnlab-statusbar").inner_text(), 10, "the status bar's word"
    )


def test_an_edit_is_listed_marked_and_switched_and_the_text_changes(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    notebook.run("import nnsight_lab as lab")
    notebook.run(GENERATE)
    plain = last_text(notebook)
    notebook.run(EDIT)
    notebook.finish(60)
    panel.says("mute")
    badge = panel.page.locator(".jp-CodeCell .nnlab-badge")
    wait_until(lambda: badge.count() == 1 and badge.inner_text() == "mute v1 · on", 10, "the cell's mark")
    notebook.run(GENERATE)
    muted = last_text(notebook)
    assert muted != plain
    panel.says("1 request")

    panel.root.get_by_role("switch", name="Edit mute runs by default").click()
    wait_until(lambda: badge.inner_text() == "mute v1 · off", 10, "the cell's mark")
    notebook.run(GENERATE)
    assert last_text(notebook) == plain
    panel.root.get_by_role("switch", name="Edit mute runs by default").click()
    wait_until(lambda: badge.inner_text() == "mute v1 · on", 10, "the cell's mark")

    panel.root.locator(".nnlab-edit summary").click()
    wait_until(lambda: "layers[2]" in panel.root.locator(".nnlab-source").inner_text(), 5, "the source")
    panel.press("Go to cell")
    page = panel.page
    active = "jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel"
    wait_until(lambda: page.evaluate(f"{active}.getSource()") == EDIT, 5, "the edit's cell")
    page.evaluate(f"{active}.setSource({EDIT.replace('[2]', '[1]')!r})")
    wait_until(lambda: badge.inner_text() == "mute v1 · stale: run the cell again", 10, "a stale mark")
    photograph(page, folder, "stale")
    page.evaluate("jupyterapp.commands.execute('notebook:run-cell')")
    wait_until(lambda: badge.inner_text() == "mute v2 · on", 15, "the new version's mark")
    panel.press("Difference to the version before")
    dialog = page.locator(".jp-Dialog")
    dialog.wait_for()
    assert "+ model.model.layers[1]" in dialog.inner_text()
    assert "- model.model.layers[2]" in dialog.inner_text()
    photograph(page, folder, "difference")
    page.keyboard.press("Escape")


def test_a_cell_says_before_it_runs_what_it_will_save(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    said = page.locator(".nnlab-forecast")
    head = '%%trace "The Eiffel Tower is in the city of", max_tokens=4, ignore_eos=True'
    row = "model.model.layers[3].output[0]"
    for source, words in (
        (f"{head}, edits=[]\nhidden = {row}.save()", "will run 1 save, about 10 KB"),
        (f"{head}\nhidden = {row}.save()", "will run 2 saves (1 of edits), about 21 KB"),
        (
            f"{head}, edits=[]\nrows = [].save()\nfor s in tracer.all():\n    rows.append({row}[-1])",
            "will run 4 saves, about 4.6 KB",
        ),
        (f"{head}, edits=[]\nx = mine({row}).save()", "will run 1 save"),
        (f"%%edit other\nhidden = {row}.save()", "will run 1 save for each request, about 1.2 KB a prompt token"),
    ):
        notebook.write(source)
        wait_until(
            lambda words=words: said.count() == 1 and said.inner_text() == words, 15, f"{words!r} on the cell"
        )
    photograph(page, folder, "forecast")
    notebook.write("%%edit other\nhidden = (")
    wait_until(lambda: said.count() == 0, 10, "no word on a half-written cell")


def test_who_is_on_each_gpu_is_said_as_far_as_it_may_be_seen(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    core = next(process for process in own_processes(folder) if "EngineCore" in process.name)
    (folder / "apps").write_text(f"GPU-aaa, {core.pid}, 12288\nGPU-aaa, 1, 4096\nGPU-aaa, 4190000, [N/A]\n")
    panel.says(f"process {core.pid}, engine main", 20)
    assert "GPU 0, NVIDIA H200: 21 GB of 151 GB" in panel.text
    assert "owner not told, process 4190000\nnot told" in panel.text
    photograph(panel.page, folder, "gpus")


def test_the_edits_chosen_for_a_notebook_are_those_that_run_and_are_kept_in_it(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    metadata = "JSON.stringify(jupyterapp.shell.currentWidget.model.getMetadata('nnsight_lab') ?? null)"
    only = panel.root.get_by_role("switch", name="Only those chosen for this notebook")
    mute = panel.root.get_by_role("switch", name="Edit mute runs by default")
    notebook.run(GENERATE)
    muted = last_text(notebook)
    only.click()
    kept = '{"default_edits":{"main":["mute"]}}'
    wait_until(lambda: page.evaluate(metadata) == kept, 10, "the choice in the notebook")
    notebook.run("engine.edits['mute'].switch_off()\n" + GENERATE)
    assert last_text(notebook) == muted
    photograph(page, folder, "chosen")
    mute.click()
    wait_until(lambda: '"main":[]' in page.evaluate(metadata), 10, "the choice in the notebook")
    notebook.run(GENERATE)
    assert last_text(notebook) != muted
    notebook.run("%edits default mute later")
    panel.says("Chosen and not installed yet, so requests are refused until its cell has run: later")
    notebook.run(GENERATE)
    notebook.finish(30)
    assert "'later', a default of this notebook, is not installed yet" in notebook.errors()[-1]
    only.click()
    wait_until(lambda: page.evaluate(metadata) == "null", 10, "the choice taken out of the notebook")
    # As a notebook says to a kernel that never had the choice.
    page.evaluate(
        "jupyterapp.shell.currentWidget.model.setMetadata('nnsight_lab', {default_edits: {main: ['mute', 'gone']}})"
    )
    panel.says("This notebook’s defaults were: mute, gone (not installed yet: gone)")
    photograph(page, folder, "offered")
    panel.press("Use the defaults kept in the notebook")
    panel.says("until its cell has run: gone")
    only.click()
    wait_until(lambda: page.evaluate(metadata) == "null", 10, "the choice taken out of the notebook")
    mute.click()
    wait_until(lambda: mute.is_checked(), 10, "the edit switched on again")


def test_what_was_saved_is_inserted_into_a_cell_and_opened_in_a_tab(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    notebook.run(GENERATE)
    notebook.finish(60)
    requests = panel.root.locator(".nnlab-saves details")
    wait_until(lambda: requests.count() >= 2, 15, "the requests that saved")
    requests.first.locator("summary").click()
    photograph(panel.page, folder, "saves")
    notebook.write("shape = list(")
    panel.press("Insert the code that reads hidden into the active cell")
    panel.page.keyboard.insert_text(".shape)\nprint(shape)")
    panel.page.keyboard.press("Control+Enter")
    wait_until(lambda: "576" in last_text(notebook), 15, "the shape of what was saved")
    panel.press("Open the saves in a tab")
    tab = panel.page.locator(".nnlab-saves-tab .nnl-browser")
    tab.wait_for()
    wait_until(lambda: "hidden" in tab.inner_text(), 15, "the browser of saves")
    photograph(panel.page, folder, "tab")
    panel.page.evaluate("jupyterapp.shell.currentWidget.close()")
    panel.page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")


def test_a_saved_value_is_dragged_into_a_cell_and_the_log_is_read(notebook: Notebook, panel: Panel) -> None:
    page = panel.page
    notebook.write("")
    save = panel.root.locator(".nnlab-save:visible").first
    save.drag_to(page.locator(".jp-Notebook .jp-CodeCell .cm-content").last)
    active = "jupyterapp.shell.currentWidget.content.widgets.at(-1).model.sharedModel.getSource()"
    wait_until(lambda: page.evaluate(active).startswith("lab.saves().get('"), 5, "the code in the cell")
    panel.press("Show the log of engine main")
    log = page.locator(".nnlab-log")
    log.wait_for()
    wait_until(lambda: "KV cache" in log.inner_text(), 15, "vLLM's words")
    page.evaluate("jupyterapp.shell.currentWidget.close()")
    page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")


def test_a_busy_engine_is_seen_while_its_cell_runs_and_interrupted(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    notebook.run("lab.generate('Once', max_tokens=950, ignore_eos=True, edits=[])")
    panel.engine_is("busy", 10)
    panel.says("1 running, 0 waiting")
    wait_until(
        lambda: "tokens/s" in panel.page.locator(".nnlab-statusbar").inner_text(), 10, "the status bar's word"
    )
    photograph(panel.page, folder, "busy")
    panel.press("Abort my requests on engine main")
    panel.engine_is("ready", 15)
    notebook.finish(15)
    assert "aborted" in notebook.errors()[-1]


def test_a_reload_in_the_middle_of_a_cell_shows_what_the_kernel_says(
    notebook: Notebook, panel: Panel
) -> None:
    page = panel.page
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    notebook.run("import time\ntime.sleep(40)")
    began_s = time.monotonic()
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    panel.show()
    panel.engine_is("ready", 20)
    panel.says("mute")
    # Not the kernel's status: the question itself makes a busy kernel look idle.
    assert time.monotonic() - began_s < 40
    notebook.run("print('awake')")
    wait_until(lambda: "awake" in last_text(notebook), 60, "the end of both cells")


def test_a_killed_engine_is_said_within_five_seconds_and_comes_back_with_its_edits(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    core = next(process for process in own_processes(folder) if "EngineCore" in process.name)
    os.kill(core.pid, signal.SIGKILL)
    assert panel.engine_is("dead", 10) < 5
    photograph(panel.page, folder, "dead")
    panel.press("Restart engine main with its edits")
    panel.engine_is("ready", START_LIMIT_S)
    panel.says("mute")


def test_a_cell_becomes_a_trace_an_edit_and_plain_again_from_the_toolbar(
    notebook: Notebook, panel: Panel
) -> None:
    page = panel.page
    notebook.write("x = 1")
    active = "jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
    for item, first in (
        ("Run this cell inside a request", '%%trace "The Eiffel Tower is in the city of", max_tokens=1'),
        ("Leave this cell on the engine", "%%edit probe"),
        ("Make this a plain cell", "x = 1"),
    ):
        page.locator("[data-jp-item-name='nnsight-lab'] button, [data-jp-item-name='nnsight-lab']").first.click()
        page.locator(f".lm-Menu-item:has-text('{item}')").click()
        wait_until(lambda first=first: page.evaluate(active).splitlines()[0] == first, 5, first)
    assert page.evaluate(active) == "x = 1"
    page.keyboard.press("Control+Alt+d")
    wait_until(lambda: page.evaluate(active).startswith("%%edit probe\n"), 5, "the shortcut's work")
    page.evaluate("jupyterapp.commands.execute('nnsight-lab:to-plain')")


def test_an_idle_kernel_is_asked_at_most_every_three_seconds(notebook: Notebook, panel: Panel) -> None:
    page = panel.page
    notebook.run(
        "%load_ext nnsight_lab\n"
        "handlers, asked = get_ipython().kernel.control_handlers, []\n"
        "answering = handlers['nnsight_lab_status_request']\n"
        "def counted(*message):\n    asked.append(1)\n    return answering(*message)\n"
        "handlers['nnsight_lab_status_request'] = counted"
    )
    notebook.finish(30)
    wait_until(lambda: "not loaded" not in panel.text, 15, "the panel's knowledge")
    began_s = time.monotonic()
    page.wait_for_timeout(10_000)  # nothing is waited for: it is counted what happens meanwhile
    notebook.run("print(len(asked))")
    count, passed_s = int(last_text(notebook)), time.monotonic() - began_s
    # It tells by itself, so it is hardly ever asked.
    assert count <= passed_s / 3 + 1


def test_two_notebooks_have_their_own_kernels_and_both_are_shown(notebook: Notebook, panel: Panel) -> None:
    page = panel.page
    new_notebook(page, "python3")
    panel.says("(another notebook)", 60)
    panel.says("nnsight-lab is not loaded in this notebook’s kernel.", 60)
    panel.engine_is("ready")


def test_a_kernel_without_the_package_or_with_another_version_is_said_in_words(
    notebook: Notebook, panel: Panel
) -> None:
    page = panel.page
    new_notebook(page, "bare")
    panel.says("nnsight-lab is not installed in this notebook’s kernel: run “%pip install nnsight-lab”", 60)
    new_notebook(page, "python3")
    panel.says("nnsight-lab is not loaded", 60)
    run_in_front(
        page, "%load_ext nnsight_lab\nimport nnsight_lab.wire.panel\nnnsight_lab.wire.panel.PROTOCOL = 99"
    )
    panel.says("which speaks to this panel in another way", 60)
    run_in_front(
        page, "%unload_ext nnsight_lab\nimport nnsight_lab.panel.control as c\nc.load_panel = lambda _: None"
    )
    panel.says("nnsight-lab is not loaded", 60)
    panel.press("Run %load_ext nnsight_lab in this notebook’s kernel")
    panel.says("is older than this panel and tells it nothing", 60)


def test_an_engine_started_by_the_cell_that_loads_the_package_is_seen_while_that_cell_runs(
    notebook: Notebook, panel: Panel
) -> None:
    page = panel.page
    new_notebook(page, "python3")
    panel.says("nnsight-lab is not loaded", 60)
    run_in_front(page, "%load_ext nnsight_lab\nimport time\ntime.sleep(30)")
    panel.says("No engine is running in this kernel.", 25)


def test_nothing_of_the_panel_is_out_of_the_keyboards_reach_or_without_a_name(panel: Panel) -> None:
    unnamed = panel.root.evaluate(
        """root => [...root.querySelectorAll('button, input, summary, [tabindex]')].filter(found => {
            const label = found.getAttribute('aria-label') || found.textContent.trim() || found.placeholder ||
                (found.labels && found.labels.length ? found.labels[0].textContent : '');
            return !label || (found.tabIndex < 0);
        }).map(found => found.outerHTML)"""
    )
    assert unnamed == []
