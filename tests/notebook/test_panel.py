"""What a kernel tells the panel, with each ipykernel that behaves differently: also while it is busy."""

from __future__ import annotations

import queue
import signal
import time
from typing import Any

import psutil
import pytest

from nnsight_lab.wire import panel as wire
from tests.notebook.conftest import VERSIONS
from tests.notebook.kernels import Kernel, Message, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

EDIT = "%%edit probe\nhidden = model.model.layers[3].output[0].save()"
#: What answering may take while a cell computes: the control thread shares the interpreter with it.
ANSWER_LIMIT_S = 2.0


#: Minutes of engine starts, for what an ipykernel has no part in.
newest_only = pytest.mark.parametrize("version", VERSIONS[:1], indirect=True)


def control(kernel: Kernel, kind: str, cell_limit_s: float = 10, **content: Any) -> dict[str, Any]:
    """Asks on the control channel."""
    client = kernel.client
    message = client.session.msg(kind, content)
    client.control_channel.send(message)
    deadline_s = time.monotonic() + cell_limit_s
    while time.monotonic() < deadline_s:
        try:
            reply = client.get_control_msg(timeout=1)
        except queue.Empty:
            continue
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            answer: dict[str, Any] = reply["content"]
            return answer
    raise AssertionError(f"no answer to {kind}")


def status(kernel: Kernel, **content: Any) -> dict[str, Any]:
    return control(kernel, wire.STATUS_REQUEST, **content)


def act(kernel: Kernel, action: str, **content: Any) -> dict[str, Any]:
    return control(kernel, wire.ACTION_REQUEST, **{wire.ACTION: action, **content})


def main_engine(kernel: Kernel) -> dict[str, Any]:
    (engine,) = status(kernel)["engines"]
    assert engine["name"] == "main"
    found: dict[str, Any] = engine
    return found


def action_over(kernel: Kernel, number: int, limit_s: float) -> dict[str, Any]:
    """Waits for the end of an action, as the panel does."""

    def found() -> list[dict[str, Any]]:
        return [a for a in status(kernel)["actions"] if a["id"] == number and a["state"] != wire.RUNNING]

    wait_until(found, limit_s, "the end of the action", tick_s=0.5)
    return found()[0]


def run_cell(kernel: Kernel, cell: str, cell_id: str) -> None:
    """As JupyterLab does, which names the cell."""
    client = kernel.client
    content = {
        "code": cell,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
    }
    message = client.session.msg("execute_request", content, metadata={"cellId": cell_id})
    client.shell_channel.send(message)
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            assert reply["content"]["status"] == "ok", reply["content"]
            return


@pytest.mark.parametrize(
    "cell",
    [
        "import time\ntime.sleep(3)",
        "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: sum(range(1000))",
        "import asyncio\nawait asyncio.sleep(3)",
    ],
    ids=["a sleeping cell", "a computing cell", "an async cell"],
)
def test_a_status_is_answered_while_a_cell_runs(kernel: Kernel, cell: str) -> None:
    running = kernel.submit(cell)
    running.until(lambda message: message["msg_type"] == "execute_input")
    began_s = time.monotonic()
    for _ in range(3):
        engine = main_engine(kernel)
    assert time.monotonic() - began_s < ANSWER_LIMIT_S
    assert engine["state"] == wire.READY
    ran = running.finish()
    assert ran.ok
    assert ran.elapsed_s > 2.5


def test_the_status_says_what_the_engine_is_and_does(kernel: Kernel) -> None:
    kernel.good("lab.generate('Once', max_tokens=3)")
    wait_until(lambda: main_engine(kernel)["pids"], 20, "the processes", tick_s=0.5)
    told = status(kernel)
    assert (told["protocol"], told["pid"]) == (wire.PROTOCOL, kernel.pid)
    assert "demo" in told["models"]
    engine = main_engine(kernel)
    assert set(engine["pids"]) == {process.pid for process in kernel.engine_processes()}
    assert (engine["model"], engine["current"]) == ("demo", True)
    assert "max_model_len=1024" in engine["options"]
    assert engine["memory_bytes"] > 2**27
    assert engine["kv_used"] == 0
    assert 0 < engine["idle_s"] < engine["up_s"]
    assert engine["saves_budget_bytes"] > 0


def test_requests_tokens_and_cache_are_counted_while_a_cell_waits_for_them(kernel: Kernel) -> None:
    running = kernel.submit(
        "outs = lab.generate(['One', 'Two', 'Three'], max_tokens=300, ignore_eos=True, temperature=0)\n"
        "print(sum(len(o.outputs[0].token_ids) for o in outs))"
    )
    seen: list[dict[str, Any]] = []

    def enough() -> bool:
        seen.append(main_engine(kernel))
        return seen[-1]["running"] == 3 and seen[-1]["tokens_per_s"] > 0

    wait_until(enough, 60, "three running requests", tick_s=0.3)
    assert seen[-1]["state"] == wire.BUSY
    assert seen[-1]["idle_s"] == 0
    assert 0 < seen[-1]["kv_used"] < 1
    assert running.finish().stdout.strip() == "900"
    assert main_engine(kernel)["running"] == 0


