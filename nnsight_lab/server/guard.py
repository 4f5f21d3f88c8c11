"""Asks every HTTP request who sends it, and lets in what is served: the outermost layer of the app.

It is plain ASGI: Starlette's own base class for middleware runs the app in another task, where the owner set
here would not be seen. What a client may not say of itself (its request id, a priority) is taken off before
vLLM's handlers read it, and so is its token.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from nnsight_lab.server.desk import asker
from nnsight_lab.server.identity import Identity
from nnsight_lab.server.limits import Limits, Refused, too_large
from nnsight_lab.server.reading import read_off
from nnsight_lab.server.revoked import Answer, Known, while_known
from nnsight_lab.wire.serving import PREFIX

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Answered to anybody: whether the server is there.
_OPEN = frozenset({"/health", "/ready"})
_SERVED = frozenset(
    {"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/version"}
)
_ADMIN = frozenset({"/metrics"})
_TAKEN_OFF = (b"x-request-id", b"authorization", b"x-api-key", b"cookie")


class Guard:
    """The layer.

    Args:
        app: What is guarded.
        identity: Tells users by their tokens; None until the server is ready.
        limits: Each user's.
        prefix: Where the service lies in a hub, as ``/services/lab``.
    """

    def __init__(self, app: Any, *, identity: Identity, limits: Limits, prefix: str = "") -> None:
        self._app = app
        self._identity = identity
        self._limits = limits
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = list(scope.get("headers", ()))
        try:
            if scope["type"] != "http":
                raise Refused(404, "Only HTTP is served.")
            scope, receive = await self._let_in(scope, receive)
        except Refused as refused:
            await read_off(headers, receive)
            await refusal(refused)(scope, receive, send)
            return
        answer = Answer(send)
        asking = asker.get()
        try:
            if asking is not None and self._identity.may_end:
                known = Known(self._identity, _token(headers), asking)
                await while_known(known, self._app, scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Refused as refused:
            if answer.began:
                raise
            await refusal(refused)(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        asker.set(None)  # a request that follows another in one connection begins with its context
        path = str(scope["path"])
        if self._prefix and path.startswith(f"{self._prefix}/"):
            path = path.removeprefix(self._prefix)
        headers = list(scope["headers"])
        token = _token(headers)
        kept = [(k, v) for k, v in headers if k.lower() not in _TAKEN_OFF and b"priority" not in k.lower()]
        scope = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "headers": [*kept, (b"x-request-id", uuid.uuid4().hex.encode())],
        }
        if path in _OPEN:
            return scope, receive
        user = await self._identity.user(token)
        if user is None:
            if not token:
                raise Refused(401, "The request has no token: Authorization: Bearer TOKEN.")
            raise Refused(
                403, "The token is not one that may use this service: it is unknown here, or ended."
            )
        if path in _ADMIN and not user.admin:
            raise Refused(404, "Not served here.")
        if path not in _SERVED and path not in _ADMIN and not path.startswith(f"{PREFIX}/"):
            raise Refused(404, "Not served here.")
        asker.set(user)
        return scope, _limited(headers, receive, self._limits.body_bytes)


def _token(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            if kind.lower() in ("bearer", "token"):
                return token.strip()
    return ""


def _limited(headers: list[tuple[bytes, bytes]], receive: Receive, most: int) -> Receive:
    """The request's body, up to a number of bytes, whatever its header says."""
    said = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    if said.isdigit() and int(said) > most:
        raise too_large(int(said), most, "The request")
    seen = 0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body") or b"")
        if seen > most:
            if message.get("more_body"):
                await read_off(headers, receive)
            raise too_large(seen, most, "The request")
        return message

    return limited


def refusal(refused: Refused) -> JSONResponse:
    """A refusal as OpenAI's clients read one: in any other form they show its number and no word of it."""
    told = {"message": refused.text, "code": refused.status, "type": "refused", "param": None}
    headers = dict(refused.headers or {})
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": told}, refused.status, headers)
