"""Asks every HTTP request who sends it, and lets in what is served: the outermost layer of the app.

It is plain ASGI: Starlette's own base class for middleware runs the app in another task, where the owner set
here would not be seen. What a client may not say of itself (its request id, a priority) is taken off before
vLLM's handlers read it, and so is its token.
"""

from __future__ import annotations

import hmac
import math
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from nnsight_lab.server.audit import REFUSALS as AUDITED
from nnsight_lab.server.audit import reason
from nnsight_lab.server.audit import refused as note_refused
from nnsight_lab.server.body import limited
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import asker
from nnsight_lab.server.identity import Identity
from nnsight_lab.server.limits import Limits, Refused
from nnsight_lab.server.reading import read_off
from nnsight_lab.server.revoked import Answer, Known, while_known
from nnsight_lab.wire.serving import PREFIX

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def _health() -> JSONResponse:
    """Healthy for as long as it answers: what asks would end the process, and the engine is started again."""
    return JSONResponse({"status": CONDITION.state})


def _ready() -> JSONResponse:
    """Whether requests are taken."""
    told = {"status": CONDITION.state}
    if CONDITION.state == "ready":
        return JSONResponse(told)
    return JSONResponse(told, 503, {"Retry-After": str(math.ceil(CONDITION.retry_after_s))})


#: Answered to anybody: how the server stands.
_OPEN = {"/health": _health, "/ready": _ready}
_SERVED = frozenset(
    {"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/version"}
)
_ADMIN = frozenset({"/metrics"})
#: By user and HTTP's number.
REFUSALS: Counter[tuple[str, int]] = Counter()
#: Where a body is a codec message, whose tensors are no more than their bytes.
_MESSAGES = frozenset({f"{PREFIX}/calls", f"{PREFIX}/edits"})
_TAKEN_OFF = (b"x-request-id", b"authorization", b"x-api-key", b"cookie")


class Guard:
    """The layer.

    Args:
        app: What is guarded.
        identity: Tells users by their tokens; None until the server is ready.
        limits: Each user's.
        prefix: Where the service lies in a hub, as ``/services/lab``.
        metrics_token: Lets whoever has it read the metrics; "" for none.
    """

    def __init__(
        self, app: Any, *, identity: Identity, limits: Limits, prefix: str = "", metrics_token: str = ""
    ) -> None:
        self._metrics_token = metrics_token
        self._app = app
        self._identity = identity
        self._limits = limits
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        whys: list[str] = []
        reason.set(whys)
        headers = list(scope.get("headers") or ())
        token = _token(headers)
        asker.set(None)  # a request that follows another in one connection begins with its context

        def audited(status: int) -> None:
            """A refusal is on record before its client reads it."""
            if status in AUDITED:
                user, method = asker.get(), str(scope.get("method", ""))
                name = "" if user is None else user.name
                note_refused(name, method, str(scope.get("path", "")), status, whys[0] if whys else "", token)

        answer = Answer(send, audited)
        try:
            if scope["type"] == "http" and (told := _OPEN.get(self._path(scope))) is not None:
                await told()(scope, receive, send)
                return
            if scope["type"] != "http":
                raise Refused(404, "Only HTTP is served.")
            inner, body = await self._entered(scope, headers, token, receive)
            asking = asker.get()
            if asking is not None and self._identity.may_end:
                await while_known(Known(self._identity, token, asking), self._app, inner, body, answer)
            else:
                await self._app(inner, body, answer)
        except Refused as refused:
            if answer.began:
                raise
            await refusal(refused)(scope, receive, answer)

    async def _entered(
        self, scope: Scope, headers: Headers, token: str, receive: Receive
    ) -> tuple[Scope, Receive]:
        try:
            return await self._let_in(scope, headers, token, receive)
        except Refused:
            await read_off(headers, receive)
            raise

    def _path(self, scope: Scope) -> str:
        path = str(scope["path"])
        return path.removeprefix(self._prefix) if path.startswith(f"{self._prefix}/") else path

    async def _let_in(
        self, scope: Scope, headers: Headers, token: str, receive: Receive
    ) -> tuple[Scope, Receive]:
        path = self._path(scope)
        kept = [(k, v) for k, v in headers if k.lower() not in _TAKEN_OFF and b"priority" not in k.lower()]
        scope = {
            **scope,
            "path": path,
            "raw_path": path.encode(),
            "headers": [*kept, (b"x-request-id", uuid.uuid4().hex.encode())],
        }
        if (
            path in _ADMIN
            and self._metrics_token
            and hmac.compare_digest(token.encode(), self._metrics_token.encode())
        ):
            return scope, receive
        user = await self._identity.user(token)
        if user is None:
            if not token:
                raise Refused(401, "The request has no token: Authorization: Bearer TOKEN.")
            raise Refused(
                403, "The token is not one that may use this service: it is unknown here, or ended."
            )
        asker.set(user)  # also of a request that is refused
        if path in _ADMIN and not user.admin:
            raise Refused(404, "Not served here.")
        if path not in _SERVED and path not in _ADMIN and not path.startswith(f"{PREFIX}/"):
            raise Refused(404, "Not served here.")
        most = self._limits.body_bytes if path in _MESSAGES else self._limits.json_bytes
        return scope, limited(headers, receive, most, self._limits.body_s)


def _token(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name.lower() == b"authorization":
            kind, _, token = value.decode("latin-1").partition(" ")
            if kind.lower() in ("bearer", "token"):
                return token.strip()
    return ""


def refusal(refused: Refused) -> JSONResponse:
    """A refusal as OpenAI's clients read one: in any other form they show its number and no word of it."""
    user = asker.get()
    if user is not None:
        REFUSALS[user.name, refused.status] += 1
    whys = reason.get()
    if whys is not None:
        whys.append(refused.text)
    told = {"message": refused.text, "code": refused.status, "type": "refused", "param": None}
    headers = dict(refused.headers or {})
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": told}, refused.status, headers)
