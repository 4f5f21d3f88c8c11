"""What a store has, how much of it is in memory, and what goes first.

Whoever calls a method here holds the lock, but for those that say otherwise: they take requests apart or
write files, and hold the lock only to look and to put down, so that reading and entering go on meanwhile.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from nnsight_lab.errors import SavesError
from nnsight_lab.saves.arrival import Arrival
from nnsight_lab.saves.held import Held, Memory, Slot
from nnsight_lab.saves.janitor import Janitor
from nnsight_lab.saves.label import SaveKey
from nnsight_lab.saves.mapped import FileTensors
from nnsight_lab.saves.spill import Spill
from nnsight_lab.saves.summary import Summary

Item: TypeAlias = Held | Arrival
#: Past this part of the budget, and while what earlier calls left is still being written, their requests are
#: dropped: the workers need the memory for the next call.
_HURRY = 1.5


class Shelf:
    """The requests of a store, oldest first.

    Args:
        spill: Where they go that do not fit.
        budget_bytes: Of memory.
        max_requests: Past that many the oldest is forgotten.

    Attributes:
        dropped: How many requests went that nobody told to go, by reason; those past ``max_requests`` aside.
        changes: Goes up whenever a request comes, goes, is marked, or loses a save.
        stamps: Of each request the value of ``changes`` since which its labels are what they are.
    """

    def __init__(self, spill: Spill, budget_bytes: int, max_requests: int) -> None:
        self.lock = threading.RLock()
        self.requests: dict[str, Item] = {}
        self.kept: set[str] = set()
        self.summaries: dict[str, dict[SaveKey, Summary]] = {}
        self.dropped: Counter[str] = Counter()
        self.changes = 0
        self.stamps: dict[str, int] = {}
        self.budget_bytes = budget_bytes
        self.max_requests = max_requests
        self.memory_bytes = 0
        self.spill = spill
        self.janitor = Janitor()
        self._writing = threading.Lock()
        self._newest: frozenset[str] = frozenset()
        self._in_memory: dict[str, int] = {}  # the bytes of each; least recently used first

    def enter(self, items: Sequence[Item]) -> None:
        """Put the requests of one call down as the newest, each in place of one with its id."""
        self._newest = frozenset(item.request_id for item in items)
        for item in items:
            self.forget(item.request_id)
            self.requests[item.request_id] = item
            self._stamp(item.request_id)
            self._count(item)
        excess = len(self.requests) - self.max_requests
        if excess > 0:
            for name in list(islice(self._older(self.requests), excess)):
                self.forget(name, later=True)

    def enter_cheaply(self, items: Sequence[Item]) -> None:
        """`enter`, and leave it to another thread to make room."""
        self.enter(items)
        limit = self.budget_bytes * _HURRY
        if self.memory_bytes > limit and self.janitor.busy:
            for name in list(self._older(self._in_memory)):
                self._drop(name, "saved faster than files take them")
                if self.memory_bytes <= limit:
                    break
        if self.memory_bytes > self.budget_bytes or self.spill.doomed:
            self.janitor.wake(self.tidy)

    def _older(self, names: Iterable[str]) -> Iterable[str]:
        return (name for name in names if name not in self.kept and name not in self._newest)

    def forget(self, request_id: str, *, later: bool = False) -> None:
        """Let go of a request, with the files it was spilled to; ``later`` leaves these to `tidy`."""
        item = self.requests.pop(request_id, None)
        if self.stamps.pop(request_id, None) is not None:
            self.changes += 1
        self.memory_bytes -= self._in_memory.pop(request_id, 0)
        self.kept.discard(request_id)
        self.summaries.pop(request_id, None)
        if isinstance(item, Held) and isinstance(item.tensors, FileTensors):
            self.spill.remove(item.tensors.path, later=later)

    def touch(self, request_id: str) -> None:
        """It was used just now."""
        nbytes = self._in_memory.pop(request_id, None)
        if nbytes is not None:
            self._in_memory[request_id] = nbytes

    def taken_apart(self, request_id: str) -> Held | None:
        """A request with its labels, or None where it is gone. Takes the lock itself.

        Raises:
            SavesError: It cannot be labelled; it is dropped.
        """
        while True:
            with self.lock:
                item = self.requests.get(request_id)
            if item is None or isinstance(item, Held):
                return item
            try:
                held = item.taken_apart()
            except SavesError:
                with self.lock:
                    if self.requests.get(request_id) is item:
                        self._drop(request_id, "too many parts to be labelled")
                raise
            with self.lock:
                if self.requests.get(request_id) is item:
                    self.requests[request_id] = held
                    self.memory_bytes -= self._in_memory.get(request_id, 0)
                    self._in_memory[request_id] = held.nbytes  # where it stood among the others
                    self.memory_bytes += held.nbytes

    def make_room(self) -> None:
        """Spill requests until memory holds what it may, but none that is kept. Takes the lock itself.

        Raises:
            OSError, CannotTravel: One could not be written.
        """
        self.spill.unlink()
        while (name := self._too_much()) is not None:
            self._spill(name)

    def tidy(self, budget_bytes: int | None = None) -> None:
        """`make_room`, but what cannot be written is dropped. Takes the lock itself, raises nothing."""
        self.spill.unlink()
        while (name := self._too_much(budget_bytes)) is not None:
            try:
                self._spill(name)
            except Exception as error:  # nobody waits for this thread who could be told
                with self.lock:
                    if name in self._in_memory:
                        self._drop(name, reason(error))

    def _too_much(self, budget_bytes: int | None = None) -> str | None:
        with self.lock:
            if self.memory_bytes <= (self.budget_bytes if budget_bytes is None else budget_bytes):
                return None
            return next((name for name in self._in_memory if name not in self.kept), None)

    def _spill(self, name: str) -> None:
        with self._writing:
            try:
                held = self.taken_apart(name)
            except SavesError:  # it was dropped, which makes room as well
                return
            with self.lock:
                if held is None or name not in self._in_memory or name in self.kept:
                    return
                if not self._in_memory[name]:  # nothing would be freed
                    del self._in_memory[name]
                    return
                if self.spill.cap_bytes is not None and held.nbytes > self.spill.cap_bytes:
                    self._drop(name, "more than may go to disk")
                    return
                while self.spill.lacks(held.nbytes):
                    on_disk = next((n for n in self._older(self.requests) if self._is_spilled(n)), None)
                    if on_disk is None:
                        break
                    self._drop(on_disk, "as many on disk as may be")
            self.spill.unlink()
            spilled, nbytes = self.spill.write(held)
            with self.lock:
                self.spill.enter(spilled.path, nbytes)
                if self.requests.get(name) is held and name not in self.kept:
                    held.tensors = spilled
                    self.memory_bytes -= self._in_memory.pop(name)
                else:
                    self.spill.remove(spilled.path)

    def _is_spilled(self, name: str) -> bool:
        item = self.requests[name]
        return (
            isinstance(item, Held)
            and isinstance(item.tensors, FileTensors)
            and self.spill.owns(item.tensors.path)
        )

    def drop_slots(self, request_id: str, slots: Iterable[Slot]) -> None:
        """Let go of some of a request's saves; on disk the rest is written anew. Takes the lock itself."""
        with self._writing:
            held = self.taken_apart(request_id)
            with self.lock:
                if held is None or self.requests.get(request_id) is not held:
                    return
                rest = held.without(slots)
                if not rest.saves:
                    self.forget(request_id)
                    return
                tensors = held.tensors
                if not isinstance(tensors, FileTensors) or not self.spill.owns(tensors.path):
                    self.replace(held, rest)
                    return
            try:
                spilled, nbytes = self.spill.write(rest)
            except OSError:  # a full disk must not keep anyone from dropping: the file stays as it is
                with self.lock:
                    self.replace(held, rest)
                return
            with self.lock:
                self.spill.enter(spilled.path, nbytes)
                if self.replace(held, rest):
                    rest.tensors = spilled
                    self.spill.remove(tensors.path)
                else:
                    self.spill.remove(spilled.path)

    def replace(self, held: Held, rest: Held) -> bool:
        """Put ``rest`` where ``held`` is, if it still is there."""
        name = held.request_id
        if self.requests.get(name) is not held:
            return False
        self.requests[name] = rest
        self._stamp(name)
        self.memory_bytes -= self._in_memory.pop(name, 0)
        self._count(rest)
        known = self.summaries.get(name, {})
        self.summaries[name] = {key: found for key, found in known.items() if Slot(*key[1:4]) in rest.saves}
        return True

    def mark(self, request_id: str, kept: bool) -> None:
        """Keep a request, or keep it no more."""
        (self.kept.add if kept else self.kept.discard)(request_id)
        self.changes += 1

    def _stamp(self, request_id: str) -> None:
        self.changes += 1
        self.stamps[request_id] = self.changes

    def _drop(self, name: str, why: str) -> None:
        self.dropped[why] += 1
        self.forget(name, later=True)

    def _count(self, item: Item) -> None:
        nbytes = item.nbytes if isinstance(item, Arrival) or isinstance(item.tensors, Memory) else 0
        if nbytes:  # spilling a request without tensors would free nothing
            self._in_memory[item.request_id] = nbytes
            self.memory_bytes += nbytes


def reason(error: Exception) -> str:
    """Why a request could not be written, in a few words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk full"
    lines = str(error).strip().splitlines()
    return f"could not be written: {lines[0][:120] if lines else type(error).__name__}"
