"""A real JupyterHub with its proxy, and kernels of its users' servers, for the engine that is its service.

The Hub is configured by the sample that comes with the package. The proxy is a process of its own, so that
the Hub can be restarted under what runs; everything is started and ended here, by its process.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import psutil
import websocket

import nnsight_lab
from tests.notebook.kernels import Ran
from tests.server.conftest import gone
from tests.waiting import until

HERE = Path(__file__).parent
PROXY = HERE / "node_modules/.bin/configurable-http-proxy"
SAMPLE = Path(nnsight_lab.__file__).parent / "server/examples/jupyterhub_config.py"
START_S = 300
ENGINE_S = 600
CELL_S = 120
BODY_BYTES = 8 * 2**20


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Hub:
    """One JupyterHub and its proxy.

    Attributes:
        url: The proxy's.
        engine_port: Where the proxy looks for the engine.
        service_token: The Hub's token of the engine.
        log: What Hub and proxy printed.
        engine_log: What the engine did.
        service: The engine's address.
        api: The Hub's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "hub.log"
        self.engine_log = folder / "engine.log"
        self.engine_port = free_port()
        self._mark = secrets.token_hex(8)
        self.service_token = secrets.token_hex(16)
        self.tests_token = secrets.token_hex(16)
        proxy, proxy_api, hub = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{proxy}"
        self.service = f"{self.url}/services/nnsight-lab"
        self.api = f"http://127.0.0.1:{hub}/hub/api"
        self._environment = {
            **os.environ,
            "CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(16),
            "LAB_SAMPLE": str(SAMPLE),
            "LAB_PROXY": self.url,
            "LAB_PROXY_API": f"http://127.0.0.1:{proxy_api}",
            "LAB_HUB": f"http://127.0.0.1:{hub}",
            "LAB_ENGINE": f"http://127.0.0.1:{self.engine_port}",
            "LAB_MARK": self._mark,
            "LAB_COOKIES": secrets.token_hex(32),
            "LAB_SERVICE_TOKEN": self.service_token,
            "LAB_TESTS_TOKEN": self.tests_token,
        }
        self._http = httpx.Client(
            base_url=self.api, headers={"Authorization": f"token {self.tests_token}"}, timeout=60
        )
        self._proxy = self._popen(
            [
                *("node", str(PROXY), "--ip=127.0.0.1", f"--port={proxy}"),
                *("--api-ip=127.0.0.1", f"--api-port={proxy_api}"),
                *(
                    f"--default-target=http://127.0.0.1:{hub}",
                    f"--error-target=http://127.0.0.1:{hub}/hub/error",
                ),
            ]
        )
        self._hub: subprocess.Popen[bytes] | None = None
        self._tokens: dict[str, str] = {}

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            return subprocess.Popen(command, cwd=self.folder, env=self._environment, stdout=out, stderr=out)

    def start(self) -> None:
        """Start the Hub; not waited for."""
        self._hub = self._popen([sys.executable, "-m", "jupyterhub", "-f", str(HERE / "hub_config.py")])

    def ready(self) -> None:
        """Wait until it answers through its proxy."""
        assert self._hub is not None
        hub = self._hub

        def answers() -> bool:
            assert hub.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/hub/health", timeout=2).status_code == 200
            return False

        until(answers, START_S, "the Hub answers")

    def stop(self) -> None:
        """End the Hub; its proxy and its users' servers stay."""
        assert self._hub is not None
        self._hub.send_signal(signal.SIGTERM)
        self._hub.wait(30)

    def close(self) -> None:
        """End everything, users' servers and their kernels last: a Hub that ends leaves them."""
        if self._hub is not None and self._hub.poll() is None:
            self.stop()
        self._proxy.terminate()
        self._proxy.wait(10)
        self._http.close()
        servers = [process for process in psutil.process_iter() if self._marked(process)]
        for process in servers:
            process.terminate()
        for process in gone(servers, 20):
            process.kill()

    def _marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("LAB_MARK") == self._mark
        except psutil.Error:
            return False

    def ask(self, method: str, path: str, **json_body: Any) -> Any:
        """Ask the Hub's API as an admin."""
        answer = self._http.request(method, path, json=json_body or None)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the engine, as its unit does; not waited for."""
        command = [sys.executable, "-m", "nnsight_lab", "serve", "demo", "--max-model-len=1024", "--hub"]
        flags = ["--admin-group=nnsight-lab-admins", f"--limit=body_bytes={BODY_BYTES}"]
        where = ["--host=127.0.0.1", f"--port={self.engine_port}"]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "JUPYTERHUB_API_URL": self.api,
            "JUPYTERHUB_API_TOKEN": self.service_token,
        }
        with self.engine_log.open("ab") as out:
            return subprocess.Popen([*command, *flags, *where], env=environment, stdout=out, stderr=out)

    def served(self, engine: subprocess.Popen[bytes]) -> None:
        """Wait until the engine answers through the proxy."""

        def answers() -> bool:
            assert engine.poll() is None, self.engine_log.read_text(errors="replace")[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.service}/health", timeout=5).status_code == 200
            return False

        until(answers, ENGINE_S, "the engine answers")

    def token(self, user: str, *scopes: str) -> dict[str, Any]:
        """A new token of a user, with all that they may do, or with some of it."""
        return dict(
            self.ask(
                "POST", f"/users/{user}/tokens", **({"scopes": list(scopes)} if scopes else {"note": ""})
            )
        )

    def http(self, token: str = "") -> httpx.Client:
        """A plain client of the engine, through the proxy."""
        return httpx.Client(
            base_url=self.service, headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=60
        )

    def spawn(self, user: str) -> None:
        """Start a user's server; not waited for."""
        self.ask("POST", f"/users/{user}/server")

    def kernel(self, user: str) -> HubKernel:
        """A kernel in the server of a user, which is waited for."""
        until(lambda: self.ask("GET", f"/users/{user}")["server"], START_S, "the user's server")
        return HubKernel(f"{self.url}/user/{user}", self.tests_token)


