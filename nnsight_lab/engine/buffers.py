"""Memory for large replies, used again: a page that is new to a process costs more than its bytes here.

On a virtual machine the first touch of a gigabyte took 1.3 to 2.2 s where the copy into it took 0.3 s. What
nobody looks at any more is kept for the next reply for some seconds, and then given back.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import weakref
from typing import NamedTuple

import numpy as np

#: How long memory waits for the next reply.
IDLE_S = 10.0
#: At most so much of it waits.
IDLE_BYTES = 2 * 2**30


def _new(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Idle(NamedTuple):
    memory: mmap.mmap
    since: float


class Buffers:
    """Memory of one kernel for what it fetches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._closed = False

    def take(self, nbytes: int) -> memoryview:
        """Memory of so many bytes, which comes back by itself once nothing looks into it."""
        with self._lock:
            fits = [one for one in self._idle if nbytes <= len(one.memory) <= 2 * nbytes]
            found = min(fits, key=lambda one: len(one.memory), default=None)
            if found is not None:
                self._idle.remove(found)
        memory = _new(nbytes) if found is None else found.memory
        view = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(view, self._back, memory).atexit = False
        return memoryview(view)  # type: ignore[arg-type]  # until Python 3.12

    def tidy(self, idle_s: float = IDLE_S) -> None:
        """Give back what waited too long."""
        now = time.monotonic()
        with self._lock:
            self._idle = [one for one in self._idle if now - one.since < idle_s]

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._closed = True
            self._idle = []

    @property
    def idle_bytes(self) -> int:
        """What waits."""
        with self._lock:
            return sum(len(one.memory) for one in self._idle)

    def _back(self, memory: mmap.mmap) -> None:
        # Called wherever a last reference goes, also while this thread holds the lock: then it is let go.
        if not self._lock.acquire(blocking=False):
            return
        try:
            waiting = sum(len(one.memory) for one in self._idle)
            if not self._closed and waiting + len(memory) <= IDLE_BYTES:
                self._idle.append(_Idle(memory, time.monotonic()))
        finally:
            self._lock.release()
