"""Two replicas behind a router that goes by the token: each user stays on one."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import pytest

from nnsight_lab.engine.remote import RemoteEngine
from tests.server.conftest import TOKENS, Server, end, start
from tests.server.test_served import GREEDY, PARIS, TOWER, mute, text_of

pytestmark = pytest.mark.engine


class Router:
    """Passes a connection on to the replica of the token in its first request, as nginx's ``hash`` does."""

    def __init__(self, urls: list[str]) -> None:
        self._ports = [urlsplit(url).port for url in urls]
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def place(self, token: str) -> int:
        """Which replica a token's user is on."""
        return hashlib.sha256(f"bearer {token}".encode()).digest()[0] % len(self._ports)

    def close(self) -> None:
        """Take no more connections."""
        self._listening.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (chunk := client.recv(65536)):
            head += chunk
        lines = head.decode("latin-1").lower().splitlines()
        value = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("authorization:")), ""
        )
        # Of the lower-case token, as the tests' are.
        port = self._ports[hashlib.sha256(value.encode()).digest()[0] % len(self._ports)]
        server = socket.create_connection(("127.0.0.1", port))
        server.sendall(head)
        back = threading.Thread(target=_pipe, args=(server, client), daemon=True)
        back.start()
        _pipe(client, server)
        back.join()
        client.close()
        server.close()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.fixture(scope="module")
def replicas(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Router, list[Server]]]:
    """The tests' server, and another."""
    other = start(tmp_path_factory.mktemp("replica"))
    router = Router([server.url, other.url])
    yield router, [server, other]
    router.close()
    end(other)


def test_users_stay_on_their_replica_with_edits_saves_and_openai_requests(replicas) -> None:
    router, servers = replicas
    first = next(name for name in TOKENS if router.place(TOKENS[name]) == 0)
    second = next(name for name in TOKENS if router.place(TOKENS[name]) == 1)
    kernels = {name: RemoteEngine(name.strip("*"), router.url, TOKENS[name]) for name in (first, second)}
    for name, kernel in kernels.items():
        kernel.start()
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key=TOKENS[name], max_retries=0) as client:
            # One name, and an effect on one's own requests only.
            assert client.completions.create(model="demo", prompt=TOWER, **GREEDY).choices[0].text == PARIS
            mute(kernel)
            assert text_of(kernel) != PARIS
            assert text_of(kernel, edits=[]) == PARIS
            assert client.completions.create(model="demo", prompt=TOWER, **GREEDY).choices[0].text != PARIS
    assert [one.figures()["leases"] for one in servers] == [1, 1]
    assert [one.figures()["edits"] for one in servers] == [1, 1]
    for kernel in kernels.values():
        kernel.stop()
    assert [one.figures()["edits"] for one in servers] == [0, 0]