def test_an_edit_is_told_with_its_cell_and_switched_from_the_panel(kernel: Kernel) -> None:
    run_cell(kernel, EDIT, "cell-1")
    run_cell(kernel, EDIT.replace("3", "4"), "cell-2")
    (edit,) = main_engine(kernel)["edits"]
    assert (edit["name"], edit["version"], edit["on"]) == ("probe", 2, True)
    assert (edit["cell_id"], edit["cell_source"]) == ("cell-2", EDIT.replace("3", "4"))
    assert "layers[4]" in edit["source"]
    assert "layers[3]" in edit["previous_source"]
    kernel.good("lab.generate('One', max_tokens=1)")
    assert main_engine(kernel)["edits"][0]["hits"] == 1

    assert act(kernel, wire.EDIT_OFF, edit="probe")["ok"]
    assert kernel.value("lab.edits()['probe'].on") is False
    assert act(kernel, wire.EDIT_ON, edit="probe")["ok"]
    assert kernel.value("lab.edits()['probe'].on") is True
    saves = status(kernel, saves=True)["saves"]
    assert [(save["block"], save["name"], save["prompt"]) for save in saves[:1]] == [
        ("probe", "hidden", "One")
    ]
    assert kernel.value(f"list({saves[0]['code']}.shape)") == saves[0]["shape"]

    number = act(kernel, wire.EDIT_CLEAR, edit="probe")["id"]
    assert action_over(kernel, number, 20)["state"] == wire.DONE
    assert main_engine(kernel)["edits"] == []


def test_requests_are_interrupted_from_the_panel_and_the_engine_stays(kernel: Kernel) -> None:
    running = kernel.submit("lab.generate('One', max_tokens=900, ignore_eos=True)")
    wait_until(lambda: main_engine(kernel)["running"] == 1, 60, "a running request", tick_s=0.2)
    assert act(kernel, wire.INTERRUPT)["text"] == "1 call aborted."
    ran = running.finish(30)
    assert "aborted" in ran.error
    assert kernel.value("len(lab.generate('One', max_tokens=2)[0].outputs[0].token_ids)") == 2


def test_what_cannot_be_done_is_said_in_one_line(kernel: Kernel) -> None:
    for content, words in (
        ({wire.ACTION: "dance"}, "does not know 'dance'"),
        ({wire.ACTION: wire.EDIT_ON, "edit": "prob"}, "No edit is called 'prob'"),
        ({wire.ACTION: wire.STOP, "engine": "mian"}, "No engine is called 'mian'. Did you mean 'main'?"),
        ({wire.ACTION: wire.CHECK, "model": ""}, "A model is needed"),
        ({wire.ACTION: wire.CHECK, "model": "demo", "options": "max_model_length=5"}, "max_model_len"),
        ({wire.ACTION: wire.CHECK, "model": "./nowhere"}, "There is no model at"),
    ):
        answer = control(kernel, wire.ACTION_REQUEST, **content)
        assert not answer["ok"]
        assert words in answer["text"]
        assert "\n" not in answer["text"]
    assert act(kernel, wire.CHECK, model="demo", options="max_model_len=512")["ok"]
    assert "vLLM" in act(kernel, wire.LOG)["text"]


def test_a_choice_of_edits_from_the_panel_is_the_kernels_and_of_no_other(kernel: Kernel) -> None:
    text = "lab.generate('The Eiffel Tower is in', max_tokens=4, temperature=0)[0].outputs[0].text"
    plain = kernel.value(text)
    run_cell(kernel, "%%edit mute\nmodel.model.layers[2].output[1][:] = 0", "cell-1")
    assert act(kernel, wire.EDIT_DEFAULT, edits=[])["ok"]
    engine = main_engine(kernel)
    assert (engine["chooses_edits"], engine["default_edits"], engine["edits"][0]["on"]) == (True, [], False)
    assert kernel.value(text) == plain
    answer = act(kernel, wire.EDIT_DEFAULT, edits=["mute", "later"])
    assert answer == {"ok": True, "text": "Requests are refused until this edit is installed: later."}
    assert kernel.value("engine.default_edits") == ["mute", "later"]
    assert not act(kernel, wire.EDIT_DEFAULT, edits="mute")["ok"]
    assert act(kernel, wire.EDIT_DEFAULT, edits=["mute"])["ok"]
    assert kernel.value(text) != plain
    assert act(kernel, wire.EDIT_DEFAULT, edits=None)["ok"]
    assert main_engine(kernel)["chooses_edits"] is False


def test_what_a_cell_would_save_is_told_while_the_kernel_computes(kernel: Kernel) -> None:
    cell = "%%trace 'One two', max_tokens=1\nhidden = model.model.layers[3].output[0].save()"
    running = kernel.submit(
        "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: sum(range(1000))"
    )
    running.until(lambda message: message["msg_type"] == "execute_input")
    began_s = time.monotonic()
    told = act(kernel, wire.FORECAST, cell=cell)["forecast"]
    assert (told["saves"], told["requests"], told["at_most"]) == (1, 1, False)
    assert told["bytes"] == 2 * 576 * 2
    assert time.monotonic() - began_s < ANSWER_LIMIT_S
    assert running.finish().ok
    assert act(kernel, wire.FORECAST, cell="x = 1")["forecast"] is None
    assert main_engine(kernel)["running"] == 0


