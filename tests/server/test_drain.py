"""A server that is asked to end: what runs may finish, for a while, and nothing stays behind."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace

import pytest

from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineDied, ServerError
from nnsight_lab.server import ending
from nnsight_lab.server.condition import Condition
from nnsight_lab.server.limits import Refused
from tests.server.conftest import TOKENS, gone, start
from tests.waiting import in_background, until

PROMPT = {"model": "demo", "prompt": "Once", "ignore_eos": True}


@pytest.mark.engine
def test_a_first_sigterm_lets_requests_finish_and_a_second_does_not(tmp_path):
    server = start(tmp_path, "--drain-s=300", "--max-num-seqs=4")
    engine = RemoteEngine("lost", server.url, TOKENS["bob"])
    engine.start()
    processes = server.processes()
    assert len(processes) >= 3

    def completion():
        with server.http() as http:
            return http.post("/v1/completions", json={**PROMPT, "max_tokens": 120})

    short = in_background(completion)
    long = in_background(lambda: engine.generate("Once", max_tokens=1000, ignore_eos=True))
    until(lambda: server.figures()["requests"] == 2, 30, "both requests")
    server.process.send_signal(signal.SIGTERM)
    with server.http(None) as http:
        until(lambda: http.get("/ready").status_code == 503, 10, "it is not ready")
        assert http.get("/health").status_code == 200
    with server.http() as http:
        refused = http.post("/v1/completions", json={**PROMPT, "max_tokens": 1})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    with pytest.raises(ServerError, match="shutting down"):
        engine.generate("One")
    done = short()
    assert done.status_code == 200
    assert done.json()["usage"]["completion_tokens"] == 120
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises((EngineDied, ServerError)):
        long()
    assert server.process.wait(timeout=30) == 0
    assert gone(processes, 20) == []
    engine.stop()


class HoldsOn:
    """The desk of a server with requests that end when they are aborted, or never."""

    def __init__(self, *, stubborn: bool) -> None:
        self.requests = 2
        self.stubborn = stubborn
        self.aborted = 0
        self.ledger = self.driver = self

    def figures(self) -> dict[str, int]:
        return {"requests": self.requests}

    def dead(self) -> bool:
        return False

    def abort_all(self) -> None:
        self.aborted += 1
        if not self.stubborn:
            self.requests = 0


@pytest.mark.parametrize("stubborn", [False, True])
def test_when_the_time_to_finish_is_over_the_rest_is_aborted(monkeypatch, stubborn):
    condition = Condition()
    monkeypatch.setattr(ending, "CONDITION", condition)
    monkeypatch.setattr(ending, "_ABORTED_S", 0.3)

    async def scenario():
        desk = HoldsOn(stubborn=stubborn)
        uvicorn = SimpleNamespace(should_exit=False, force_exit=False)
        end = ending.Ending(SimpleNamespace(server=uvicorn), desk, drain_s=0.3)
        end.end(0.3)
        assert condition.ending
        assert not uvicorn.should_exit
        with pytest.raises(Refused, match="shutting down"):
            condition.require()
        condition.ready()  # an engine that is there again does not undo it
        assert condition.ending
        while not uvicorn.should_exit:
            await asyncio.sleep(0.01)
        # What does not end by being aborted is not waited for.
        assert (desk.aborted, uvicorn.force_exit) == (1, stubborn)

    asyncio.run(asyncio.wait_for(scenario(), 30))
