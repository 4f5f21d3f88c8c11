"""Waiting for conditions with a limit, and the one engine the tests share."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Prompts of 16, 4 and 27 tokens for the tiny models, whose tokens are bytes.
TOWER, CAT, FOX = "The Eiffel Tower", "cats", "the quick brown fox jumped."
GREEDY = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
#: Some seconds on any machine; for requests that are to be caught while they run.
LONG = {"max_tokens": 900, "temperature": 0, "ignore_eos": True}


def until(condition: Callable[[], Any], limit_s: float, what: str = "") -> Any:
    """The condition's value once it is true; an AssertionError after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what or condition}"
        time.sleep(0.02)
    return value


def idle(engine: Any) -> None:
    """Within two seconds nothing of any request is left in the engine, and no edit is on it."""
    until(lambda: engine.request_count() == 0, 2, "a worker entry was left behind")
    until(lambda: engine._driver.unfinished() == 0, 2, "a request was left running")
    assert list(engine.edits) == []


def freed(engine: Any) -> None:
    """Within two seconds no request of the engine is tracked in a worker or running."""
    until(lambda: engine.request_count() == 0, 2, "a worker entry was left behind")
    until(lambda: engine._driver.unfinished() == 0, 2, "a request was left running")


def owned() -> list[Any]:
    """The engine processes that this process started."""
    from nnsight_lab.engine import processes

    owner = processes.this_owner()
    return [process for process in processes.engine_processes() if process.owner == owner]


def pid_of(engine: Any, name: str) -> int:
    """The process of ``engine`` whose title contains ``name``."""
    from nnsight_lab.engine import processes

    return next(p.pid for p in processes.engine_processes(engine.id) if name in p.name)


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``work`` in a thread; calling what is returned waits for it and gives its value or error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:  # given to whoever asks
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert found, "the thread did not end"
        value, error = found[0]
        if error is not None:
            raise error
        return value

    return result


def when_running(engine: Any, act: Callable[[], None], requests: int = 1) -> Callable[[], Any]:
    """Call ``act`` from another thread once the workers track that many requests."""

    def watch() -> float:
        until(lambda: engine.request_count() >= requests, 30, "the request did not start")
        at = time.monotonic()
        act()
        return at

    return in_background(watch)


def interrupt() -> None:
    """The stop button: SIGINT to this process, so a KeyboardInterrupt in its main thread."""
    os.kill(os.getpid(), signal.SIGINT)


class OneEngine:
    """At most one engine alive: asking for another stops the one there is."""

    def __init__(self) -> None:
        self._wanted: Any = None

    @property
    def live(self) -> Any:
        """The engine, or None when there is none or it is dead."""
        import nnsight_lab as lab

        engine = lab.engines().get("main")
        return engine if engine is not None and engine.alive else None

    def want(self, model: Path | str, mode: str, *, worker: str = "", **options: Any) -> Any:
        """The live engine where it has this configuration, else a new one in its place.

        ``worker`` names another worker class than the package's own.
        """
        import pytest

        import nnsight_lab as lab

        wanted = (str(model), mode, worker, options)
        if self.live is not None and wanted == self._wanted:
            return self.live
        self.stop()
        with pytest.MonkeyPatch.context() as patch:
            if worker:
                from nnsight_lab.engine.importing import load

                load()  # in the package's own order
                from nnsight_lab.engine import model as tree

                patch.setattr(tree, "_CPU_WORKER", worker)
            engine = lab.start(str(model), mode=mode, **options)
        self._wanted = wanted
        return engine

    def stop(self) -> None:
        """Stop the engine, dead or alive."""
        import nnsight_lab as lab

        if "main" in lab.engines():
            report = lab.stop("main")
            assert report.left == (), report
