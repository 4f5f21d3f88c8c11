"""The magics in a real kernel, with a fake engine: what a front end and a saved notebook get to see."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.notebook

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
SETUP = """
import sys
sys.path.insert(0, {root!r})
from tests.magics import fakes
from tests.magics.fakes import save
lab = fakes.install()
lab.start("demo", mode="{mode}").delay_s = 0.01
%load_ext nnsight_lab.magics.extension
"""


@dataclass
class Answer:
    """What a kernel sent back for one cell."""

    status: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.messages if message["msg_type"] == kind]


class Kernel:
    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, cell: str) -> Answer:
        answer = Answer()
        reply = self.client.execute_interactive(
            cell, timeout=TIMEOUT_S, output_hook=answer.messages.append, allow_stdin=False
        )
        answer.status = reply["content"]["status"]
        return answer

    def complete(self, marked: str) -> list[str]:
        cell, at = marked.replace("|", "", 1), marked.index("|")
        content = self.client.complete(cell, at, reply=True, timeout=TIMEOUT_S)["content"]
        return list(content["matches"])

    def is_complete(self, cell: str) -> str:
        asked = self.client.is_complete(cell)
        while True:
            reply = self.client.get_shell_msg(timeout=TIMEOUT_S)
            if reply["parent_header"]["msg_id"] == asked:
                return str(reply["content"]["status"])


@pytest.fixture(scope="module", params=["sync", "async"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        kernel = Kernel(client)
        assert kernel.run(SETUP.format(root=str(ROOT), mode=request.param)).status == "ok"
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def test_tokens_are_one_output_updated_in_place(kernel: Kernel) -> None:
    answer = kernel.run("%%trace 'a <prompt>', max_tokens=30\ny = save([1])\n")
    assert answer.status == "ok"
    first, *updates = answer.of("display_data"), *answer.of("update_display_data")
    ids = {message["transient"]["display_id"] for message in [*first, *updates]}
    assert (len(first), len(ids)) == (1, 1)
    assert 1 <= len(updates) <= 15
    assert updates[-1]["data"]["text/plain"] == "a <prompt>" + " tok" * 30
    assert "a &lt;prompt&gt;" in updates[-1]["data"]["text/html"]
    assert kernel.run("print(y, tracer.outputs[0].prompt)").of("stream")[0]["text"] == "[1] a <prompt>\n"


def test_a_wrong_first_line_is_one_red_line(kernel: Kernel) -> None:
    for cell in ("%%trace no such\nx\n", "%%trace 'a'\n", "%engine strat demo", "%edits on prob"):
        answer = kernel.run(cell)
        assert answer.status == "error"
        (error,) = answer.of("error")
        assert len(error["traceback"]) == 1
        assert "\n" not in error["traceback"][0]
        assert error["ename"] in ("CellUsageError", "UnknownEdit")
        assert answer.of("stream") == []


def test_an_error_in_the_body_is_shown_on_the_cells_own_line(kernel: Kernel) -> None:
    (error,) = kernel.run("%%time\n%%trace ['a',\n 'b']\nx = 1\n\n1 / 0\n").of("error")
    assert error["ename"] == "ZeroDivisionError"
    assert "line 6" in "\n".join(error["traceback"]) or "6 1 / 0" in "\n".join(error["traceback"])


def test_is_complete_and_completion_answer(kernel: Kernel) -> None:
    assert kernel.is_complete("%%trace 'a'") == "incomplete"
    assert kernel.is_complete("%%trace ['a',") == "incomplete"
    assert kernel.is_complete("%%trace no such\nx\n\n") == "complete"
    assert "tracer.stop" in kernel.complete("%%trace 'a'\ntracer.st|")
    assert "max_tokens=" in kernel.complete("%%trace 'a', max_t|")


def test_engine_and_edits_show_small_tables(kernel: Kernel) -> None:
    kernel.run("%%edit probe\nx = 1\n")
    (shown,) = kernel.run("%edits").of("display_data")
    assert "<table>" in shown["data"]["text/html"]
    assert shown["data"]["text/plain"].splitlines()[1].startswith("probe")
    started = kernel.run("%engine start demo name=other")
    assert len(started.of("display_data")) == 1
    assert "engine other: demo ready in" in started.of("update_display_data")[-1]["data"]["text/plain"]
    assert kernel.run("%engine stop other").status == "ok"
    kernel.run("lab.current = 'main'")


def test_help_shows_what_the_cells_take(kernel: Kernel) -> None:
    for name in ("%%trace?", "%engine?"):
        payload = kernel.client.execute(name, reply=True, timeout=TIMEOUT_S)["content"]["payload"]
        assert "engine" in payload[0]["data"]["text/plain"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_saved_notebook_keeps_the_last_state_and_stays_small(mode: str, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        SETUP.format(root=str(ROOT), mode=mode),
        "%%trace 'one prompt', max_tokens=40\ny = save([1])",
        "%%trace [f'prompt {i}' for i in range(200)], max_tokens=10\ny = save([1])",
        "print(y)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3").execute()
    (one,), (many,), (printed,) = (cell.outputs for cell in notebook.cells[1:])
    assert one.data["text/plain"] == "one prompt" + " tok" * 40
    assert many.data["text/plain"].startswith("200 of 200 requests, 2,000 tokens")
    assert printed.text == "[1]\n"
    assert len(json.dumps(notebook)) < 12_000, sys.version
