"""When a widget's view is answered while a cell runs, with each ipykernel that behaves differently.

ipykernel 7 has subshells: the front end sends a comm's messages to one, and views are answered at once.
6.31 has one thread for both: a question waits for a sync cell, and is answered while an async one awaits; the
answer to an earlier one goes on.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import STATIC
from tests.notebook.conftest import VERSIONS
from tests.notebook.kernels import Kernel

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.skipif(
        not (STATIC / "heatmap.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

CELL_S = 3
BUSY = {
    "a sync cell": f"import time\ntime.sleep({CELL_S})\nended = time.monotonic()",
    "an async cell": f"import asyncio, time\nawait asyncio.sleep({CELL_S})\nended = time.monotonic()",
}
TILES = {
    "leads": [],
    "level": [0, 0],
    "how": "mean",
    "scale": "auto",
    "clip": "robust",
    "tiles": [[0, 0], [1, 0]],
}


class Front:
    """A front end with one view of one widget."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        kernel.good(
            "import torch\nfrom nnsight_lab.widgets import Heatmap\n"
            "heatmap = Heatmap(torch.full((300, 300), 0.25))"
        )
        self.comm_id = kernel.value("heatmap.comm.comm_id")
        self.subshell = self._subshell() if kernel.version.startswith("7.") else None
        self._asked = 0

    def _subshell(self) -> str:
        client = self.kernel.client
        message = client.session.msg("create_subshell_request", {})
        client.control_channel.send(message)
        return str(client.get_control_msg(timeout=10)["content"]["subshell_id"])

    def ask(self, kind: str, **content: Any) -> str:
        """Sends a question as JupyterLab does."""
        self._asked += 1
        question = f"view:{self._asked}"
        said = {**content, kinds.ASK: question, kinds.KIND: kind, kinds.VIEW: "view"}
        client = self.kernel.client
        data = {"method": "custom", "content": said}
        message = client.session.msg("comm_msg", {"comm_id": self.comm_id, "data": data})
        if self.subshell is not None:
            message["header"]["subshell_id"] = self.subshell
        client.shell_channel.send(message)
        return question

    def answers(self, question: str, limit_s: float = 30) -> list[tuple[float, dict[str, Any]]]:
        """The parts of an answer, each with when it came (`time.monotonic`)."""
        found: list[tuple[float, dict[str, Any]]] = []
        deadline_s = time.monotonic() + limit_s
        while not found or not found[-1][1][kinds.LAST]:
            assert time.monotonic() < deadline_s, f"no answer; so far: {found}"
            try:
                message = self.kernel.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["msg_type"] == "comm_msg":
                content = message["content"]["data"].get("content", {})
                if content.get(kinds.ANSWER) == question:
                    found.append((time.monotonic(), content))
        return found


@pytest.fixture(scope="module", params=VERSIONS)
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    kernel = Kernel(request.param, tmp_path_factory.mktemp("kernel"))
    yield Front(kernel)
    kernel.good("heatmap.close()")
    kernel.close()


@pytest.mark.parametrize("cell", BUSY)
def test_a_question_during_a_cell_is_answered_at_once_but_in_one_threads_sync_cell(
    front: Front, cell: str
) -> None:
    client = front.kernel.client
    client.execute(BUSY[cell])
    began_s = time.monotonic()
    question = front.ask(kinds.VALUE, leads=[], row=0, column=0)
    ((came_s, content),) = front.answers(question)
    assert content["text"] == "0.25"
    if front.subshell is not None or "async" in cell:
        assert came_s - began_s < CELL_S - 1
    else:
        assert came_s - began_s > CELL_S - 1
    assert front.kernel.value("ended") > 0


@pytest.mark.parametrize("cell", BUSY)
def test_what_a_question_started_goes_on_during_a_cell(front: Front, cell: str) -> None:
    front.kernel.good(
        "import time\noriginal = type(heatmap._tiles).tile\n"
        "def slow(*arguments, **more):\n    time.sleep(0.5)\n"
        "    return original(heatmap._tiles, *arguments, **more)\n"
        "heatmap._tiles.tile = slow\nheatmap._tiles.is_quick = lambda *_: False"
    )
    question = front.ask(kinds.TILES, **TILES)
    front.kernel.client.execute(BUSY[cell])
    began_s = time.monotonic()
    parts = front.answers(question)
    assert len(parts) == 3
    assert parts[-1][0] - began_s < CELL_S - 0.5
    assert front.kernel.value("ended") > 0
