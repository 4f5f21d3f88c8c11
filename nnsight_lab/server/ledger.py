"""Who has which edits, requests, leases and saves: plain bookkeeping, on the server's loop alone.

Everything is keyed by owner first, so nothing of another can be named. An edit belongs to the lease of the
kernel that installed it; a kernel that is gone renews no lease, and what hangs on it goes with it.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnsight_lab.engine.edits import named_well
from nnsight_lab.server.identity import User
from nnsight_lab.server.limits import Limits, Refused, not_found, too_large, too_many
from nnsight_lab.server.usage import Usage
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.serving import LEASE_S, EditAsked
from nnsight_lab.wire.touch import UNKNOWN, Touch


@dataclass(eq=False)
class ServedEdit:
    """One installed edit.

    Attributes:
        owner: Whose it is.
        id: As its owner says.
        name: As its owner says.
        lease: What it belongs to.
        scoped: Whether it is a trace's block, for one call only.
        payload: The block, for the workers of another engine should this one die.
        on: Whether its owner's OpenAI requests run it unasked.
        published: Whether everybody's requests do.
        in_flight: Requests that run it now.
        cleared: Whether it goes once none does.
        steps: What it does, where it is data.
        touch: What of a prompt it touches.
        registration: What the workers know it by: made here, so that no owner can spell another's.
    """

    owner: str
    id: str
    name: str
    lease: str
    scoped: bool
    payload: bytes = b""
    on: bool = True
    published: bool = False
    in_flight: int = 0
    cleared: bool = False
    steps: list[Any] | None = None
    touch: Touch = UNKNOWN
    registration: str = field(default_factory=lambda: f"edit-{uuid.uuid4().hex}")


@dataclass(eq=False)
class Lease:
    """What a kernel holds, until it stops saying that it is there.

    Attributes:
        id: As its kernel says.
        owner: Whose kernel.
        expires: When, by the ledger's clock.
        calls: What aborts each call that runs.
        requests: What the engine calls each request of those, by the kernel's own id.
    """

    id: str
    owner: str
    expires: float
    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Kept:
    """What an OpenAI request saved, until somebody fetches it."""

    saves: Any
    nbytes: int
    expires: float


class Ledger:
    """The books."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.usage = Usage(limits.tokens_per_minute, clock)
        self._clock = clock
        self._edits: dict[str, dict[str, ServedEdit]] = defaultdict(dict)
        #: By owner and id: put together in one text, an owner could spell another's.
        self._leases: dict[tuple[str, str], Lease] = {}
        #: By owner, the oldest first, and how much that is.
        self._kept: dict[str, OrderedDict[str, Kept]] = defaultdict(OrderedDict)
        self._kept_bytes: dict[str, int] = defaultdict(int)
        self._running: dict[str, int] = defaultdict(int)
        #: Saves that nobody fetched in time.
        self.forgotten = 0
        #: Requests so far.
        self.begun = 0

    # -- leases ----------------------------------------------------------------------------------

    def open_lease(self, user: User, lease: str, hold_s: float = LEASE_S) -> bool:
        """Begin or renew a lease; whether it was not there: what hung on one before is gone."""
        found = self._leases.get((user.name, lease))
        new = found is None
        if found is None:
            found = self._leases[user.name, lease] = Lease(lease, user.name, 0.0)
        found.expires = self._clock() + hold_s
        return new

    def lease(self, user: User, lease: str) -> Lease:
        """A lease that holds.

        Raises:
            Refused: It ended, or is another's.
        """
        found = self._leases.get((user.name, lease))
        if found is None:
            raise not_found("lease")
        return found

    def holds(self, owner: str, lease: str) -> bool:
        """Whether there is such a lease."""
        return (owner, lease) in self._leases

    def end_lease(self, owner: str, lease: str) -> list[ServedEdit]:
        """Abort what hangs on a lease; returns edits to take off the workers."""
        found = self._leases.pop((owner, lease), None)
        if found is None:
            return []
        for abort in list(found.calls.values()):
            abort()
        mine = [edit for edit in self._edits[owner].values() if edit.lease == lease and not edit.published]
        return [gone for edit in mine if (gone := self._clear(edit)) is not None]

    def expired(self) -> list[Lease]:
        """Leases that nobody renewed."""
        now = self._clock()
        return [lease for lease in self._leases.values() if lease.expires < now]

    # -- edits -----------------------------------------------------------------------------------

    def add_edit(self, user: User, asked: EditAsked) -> ServedEdit:
        """Note an edit; it still has to be installed.

        Raises:
            Refused: It is too large, one too many, or called like another of its owner.
        """
        if len(asked.payload) > self.limits.block_bytes:
            raise too_large(len(asked.payload), self.limits.block_bytes, "The block with what it reads")
        if asked.scoped != (asked.name == TRACE_BLOCK) or not named_well(asked.name):
            raise Refused(400, f"An edit cannot be called {asked.name!r:.80}.")
        self.lease(user, asked.lease)
        mine = self._edits[user.name]
        if asked.id in mine:
            raise Refused(409, f"An edit of yours has the id {asked.id!r} already.")
        if not asked.scoped:
            count = sum(not edit.scoped for edit in mine.values())
            if count >= self.limits.edits:
                raise too_many(count, "edits")
        held = sum(len(edit.payload) for edit in mine.values())
        if held + len(asked.payload) > self.limits.blocks_bytes:
            raise too_large(held + len(asked.payload), self.limits.blocks_bytes, "All your blocks together")
        edit = ServedEdit(user.name, asked.id, asked.name, asked.lease, asked.scoped, asked.payload)
        mine[asked.id] = edit
        return edit

    def edits(self, user: User) -> list[ServedEdit]:
        """A user's own edits and the published ones."""
        return [*self._own(user.name), *(e for e in self._published() if e.owner != user.name)]

    def edit(self, user: User, edit_id: str) -> ServedEdit:
        """One of a user's own edits.

        Raises:
            Refused: There is none of that id.
        """
        found = self._edits[user.name].get(edit_id)
        if found is None or found.cleared:
            raise not_found("edit")
        return found

    def has_edit(self, user: User, edit_id: str) -> bool:
        """Whether a user has an edit of that id."""
        return edit_id in self._edits[user.name]

    def publish(self, user: User, edit_id: str, published: bool) -> ServedEdit:
        """Let everybody's requests run an edit, or no more.

        Raises:
            Refused: The user is no admin, or it is not theirs.
        """
        found = self.edit(user, edit_id)
        if not user.admin:
            raise Refused(403, "Publishing an edit is for admins.")
        found.published = published
        return found

    def clear_edit(self, user: User, edit_id: str) -> ServedEdit | None:
        """Clear a user's edit; returns it where workers can forget it now. Unknown ids are harmless."""
        found = self._edits[user.name].get(edit_id)
        return None if found is None else self._clear(found)

    def _clear(self, edit: ServedEdit) -> ServedEdit | None:
        edit.cleared = True
        if edit.in_flight:
            return None
        self._edits[edit.owner].pop(edit.id, None)
        return edit

    def chosen(self, user: User, names: object) -> list[ServedEdit]:
        """The edits that an OpenAI request runs.

        Args:
            user: Whose request.
            names: What it named; None where it named none.

        Raises:
            Refused: A name nothing is installed under, or what is no list of names.
        """
        published = self._published()
        if names is None:
            own = [edit for edit in self._current(user.name).values() if edit.on and not edit.published]
            return [*own, *published]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused(400, 'The edits of a request are a list of names: {"nnsight_edits": ["probe"]}.')
        if len(set(names)) < len(names):
            raise Refused(400, "The request names an edit twice; each runs once.")
        known = {edit.name: edit for edit in published} | self._current(user.name)
        missing = [name for name in names if name not in known]
        if missing:
            raise Refused(404, f"No edit of yours, and no published one, is called {missing[0]!r}.")
        return [known[name] for name in names]

    def named(self, user: User, ids: Sequence[str]) -> list[ServedEdit]:
        """The edits of a kernel's request, by id.

        Raises:
            Refused: One is not there, or another's.
        """
        mine = self._edits[user.name]
        found = [mine.get(one) for one in ids]
        if any(edit is None or edit.cleared for edit in found):
            raise not_found("edit that the request names")
        return [edit for edit in found if edit is not None]

    def hold(self, edits: Iterable[ServedEdit]) -> None:
        """A request with these edits begins."""
        for edit in edits:
            edit.in_flight += 1

    def let_go(self, edits: Iterable[ServedEdit]) -> list[ServedEdit]:
        """It is over; returns edits that the workers can forget."""
        gone = []
        for edit in edits:
            edit.in_flight -= 1
            if edit.cleared and not edit.in_flight:
                self._edits[edit.owner].pop(edit.id, None)
                gone.append(edit)
        return gone

    def _own(self, owner: str) -> list[ServedEdit]:
        return [edit for edit in self._edits[owner].values() if not edit.scoped and not edit.cleared]

    def _current(self, owner: str) -> dict[str, ServedEdit]:
        """By name; of two that have one, the later."""
        return {edit.name: edit for edit in self._own(owner)}

    def _published(self) -> list[ServedEdit]:
        return [e for mine in self._edits.values() for e in mine.values() if e.published and not e.cleared]

    def installed(self) -> list[ServedEdit]:
        """Every edit that the workers should know."""
        return [edit for mine in self._edits.values() for edit in mine.values() if not edit.cleared]

    def leases(self) -> list[Lease]:
        """All that hold."""
        return list(self._leases.values())

    # -- requests --------------------------------------------------------------------------------

    def begin(self, user: User, count: int = 1) -> None:
        """Requests of a user begin.

        Raises:
            Refused: They would be more than one user may have.
        """
        if self._running[user.name] + count > self.limits.requests:
            running = self._running[user.name]
            if count > self.limits.requests:
                raise Refused(413, f"A call has at most {self.limits.requests} requests here, not {count}.")
            raise Refused(
                429,
                f"{user.name} has {running:,} requests running or waiting; the limit is "
                f"{self.limits.requests:,}.",
                retry_after_s=self.usage.next_end_s(user.name, running),
            )
        wait_s = self.usage.wait_s(user.name)
        if wait_s:
            raise Refused(
                429,
                f"{user.name} had more tokens than the {self.limits.tokens_per_minute:,} a minute that one "
                "user may have here.",
                retry_after_s=wait_s,
            )
        self._running[user.name] += count
        self.begun += count

    def end(self, user: User, count: int = 1) -> None:
        """They are over."""
        self._running[user.name] -= count
        if not self._running[user.name]:
            del self._running[user.name]

    def running(self, owner: str) -> int:
        """How many a user has."""
        return self._running.get(owner, 0)

    # -- saves of OpenAI requests ------------------------------------------------------------------

    def keep(self, user: User, request_id: str, saves: Any, nbytes: int) -> None:
        """Keep what a request saved until it is fetched, or too old, or too much."""
        self.drop_kept(user, request_id)
        self._kept[user.name][request_id] = Kept(saves, nbytes, self._clock() + self.limits.kept_s)
        self._kept_bytes[user.name] += nbytes
        while self._kept_bytes.get(user.name, 0) > self.limits.kept_bytes:
            self._forget_oldest(user.name)

    def kept(self, user: User, request_id: str) -> Any:
        """What a request of this user saved.

        Raises:
            Refused: Nothing is kept of such a request of theirs.
        """
        mine = self._kept.get(user.name)
        found = None if mine is None else mine.get(request_id)
        if found is None:
            raise not_found("request with saves")
        return found.saves

    def drop_kept(self, user: User, request_id: str) -> None:
        """Forget them; unknown ids are harmless."""
        mine = self._kept.get(user.name)
        found = None if mine is None else mine.pop(request_id, None)
        if found is not None:
            self._kept_bytes[user.name] -= found.nbytes
            self._tidy(user.name)

    def sweep(self) -> None:
        """Forget saves that are too old."""
        now = self._clock()
        for owner in list(self._kept):
            while owner in self._kept and next(iter(self._kept[owner].values())).expires < now:
                self._forget_oldest(owner)

    def _forget_oldest(self, owner: str) -> None:
        _, kept = self._kept[owner].popitem(last=False)
        self._kept_bytes[owner] -= kept.nbytes
        self.forgotten += 1
        self._tidy(owner)

    def _tidy(self, owner: str) -> None:
        if not self._kept[owner]:
            del self._kept[owner], self._kept_bytes[owner]

    def figures(self) -> dict[str, Any]:
        """The books in figures."""
        return {
            "edits": sum(len(mine) for mine in self._edits.values()),
            "leases": len(self._leases),
            "requests": sum(self._running.values()),
            "kept": sum(map(len, self._kept.values())),
            "kept_bytes": sum(self._kept_bytes.values()),
            "forgotten": self.forgotten,
        }
