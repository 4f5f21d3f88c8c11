"""The stop button: one plain line at once, and an engine that is as it was.

A front end sends SIGINT to the kernel's process group, as these tests do; it kills an engine whose processes
are in that group.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.notebook.conftest import Kernels
from tests.notebook.kernels import Kernel, Message

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)

#: From the signal to the line.
SAID_WITHIN_S = 1.0
#: From the line to a worker that tracks no request.
FORGOTTEN_WITHIN_S = 2.0

LONG = "'Once upon a time', max_tokens=1000, ignore_eos=True"
WATCH = "watch=lambda requests: requests[0].tokens > 3 and print('busy')"


@dataclass(frozen=True)
class Busy:
    """A cell that runs for long, and the message that shows that it is at it."""

    cell: str
    sign: str


CELLS = {
    "a plain generate": Busy(f"engine.generate({LONG}, {WATCH})", "stream"),
    "a trace cell": Busy(f"%%trace {LONG}\nlogits = model.logits.save()\n", "update_display_data"),
    "an awaited generate": Busy(f"await engine.agenerate({LONG}, {WATCH})", "stream"),
    "an awaited stream": Busy(f"async for output in engine.stream({LONG}):\n    print('busy')", "stream"),
    "a trace of many prompts": Busy(
        "%%trace ['Once'] * 32, max_tokens=900, ignore_eos=True\n"
        "for step in tracer.all():\n    hidden = model.model.layers[3].output[0].save()\n",
        "update_display_data",
    ),
}


def stop(kernel: Kernel, busy: Busy) -> None:
    """Interrupts a busy cell, and checks everything that a user would."""
    running = kernel.submit(busy.cell)
    running.until(lambda message: message["msg_type"] == busy.sign)
    pressed_s = kernel.interrupt()
    said_s = running.until(_is_error, limit_s=30)
    ran = running.finish()
    assert said_s - pressed_s < SAID_WITHIN_S
    assert "\n" not in ran.error
    assert ran.error.endswith("the requests of this cell were aborted; the engine is still loaded.")
    assert "Interrupted: " in ran.error
    forgotten = """
import time
began = time.monotonic()
while engine.request_count() and time.monotonic() - began < 10:
    pass
print(engine.request_count(), time.monotonic() - began)
"""
    count, took_s = kernel.good(forgotten).stdout.split()
    assert (count, float(took_s) < FORGOTTEN_WITHIN_S) == ("0", True)
    assert kernel.value("[o.prompt for o in engine.generate(['one', 'two'], max_tokens=3)]") == ["one", "two"]
    assert kernel.value("engine.status().state") == "ready"


def _is_error(message: Message) -> bool:
    return bool(message["msg_type"] == "error")


@pytest.mark.parametrize("what", [*CELLS][:4])
def test_the_stop_button_stops_the_cell_and_not_the_engine(kernel: Kernel, what: str) -> None:
    stop(kernel, CELLS[what])


def test_the_stop_button_does_nothing_to_an_idle_kernel(kernel: Kernel) -> None:
    kernel.interrupt()
    assert kernel.value("[o.prompt for o in engine.generate(['one', 'two'], max_tokens=3)]") == ["one", "two"]
    assert len(kernel.engine_processes()) >= 1


@newest
def test_stopping_many_requests_with_blocks_forgets_them_all(kernel: Kernel) -> None:
    stop(kernel, CELLS["a trace of many prompts"])


@newest
def test_a_cell_can_be_stopped_again_and_again(kernel: Kernel) -> None:
    for what in [*CELLS][:4] * 2:
        stop(kernel, CELLS[what])


@newest
def test_a_stopped_cell_keeps_what_it_wrote_so_far(kernel: Kernel) -> None:
    running = kernel.submit(f"%%trace {LONG}, temperature=0\npass\n")
    running.until(lambda message: message["msg_type"] == "update_display_data")
    kernel.interrupt()
    ran = running.finish()
    assert ran.texts[0].startswith("Once upon a time")
    assert not ran.ok


@newest
def test_a_sync_engine_is_stopped_as_well(kernel: Kernel, kernels: Kernels) -> None:
    kernel.good("%engine stop")
    try:
        started = kernel.good('%engine start demo max_model_len=1024 mode="sync"')
        assert started.texts[0].endswith("(sync, CPU)")
        for busy in CELLS.values():
            stop(kernel, busy)
        ran = kernel.good("%%trace 'The Eiffel Tower is in the city of', max_tokens=1, temperature=0\npass\n")
        assert ran.texts == ["The Eiffel Tower is in the city of Paris"]
    finally:
        kernel.good("%engine stop")
    assert kernel.engine_processes() == []