def test_sleep_is_refused_on_a_cpu_with_the_reason_the_panel_shows(kernel: Kernel) -> None:
    reason = main_engine(kernel)["no_sleep"]
    assert "runs on the CPU" in reason
    assert act(kernel, wire.SLEEP) == {"ok": False, "text": reason}
    assert main_engine(kernel)["state"] == wire.READY
    assert reason in kernel.run("%engine sleep").error


class Page:
    """A page that is told of changes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.told: list[tuple[float, dict[str, Any]]] = []
        self._send(
            "comm_open", {"comm_id": "page", "target_name": wire.COMM_TARGET, "data": {"visible": True}}
        )

    def close(self) -> None:
        self._send("comm_close", {"comm_id": "page", "data": {}})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        client = self.kernel.client
        client.shell_channel.send(client.session.msg(kind, content))

    def until(self, wanted: Any, limit_s: float) -> float:
        """Waits for a status; when it came."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            try:
                message: Message = self.kernel.client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "page":
                self.told.append((time.monotonic(), message["content"]["data"]))
                if wanted(message["content"]["data"]):
                    return time.monotonic()
        raise AssertionError(f"not told within {limit_s} s: {self.told}")


def test_a_page_is_told_of_changes(kernel: Kernel) -> None:
    page = Page(kernel)
    page.until(lambda told: told["engines"][0]["state"] == wire.READY, 20)
    run_cell(kernel, EDIT, "cell-1")
    page.until(lambda told: [e["name"] for e in told["engines"][0]["edits"]] == ["probe"], 5)
    # Nothing changes now, so it is told every three seconds and not oftener.
    began_s, before = time.monotonic(), len(page.told)
    page.until(lambda _: time.monotonic() - began_s > 8, 15)
    assert 2 <= len(page.told) - before <= 5
    page.close()


@newest_only
def test_a_page_is_told_of_a_death_within_five_seconds_and_the_engine_comes_back(kernel: Kernel) -> None:
    page = Page(kernel)
    page.until(lambda told: told["engines"][0]["state"] == wire.READY, 20)
    run_cell(kernel, EDIT, "cell-1")
    page.until(lambda told: [e["name"] for e in told["engines"][0]["edits"]] == ["probe"], 5)
    core = next(p for p in kernel.engine_processes() if "EngineCore" in p.name)
    psutil.Process(core.pid).send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    came_s = page.until(lambda told: told["engines"][0]["state"] == wire.DEAD, 10)
    assert came_s - killed_s < 5
    assert page.told[-1][1]["engines"][0]["cause"]
    page.close()

    number = act(kernel, wire.RESTART)["id"]
    assert status(kernel)["actions"][-1]["action"] == wire.RESTART
    assert action_over(kernel, number, 240)["state"] == wire.DONE
    engine = main_engine(kernel)
    assert engine["state"] == wire.READY
    assert [edit["name"] for edit in engine["edits"]] == ["probe"]


@newest_only
def test_an_engine_is_started_given_up_and_stopped_from_the_panel(kernel: Kernel) -> None:
    number = act(kernel, wire.STOP)["id"]
    over = action_over(kernel, number, 60)
    assert (over["state"], "stopped in" in over["text"]) == (wire.DONE, True)
    assert status(kernel)["engines"] == []

    number = act(kernel, wire.START, model="demo", options="max_model_len=1024")["id"]
    wait_until(lambda: status(kernel)["engines"], 60, "an engine that starts", tick_s=0.2)
    engine = main_engine(kernel)
    assert engine["state"] == wire.STARTING
    assert engine["phase"]
    wait_until(lambda: main_engine(kernel)["phase_s"] > 3, 60, "a start under way", tick_s=0.5)
    assert act(kernel, wire.STOP)["ok"]
    over = action_over(kernel, number, 60)
    assert over["state"] == wire.FAILED
    assert "given up" in over["text"]
    wait_until(lambda: not kernel.engine_processes(), 20, "what was started is left", tick_s=0.5)

    number = act(kernel, wire.START, model="demo", options="max_model_len=1024")["id"]
    assert action_over(kernel, number, 240)["state"] == wire.DONE
    assert kernel.value("engine.name") == "main"
    assert len(kernel.value("lab.generate('One', max_tokens=2)[0].outputs[0].token_ids")) == 2


def test_after_an_unload_nothing_listens(kernel: Kernel) -> None:
    kernel.good("%unload_ext nnsight_lab")
    try:
        client = kernel.client
        client.control_channel.send(client.session.msg(wire.STATUS_REQUEST, {}))
        with pytest.raises(queue.Empty):
            client.get_control_msg(timeout=1)
    finally:
        kernel.good("%load_ext nnsight_lab")
    assert main_engine(kernel)["state"] == wire.READY
