"""Drives an engine that a server runs: calls and edits over HTTP, each answer read by the codec alone.

A call is one POST whose answer grows; it is read by a thread of its own, so that a caller is interrupted at
once, whatever the network does. A thread renews the lease that edits and calls hang on: a server that it does
not reach for a while counts as gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from nnsight_lab.engine.bounded import Bounded
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.driver import Driver, receive
from nnsight_lab.engine.fetching import Fetcher
from nnsight_lab.engine.frames import messages
from nnsight_lab.engine.peeks import Peeks
from nnsight_lab.engine.proxy_words import said_by_proxy
from nnsight_lab.engine.remote_output import RemoteOutput
from nnsight_lab.engine.same_host import NextDoor, no_door
from nnsight_lab.errors import EngineDied, Interrupted, LabError, RequestRefused, ServerError
from nnsight_lab.wire.codec import WireError, decode, encode
from nnsight_lab.wire.keys import (
    BUDGET_KEY,
    CLEAR,
    COUNT,
    DECLARE,
    DECLARED_KEY,
    LOOK,
    PEEK,
    REGISTER,
    RELEASE,
    STEPS,
    TRACE_BLOCK,
    TRACE_KEY,
)
from nnsight_lab.wire.serving import (
    CONTENT_TYPE,
    LEASE_S,
    PREFIX,
    PROTOCOL,
    RENEW_S,
    TAKES,
    TAKES_STEPS,
    CallAsked,
    CallOver,
    EditAsked,
    OutputSeen,
    Parked,
    RequestAsked,
    SavesHere,
    SavesSeen,
    Served,
)

#: HTTP's for one who asks too much at once.
_TOO_MANY = 429
_CALLS = 256
_QUESTIONS = 8
_CONNECT_S = 5.0
_ANSWER_S = 60.0


class RemoteDriver(Driver):
    """Drives the engine of one server, whose workers keep nobody's blocks.

    Args:
        url: ``http://host:port``, with the path of a hub's service where there is one, or ``unix:/path``.
        token: Sent with each request; "" for none.
        same_host: Whether saves are mapped, where the server is this user's and on this machine.
    """

    keeps_blocks = False

    def __init__(self, url: str, token: str, *, same_host: bool = True) -> None:
        super().__init__()
        self.url = url
        self.lease = uuid.uuid4().hex[:16]
        self.served: Served | None = None
        #: Why the server counts as gone.
        self.cause = ""
        split = urlsplit(url)
        socket = split.path if split.scheme == "unix" else None
        self._base = "http://localhost" if socket else url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._fetcher = Fetcher(url, headers, partial(refused, url))
        self._same_host = same_host
        self._door: NextDoor | None = None
        self.home.reader.opener = no_door
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            transport=Bounded(uds=socket, limits=httpx.Limits(max_connections=None)),
            trust_env=False,
        )
        #: Each call keeps a thread for as long as it lasts; what is asked beside them must not wait for one.
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="nnsight-lab-call")
        self._threads = ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="nnsight-lab-ask")
        #: Called when the server let go of the lease and of what hung on it: this kernel was silent too long.
        self.lapsed: Callable[[], object] = lambda: None
        #: Of edits, by id: what of a prompt they touch.
        self.reaches: dict[str, str] = {}
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
        if self._same_host:
            self._enter(found.door)
        self.served = found
        threading.Thread(target=self._renew, daemon=True, name="nnsight-lab-lease").start()
        return found

    @property
    def road(self) -> str:
        """How large saves come: ``mapped`` from the server's memory, or ``fetched``."""
        return "fetched" if self._door is None else "mapped"

    def _enter(self, name: str) -> None:
        """Map saves rather than fetch them, where the server is this user's and on this machine."""
        door = NextDoor.find(name)
        if door is None:
            return
        ticket = self._asked("POST", f"/leases/{self.lease}/door").json()["ticket"]
        if not door.enter(ticket):
            door.close()
            return
        self._door = door
        self.home.reader.opener = door.open

    def _give_back(self, pieces: bytes) -> list[str]:
        """Say which pieces nobody looks at; returns slabs that need not be mapped any more."""
        if self._door is None:
            return []
        gone = decode(self._asked("POST", f"/leases/{self.lease}/pieces", content=pieces).content)
        return gone if type(gone) is list and all(type(path) is str for path in gone) else []

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._fetcher.buffers.tidy()
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
        self._fetcher.close()
        if self._door is not None:
            self._door.close()

    def rpc(self, method: str, *args: Any) -> Future[list[Any]]:
        ways: dict[str, Callable[..., Any]] = {
            REGISTER: self._install,
            DECLARE: self._declare,
            CLEAR: self._clear,
            RELEASE: self._give_back,
            COUNT: lambda: 0,
            LOOK: lambda question: self._relayed("look", question),
            STEPS: self._steps_ran,
            PEEK: lambda question: self._relayed(f"leases/{self.lease}/peek", question),
        }
        way = ways.get(method)
        if way is None:
            failed: Future[list[Any]] = Future()
            failed.set_exception(ServerError(f"A shared engine does not take {method!r}."))
            return failed
        answer = self._threads.submit(lambda: [way(*args)])
        if method in (REGISTER, DECLARE):
            self._installing.add(answer)
            answer.add_done_callback(self._installing.discard)
        return answer

    def _install(self, edit_id: str, payload: bytes, name: str) -> None:
        reach = self.reaches.get(edit_id, "prompt")
        scoped = name == TRACE_BLOCK
        self._edit(EditAsked(edit_id, name, payload, self.lease, scoped=scoped, reach=reach))

    def _declare(self, edit_id: str, payload: bytes, name: str) -> None:
        self._edit(EditAsked(edit_id, name, payload, self.lease, declared=True))

    def _edit(self, asked: EditAsked) -> None:
        self._asked("POST", "/edits", content=encode(asked), headers={"Content-Type": CONTENT_TYPE})

    def _relayed(self, route: str, question: bytes) -> bytearray:
        """The workers' answer to a question of theirs."""
        headers = {"Content-Type": CONTENT_TYPE}
        return bytearray(self._asked("POST", f"/{route}", content=question, headers=headers).content)

    def _steps_ran(self) -> dict[str, bytes]:
        """How steps ran; a server of an older version has no such route."""
        return {"figures": self._asked("GET", "/steps").content}

    def activity(self) -> object:
        """Never the same: others use the engine, too."""
        return object()

    def _clear(self, edit_ids: list[str]) -> None:
        for one in edit_ids:
            self.reaches.pop(one, None)
            self._asked("DELETE", f"/edits/{quote(one, safe='')}")

    # -- calls -----------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        self._under_way[id(call)] = ""  # nothing that the server knows yet
        self._calls.submit(self._run, call, set(self._installing))

    def _run(self, call: Call, first: set[Future[list[Any]]]) -> None:
        try:
            wait(first)
            if not call.aborted.is_set():
                self._exchange(call)
            error: BaseException | None = None
        except BaseException as raised:
            error = raised
        call_id = self._under_way.pop(id(call), "")
        if call_id and (error is not None or call.aborted.is_set()):
            # What waits for this call, or was lent for it, is not asked for any more.
            self._later(self._told_over, f"/leases/{self.lease}/calls/{call_id}")
        # An aborted call ends quietly, however its answer ended.
        call.resolve(None if call.aborted.is_set() else error)

    def _exchange(self, call: Call) -> None:
        """Send a call; one of more requests than the server takes at once, in pieces, one after the other."""
        most = 0 if self.served is None else self.served.requests
        ranges = pieces([request.params.n for request in call.requests], most)
        for start, stop in ranges:
            while not call.aborted.is_set():
                try:
                    self._send_piece(call, start, stop)
                    break
                except ServerError as error:
                    # Beside other calls of this user a piece waits; a call that is one piece is refused.
                    if error.status != _TOO_MANY or len(ranges) == 1:
                        raise
                    call.aborted.wait(error.retry_after_s or 1.0)

    def _send_piece(self, call: Call, start: int, stop: int) -> None:
        # Each piece is a call of its own to the server, which may end the last one while this one runs.
        call_id = self._under_way[id(call)] = uuid.uuid4().hex[:16]
        if call.aborted.is_set():  # by somebody who did not see that id
            return
        requests = tuple(map(_asked_of, call.requests[start:stop]))
        # Along with it: the next saves may go where the last ones were.
        returned = (self._door is not None and self.home.returned()) or b""
        body = encode(CallAsked(call_id, self.lease, requests, call.live, returned))
        try:
            with self._http.stream(
                "POST",
                f"{self._base}{PREFIX}/calls",
                content=body,
                headers={"Content-Type": CONTENT_TYPE, TAKES: TAKES_STEPS},
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refused(self.url, answer)
                for message in messages(answer.iter_raw()):
                    if self._took(call, start, decode(message)):
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

    def _took(self, call: Call, start: int, seen: Any) -> bool:
        """Take one message of the piece that begins at request ``start``; whether it was the last."""
        if type(seen) in (OutputSeen, SavesSeen, SavesHere) and (
            type(seen.place) is not int or not 0 <= seen.place < len(call.requests) - start
        ):
            raise WireError(f"a call of {len(call.requests)} requests has none at {seen.place!r:.40}")
        if type(seen) is OutputSeen:
            place = start + seen.place
            output = RemoteOutput.of(call.requests[place].id, seen)
            call.took(place, output)
            if seen.finished:
                self.finished(output)
            elif call.peeks is not None and not place and call.peeks.due():
                self._peek(call.peeks, call.requests[0].id)
        elif type(seen) is Parked:
            fetched = self._fetched(call, seen)
            if type(fetched) is Parked:
                raise WireError("a parked reply says that it is parked")
            return self._took(call, start, fetched)
        elif type(seen) is SavesSeen:
            call.requests[start + seen.place].saves = seen.saves
        elif type(seen) is SavesHere:
            began, opened = time.perf_counter(), self.home.opened_bytes
            receive(call.requests[start + seen.place], seen.ranks, self.home)
            self.came_home(began, opened)
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

    def _fetched(self, call: Call, parked: Parked) -> Any:
        """A message that was too large for a frame."""
        path = f"/leases/{self.lease}/parked/{quote(parked.id, safe='')}"
        began = time.perf_counter()
        call.home_bytes += parked.nbytes
        try:
            memory = self._fetcher.bring(
                f"{PREFIX}{path}", parked, stopped=call.aborted.is_set, told=call.brought
            )
        finally:
            self._later(self._told_over, path)
        self.home_s += time.perf_counter() - began
        return decode(memory)

    def _later(self, work: Callable[[str], object], path: str) -> None:
        """Have something said that nobody waits for; once the engine is let go of, nothing is."""
        with contextlib.suppress(RuntimeError):
            self._threads.submit(work, path)

    def _told_over(self, path: str) -> None:
        """Say that a reply is not needed any more; what is not heard ends by itself."""
        with contextlib.suppress(ServerError):
            self._asked("DELETE", path)

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
            if call_id:
                self._asked("DELETE", f"/leases/{self.lease}/calls/{call_id}")

        return self._threads.submit(ask)


def pieces(weights: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Where to cut a call, as ``(start, stop)``.

    Args:
        weights: What each request counts: its answers.
        most: What a piece may count; 0 for any number.
    """
    found: list[tuple[int, int]] = []
    start = count = 0
    for place, weight in enumerate(weights):
        if most and place > start and count + weight > most:
            found.append((start, place))
            start, count = place, 0
        count += weight
    return [*found, (start, len(weights))]


def _asked_of(request: LabRequest) -> RequestAsked:
    extra = request.params.extra_args or {}
    return RequestAsked(
        id=request.id,
        prompt=request.prompt,
        settings=dict(request.params.settings),
        edits=tuple(version.id for version in request.edits),
        block=extra.get(TRACE_KEY),
        declared=extra.get(DECLARED_KEY),
        save_budget=extra.get(BUDGET_KEY),
        wants_result=request.wants_result,
        lora=str(request.lora_request or ""),
        reach=request.block_reach,
    )


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
