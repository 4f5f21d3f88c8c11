"""Replies too large for a frame: they wait where the workers left them, and kernels fetch them in pieces.

What waits is a message in parts, views of the workers' shared memory: nothing is joined, nothing is copied.
It hangs on the lease of the kernel that asked, and is gone when that ends, when the kernel drops it, or when
nobody touched it for a while. A user has only so much waiting: what comes next waits for what is fetched,
rather than that something is dropped which a kernel still wants.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nnsight_lab.server.limits import Limits, Refused, not_found
from nnsight_lab.wire.codec import encode, head_of
from nnsight_lab.wire.serving import HEAD_BYTES, PARK_BYTES, Parked

#: A chunk of an answer: large enough to cost little each, small enough to wait for a slow reader.
CHUNK_BYTES = 2**20


@dataclass(eq=False)
class Waiting:
    """One message that waits.

    Attributes:
        id: Its name.
        call: Which call's reply it is.
        parts: Its bytes, in order.
        nbytes: How many.
        expires: When it is forgotten, if nobody touches it.
    """

    id: str
    call: str
    parts: tuple[memoryview, ...]
    nbytes: int
    expires: float

    def chunks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Its bytes from ``start`` to ``stop``, none of them copied."""
        at = 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, part.nbytes)
            for begin in range(low, high, CHUNK_BYTES):
                yield part[begin : min(begin + CHUNK_BYTES, high)]
            at += part.nbytes


class Parking:
    """What waits, by owner and lease; on the server's loop alone."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._waiting: dict[tuple[str, str], dict[str, Waiting]] = {}
        self._bytes: dict[str, int] = defaultdict(int)
        self._fetched = asyncio.Event()
        #: Messages that nobody fetched in time.
        self.forgotten = 0

    async def framed(self, owner: str, lease: str, call: str, parts: list[Any]) -> list[Any]:
        """A message as a frame holds it: itself, or where it waits.

        Raises:
            Refused: The lease ended meanwhile.
        """
        views = tuple(memoryview(part).cast("B") for part in parts)
        nbytes = sum(view.nbytes for view in views)
        if nbytes <= PARK_BYTES:
            return parts
        most = self._limits.parked_bytes
        # One that is larger than all there may be waits alone.
        while self._bytes[owner] and self._bytes[owner] + nbytes > most:
            self._fetched.clear()
            await self._fetched.wait()
        mine = self._waiting.get((owner, lease))
        if mine is None:
            raise not_found("lease")
        found = Waiting(uuid.uuid4().hex, call, views, nbytes, self._clock() + self._limits.parked_s)
        mine[found.id] = found
        self._bytes[owner] += nbytes
        head = head_of(parts).contents
        told = head if len(head) <= HEAD_BYTES else b""
        return [encode(Parked(found.id, nbytes, len(head), told))]

    def open(self, owner: str, lease: str) -> None:
        """A lease begins."""
        self._waiting.setdefault((owner, lease), {})

    def close(self, owner: str, lease: str) -> None:
        """A lease ended: nobody fetches what hung on it."""
        for one in self._waiting.pop((owner, lease), {}).values():
            self._gone(owner, one)

    def piece(self, owner: str, lease: str, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes of a message that waits, which thereby waits on.

        Raises:
            Refused: There is none of that name of this owner's, or not those bytes of it.
        """
        found = self._waiting.get((owner, lease), {}).get(name)
        if found is None:
            raise not_found("reply")
        if not 0 <= start < stop <= found.nbytes:
            raise Refused(416, f"The reply has bytes 0 to {found.nbytes:,}, not {start:,} to {stop:,}.")
        found.expires = self._clock() + self._limits.parked_s
        return found.chunks(start, stop)

    def drop(self, owner: str, lease: str, name: str) -> None:
        """A message was fetched, or is not wanted; an unknown one is harmless."""
        found = self._waiting.get((owner, lease), {}).pop(name, None)
        if found is not None:
            self._gone(owner, found)

    def end_call(self, owner: str, lease: str, call: str) -> None:
        """A call is over that its kernel did not hear out."""
        for one in [one for one in self._waiting.get((owner, lease), {}).values() if one.call == call]:
            self.drop(owner, lease, one.id)

    def sweep(self) -> None:
        """Forget what nobody touched for too long."""
        now = self._clock()
        for (owner, _), mine in self._waiting.items():
            for one in [one for one in mine.values() if one.expires < now]:
                del mine[one.id]
                self._gone(owner, one)
                self.forgotten += 1

    def figures(self) -> dict[str, int]:
        """What waits, in figures."""
        return {
            "parked": sum(map(len, self._waiting.values())),
            "parked_bytes": sum(self._bytes.values()),
            "parked_forgotten": self.forgotten,
        }

    def _gone(self, owner: str, one: Waiting) -> None:
        self._bytes[owner] -= one.nbytes
        if not self._bytes[owner]:
            del self._bytes[owner]
        self._fetched.set()
