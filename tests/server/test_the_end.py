"""A server that is killed: nothing of it stays, and its kernels are told."""

from __future__ import annotations

import pytest

from nnsight_lab.engine import remote_driver
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import EngineDied, LabError
from tests.server.conftest import gone, start
from tests.waiting import in_background, until

pytestmark = [
    pytest.mark.engine,
    # What a client of a Unix socket leaves that cannot connect.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def test_a_killed_server_leaves_no_process_and_its_kernels_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_driver, "RENEW_S", 0.5)
    monkeypatch.setattr(remote_driver, "LEASE_S", 2.0)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    # On a Unix socket, for its owner alone: no token is asked for.
    server = start(tmp_path, "--max-num-seqs=4", path=folder / "lab.sock")
    engine = RemoteEngine("lost", server.url)
    engine.start()
    assert (engine.served.user, engine.served.admin) == ("owner", True)
    running = in_background(lambda: engine.generate("Once", max_tokens=1000, ignore_eos=True))
    until(lambda: server.figures()["requests"] == 1, 30, "its request")
    processes = server.processes()
    assert len(processes) >= 3
    server.process.kill()
    server.process.wait()
    assert gone(processes, 10) == []
    with pytest.raises(LabError):
        running()
    until(lambda: engine.state()[0] == "dead", 15, "the kernel knows")
    with pytest.raises(EngineDied, match=r"Engine 'lost' is lost: .*does not answer"):
        engine.generate("One")
    engine.stop()
