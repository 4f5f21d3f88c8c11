"""The side panel in a real JupyterLab with a real engine: started, watched, edited, interrupted, killed, reloaded.

One page and one engine go through all of it, in the order a person would, and axe-core looks at each state on
the way. Screenshots of all looks are left in the test's temporary folder; see them when the drawing was changed.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.bench.jupyterlab import (
    LABEXTENSION,
    Notebook,
    Server,
    empty_notebook,
    open_page,
    serve,
    wait_until,
)
from nnsight_lab.engine import kept
from nnsight_lab.engine.processes import EngineProcess, engine_processes
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, OWNER_ENV
from tests.labextension import pseudo
from tests.labextension.looks import EVERY, PANEL, focus_shows, look_at
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


#: A kernel of a language that is not Python; it counts what it is asked to run, but for its own question.
OTHER_KERNEL = {
    "argv": [
        sys.executable,
        "-c",
        "from ipykernel.kernelapp import IPKernelApp\n"
        "from ipykernel.kernelbase import Kernel\n"
        "class Counts(Kernel):\n"
        "    implementation = implementation_version = banner = 'counts'\n"
        "    language_info = {'name': 'counting', 'mimetype': 'text/plain', 'file_extension': '.txt'}\n"
        "    asked = 0\n"
        "    async def do_execute(self, code, silent, *rest, **more):\n"
        "        self.asked += 1\n"
        "        self.send_response(self.iopub_socket, 'stream', {'name': 'stdout', 'text': str(self.asked)})\n"
        "        return {'status': 'ok', 'execution_count': self.asked, 'payload': [], 'user_expressions': {}}\n"
        "IPKernelApp.launch_instance(kernel_class=Counts)",
        "-f",
        "{connection_file}",
    ],
    "display_name": "Counting",
    "language": "counting",
}


#: A machine with one GPU, and on it whoever the test says.
NVIDIA = """#!/bin/sh
case "$1" in
--query-gpu=*) [ ! -e {apps} ] || echo "0, GPU-aaa, NVIDIA H200, 20480, 143771, 37" ;;
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

    def engine_is_named(self, label: str) -> None:
        self.root.locator(f".nnlab-engine[aria-label='{label}']").wait_for()

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name).first.click()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("panel")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    notebook = empty_notebook(folder / "panel.ipynb")
    for name, spec in (("bare", BARE_KERNEL), ("other", OTHER_KERNEL)):
        place = folder / "jupyter" / "kernels" / name
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(spec))
    packs = [str(pseudo.language_pack(folder / "packs")), *filter(None, [os.environ.get("PYTHONPATH")])]
    state = {
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONPATH": os.pathsep.join(packs),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
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
        page.on("pageerror", lambda error: problems.append(f"{error}: {error.stack}"))
        Notebook(page).finish(60)
        yield page
        page.screenshot(path=folder / "last.png")


@pytest.fixture
def notebook(page: Any, problems: list[str]) -> Iterator[Notebook]:
    problems.clear()
    yield Notebook(page)
    # JupyterLab's own splash screen takes itself away twice on some loads and changes of theme.
    assert [one for one in problems if "/static/lab/jlab_core." not in one] == []


@pytest.fixture
def panel(page: Any) -> Panel:
    found = Panel(page)
    found.show()
    return found


class Settings:
    """JupyterLab's settings editor."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def field(self, name: str) -> Any:
        return self.page.locator(f".jp-SettingsForm [id$='_{name}']:is(input, select)").first

    def refuses(self, name: str) -> None:
        """Waits for the word on a value that is not allowed."""
        wrong = self.page.locator(f".jp-SettingsForm [id$='_{name}__error'] li")
        wait_until(lambda: wrong.count(), 10, f"a word about {name}")


@contextmanager
def settings_open(page: Any, query: str) -> Iterator[Settings]:
    """The editor with the settings that are found by some words; closed in the end, the notebook in front."""
    page.evaluate("query => jupyterapp.commands.execute('settingeditor:open', {query})", query)
    page.locator(".jp-SettingsForm").first.wait_for()
    yield Settings(page)
    page.evaluate("jupyterapp.shell.currentWidget.close()")
    page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")


def gpus() -> int:
    """How many this machine has."""
    return Surroundings().look().gpus


def reload(page: Any, panel: Panel, folder: Path) -> None:
    """The whole page, as by F5, with the notebook as it is."""
    Notebook(page).save_to(folder / "root" / "panel.ipynb")
    reload_as_saved(page, panel)


def reload_as_saved(page: Any, panel: Panel) -> None:
    """The whole page, with the notebook as its file is."""
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    panel.show()


#: What is on the page of a model, an engine, an edit and what they saved, and of code: it has no language.
DATA = re.compile(
    r"panel\.ipynb|The Eiffel Tower is in the city of|lab\.saves\(\)\.get\(.*\)|max_model_len=\d+|dtype=bfloat16|save_budget='1GB'"
    r"|bfloat16|\b(?:main|demo|async|mute|hidden|probe|NAME)\b|%%(?:edit|trace)|%load_ext nnsight_lab|\.save\(\)"
    r"|^\s*(?:model|hidden|layers|output|save)$|lab-[0-9a-f]+|(?<!\S)/\S+"
    # A reason of the kernel's, which are in English, as a tooltip.
    r"|Engine 'main' runs on the CPU, and vLLM's sleep mode frees GPU memory only: `%engine stop main` frees this one's\."
)


def untranslated(said: list[str]) -> list[str]:
    """Texts with letters that neither the pseudo-language has nor are data."""
    # An engine that is none of these tests' has no name here, but an id: the panel looks at the whole machine.
    known = re.compile(rf"{DATA.pattern}|\b{re.escape(getpass.getuser())}\b|\b(?:[0-9a-f]{{12}}|served-\d+)\b")
    return [text for text in said if re.search(r"[A-Za-z]{2}", known.sub("", text))]


def own_processes(folder: Path) -> list[EngineProcess]:
    return [found for found in engine_processes() if str(folder) in found.log]


def last_text(notebook: Notebook) -> str:
    """What the last cell printed, once it is done."""
    wait_until(lambda: notebook.cells[-1]["execution_count"] is not None, 60, "the cell's end", tick_s=0.2)
    return "".join(str(output.get("text", "")) for output in notebook.cells[-1]["outputs"])


def listen(panel: Panel) -> None:
    """From now on, what the panel says to a screen reader is kept."""
    panel.root.evaluate(
        """root => {
            window.heard = [];
            (window.hearing ?? []).forEach(observer => observer.disconnect());
            window.hearing = [];
            for (const live of root.querySelectorAll('[aria-live], [role=status], [role=alert]')) {
                const hear = () => live.textContent && window.heard.push(live.textContent);
                const observer = new MutationObserver(hear);
                observer.observe(live, {childList: true, characterData: true, subtree: true});
                window.hearing.push(observer);
            }
        }"""
    )


def heard(page: Any) -> list[str]:
    """What it said since."""
    return list(page.evaluate("window.heard"))


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


def test_without_an_engine_the_panel_says_why_it_is_empty(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    panel.says("nnsight-lab is not loaded in this notebook’s kernel.")
    assert panel.root.get_by_role("button", name="Run %load_ext nnsight_lab").is_visible()
    look_at(panel.page, folder, "empty")


def test_settings_are_taken_without_a_reload_and_wrong_ones_are_refused(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    form = panel.root.get_by_role("form", name="Start an engine", include_hidden=True)
    model, options = form.locator("input.nnlab-input").first, form.locator("input.nnlab-input").last
    assert (model.input_value(), options.input_value()) == ("demo", "")
    with settings_open(page, "nnsight-lab: panel") as settings:
        page.screenshot(path=folder / "settings.png")
        settings.field("startModel").fill("other/model")
        wait_until(lambda: model.input_value() == "other/model", 10, "the new default in the form")
        settings.field("startModel").fill("demo")
        wait_until(lambda: model.input_value() == "demo", 10, "the old one")
        settings.field("startOptions").fill("dtype=float32")
        wait_until(lambda: options.input_value() == "dtype=float32", 10, "the new default in the form")
        settings.field("saveBudget").fill("much")
        settings.refuses("saveBudget")
        settings.field("saveBudget").fill("1 GB")
        settings.field("saveBudget").blur()
        saved = folder / "settings" / "nnsight-lab" / "panel.jupyterlab-settings"
        wait_until(lambda: saved.exists() and "1 GB" in saved.read_text(), 10, "the setting on disk")
    with settings_open(page, "nnsight-lab: questions") as settings:
        settings.field("pollSeconds").fill("1")
        settings.refuses("pollSeconds")


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
    options = form.locator("input.nnlab-input").last
    assert options.get_attribute("aria-invalid") == "true"
    look_at(page, folder, "form", looks=EVERY)
    keep = form.get_by_label("Keep it running when the kernel ends")
    page.keyboard.press("Tab")
    assert keep.evaluate("input => input === document.activeElement")
    page.keyboard.press("Space")
    assert keep.is_checked()
    page.keyboard.press("Space")
    options.focus()
    page.keyboard.press("End")
    page.keyboard.insert_text("1024")
    wait_until(lambda: not form.locator(".nnlab-error").inner_text(), 15, "the form's consent")
    listen(panel)
    page.keyboard.press("Enter")
    panel.engine_is("starting", 120)
    look_at(page, folder, "starting")
    panel.engine_is("ready", START_LIMIT_S)
    # Seconds and phases are seen, not heard.
    wait_until(lambda: heard(page)[-1:] == ["Engine main: ready."], 5, "a word about it")
    assert heard(page) == ["Engine main: starting.", "Engine main: ready."]
    panel.says("max_model_len=1024")
    panel.says("save_budget='1GB'")  # by the settings
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
    look_at(page, folder, "stale")
    page.evaluate("jupyterapp.commands.execute('notebook:run-cell')")
    wait_until(lambda: badge.inner_text() == "mute v2 · on", 15, "the new version's mark")
    panel.press("Difference to the version before")
    dialog = page.locator(".jp-Dialog")
    dialog.wait_for()
    assert "+ model.model.layers[1]" in dialog.inner_text()
    assert "- model.model.layers[2]" in dialog.inner_text()
    look_at(page, folder, "difference", ".jp-Dialog-content")
    page.keyboard.press("Escape")


def test_marks_on_cells_can_be_switched_off(notebook: Notebook, panel: Panel) -> None:
    page = panel.page
    badge = page.locator(".jp-CodeCell .nnlab-badge")
    with settings_open(page, "nnsight-lab: marks") as settings:
        settings.field("show").uncheck()
        wait_until(lambda: badge.count() == 0, 10, "no mark")
        settings.field("show").check()
        wait_until(lambda: badge.count() == 1, 10, "the mark again")


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
    look_at(page, folder, "forecast")
    notebook.write("%%edit other\nhidden = (")
    wait_until(lambda: said.count() == 0, 10, "no word on a half-written cell")


def test_who_is_on_each_gpu_is_said_as_far_as_it_may_be_seen(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    core = next(process for process in own_processes(folder) if "EngineCore" in process.name)
    (folder / "apps").write_text(f"GPU-aaa, {core.pid}, 12288\nGPU-aaa, 1, 4096\nGPU-aaa, 4190000, [N/A]\n")
    # The server tells it of the whole machine; where it does not, the kernel.
    panel.says("0: NVIDIA H200", 30)
    without = {"status": 404, "json": {"message": "Not Found"}}
    with answered(panel.page, lambda route: route.fulfill(**without)):
        panel.says(f"process {core.pid}, engine main", 40)
        assert "GPU 0, NVIDIA H200: 21 GB of 151 GB" in panel.text
        assert "owner not told, process 4190000\nnot told" in panel.text
        look_at(panel.page, folder, "gpus")
    (folder / "apps").unlink()
    wait_until(lambda: "NVIDIA" not in panel.text, 30, "no GPU again")


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
    look_at(page, folder, "chosen")
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
    look_at(page, folder, "offered")
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
    look_at(panel.page, folder, "saves", looks=EVERY)
    stops = focus_shows(panel.page, PANEL)
    assert len(stops) >= 14  # engine, edits, form, saves
    focus_shows(panel.page, ".nnlab-statusbar")
    notebook.write("shape = list(")
    panel.press("Insert the code that reads hidden into the active cell")
    panel.page.keyboard.insert_text(".shape)\nprint(shape)")
    panel.page.keyboard.press("Control+Enter")
    wait_until(lambda: "576" in last_text(notebook), 15, "the shape of what was saved")
    panel.press("Open the saves in a tab")
    tab = panel.page.locator(".nnlab-saves-tab .nnl-browser")
    tab.wait_for()
    wait_until(lambda: "hidden" in tab.inner_text(), 15, "the browser of saves")
    look_at(panel.page, folder, "tab", ".nnlab-saves-tab", looks=EVERY)
    panel.page.evaluate("jupyterapp.shell.currentWidget.close()")
    panel.page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")


def test_a_saved_value_is_dragged_into_a_cell_and_the_log_is_read(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
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
    look_at(page, folder, "log", ".nnlab-log-view")
    assert len(focus_shows(page, ".nnlab-log-view")) == 2
    page.evaluate("jupyterapp.shell.currentWidget.close()")
    page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")


def test_in_another_language_every_word_of_ours_is_in_it(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    language = folder / "settings" / "@jupyterlab" / "translation-extension" / "plugin.jupyterlab-settings"
    language.parent.mkdir(parents=True, exist_ok=True)
    language.write_text(json.dumps({"locale": pseudo.LOCALE}))
    reload(page, panel, folder)
    try:
        panel.engine_is_named("Ｅｎｇｉｎｅ main")
        for summary in panel.root.locator("summary").all():
            summary.click()
        page.locator(".nnlab-badge").wait_for()
        page.screenshot(path=folder / "other-language.png")
        said = page.evaluate(pseudo.READ, f"{PANEL}, .nnlab-badge, [data-jp-item-name='nnsight-lab']")
        # The status bar's, the palette's and the sidebar's, as their own texts.
        said += page.locator(".nnlab-statusbar").all_inner_texts()
        said += page.evaluate(
            """() => jupyterapp.commands.listCommands().filter(id => id.startsWith('nnsight-lab:')).flatMap(
                id => [jupyterapp.commands.label(id, {}), jupyterapp.commands.caption(id, {})])"""
        )
        said.append(page.evaluate(f"document.querySelector(`[data-id='{PANEL[1:]}']`).title"))
        assert len(said) > 40
        assert untranslated(said) == []
        # And data alone would not have passed for them.
        assert sum(bool(re.search(r"[ａ-ｚ]{3}", text)) for text in said) > 30
    finally:
        language.unlink()
        reload(page, panel, folder)


def test_a_busy_engine_is_seen_while_its_cell_runs_and_interrupted(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    listen(panel)
    notebook.run("lab.generate('Once', max_tokens=950, ignore_eos=True, edits=[])")
    panel.engine_is("busy", 10)
    panel.says("1 running, 0 waiting")
    wait_until(
        lambda: "tokens/s" in panel.page.locator(".nnlab-statusbar").inner_text(), 10, "the status bar's word"
    )
    look_at(panel.page, folder, "busy")
    panel.press("Interrupt my requests on engine main")
    panel.engine_is("ready", 15)
    notebook.finish(15)
    assert "aborted" in notebook.errors()[-1]
    assert heard(panel.page) == ["1 call aborted."]


def test_a_reload_in_the_middle_of_a_cell_shows_what_the_kernel_says(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    notebook.save_to(folder / "root" / "panel.ipynb")
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


def test_nothing_of_what_is_shown_comes_from_the_browser(notebook: Notebook, panel: Panel, folder: Path) -> None:
    page = panel.page

    def shown() -> str:
        # What goes on by itself, was opened by hand, or is of others on this machine, aside.
        ours = panel.text.partition("Other engines")[0]
        return re.sub(r"\d+(?:\.\d+)? (?:s|min|GB|MB)\b|(?<=Tokens/s\n)\d+", "#", ours)

    page.evaluate("[...document.querySelectorAll('#nnsight-lab-panel details')].forEach(one => one.open = false)")
    before = shown()
    assert "mute" in before
    assert "The Eiffel Tower" in before
    notebook.save_to(folder / "root" / "panel.ipynb")
    page.evaluate(
        """async () => {
            localStorage.clear();
            sessionStorage.clear();
            for (const { name } of await indexedDB.databases()) {
                indexedDB.deleteDatabase(name);
            }
        }"""
    )
    reload_as_saved(page, panel)  # JupyterLab no longer saves: it waits for a database of its own
    panel.engine_is("ready", 20)
    try:
        wait_until(lambda: shown() == before, 20, "the same panel")
    finally:
        assert shown() == before


def test_a_killed_engine_is_said_within_five_seconds_and_comes_back_with_its_edits(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    core = next(process for process in own_processes(folder) if "EngineCore" in process.name)
    os.kill(core.pid, signal.SIGKILL)
    listen(panel)
    assert panel.engine_is("dead", 10) < 5
    wait_until(lambda: heard(panel.page), 2, "a word about it")
    assert [said.split(".")[0] for said in heard(panel.page)] == ["Engine main: dead"]
    look_at(panel.page, folder, "dead", looks=EVERY)
    panel.press("Restart engine main with its edits")
    panel.engine_is("ready", START_LIMIT_S)
    panel.says("mute")


def test_an_engine_without_a_kernel_is_shown_and_ended(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    marks = {ENGINE_ENV: "left-behind", OWNER_ENV: f"{2**22 - 1}:1.00", LOG_ENV: str(folder / "its.log")}
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(program, env={**os.environ, **marks}) as process:
        try:
            panel.says("Engines without a kernel", 20)
            look_at(panel.page, folder, "orphans")
            panel.press("End the processes of engine left-behind")
            wait_until(lambda: process.poll() is not None, 20, "the end of the process")
        finally:
            process.kill()
    wait_until(lambda: "Engines without a kernel" not in panel.text, 20, "an end of the list")


def test_a_kept_engine_is_shown_with_its_attach_line_and_stopped(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    marks = {ENGINE_ENV: "0123456789ab", LOG_ENV: str(folder / "kept.log")}
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(program, env={**os.environ, **marks}) as process:
        try:
            where = kept.socket_of("0123456789ab")
            record = kept.Kept("mine", "0123456789ab", "demo", process.pid, 0.0, str(where), "", 0.0, ready=True)
            kept.write(kept.process_of(record))
            panel.says("Kept engines", 20)
            panel.says("mine · demo")
            panel.says("%engine attach mine")
            panel.root.locator(".nnlab-kept").scroll_into_view_if_needed()
            look_at(panel.page, folder, "kept", looks=EVERY)
            panel.page.evaluate("jupyterapp.commands.execute('nnsight-lab:start')")
            tick = panel.root.get_by_label("Keep it running when the kernel ends")
            tick.wait_for()
            assert "button Copy attach line of engine mine" in focus_shows(panel.page, PANEL)
            form = focus_shows(panel.page, f"{PANEL} form")
            assert sum(stop.startswith("input") for stop in form) == 3  # the tick is one
            tick.evaluate("tick => { tick.closest('details').open = false; }")
            panel.press("Copy attach line of engine mine")
            panel.says("Copied: %engine attach mine")
            panel.press("Stop engine mine, for every notebook")
            wait_until(lambda: process.poll() is not None, 20, "the end of the process")
        finally:
            process.kill()
    wait_until(lambda: "Kept engines" not in panel.text, 20, "an end of the list")
    assert kept.all_kept() == []


def test_a_cell_becomes_a_trace_an_edit_and_plain_again_from_the_toolbar(
    notebook: Notebook, panel: Panel, folder: Path
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
    # And by the keyboard alone; Escape gives it back where it was.
    opener = page.locator("[data-jp-item-name='nnsight-lab'] jp-button")
    opener.focus()
    page.keyboard.press("Enter")
    page.locator(".lm-Menu").wait_for()
    look_at(page, folder, "menu", ".lm-Menu")
    page.keyboard.press("Escape")
    wait_until(lambda: opener.evaluate("button => button === document.activeElement"), 5, "the button again")
    page.keyboard.press("Enter")
    page.locator(".lm-Menu").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_until(lambda: page.evaluate(active).startswith("%%edit probe\n"), 5, "the menu's work")
    assert page.evaluate("document.activeElement.closest('.jp-Cell') !== null")
    page.evaluate("jupyterapp.commands.execute('nnsight-lab:to-plain')")
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
    protocol = "nnsight_lab.wire.panel.PROTOCOL"
    run_in_front(page, f"%load_ext nnsight_lab\nimport nnsight_lab.wire.panel\nknown = {protocol}\n{protocol} += 1")
    panel.says("which is newer than this panel: install that version where JupyterLab runs", 60)
    run_in_front(page, f"{protocol} = known - 1")
    panel.says("which is older than this panel: run “%pip install -U nnsight-lab” there", 60)
    run_in_front(
        page, "%unload_ext nnsight_lab\nimport nnsight_lab.panel.control as c\nc.load_panel = lambda _: None"
    )
    panel.says("nnsight-lab is not loaded", 60)
    panel.press("Run %load_ext nnsight_lab in this notebook’s kernel")
    panel.says("is older than this panel and tells it nothing", 60)


def test_a_kernel_of_another_language_is_left_alone(notebook: Notebook, panel: Panel) -> None:
    new_notebook(panel.page, "other")
    panel.says("This notebook’s kernel is not a Python kernel.", 60)
    # Nothing is offered that it could not do, and nothing was ever run in it.
    part = panel.root.locator(".nnlab-kernel-part").first
    assert part.locator("summary:visible, button:visible").count() == 0
    run_in_front(panel.page, "how often")
    output = panel.page.locator(".jp-Notebook:visible .jp-OutputArea-output")
    wait_until(lambda: output.count() and output.last.inner_text().strip() == "1", 20, "the kernel's count")


def test_a_kernel_that_stops_answering_is_said_and_so_is_its_return(notebook: Notebook, panel: Panel) -> None:
    page = panel.page
    new_notebook(page, "python3")
    panel.says("nnsight-lab is not loaded", 60)
    run_in_front(page, "%load_ext nnsight_lab\nimport os\nprint('pid', os.getpid())")
    panel.says("No engine is running in this kernel.", 60)
    panel.says("It has no GPU" if gpus() == 0 else "No engine", 20)
    output = page.locator(".jp-Notebook:visible .jp-OutputArea-output")
    wait_until(lambda: output.count() and "pid" in output.last.inner_text(), 20, "the kernel's pid")
    pid = int(output.last.inner_text().split()[-1])
    os.kill(pid, signal.SIGSTOP)
    try:
        panel.says("The kernel has not answered for a while; what is shown may be old.", 40)
    finally:
        os.kill(pid, signal.SIGCONT)
    panel.says("No engine is running in this kernel.", 30)


def test_an_engine_started_by_the_cell_that_loads_the_package_is_seen_while_that_cell_runs(
    notebook: Notebook, panel: Panel
) -> None:
    page = panel.page
    new_notebook(page, "python3")
    panel.says("nnsight-lab is not loaded", 60)
    run_in_front(page, "%load_ext nnsight_lab\nimport time\ntime.sleep(30)")
    panel.says("No engine is running in this kernel.", 25)


# -- what the server tells, whatever the kernels do ------------------------------------------------

STATUS = re.compile(r"/nnsight-lab/api/status\b")
#: A worker that is not told of its kernel's end, and notices nothing: stuck in C code with Python's lock.
STUCK = """\
%%trace "The Eiffel Tower is in the city of", max_tokens=1
import ctypes
ctypes.CDLL(None).prctl(1, 0)
open({there!r}, "w").close()
ctypes.PyDLL(None).sleep(600)
"""
#: And a kernel that is, once it gets the signal.
STUCK_AT_SIGNAL = """\
import ctypes, signal
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(600))
"""


def test_what_a_server_of_another_kind_does_not_tell_is_said_in_words(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    without = {"status": 404, "json": {"message": "Not Found"}}
    for told, words in (
        (without, "This Jupyter server has no nnsight-lab"),
        ({"status": 403, "json": {"message": "Forbidden"}}, "does not let you ask"),
        ({"json": {"protocol": 99, "version": "7.8.9"}}, "has nnsight-lab 7.8.9, which speaks to this panel"),
        ({"json": {"protocol": "?"}}, "This Jupyter server has no nnsight-lab"),
    ):
        with answered(page, lambda route, told=told: route.fulfill(**told)):
            panel.says(words)
            panel.engine_is("ready")  # as its kernel tells
            if told is without:
                look_at(page, folder, "server-without")
    wait_until(panel.root.locator(".nnlab-machine-words").is_hidden, 15, "the real server's answer")


def test_the_gpus_are_shown_with_whose_processes_they_hold(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page

    def with_gpus(route: Any) -> None:
        told = route.fetch().json()
        (engine,) = [engine for engine in told["engines"] if str(folder) in engine["log"]]
        mine = {"pid": engine["pids"][0], "used_bytes": 30 << 30, "owner": "ada", "engine": engine["engine"]}
        other = {"pid": 4242, "used_bytes": 64 << 30, "owner": "grace", "engine": ""}
        hidden = {"pid": 17, "used_bytes": 0, "owner": "", "engine": ""}
        gpu = {"name": "NVIDIA H200", "total_bytes": 141 << 30}
        told["gpus"] = [
            {**gpu, "index": 0, "used_bytes": 95 << 30, "busy": 37, "processes": [mine, other]},
            {**gpu, "index": 1, "used_bytes": 1 << 30, "busy": -1, "processes": [hidden]},
        ]
        route.fulfill(json=told)

    with answered(page, with_gpus):
        panel.says("0: NVIDIA H200")
        panel.says("your engine main")
        panel.says("69 GB · grace (process 4242)")
        panel.says("– · process 17")
        # It is a kernel's, and shown there.
        own = own_processes(folder)[0].engine
        assert panel.root.locator(f"[data-engine='{own}']").count() == 0
        panel.root.locator(".nnlab-machine .nnlab-gpus").scroll_into_view_if_needed()
        look_at(page, folder, "gpus")
    wait_until(lambda: "NVIDIA" not in panel.text, 15, "the real server's answer")


def test_an_engine_is_shown_though_its_kernel_computes_in_c_and_ended_once_that_is_killed(
    notebook: Notebook, panel: Panel, folder: Path
) -> None:
    page = panel.page
    # Closing asks what to do with what was not saved.
    page.evaluate("[...jupyterapp.shell.widgets('main')].slice(1).forEach(widget => widget.dispose())")
    page.evaluate("jupyterapp.shell.activateById([...jupyterapp.shell.widgets('main')][0].id)")
    wait_until(lambda: notebook.idle, 30, "the first notebook's kernel")
    core = own_processes(folder)[0]
    kernel, there = int(core.owner.partition(":")[0]), folder / "there"
    notebook.run(STUCK_AT_SIGNAL)
    notebook.run(STUCK.format(there=str(there)))
    wait_until(there.exists, 30, "the block in the worker")
    notebook.save_to(folder / "root" / "panel.ipynb")
    os.kill(kernel, signal.SIGUSR1)
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    panel.show()
    engine = panel.root.locator(f"[data-engine='{core.engine}']")
    wait_until(lambda: engine.count() == 1, 30, "the engine of the silent kernel")
    # Until the notebook is there again, it is one that is not open.
    silent = "Of panel.ipynb, whose kernel says nothing of it just now."
    wait_until(lambda: silent in engine.inner_text(), 30, "whose engine it is")
    end = engine.get_by_role("button", name="End the processes of engine")
    assert end.count() == 0
    look_at(page, folder, "silent")

    os.kill(kernel, signal.SIGKILL)
    page.evaluate("void jupyterapp.serviceManager.sessions.shutdownAll()")
    page.evaluate("jupyterapp.shell.currentWidget.dispose()")
    panel.says("Open a notebook")
    wait_until(lambda: end.count() == 1, 20, "the orphan")
    assert "main · demo" in engine.inner_text()
    look_at(page, folder, "orphan")
    engine.get_by_role("button", name="Show the log of engine").click()
    wait_until(lambda: "KV cache" in page.locator(".nnlab-log").inner_text(), 15, "vLLM's words")
    assert own_processes(folder)
    end.click()
    wait_until(lambda: not own_processes(folder), 20, "the end of the orphan", tick_s=0.2)
    wait_until(lambda: engine.count() == 0, 20, "a list without it")
    panel.says("1 process ended.")


@contextmanager
def answered(page: Any, answer: Any) -> Iterator[None]:
    """Meanwhile the panel is told by `answer` instead of the server, or on its way from it."""
    page.route(STATUS, lambda route: answer(route))
    show_again(page)
    try:
        yield
    finally:
        page.unroute(STATUS)
        show_again(page)


def show_again(page: Any) -> None:
    """Closes the side panel and opens it, which asks the server anew."""
    page.evaluate("jupyterapp.shell.collapseLeft()")
    page.evaluate("jupyterapp.shell.activateById('nnsight-lab-panel')")
