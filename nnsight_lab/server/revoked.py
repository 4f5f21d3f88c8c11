"""Ends a request whose token ends while it runs: one that was revoked, or whose server was stopped.

A stream of tokens or a trace can take minutes, and is asked for its owner but once. So while it runs its
token is looked at again; the identity says how old an answer may be. A client that reads a stream
is told in it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from nnsight_lab.server.identity import Identity, User
from nnsight_lab.server.limits import Refused

#: How often a running request's token is looked at.
_AGAIN_S = 5.0
#: How long it has to end by itself.
_LEAVE_S = 2.0
_SILENT = 503
_ENDED = "The token was revoked, or its server stopped, while the request ran."

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class Answer:
    """Sends an answer, and knows how far it is.

    Args:
        send: Where to.
        begins: Called with HTTP's number before the first word goes out.
    """

    def __init__(self, send: Send, begins: Callable[[int], None]) -> None:
        self._send = send
        self._begins = begins
        self.began = False
        #: HTTP's number; 0 before it began.
        self.status = 0
        #: Whether what the app still says is for nobody.
        self.shut = False
        self._over = False
        self._events = False
        self._sized = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if self.shut:
            return
        began, self.began = self.began, True
        self.status = int(message.get("status", self.status))
        if not began:  # whatever it is: of a websocket that is refused, it has another name
            self._begins(self.status)
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self._sized = b"content-length" in headers
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def end(self, refused: Refused) -> None:
        """End an answer that began, in its own form; one of a promised length is cut off."""
        if self._over or self._sized:
            return
        self.shut = False
        told = {"error": {"message": refused.text, "code": refused.status, "type": "refused", "param": None}}
        body = f"data: {json.dumps(told)}\n\n".encode() if self._events else b""
        await self({"type": "http.response.body", "body": body, "more_body": False})


class _Reader:
    """Receives for an app, until it is told that its client is gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.left = asyncio.Event()

    async def _next(self) -> Message:
        return await self._receive()

    async def __call__(self) -> Message:
        """The next message."""
        message, left = asyncio.ensure_future(self._next()), asyncio.ensure_future(self.left.wait())
        try:
            await asyncio.wait({message, left}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if left.done() else message.result()
        finally:
            message.cancel()
            left.cancel()
            await asyncio.gather(message, left, return_exceptions=True)


class Known(NamedTuple):
    """Who sends a request, and how that is known.

    Attributes:
        identity: Tells it.
        token: Of the request.
        user: Its owner when it began.
    """

    identity: Identity
    token: str
    user: User

    async def still(self) -> bool:
        """Whether the token is still its owner's."""
        try:
            found = await self.identity.user(self.token)
        except Refused as refused:
            return refused.status == _SILENT  # a Hub that does not answer revokes nothing
        return found is not None and found.name == self.user.name


async def while_known(known: Known, app: App, scope: Any, receive: Receive, answer: Answer) -> None:
    """Run the app on a request for as long as its token is its owner's.

    Raises:
        Refused: The token ended before the answer began.
    """
    reader = _Reader(receive)
    running = asyncio.ensure_future(app(scope, reader, answer))
    try:
        while not (await asyncio.wait({running}, timeout=_AGAIN_S))[0]:
            if await known.still():
                continue
            answer.shut = True
            # vLLM's handlers run in tasks of their own, which end with their client, not with their caller.
            reader.left.set()
            await asyncio.wait({running}, timeout=_LEAVE_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            break
        else:
            return running.result()
    finally:
        running.cancel()
    refused = Refused(403, _ENDED)
    if not answer.began:
        answer.shut = False
        raise refused
    return await answer.end(refused)
