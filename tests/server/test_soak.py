"""OpenAI requests under a saving edit leave nothing; `nnsight_lab.bench.soak_served` sends ten thousand."""

from __future__ import annotations

import pytest

from nnsight_lab.bench.soak_served import growth, install, soak
from nnsight_lab.wire.serving import PREFIX
from tests.waiting import until

pytestmark = pytest.mark.engine

#: What one request of the edit saves: thirty layers of five tokens.
SAVED = 30 * 5 * 576 * 2


def test_requests_of_openai_clients_leave_no_entry_and_no_memory(attach, server):
    engine = attach("*root")
    before = server.figures()["kept_bytes"]
    install(engine)
    looks = soak(lambda: server.http("*root"), "demo", server.process.pid, requests=240, every=60, at_once=8)
    assert [look.tracked for look in looks] == [0] * 5
    # Kept for who may still ask: one in fifty.
    assert looks[-1].kept_bytes - before <= 5 * SAVED
    assert looks[-1].slab_bytes == looks[1].slab_bytes
    grown = growth(looks, 60)
    assert {"server", "EngineCore"} <= grown.keys()
    # Were the saves left anywhere, a process would grow by all of them. What a worker grows by on a CPU at
    # first are oneDNN's primitives, one a size of step, and not to be told apart over so few requests.
    for name in ("server", "EngineCore"):
        assert grown[name] < SAVED / 3, grown
    figures = server.figures()
    assert (figures["requests"], figures["edits"]) == (0, 1)


def test_what_the_workers_hold_is_told_to_admins_only(server):
    for user, status in (("alice", 403), ("*root", 200)):
        with server.http(user) as http:
            assert http.get(f"{PREFIX}/workers").status_code == status
    with server.http("*root") as http:
        until(lambda: http.get(f"{PREFIX}/workers").json()["tracked"] == 0, 10)
