"""Work of this process while an engine's processes start: they import for ten seconds, and it only waits.

vLLM's constructor blocks the thread that calls it until the engine is ready, and its processes die with
that thread, so it is the other work that goes to a thread of its own. It begins when the first process was
spawned: until then vLLM reads the same configuration here, and what is wrong with that is vLLM's to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: Work that nobody needs any more is waited for so long: what it patches must be put back.
_LEFT_S = 20.0


@dataclass(frozen=True)
class Launch:
    """What the threads of one start tell each other.

    Attributes:
        given_up: Set when the start is given up: nothing may be spawned after that.
        spawned: Set when the first process of the engine is there.
        failed: Set when the work beside the processes failed: there is nothing to wait for.
    """

    given_up: threading.Event = field(default_factory=threading.Event)
    spawned: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)


class Beside(Generic[T]):
    """One piece of such work.

    Args:
        work: What to do.
        launch: The start it belongs to.
    """

    def __init__(self, work: Callable[[], T], launch: Launch) -> None:
        self._work = work
        self._launch = launch
        self._begin = launch.spawned
        self._wanted = True
        self._done: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nnsight-lab-tree")
        self._thread.start()

    def _run(self) -> None:
        self._begin.wait()
        if not self._wanted:
            return
        try:
            self._done.set_result(self._work())
        except BaseException as error:  # handed to whoever wants the result
            self._done.set_exception(error)
            self._launch.failed.set()

    def result(self) -> T:
        """What came of it; where no process was spawned, it is done now."""
        self._begin.set()
        return self._done.result()

    def drop(self) -> BaseException | None:
        """Nobody needs it any more; what it failed with, if it did."""
        self._wanted = False
        self._begin.set()
        self._thread.join(_LEFT_S)
        return self._done.exception() if self._done.done() else None
