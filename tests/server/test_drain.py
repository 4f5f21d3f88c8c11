"""A server that is asked to end: what runs may finish, for a while, and nothing stays behind."""

from __future__ import annotations

import signal

import pytest

from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineDied, ServerError
from tests.server.conftest import TOKENS, gone, start
from tests.waiting import in_background, until

pytestmark = [
    pytest.mark.engine,
    # What a client of a Unix socket leaves that cannot connect.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

PROMPT = {"model": "demo", "prompt": "Once", "ignore_eos": True}


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


def test_when_the_time_to_finish_is_over_the_rest_is_aborted_and_told(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    server = start(tmp_path, "--drain-s=1", "--max-num-seqs=2", path=folder / "lab.sock")
    engine = RemoteEngine("lost", server.url)
    engine.start()
    processes = server.processes()
    calls = [
        in_background(lambda: engine.generate("Once", max_tokens=1000, ignore_eos=True)) for _ in range(3)
    ]
    until(lambda: server.figures()["requests"] == 3, 30, "all, of which one waits")
    server.process.send_signal(signal.SIGTERM)
    for call in calls:
        with pytest.raises((EngineDied, ServerError), match=r"shut down|shutting down"):
            call()
    assert server.process.wait(timeout=60) == 0
    assert gone(processes, 20) == []
    engine.stop()
