"""The one line of an engine's start: `%engine start` shows it, and `lab.start` to a person who watches.

A start takes from seconds to minutes, and one without a sign of life is interrupted by its user. A pipe or a
log file has nobody who watches, so there it is shown only where it is asked for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from nnsight_lab.engine.status import duration
from nnsight_lab.errors import EngineMismatch
from nnsight_lab.magics.contract import Engine, StartProgress
from nnsight_lab.magics.drawing import Canvas, in_notebook, sentence

#: As people write them.
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}


def watched() -> bool:
    """Whether a person sees what is printed while it is: a notebook, or a terminal."""
    try:
        return in_notebook() or sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced by something else, or closed
        return False


class StartLine:
    """The one line of a start: the phases with their times, then what came of it."""

    def __init__(self, head: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._head = head
        self._model = f" {model}" if model else ""
        self._clock = clock
        self._began_s = clock()
        self._canvas = Canvas()

    def progress(self, state: StartProgress) -> None:
        """Shows how far the start is."""
        # A terminal has one line, and what is wider than it cannot be drawn again in place.
        done = state.done if in_notebook() else ()
        behind = "".join(f"{phase} {seconds:.1f} s · " for phase, seconds in done)
        text = f"{self._head}:{self._model} … {behind}{state.phase} ({state.elapsed_s:.0f} s in all)"
        self._canvas.draw(sentence(text))

    def around(self, start: Callable[[], Engine]) -> Engine:
        """Runs a start, and says what came of it; an error passes through."""
        try:
            engine = start()
        except EngineMismatch:  # nothing was begun: an engine of that name runs, and the error says so
            raise
        except BaseException:
            self._canvas.finish(sentence(f"{self._head}:{self._model} not started ({self._elapsed()})"))
            raise
        model = self._model or f" {engine.status().model}"
        status = engine.status()
        if engine.already_running:
            text = (
                f"{self._head}:{model} already running with this configuration (up {duration(status.up_s)})"
            )
        else:
            kind = ", ".join(
                part for part in (engine.mode, _DEVICES.get(status.device, status.device)) if part
            )
            text = f"{self._head}:{model} ready in {self._elapsed()} ({kind})"
        self._canvas.finish(sentence(text))
        return engine

    def _elapsed(self) -> str:
        return f"{self._clock() - self._began_s:.1f} s"
