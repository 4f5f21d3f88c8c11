"""A thread that is there while there is something to do, and not a moment longer.

Spilling writes gigabytes, so it is nobody's call that waits for it. A thread that waited for work would keep
its store alive for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Janitor:
    """Does one kind of work, never twice at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False
        self._running = False

    def wake(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by another thread, once more if it is under way; it must not raise."""
        with self._lock:
            self._wanted = True
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, args=(work,), daemon=True, name="nnsight-lab-store").start()
        except RuntimeError:  # the interpreter is ending, or has no thread to spare
            with self._lock:
                self._running = False

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._running

    def _run(self, work: Callable[[], None]) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._running = False
                    return
                self._wanted = False
            work()
