"""Drives an engine that a server runs: calls and edits over HTTP, each answer read by the codec alone.

A call is one POST whose answer grows; it is read by a thread of its own, so that a caller is interrupted at
once, whatever the network does. A thread renews the lease that edits and calls hang on: a server that it does
not reach for a while counts as gone.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.driver import Driver
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.engine.proxy_words import said_by_proxy
from nnsight_lab.engine.remote_output import RemoteOutput
from nnsight_lab.errors import EngineDied, Interrupted, LabError, RequestRefused, ServerError
from nnsight_lab.wire.codec import WireError, decode, encode
from nnsight_lab.wire.keys import (
    BUDGET_KEY,
    CLEAR,
    COUNT,
    LOOK,
    PEEK,
    REGISTER,
    RELEASE,
    TRACE_BLOCK,
    TRACE_KEY,
)
from nnsight_lab.wire.serving import (
    CONTENT_TYPE,
    FRAME_BYTES,
    LEASE_S,
    PREFIX,
    PROTOCOL,
    RENEW_S,
    CallAsked,
    CallOver,
    EditAsked,
    OutputSeen,
    RequestAsked,
    SavesSeen,
    Served,
)

_CALLS = 256
_QUESTIONS = 8
_CONNECT_S = 5.0
_ANSWER_S = 60.0


class RemoteDriver(Driver):
    """Drives the engine of one server.

    Args:
        url: ``http://host:port``, with the path of a hub's service where there is one, or ``unix:/path``.
        token: Sent with each request; "" for none.
    """

    def __init__(self, url: str, token: str) -> None:
        super().__init__()
        self.url = url
        self.lease = uuid.uuid4().hex[:16]
        self.served: Served | None = None
        #: Why the server counts as gone.
        self.cause = ""
        split = urlsplit(url)
        socket = split.path if split.scheme == "unix" else None
        self._base = "http://localhost" if socket else url.rstrip("/")
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            transport=httpx.HTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None)),
            trust_env=False,
        )
        #: Each call keeps a thread for as long as it lasts; what is asked beside them must not wait for one.
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="nnsight-lab-call")
        self._threads = ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="nnsight-lab-ask")
        #: Called when the server let go of the lease and of what hung on it: this kernel was silent too long.
        self.lapsed: Callable[[], object] = lambda: None
        self._under_way: dict[int, str] = {}
        #: Edits on their way; a call that is submitted after one must not overtake it.
        self._installing: set[Future[list[Any]]] = set()
        self._ended = threading.Event()
        self._renewed = time.monotonic()

    # -- attaching -----------------------------------------------------------------------------------

    def attach(self) -> Served:
        """Ask the server what it serves, and begin a lease.

        Raises:
            ServerError: It is not there, lets nobody in, or is of another version.
        """
        answer = self._asked("GET", "/served")
        try:
            found = decode(bytearray(answer.content))
        except WireError as error:
            raise ServerError(f"{self.url} serves nothing this version knows: {error}.") from None
        if type(found) is not Served or found.protocol != PROTOCOL:
            said = found.versions.get("nnsight_lab", "?") if type(found) is Served else "?"
            raise ServerError(
                f"{self.url} runs nnsight_lab {said}, which speaks another protocol than this kernel's: "
                "use one version on both sides."
            )
        self._asked("PUT", f"/leases/{self.lease}")
        self._renewed = time.monotonic()
        self.served = found
        threading.Thread(target=self._renew, daemon=True, name="nnsight-lab-lease").start()
        return found

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                answer = self._asked("PUT", f"/leases/{self.lease}")
                self._renewed = time.monotonic()
                if answer.status_code == httpx.codes.CREATED:
                    self.lapsed()
            except LabError as error:
                status = error.status if isinstance(error, ServerError) else 0
                if status in (401, 403) or time.monotonic() - self._renewed > LEASE_S:
                    self.cause = str(error)
                    return

    def _asked(self, method: str, path: str, **more: Any) -> httpx.Response:
        """One request that is answered at once.

        Raises:
            ServerError: It was refused, or nothing was answered.
        """
        try:
            answer = self._http.request(method, f"{self._base}{PREFIX}{path}", **more)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from None
        if not answer.is_success:
            raise refused(self.url, answer)
        return answer

    # -- what drivers do -------------------------------------------------------------------------------

    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        """Refused: the server starts its engine."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self.served is not None

    def processor(self) -> Any:
        return None

    def sleep(self) -> Future[None]:
        """Refused: others use it, too."""
        raise ServerError("A shared engine is not put to sleep by one of its users.")

    def wake(self) -> Future[None]:
        """Refused, as `sleep`."""
        raise ServerError("A shared engine is not woken by one of its users.")

    def dead(self) -> bool:
        return bool(self.cause)

    def unfinished(self) -> int:
        return len(self._under_way)

    def stop(self) -> None:
        """Let go of the lease; the engine goes on for others."""
        self._ended.set()
        if self.served is not None and not self.cause:
            try:
                self._asked("DELETE", f"/leases/{self.lease}")
            except ServerError:
                return  # it ends by itself

    def close(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        ways: dict[str, Callable[..., Any]] = {
            REGISTER: self._install,
            CLEAR: self._clear,
            RELEASE: lambda _: [],
            COUNT: lambda: 0,
            LOOK: lambda question: self._relayed("look", question),
            PEEK: lambda question: self._relayed(f"leases/{self.lease}/peek", question),
        }
        way = ways.get(method)
        if way is None:
            failed: Future[list[Any]] = Future()
            failed.set_exception(ServerError(f"A shared engine does not take {method!r}."))
            return failed
        answer = self._threads.submit(lambda: [way(*args)])
        if method == REGISTER:
            self._installing.add(answer)
            answer.add_done_callback(self._installing.discard)
        return answer

    def _install(self, edit_id: str, payload: bytes, name: str) -> None:
        asked = EditAsked(edit_id, name, payload, self.lease, scoped=name == TRACE_BLOCK)
        self._asked("POST", "/edits", content=encode(asked), headers={"Content-Type": CONTENT_TYPE})

    def _relayed(self, route: str, question: bytes) -> bytearray:
        """The workers' answer to a question of theirs."""
        headers = {"Content-Type": CONTENT_TYPE}
        return bytearray(self._asked("POST", f"/{route}", content=question, headers=headers).content)

    def _clear(self, edit_ids: list[str]) -> None:
        for one in edit_ids:
            self._asked("DELETE", f"/edits/{quote(one, safe='')}")

    # -- calls -----------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        call_id = uuid.uuid4().hex[:16]
        self._under_way[id(call)] = call_id
        self._calls.submit(self._run, call, call_id, set(self._installing))

    def _run(self, call: Call, call_id: str, first: set[Future[list[Any]]]) -> None:
        try:
            wait(first)
            if not call.aborted.is_set():
                self._exchange(call, call_id)
            error: BaseException | None = None
        except BaseException as raised:
            error = raised
        self._under_way.pop(id(call), None)
        # An aborted call ends quietly, however its answer ended.
        call.resolve(None if call.aborted.is_set() else error)

    def _exchange(self, call: Call, call_id: str) -> None:
        asked = CallAsked(call_id, self.lease, tuple(map(_asked_of, call.requests)), call.live)
        body = encode(asked)
        try:
            with self._http.stream(
                "POST",
                f"{self._base}{PREFIX}/calls",
                content=body,
                headers={"Content-Type": CONTENT_TYPE},
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refused(self.url, answer)
                for message in _messages(answer.iter_raw()):
                    if self._took(call, decode(message)):
                        return
        except httpx.HTTPError as error:
            self._still_here()
            raise unreachable(self.url, error) from None
        self._still_here()
        raise ServerError(f"{self.url} ended its answer before the call was over.")

    def _still_here(self) -> None:
        """See that the server still lets this kernel in: where it does not, that is why a call broke off.

        Raises:
            ServerError: It does not, and says why.
        """
        try:
            answer = self._asked("PUT", f"/leases/{self.lease}")
            if answer.status_code == httpx.codes.CREATED:
                self.lapsed()
        except ServerError as error:
            if error.status:
                raise

    def _took(self, call: Call, seen: Any) -> bool:
        """Take one message; whether it was the last."""
        if type(seen) is OutputSeen:
            output = RemoteOutput.of(call.requests[seen.place].id, seen)
            call.took(seen.place, output)
            if seen.finished:
                self.finished(output)
            elif call.peeks is not None and not seen.place and call.peeks.due():
                self._peek(call.peeks, call.requests[0].id)
        elif type(seen) is SavesSeen:
            call.requests[seen.place].saves = seen.saves
        elif type(seen) is CallOver:
            if seen.error == Interrupted.__name__:
                call.aborted.set()
            elif seen.error:
                kind = {"RequestRefused": RequestRefused}.get(seen.error)
                if kind is None:
                    raise EngineDied(f"The engine of {self.url} died: {seen.text}.", cause=seen.text)
                raise kind(seen.text)
            return True
        else:
            raise WireError(f"a call is not answered by a {type(seen).__name__}")
        return False

    def _peek(self, peeks: Peeks, request_id: str) -> None:
        """Look at what a running request saves, beside its tokens, which do not wait for it."""

        def told(answer: Future[list[Any]]) -> None:
            if answer.exception() is None:
                peeks.took(answer.result())
            else:  # the request itself says what became of the engine
                peeks.over()

        self.rpc(PEEK, peeks.question(request_id)).add_done_callback(told)

    def abort(self, call: Call) -> Future[None]:
        call.aborted.set()
        call_id = self._under_way.get(id(call))

        def ask() -> None:
            if call_id is not None:
                self._asked("DELETE", f"/leases/{self.lease}/calls/{call_id}")

        return self._threads.submit(ask)


def _asked_of(request: LabRequest) -> RequestAsked:
    extra = request.params.extra_args or {}
    return RequestAsked(
        id=request.id,
        prompt=request.prompt,
        settings=dict(request.params.settings),
        edits=tuple(version.id for version in request.edits),
        block=extra.get(TRACE_KEY),
        save_budget=extra.get(BUDGET_KEY),
        wants_result=request.wants_result,
        lora=str(request.lora_request or ""),
    )


def _messages(chunks: Iterator[bytes]) -> Iterator[bytearray]:
    """The messages of an answer, each in memory of its own, which what is in it will look into."""
    prefix = bytearray()
    message: bytearray | None = None
    filled = 0
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            if message is None:
                need = FRAME_BYTES - len(prefix)
                prefix += view[:need]
                view = view[need:]
                if len(prefix) == FRAME_BYTES:
                    message, filled = bytearray(int.from_bytes(prefix, "little")), 0
                    prefix = bytearray()
                continue
            took = min(len(view), len(message) - filled)
            message[filled : filled + took] = view[:took]
            filled += took
            view = view[took:]
            if filled == len(message):
                yield message
                message = None


def refused(url: str, answer: httpx.Response) -> LabError:
    """The error of an answer that says no."""
    text = said_by_proxy(url, answer)
    try:
        told = {} if text else answer.json()
        text = text or str(told["error"]["message"] if "error" in told else told["detail"])
    except (ValueError, KeyError, TypeError):
        text = answer.text[:200] or answer.reason_phrase
    after = answer.headers.get("retry-after", "")
    when = f" Try again in {after} s." if after else ""
    if answer.status_code == 400:
        return RequestRefused(text)
    return ServerError(
        f"{text}{when}", status=answer.status_code, retry_after_s=float(after) if after.isdigit() else None
    )


def unreachable(url: str, error: Exception) -> ServerError:
    """Nothing was answered."""
    why = str(error).strip() or type(error).__name__
    return ServerError(f"{url} does not answer ({why}): is the server running, and the address right?")
