"""One JupyterHub with its proxy, the engine as its service, and a kernel in the servers of two users."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.server.conftest import gone
from tests.server.hub.behind import PROXY, Hub, HubKernel


@dataclass
class Behind:
    """What runs.

    Attributes:
        hub: The Hub and its proxy.
        engine: The engine's server.
        alice: A kernel in her server.
        bob: One in his.
    """

    hub: Hub
    engine: subprocess.Popen[bytes]
    alice: HubKernel
    bob: HubKernel

    def processes(self) -> list[psutil.Process]:
        """The engine's."""
        parent = psutil.Process(self.engine.pid)
        return [parent, *parent.children(recursive=True)]

    def end_engine(self) -> None:
        """End the engine, and see that nothing of it is left."""
        processes = self.processes()
        self.engine.terminate()
        left = gone(processes, 30)
        for one in left:
            one.kill()
        self.engine.wait(10)
        assert not left, f"left after SIGTERM: {left}"


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    if not PROXY.exists():
        pytest.skip("no configurable-http-proxy: scripts/setup.sh hub installs it where node is")
    hub = Hub(tmp_path_factory.mktemp("hub"))
    engine = None
    try:
        hub.start()
        engine = hub.serve()
        hub.ready()
        for user in ("alice", "bob"):
            hub.spawn(user)
        kernels = [hub.kernel(user) for user in ("alice", "bob")]
        hub.served(engine)
        found = Behind(hub, engine, *kernels)
        yield found
        engine = found.engine
        for kernel in kernels:
            kernel.close()
        found.end_engine()
    finally:
        if engine is not None and engine.poll() is None:
            engine.kill()
            engine.wait()
        hub.close()
