"""The traces' blocks that an engine has by now: what it has is not sent to it again, nor read there again.

A block is known by its content, which is what would be sent: its source, where it stands, and the values that
it captured. The workers forget a block when this side tells them to, so that what is believed to be there is
there: one that a request still names stays, of the others the latest ones used. A new engine knows none.

A block gets there with the first request that runs it, or, where several run it, in a message before them.
With a request it counts as there once that request came home without an error of its own: one that is aborted
may never have reached a worker.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MOST: Final = 64
MOST_BYTES: Final = 64 * 2**20


def content_id(payload: bytes) -> str:
    """What a block is called by, the same for the same content."""
    return f"block-{hashlib.sha256(payload).hexdigest()[:32]}"


@dataclass
class _Known:
    nbytes: int
    there: bool = False
    users: int = 0


class KnownBlocks:
    """Those of one engine.

    Args:
        most: How many are kept that no request names.
        most_bytes: And how large they are together, as they were sent.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        #: In the order they were last used.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        # A user may be collected, and so let go, at any moment: also while this is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._known)

    def use(self, content: str, nbytes: int, user: object) -> bool:
        """Note that ``user`` names a block, for as long as it lives; whether the workers have it.

        Args:
            content: Its `content_id`.
            nbytes: What it takes to send.
            user: A request, or an edit of one call.
        """
        with self._lock:
            known = self._known.setdefault(content, _Known(nbytes))
            self._known.move_to_end(content)
            known.users += 1
            weakref.finalize(user, self._let_go, known).atexit = False
            return known.there

    def _let_go(self, known: _Known) -> None:
        with self._lock:
            known.users -= 1

    def arrived(self, content: str) -> None:
        """The workers have it."""
        with self._lock:
            known = self._known.get(content)
            if known is not None:
                known.there = True

    def lost(self, content: str) -> None:
        """The workers could not read it."""
        with self._lock:
            self._known.pop(content, None)

    def gone(self) -> list[str]:
        """Forget those that are too many; the workers are to be told."""
        with self._lock:
            found = []
            nbytes = sum(known.nbytes for known in self._known.values())
            for content, known in list(self._known.items()):
                if len(self._known) <= self._most and nbytes <= self._most_bytes:
                    break
                if not known.users:
                    del self._known[content]
                    nbytes -= known.nbytes
                    found.append(content)
            return found
