"""Users of a JupyterHub: whose a token is, and whether it may use this service.

The Hub is asked with the user's own token, so the engine's server needs no secret of the Hub. An answer holds
for ten seconds, by which a revoked token, or one whose server was stopped, ends soon. A Hub that does not
answer (it restarts, say) revokes nothing: whom it has told, goes on for five minutes, which is how long
JupyterHub's own services remember a token; who is new is told to wait. Tokens themselves are not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from nnsight_lab.errors import ServeRefused
from nnsight_lab.server.identity import Identity, User
from nnsight_lab.server.limits import Refused
from nnsight_lab.wire.serving import HUB_SERVICE

#: How long an answer of the Hub holds.
HOLDS_S = 10.0
#: How long after its last answer a user goes on while the Hub does not answer.
GONE_S = 300.0
#: How long the Hub is waited for, and not asked again after it did not answer.
_ANSWER_S = 5.0
_REMEMBERED = 10_000
_KINDS = ("user", "service")


@dataclass(frozen=True)
class _Known:
    """What the Hub said of a token, and when."""

    at: float
    answer: User | Refused | None


class Hub(Identity):
    """Users of a JupyterHub, whose tokens may use this service.

    Args:
        auth: JupyterHub's ``HubAuth``.
        service: What the service is called there.
        admins: Hub groups whose members may publish, as the Hub's own admins may.
    """

    may_end = True

    def __init__(self, auth: Any, service: str = HUB_SERVICE, admins: frozenset[str] = frozenset()) -> None:
        self._auth = auth
        self._scope = f"access:services!service={service}"
        self._admins = admins
        self._known: dict[bytes, _Known] = {}
        self._asking: dict[bytes, asyncio.Task[User | Refused | None]] = {}
        self._silent_until = 0.0

    async def user(self, token: str) -> User | None:
        if not token:
            return None
        key = hashlib.sha256(token.encode()).digest()
        known = self._known.get(key)
        if known is None or known.at + HOLDS_S <= time.monotonic():
            answer = await self._asked(key, token)
        else:
            answer = known.answer
        if isinstance(answer, Refused):
            raise answer
        return answer

    async def _asked(self, key: bytes, token: str) -> User | Refused | None:
        """The Hub's answer; requests that come together with one token ask it once."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._fresh(key, token))
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(asking)  # one that leaves must not end it for the others

    async def _fresh(self, key: bytes, token: str) -> User | Refused | None:
        if time.monotonic() < self._silent_until:
            return self._unanswered(key)
        try:
            model = await asyncio.wait_for(
                # HubAuth's own cache is off: it would keep answers for as long as it likes.
                self._auth.user_for_token(token, use_cache=False, sync=False),
                _ANSWER_S,
            )
        except Exception:  # however it failed to answer: HubAuth raises tornado's errors, and aiohttp's
            self._silent_until = time.monotonic() + _ANSWER_S
            return self._unanswered(key)
        self._silent_until = 0.0
        answer = None if model is None else self._of(model)
        self._remember(key, answer)
        return answer

    def _unanswered(self, key: bytes) -> User | Refused:
        known = self._known.get(key)
        if known is not None and known.at + GONE_S > time.monotonic() and isinstance(known.answer, User):
            return known.answer
        return Refused(
            503,
            "The JupyterHub does not answer, so it cannot be told who you are.",
            retry_after_s=_ANSWER_S,
        )

    def _remember(self, key: bytes, answer: User | Refused | None) -> None:
        if len(self._known) >= _REMEMBERED:  # whoever tries tokens must not make users forgotten
            self._known = {one: known for one, known in self._known.items() if isinstance(known.answer, User)}
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = _Known(time.monotonic(), answer)

    def _of(self, model: Mapping[str, Any]) -> User | Refused:
        name = name_of(str(model.get("kind", "user")), str(model["name"]))
        if not self._auth.check_scopes({self._scope}, model):
            return Refused(
                403,
                f"This token of {name!r} lacks the scope {self._scope}. Ask the JupyterHub's admin for a "
                "role that has it, and for it in c.Spawner.server_token_scopes; then restart your server.",
            )
        admin = model.get("admin") is True or bool(self._admins & set(model.get("groups") or ()))
        return User(name, admin)


def name_of(kind: str, name: str) -> str:
    """What the owner of a token is called here, so that no two owners are called alike.

    A service is ``service:x``. A Hub takes nearly any name for a user, that one too.
    """
    if kind != "user":
        return f"{kind}:{name}"
    return f"user:{name}" if name.split(":")[0] in _KINDS and ":" in name else name


class HubService(NamedTuple):
    """Where a server is a service.

    Attributes:
        name: What it is called at the Hub.
        prefix: The path under which the Hub's proxy passes requests on.
    """

    name: str
    prefix: str


def hub_service(environment: MutableMapping[str, str]) -> HubService:
    """What the environment says of the Hub; its token of the service is used once, here.

    Raises:
        ServeRefused: It says too little, or the Hub knows the service by another name.
    """
    url = environment.get("JUPYTERHUB_API_URL", "")
    if not url:
        raise ServeRefused(
            "--hub needs JUPYTERHUB_API_URL, as http://127.0.0.1:8081/hub/api. A unit that has it: "
            "nnsight-lab serve --example systemd"
        )
    name = environment.get("JUPYTERHUB_SERVICE_NAME") or HUB_SERVICE
    base = environment.get("JUPYTERHUB_BASE_URL") or "/"
    prefix = environment.get("JUPYTERHUB_SERVICE_PREFIX") or f"{base.rstrip('/')}/services/{name}/"
    token = environment.get("JUPYTERHUB_API_TOKEN", "")
    if token:
        _check(url, token, name)
    return HubService(name, prefix)


def _check(url: str, token: str, name: str) -> None:
    """See that the Hub knows the service; one that is not up yet is not waited for."""
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/user", headers={"Authorization": f"token {token}"}, timeout=_ANSWER_S
        )
        known = answer.json() if answer.is_success else {}
    except (httpx.HTTPError, ValueError):
        return
    if answer.status_code in (401, 403):
        raise ServeRefused(
            f"The JupyterHub at {url} does not know the token in JUPYTERHUB_API_TOKEN: it is the api_token "
            f"of the service {name!r} in jupyterhub_config.py. It is not needed: leave it out."
        )
    if known.get("kind") == "service" and known.get("name") != name:
        raise ServeRefused(
            f"JUPYTERHUB_API_TOKEN is that of the service {known.get('name')!r}, and this one is called "
            f"{name!r}: set JUPYTERHUB_SERVICE_NAME."
        )
