"""Who sends a request: a token of a list, or the owner of a Unix socket. `hub` has those of a JupyterHub.

A token never leaves the process that answers HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from nnsight_lab.errors import ServeRefused


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
    #: Whether a token can end while a request of it runs.
    may_end = False

    @abstractmethod
    async def user(self, token: str) -> User | None:
        """The user of a token, or None. The empty token is that of a request without one.

        Raises:
            Refused: There is more to say than that nobody knows it.
        """


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