class HubKernel:
    """A kernel of a user's server, through the proxy: started by REST, spoken to by a websocket."""

    def __init__(self, server: str, token: str) -> None:
        self._headers = {"Authorization": f"token {token}"}
        self._http = httpx.Client(base_url=server, headers=self._headers, timeout=60)
        answer = self._http.post("/api/kernels", json={"name": "python3"})
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]
        self._url = f"{server.replace('http', 'ws', 1)}/api/kernels/{self.id}/channels"
        self._sockets: dict[str, websocket.WebSocket] = {}

    def submit(self, cell: str) -> str:
        """Send a cell and do not wait; returns the id of its message."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "username": "",
            "session": self.id,
            "msg_type": "execute_request",
            "version": "5.3",
            "date": "2026-01-01T00:00:00Z",
        }
        content = {"code": cell, "silent": False, "store_history": True, "allow_stdin": False}
        message = {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "channel": "shell",
        }
        # One for each cell: the server closes one whose reader does not answer its pings.
        opened = websocket.create_connection(self._url, header=self._headers, timeout=1)
        self._sockets[header["msg_id"]] = opened
        opened.send(json.dumps(message))
        return str(header["msg_id"])

    def finish(self, sent: str, limit_s: float = CELL_S) -> Ran:
        """What a cell showed, once it is over."""
        ran, deadline, idle = Ran(), time.monotonic() + limit_s, False
        opened = self._sockets.pop(sent)
        while not (idle and ran.reply):
            assert time.monotonic() < deadline, f"no end within {limit_s} s: {ran.messages}"
            try:
                message = json.loads(opened.recv())
            except websocket.WebSocketTimeoutException:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["channel"] == "shell":
                ran.reply = message["content"]
            else:
                ran.messages.append(message)
                idle = idle or message["content"].get("execution_state") == "idle"
        opened.close()
        return ran

    def run(self, cell: str, limit_s: float = CELL_S) -> Ran:
        """Run a cell to its end."""
        return self.finish(self.submit(cell), limit_s)

    def good(self, cell: str) -> Ran:
        """Run a cell that must not fail."""
        ran = self.run(cell)
        assert ran.ok, ran.error
        return ran

    def value(self, expression: str) -> Any:
        """The value of an expression that prints as a Python literal."""
        return ast.literal_eval(self.good(f"print(repr({expression}))").stdout.strip())

    def close(self) -> None:
        """Close the connections; the kernel ends with its server."""
        for opened in self._sockets.values():
            opened.close()
        self._http.close()
