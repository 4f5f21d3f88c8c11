"""What a kernel knows of how an engine's steps ran, without waiting for a worker.

A worker answers between two steps, and one that hangs in a block never does; a status must not hang with it.
So figures come along with the saves of finished requests. Where that is not new enough they are asked for,
one question at a time, waited for as long as the asker likes; what comes later is there for the next look.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from nnsight_lab.errors import ServerError
from nnsight_lab.wire.codec import decode
from nnsight_lab.wire.step_figures import StepFigures

#: An engine is not asked oftener by those who do not wait.
_EVERY_S = 2.0


class StepWatch:
    """What is known of one engine's steps.

    Args:
        ask: Asks the workers, each of which answers by a dictionary with ``figures``, encoded.
        activity: Equals what it was where no step was run in between.

    Attributes:
        figures: As they were last told; None before.
    """

    def __init__(self, ask: Callable[[], Future[Any]], activity: Callable[[], object]) -> None:
        self._ask = ask
        self._activity = activity
        self.figures: StepFigures | None = None
        self._lock = threading.Lock()
        self._asking: Future[Any] | None = None
        self._asked_at = float("-inf")
        self._seen: object = object()
        self._mute = False

    def took(self, figures: StepFigures) -> None:
        """Note figures that came along with something else."""
        self.figures = figures

    def look(self, wait_s: float = 0.0) -> StepFigures | None:
        """The newest figures.

        Args:
            wait_s: How long to wait for newer ones; 0 only has them asked for, and not all the time.
        """
        asking = self._asked(at_once=wait_s > 0)
        if wait_s > 0 and asking is not None:
            concurrent.futures.wait([asking], timeout=wait_s)
        return self.figures

    def _asked(self, *, at_once: bool) -> Future[Any] | None:
        """The question under way, or a new one where that is worth it."""
        with self._lock:
            if self._mute or (self._asking is not None and not self._asking.done()):
                return self._asking
            now, activity = time.monotonic(), self._activity()
            if activity == self._seen or (not at_once and now - self._asked_at < _EVERY_S):
                return None
            self._asked_at = now
            told: Future[Any] = Future()
            try:
                self._ask().add_done_callback(lambda answer: self._answered(answer, activity, told))
            except Exception:  # an engine that is just going
                return None
            self._asking = told
            return told

    def _answered(self, answer: Future[Any], activity: object, told: Future[Any]) -> None:
        try:
            found = answer.result()
            if found:
                self.figures = decode(found[0]["figures"])
            self._seen = activity
        except ServerError as error:
            # One of a version that does not tell.
            self._mute = error.status in (404, 405)
        except Exception:  # a worker that is going, or the message of another version: nothing is known anew
            pass
        finally:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                told.set_result(None)
