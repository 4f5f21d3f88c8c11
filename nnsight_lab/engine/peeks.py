"""What was seen of a watched request's saves while it runs.

The worker is asked after a token came, never more often than twenty times a second and never twice at once,
and only about a request that somebody watches: everybody else pays one look at an attribute. The engine's
own loop asks. What was seen is for the eye: what the request saved comes home as ever, when it is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.limits import PEEK_BYTES

#: Between two looks.
APART_S: Final = 0.05
#: What is kept of one name for the eye; a longer list is seen when it is home.
MOST_BYTES: Final = 32 * 2**20


class Watched(NamedTuple):
    """One saved list, as far as it was seen.

    Attributes:
        block: Whose it is.
        name: What it was saved as.
        items: Its elements: numbers, and tensors of at most two dimensions.
        refused: Why it is not looked at any further; empty where it is.
    """

    block: str
    name: str
    items: tuple[Any, ...]
    refused: str = ""


class Peeks:
    """The looks at one request.

    Args:
        names: The names looked at; all lists that the request saves where it is None.
        clock: Seconds.

    Attributes:
        looks: How many times the worker was asked.
        seconds: How long its answers took, together.
    """

    def __init__(
        self, names: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = None if names is None else tuple(names)
        self._clock = clock
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, str], list[Any]] = {}
        self._bytes: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._asked_s: float | None = None
        self._ended_s = -APART_S
        self.looks = 0
        self.seconds = 0.0

    def wants(self, name: str) -> bool:
        """Whether that name is looked at."""
        return self._names is None or name in self._names

    def due(self) -> bool:
        """Whether it is time to look again."""
        return self._asked_s is None and self._clock() - self._ended_s >= APART_S

    def question(self, request_id: str) -> bytes:
        """What to ask the workers; answered by `took`."""
        self._asked_s = self._clock()
        self.looks += 1
        have: dict[str, dict[str, int]] = {}
        with self._lock:
            for (block, name), items in self._lists.items():
                done = (block, name) in self._refused
                have.setdefault(block, {})[name] = 2**62 if done else len(items)
        return encode(
            {"request_id": request_id, "have": have, "names": self._names, "most_bytes": PEEK_BYTES}
        )

    def took(self, payloads: Sequence[bytes | None]) -> None:
        """Take the workers' answers; the earliest rank that has a list says what is in it."""
        seen: set[tuple[str, str]] = set()
        for payload in payloads:
            found: Any = decode(payload) if payload else {}
            if "refused" in found:
                continue
            for block, names in found.items():
                for name, new in names.items():
                    if (block, name) not in seen:
                        seen.add((block, name))
                        self._add((block, name), new)
        self.over()

    def over(self) -> None:
        """An answer came, or none will."""
        now = self._clock()
        if self._asked_s is not None:
            self.seconds += now - self._asked_s
        self._asked_s, self._ended_s = None, now

    def watched(self) -> tuple[Watched, ...]:
        """What was seen so far, in the order in which it appeared."""
        with self._lock:
            return tuple(
                Watched(*key, tuple(items), self._refused.get(key, "")) for key, items in self._lists.items()
            )

    def _add(self, key: tuple[str, str], new: dict[str, Any]) -> None:
        with self._lock:
            items = self._lists.setdefault(key, [])
            if "refused" in new:
                self._refused[key] = str(new["refused"])
                return
            if new["first"] != len(items):
                return  # an answer to an older question
            items.extend(new["items"])
            nbytes = sum(item.nbytes if isinstance(item, torch.Tensor) else 8 for item in new["items"])
            self._bytes[key] = self._bytes.get(key, 0) + nbytes
            if self._bytes[key] > MOST_BYTES:
                self._refused[key] = f"more than {MOST_BYTES >> 20} MB: the rest is shown when it is home"
