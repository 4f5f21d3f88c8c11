"""One thread for a widget's long answers, so that neither a cell nor the next question waits for them.

Who looks moves on faster than gigabytes are read: a newer question of the same view and kind takes the
place of the older, which is told so between two pieces of its work. The thread ends when there is nothing
to do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_IDLE_S: Final = 5.0

#: Work is given a function that says whether to stop.
Work = Callable[[Callable[[], bool]], None]


class Stopped(Exception):
    """Nobody waits for the answer any more."""


class Jobs:
    """Works one after another, the newest of a key only.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Hashable, Work] = OrderedDict()
        self._running: tuple[Hashable, threading.Event] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, key: Hashable, work: Work, dropped: Callable[[], None]) -> None:
        """Do ``work`` soon, in place of what waits or runs under that key.

        Args:
            key: Whose work it is.
            work: What to do; it sees to its own errors.
            dropped: Called where nothing is done any more.
        """
        with self._changed:
            if self._closed:
                refused = True
            else:
                refused = False
                if self._running is not None and self._running[0] == key:
                    self._running[1].set()
                older = self._waiting.pop(key, None)
                self._waiting[key] = work
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if refused:
            dropped()
        elif older is not None:
            older(lambda: True)

    def close(self) -> None:
        """Do no more, and tell what runs to stop; does not wait for it."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            if self._running is not None:
                self._running[1].set()
            self._changed.notify_all()
        for work in waiting:
            work(lambda: True)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        with self._changed:
            return self._thread is not None

    @property
    def awaited(self) -> bool:
        """Whether something waits for what is done now to end."""
        with self._changed:
            return bool(self._waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed or not self._changed.wait(_IDLE_S):
                        if self._waiting and not self._closed:
                            break
                        self._thread = None
                        return
                key, work = self._waiting.popitem(last=False)
                stop = threading.Event()
                self._running = (key, stop)
            try:
                work(stop.is_set)
            finally:
                del work  # nothing of a widget is held while this thread waits
                with self._changed:
                    self._running = None
