"""Brings the bytes of a large reply straight into memory of the kernel's own, piece after piece.

A general HTTP client hands a body over in chunks of 64 KB that are then joined: 0.3 GB/s of a loopback that
does 3. Here the socket writes into the memory that the tensors will lie in. How much that is was said by the
server, and is believed as far as this machine has it: pages are the system's until bytes arrive for them.
An interrupt is heard between two reads, and a piece whose connection breaks is asked for once more.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import psutil

from nnsight_lab.engine.buffers import Buffers
from nnsight_lab.errors import Interrupted, OverBudget, ServerError
from nnsight_lab.wire.codec import WireError, check_head
from nnsight_lab.wire.serving import PIECE_BYTES, Parked
from nnsight_lab.wire.sizes import shown_bytes

_READ_BYTES = 2**20
_TIMEOUT_S = 60.0
_TRIES = 2


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._path)


class Fetcher:
    """Connections to one server, for whoever fetches.

    Args:
        url: ``http://host:port/prefix``, ``https://…``, or ``unix:/path``.
        headers: Of each request.
        refused: Makes an error of an answer that says no.
    """

    def __init__(
        self, url: str, headers: dict[str, str], refused: Callable[[httpx.Response], Exception]
    ) -> None:
        split = urlsplit(url)
        self._url = url
        self._host, self._port, self._scheme = split.hostname or "localhost", split.port, split.scheme
        self._prefix = "" if split.scheme == "unix" else split.path.rstrip("/")
        self._socket = split.path
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._refused = refused
        self._idle: list[http.client.HTTPConnection] = []
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.buffers = Buffers()

    def bring(
        self,
        path: str,
        parked: Parked,
        *,
        stopped: Callable[[], bool] = lambda: False,
        told: Callable[[int], object] = lambda nbytes: None,
    ) -> memoryview:
        """A whole message.

        Args:
            path: Where it waits.
            parked: What was said of it.
            stopped: Asked between two reads; whether nobody wants it any more.
            told: Called with the bytes of each read.

        Raises:
            Interrupted: It was stopped.
            OverBudget: This machine has no memory for it.
            WireError: It is not what was said.
            ServerError: It is gone, or the server is.
        """
        if not 0 < parked.head_bytes <= parked.nbytes or len(parked.head) not in (0, parked.head_bytes):
            raise WireError(f"a reply of {parked.nbytes} bytes has no head of {parked.head_bytes}")
        free = psutil.virtual_memory().available
        if parked.nbytes > free:
            raise OverBudget(
                f"The reply has {shown_bytes(parked.nbytes)}, and this machine has {shown_bytes(free)} free: "
                "save less (a row, a mean), or fewer prompts at a time.",
                asked_bytes=parked.nbytes,
                allowed_bytes=free,
                values=[],
            )
        view = self.buffers.take(parked.nbytes)
        if parked.head:
            view[: parked.head_bytes] = parked.head
        else:
            self._pieces(path, view, 0, parked.head_bytes, stopped, told)
        check_head(view[: parked.head_bytes], parked.nbytes)
        self._pieces(path, view, parked.head_bytes, parked.nbytes, stopped, told)
        return view

    def close(self) -> None:
        """Let go of the connections, and of memory that nobody looks at."""
        self.buffers.close()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for one in idle:
            one.close()

    def _pieces(
        self,
        path: str,
        view: memoryview,
        start: int,
        stop: int,
        stopped: Callable[[], bool],
        told: Callable[[int], object],
    ) -> None:
        for begin in range(start, stop, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, stop)
            for left in reversed(range(_TRIES)):
                try:
                    self._piece(f"{path}?start={begin}&stop={end}", view[begin:end], stopped, told)
                    break
                except (OSError, http.client.HTTPException) as error:
                    if not left:
                        raise ServerError(
                            f"{self._url} broke off in the middle of a reply ({error})."
                        ) from None

    def _piece(
        self, target: str, view: memoryview, stopped: Callable[[], bool], told: Callable[[int], object]
    ) -> None:
        connection = self._connection()
        whole, at = False, 0
        answer: http.client.HTTPResponse | None = None
        try:
            connection.request("GET", self._prefix + target, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != httpx.codes.OK:
                content = answer.read(2**16)
                raise self._refused(
                    httpx.Response(answer.status, headers=answer.headers.items(), content=content)
                )
            if answer.length != len(view):
                raise WireError(f"a piece of {len(view):,} bytes was asked for, and {answer.length} are sent")
            while at < len(view):
                if stopped():
                    raise Interrupted("the reply is not wanted any more")
                count = answer.readinto(view[at : at + _READ_BYTES])
                if not count:
                    raise ConnectionError("the connection was closed")
                at += count
                told(count)
            answer.read()
            whole = True
        finally:
            if not whole:
                told(-at)
                if answer is not None:
                    answer.close()
            self._back(connection, whole)

    def _connection(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._scheme == "unix":
            return _UnixConnection(self._socket)
        if self._scheme == "https":
            if self._tls is None:
                self._tls = httpx.create_ssl_context(trust_env=False)
            return http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)

    def _back(self, connection: http.client.HTTPConnection, whole: bool) -> None:
        """A connection is free again; one that stands in the middle of an answer is no use."""
        with self._lock:
            if whole and not self._closed:
                self._idle.append(connection)
                return
        connection.close()
