"""Who sends a request: a token of a JupyterHub, one of a list, or the owner of a Unix socket.

Names of a hub's services are prefixed ``service:``, so that no user can be called like one. A token is
looked up again after ten seconds, so a revoked one ends soon; it never leaves this process.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnsight_lab.errors import ServeRefused

#: How long an answer of the hub holds.
HUB_CACHE_S = 10.0
_REMEMBERED = 10_000


@dataclass(frozen=True)
class User:
    """Who sends a request.

    Attributes:
        name: In whose name edits and saves are kept.
        admin: Whether they may publish edits and end what is others'.
    """

    name: str
    admin: bool = False


class Identity(ABC):
    """How tokens are told apart."""

    #: Whether a request without a token has an owner.
    open = False

    @abstractmethod
    async def user(self, token: str) -> User | None:
        """The user of a token, or None. The empty token is that of a request without one."""


class Owner(Identity):
    """One user, who is whoever can reach the socket: for a Unix socket of mode 0600."""

    open = True

    async def user(self, token: str) -> User | None:
        return User("owner", admin=True)


class Tokens(Identity):
    """Users of a fixed list.

    Args:
        users: By token; at least 16 characters each.
    """

    def __init__(self, users: Mapping[str, User]) -> None:
        for token in users:
            if len(token) < 16:
                raise ServeRefused(
                    "A token has at least 16 characters: python -c 'import secrets; "
                    "print(secrets.token_urlsafe(32))' makes one."
                )
        self._users = {hashlib.sha256(token.encode()).digest(): user for token, user in users.items()}

    async def user(self, token: str) -> User | None:
        given = hashlib.sha256(token.encode()).digest()
        found = None
        for known, user in self._users.items():  # all of them: time must not tell which
            if hmac.compare_digest(known, given):
                found = user
        return found


class Hub(Identity):
    """Users of a JupyterHub, whose tokens may use this service.

    Args:
        auth: JupyterHub's ``HubAuth``.
        admins: Hub groups whose members may publish.
    """

    def __init__(self, auth: Any, admins: frozenset[str] = frozenset()) -> None:
        self._auth = auth
        self._admins = admins
        self._known: dict[bytes, tuple[float, User | None]] = {}

    async def user(self, token: str) -> User | None:
        if not token:
            return None
        key = hashlib.sha256(token.encode()).digest()
        known = self._known.get(key)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        # HubAuth's own cache is off: it keeps tokens, and this one keeps none.
        model = await self._auth.user_for_token(token, use_cache=False, sync=False)
        found = None if model is None else self._of(model)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = (time.monotonic() + HUB_CACHE_S, found)
        return found

    def _of(self, model: Mapping[str, Any]) -> User | None:
        if not self._auth.check_scopes(self._auth.access_scopes, model):
            return None
        kind, name = str(model.get("kind", "user")), str(model["name"])
        groups = set(model.get("groups") or ())
        return User(name if kind == "user" else f"{kind}:{name}", bool(self._admins & groups))
