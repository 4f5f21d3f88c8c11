"""Live views in real kernels: they grow while the cell awaits, can be stopped, and outlive an interrupt."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import STATIC
from tests.notebook.kernels import Kernel, Message, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.engine,
    pytest.mark.skipif(
        not (STATIC / "token_strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
    ),
]

LONG = "'Once upon a time', max_tokens=900, ignore_eos=True, temperature=0"
TRACE = f"""%%trace {LONG}, live=True
norms = [].save()
for step in tracer.all():
    norms.append(lab.residual(model.model.layers[15].output)[-1])
"""
RUN = f"run = lab.live({LONG})\nawait run"
CELLS = {"a trace cell": TRACE, "a live run that is awaited": RUN}


def grown(message: Message) -> dict[str, Any] | None:
    """What a view says of its growth, where a message says that."""
    if message["msg_type"] != "comm_msg":
        return None
    content = message["content"]["data"].get("content", {})
    return content if content.get(kinds.KIND) == kinds.GREW else None


def strips(messages: list[Message]) -> list[dict[str, Any]]:
    found = [content for message in messages if (content := grown(message)) is not None]
    return [content for content in found if "tokens" in content]


def tell(kernel: Kernel, comm_id: str, kind: str, **content: Any) -> None:
    """Sends a question as JupyterLab does."""
    client = kernel.client
    said = {**content, kinds.ASK: "view:1", kinds.KIND: kind, kinds.VIEW: "view"}
    message = client.session.msg(
        "comm_msg", {"comm_id": comm_id, "data": {"method": "custom", "content": said}}
    )
    if kernel.version.startswith("7."):
        client.control_channel.send(client.session.msg("create_subshell_request", {}))
        message["header"]["subshell_id"] = client.get_control_msg(timeout=10)["content"]["subshell_id"]
    client.shell_channel.send(message)


def on_their_way(kernel: Kernel) -> list[Message]:
    """What is still in the channel: a view's messages come beside the cell's."""
    found = []
    deadline_s = time.monotonic() + 1
    while time.monotonic() < deadline_s:
        try:
            found.append(kernel.client.get_iopub_msg(timeout=0.1))
        except queue.Empty:
            continue
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_view_grows_while_the_cell_awaits_and_its_stop_button_is_heard(kernel: Kernel, cell: str) -> None:
    began_s = time.monotonic()
    running = kernel.submit(CELLS[cell])
    grew: list[dict[str, Any]] = []

    def more_than_once(message: Message) -> bool:
        grew.extend(strips([message]))  # a busy machine's first may have many tokens
        return len(grew) > 2 and grew[-1]["traits"].get("count", 0) > 30

    running.until(more_than_once)
    growing_s = time.monotonic() - began_s
    seen = strips(running.ran.messages)
    assert len(seen) <= 20 * growing_s + 2
    pressed_s = time.monotonic()
    shown = next(m for m in running.ran.messages if m["msg_type"] == "display_data")
    assert (
        "lab-strip" in shown["content"]["data"]["text/html"]
        or "Waiting" in shown["content"]["data"]["text/html"]
    )
    comm_id = next(m["content"]["comm_id"] for m in running.ran.messages if strips([m]))
    tell(kernel, comm_id, kinds.STOP)
    ran = running.finish(60)
    assert time.monotonic() - pressed_s < 15
    if cell == "a trace cell":
        assert "the request was stopped in its view" in ran.error
        assert "\n" not in ran.error
    else:
        assert ran.ok, ran.error
        assert kernel.value("run.output.finished") is False
    wait_until(lambda: kernel.value("engine.request_count()") == 0, 10, "an aborted request")
    kernel.good("lab.generate('Still there', max_tokens=1)")


@pytest.mark.parametrize("cell", CELLS)
def test_an_interrupt_leaves_a_strip_that_says_so(kernel: Kernel, cell: str) -> None:
    running = kernel.submit(CELLS[cell])
    running.until(
        lambda message: len(strips([message])) and strips([message])[0]["traits"].get("count", 0) > 12
    )
    kernel.interrupt()
    ran = running.finish(60)
    assert "Interrupted: the requests of this cell were aborted" in ran.error
    # What stays in the notebook: the tokens that came, and what became of the request.
    (html,) = [data["text/html"] for data in ran.shown if "text/html" in data]
    assert "Interrupted after " in html
    assert html.count('role="listitem"') > 10
    wait_until(lambda: kernel.value("engine.request_count()") == 0, 10, "an aborted request")


def test_a_live_run_goes_on_after_its_cell_and_during_the_next_ones(kernel: Kernel) -> None:
    kernel.good(f"run = lab.live({LONG.replace('900', '150')})")
    busy = kernel.submit("import time\ntime.sleep(3)\nlength = len(run.strip)")
    ran = busy.finish()
    assert ran.ok, ran.error
    assert kernel.value("length") > 10
    output = kernel.good(
        "output = await run\nprint(len(output.outputs[0].token_ids), run.strip.state['ended'])"
    )
    assert output.stdout.split() == ["150", "done"]
    assert on_their_way(kernel) is not None
