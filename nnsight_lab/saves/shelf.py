"""What a store has, how much of it is in memory, and what goes first.

Whoever calls a method here holds the lock, but for `make_room` and `drop_slots`, which write files: they take
turns with each other and hold the lock only to look and to put down, so that reading goes on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from nnsight_lab.saves.held import Held, Memory, Slot
from nnsight_lab.saves.label import SaveKey
from nnsight_lab.saves.mapped import FileTensors
from nnsight_lab.saves.spill import Spill
from nnsight_lab.saves.summary import Summary


class Shelf:
    """The requests of a store, oldest first.

    Args:
        spill: Where they go that do not fit.
        budget_bytes: Of memory.
        max_requests: Past that many the oldest is forgotten.
    """

    def __init__(self, spill: Spill, budget_bytes: int, max_requests: int) -> None:
        self.lock = threading.RLock()
        self.requests: dict[str, Held] = {}
        self.kept: set[str] = set()
        self.summaries: dict[str, dict[SaveKey, Summary]] = {}
        self.budget_bytes = budget_bytes
        self.max_requests = max_requests
        self.memory_bytes = 0
        self.spill = spill
        self._writing = threading.Lock()
        self._in_memory: dict[str, int] = {}  # the bytes of each; least recently used first

    def enter(self, held: Held) -> None:
        """Put a request down as the newest, in place of one with its id."""
        name = held.request_id
        self.forget(name)
        self.requests[name] = held
        self._count(held)
        while len(self.requests) > self.max_requests:
            oldest = next(
                (other for other in self.requests if other not in self.kept and other != name), None
            )
            if oldest is None:
                break
            self.forget(oldest)

    def forget(self, request_id: str) -> None:
        """Let go of a request, with the files it was spilled to."""
        held = self.requests.pop(request_id, None)
        self.memory_bytes -= self._in_memory.pop(request_id, 0)
        self.kept.discard(request_id)
        self.summaries.pop(request_id, None)
        if held is not None and isinstance(held.tensors, FileTensors):
            self.spill.remove(held.tensors.path)

    def touch(self, request_id: str) -> None:
        """It was used just now."""
        nbytes = self._in_memory.pop(request_id, None)
        if nbytes is not None:
            self._in_memory[request_id] = nbytes

    def make_room(self) -> None:
        """Spill requests until memory holds what it may, those marked to be kept aside.

        Raises:
            OSError, CannotTravel: One could not be written.
        """
        while self.memory_bytes > self.budget_bytes:
            with self._writing:
                with self.lock:
                    name = next((name for name in self._in_memory if name not in self.kept), None)
                    if name is None or self.memory_bytes <= self.budget_bytes:
                        return
                    held = self.requests[name]
                spilled, nbytes = self.spill.write(held)
                with self.lock:
                    self.spill.enter(spilled.path, nbytes)
                    if self.requests.get(name) is held and name not in self.kept:
                        held.tensors = spilled
                        self.memory_bytes -= self._in_memory.pop(name)
                    else:
                        self.spill.remove(spilled.path)

    def drop_slots(self, request_id: str, slots: Iterable[Slot]) -> None:
        """Let go of some of a request's saves; on disk the rest is written anew."""
        with self._writing:
            with self.lock:
                held = self.requests.get(request_id)
                if held is None:
                    return
                rest = held.without(slots)
                if not rest.saves:
                    self.forget(request_id)
                    return
                tensors = held.tensors
                if not isinstance(tensors, FileTensors) or not self.spill.owns(tensors.path):
                    self._replace(held, rest)
                    return
            try:
                spilled, nbytes = self.spill.write(rest)
            except OSError:  # a full disk must not keep anyone from dropping: the file stays as it is
                with self.lock:
                    self._replace(held, rest)
                return
            with self.lock:
                self.spill.enter(spilled.path, nbytes)
                if self._replace(held, rest):
                    rest.tensors = spilled
                    self.spill.remove(tensors.path)
                else:
                    self.spill.remove(spilled.path)

    def _replace(self, held: Held, rest: Held) -> bool:
        name = held.request_id
        if self.requests.get(name) is not held:
            return False
        self.requests[name] = rest
        self.memory_bytes -= self._in_memory.pop(name, 0)
        self._count(rest)
        known = self.summaries.get(name, {})
        self.summaries[name] = {key: found for key, found in known.items() if Slot(*key[1:4]) in rest.saves}
        return True

    def _count(self, held: Held) -> None:
        nbytes = held.nbytes if isinstance(held.tensors, Memory) else 0
        if nbytes:  # spilling a request without tensors would free nothing
            self._in_memory[held.request_id] = nbytes
            self.memory_bytes += nbytes
