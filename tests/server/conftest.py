"""A real server on the demo model, with several users; one for all tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.wire.serving import PREFIX
from tests.waiting import OneEngine

TOKENS = {
    "alice": "alice-0123456789abcdef",
    "bob": "bob-0123456789abcdef",
    "carol": "carol-0123456789abcdef",
    "dan": "dan-0123456789abcdef",
    "eve": "eve-0123456789abcdef",
    "*root": "root-0123456789abcdef",
}
START_S = 300


@dataclass
class Server:
    """One server.

    Attributes:
        process: What was started.
        url: Its address.
        log: What it printed.
        socket: The Unix socket it listens on; None where it has a port.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    socket: Path | None = None

    def http(self, user: str | None = "alice") -> httpx.Client:
        """A plain client of a user."""
        headers = {} if user is None else {"Authorization": f"Bearer {TOKENS[user]}"}
        return client(self.url, self.socket, headers=headers, timeout=60)

    def figures(self) -> dict[str, Any]:
        """The server's books in figures."""
        with self.http("*root" if self.socket is None else None) as http:
            return dict(http.get(f"{PREFIX}/health").raise_for_status().json())

    def processes(self) -> list[psutil.Process]:
        """It and what it started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


def client(url: str, path: Path | None, **more: Any) -> httpx.Client:
    """A plain client of a port, or of a Unix socket."""
    if path is None:
        return httpx.Client(base_url=url, **more)
    return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)), **more)


def start(folder: Path, *flags: str, path: Path | None = None) -> Server:
    """A server that answers: on a port, for users of a list; or on a Unix socket, for its owner."""
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "nnsight_lab", "serve", "demo", "--max-model-len=1024"),
                "--kv-cache-memory-bytes=536870912",
                *(("--host=127.0.0.1", f"--port={port}", f"--tokens={tokens}") if path is None else ()),
                *(() if path is None else (f"--uds={path}",)),
                *flags,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    server = Server(process, f"http://127.0.0.1:{port}" if path is None else f"unix:{path}", log, path)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        if path is not None and not _listens(path):
            time.sleep(0.3)
            continue
        try:
            with client(server.url, path, timeout=2) as http:
                if http.get("/health").status_code == 200:
                    return server
        except httpx.HTTPError:
            time.sleep(0.3)
    process.kill()
    process.wait()
    raise AssertionError(f"no answer: {log.read_text(errors='replace')[-4000:]}")


def _listens(path: Path) -> bool:
    """Whether a Unix socket can be connected to; asked here, since a client that cannot leaks its own."""
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(str(path)) == 0


def gone(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are still there after a while."""
    return list(psutil.wait_procs(processes, timeout=within_s)[1])


def end(server: Server) -> None:
    """End a server as systemd would, and see that nothing of it is left."""
    processes = server.processes()
    server.process.send_signal(signal.SIGTERM)
    left = gone(processes, 30)
    for one in left:
        one.kill()
    server.process.wait(timeout=10)
    assert not left, f"left after SIGTERM: {left}"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, one_engine: OneEngine) -> Iterator[Server]:
    """The server that all tests share."""
    one_engine.stop()  # each has gigabytes, and there are to be three of them at most
    found = start(
        tmp_path_factory.mktemp("server"),
        "--limit=edits=8",
        "--limit=requests=64",
        "--limit=body_s=6",
        "--enable-prompt-tokens-details",
    )
    yield found
    end(found)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes edits as data only, and writes an audit log beside its own."""
    folder = tmp_path_factory.mktemp("strict")
    found = start(folder, "--level=strict", f"--audit={folder / 'audit.jsonl'}")
    yield found
    end(found)


@pytest.fixture
def attach(server: Server) -> Iterator[Callable[..., RemoteEngine]]:
    """Attaches a user's kernel."""
    engines: list[RemoteEngine] = []

    def attached(user: str = "alice", token: str | None = None) -> RemoteEngine:
        engine = RemoteEngine(f"{user.strip('*')}-{len(engines)}", server.url, token or TOKENS[user])
        engine.start()
        engines.append(engine)
        return engine

    yield attached
    for engine in engines:
        engine.stop()
    deadline = time.monotonic() + 10
    while (left := {k: server.figures()[k] for k in ("edits", "leases", "requests")}) != {
        "edits": 0,
        "leases": 0,
        "requests": 0,
    }:
        assert time.monotonic() < deadline, f"left in the server's books: {left}"
        time.sleep(0.1)
