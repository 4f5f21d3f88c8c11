"""Waiting for an engine so that the stop button, a dead process and a live view all work.

A wait is never a bare ``result()``: the calling thread looks up every few milliseconds, so that an
interrupt is taken at once (from an async cell too, where ipykernel's cancellation is only seen when
the loop wakes), a dead engine is noticed by everybody who waits on it, and the live view is drawn
in the thread that owns the output.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from nnsight_lab.errors import Interrupted

T = TypeVar("T")

_TICK_S = 0.05
#: How long an interrupt waits for its abort to be carried out: before the block is broken off, and after that
#: before it is reported anyway.
_ABORT_S = 0.5
_BREAK_S = 0.7
_DEATH_GRACE_S = 1.5

STUCK = (
    "the wait is over, but the worker is still at it: if the next call does not answer, `%engine restart`."
)
INTERRUPTED = "the requests of this cell were aborted; the engine is still loaded."


class InterruptedTask(Interrupted, asyncio.CancelledError):
    """An interrupt of an async cell: also the cancellation it arrived as, so asyncio keeps its rules."""

    shown_as = "Interrupted"


class Watch:
    """What to look at while waiting.

    Attributes:
        tick: Called at most 20 times a second in the waiting thread, and once at the end.
        died: The error to raise once the engine is dead, or None while it lives.
        abort: Called when the caller is interrupted; its future is waited on briefly.
        break_off: Called when that is not carried out in time: a block may run for ever.
    """

    def __init__(
        self,
        *,
        died: Callable[[], BaseException | None],
        abort: Callable[[], Future[None] | None] | None = None,
        break_off: Callable[[], None] | None = None,
        tick: Callable[[], None] | None = None,
        interrupted: str = INTERRUPTED,
    ) -> None:
        self.died = died
        self.abort = abort
        self.break_off = break_off
        self.tick = tick
        self.interrupted = interrupted
        self._dead_since: float | None = None

    def look(self) -> None:
        """Draw, and raise when the engine is dead and nobody said so to the future."""
        if self.tick is not None:
            self.tick()
        error = self.died()
        if error is None:
            return
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since > _DEATH_GRACE_S:
            raise error


def wait(future: Future[T], watch: Watch) -> T:
    """The future's result, from a thread without a loop to keep running.

    Raises:
        Interrupted: On a keyboard interrupt, after aborting.
    """
    __tracebackhide__ = True
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=_TICK_S)
            watch.look()
        return future.result()
    except KeyboardInterrupt:
        raise stopped(watch) from None


def stopped(watch: Watch) -> Interrupted:
    """Abort what is watched, after a keyboard interrupt; the error that says so."""
    aborting = watch.abort() if watch.abort is not None else None
    if aborting is not None:
        # A second press must not lose the abort, only the wait for it.
        with contextlib.suppress(KeyboardInterrupt):
            concurrent.futures.wait([aborting], timeout=_ABORT_S)
            if not aborting.done() and watch.break_off is not None:
                watch.break_off()
                concurrent.futures.wait([aborting], timeout=_BREAK_S)
    return Interrupted(_outcome(aborting, watch))


async def await_(future: Future[T], watch: Watch) -> T:
    """The future's result, without blocking the caller's loop.

    Raises:
        InterruptedTask: On cancellation, after aborting.
    """
    __tracebackhide__ = True
    wrapped: asyncio.Future[T] = asyncio.wrap_future(future)
    try:
        while not wrapped.done():
            await asyncio.wait([wrapped], timeout=_TICK_S)
            watch.look()
        return wrapped.result()
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise (await astopped(watch)) from None


async def astopped(watch: Watch) -> InterruptedTask:
    """`stopped`, of a task that was cancelled."""
    aborting = watch.abort() if watch.abort is not None else None
    if aborting is not None:
        await _briefly(aborting, _ABORT_S)
        if not aborting.done() and watch.break_off is not None:
            watch.break_off()
            await _briefly(aborting, _BREAK_S)
    return InterruptedTask(_outcome(aborting, watch))


def _outcome(aborting: Future[Any] | None, watch: Watch) -> str:
    return STUCK if aborting is not None and not aborting.done() else watch.interrupted


async def _briefly(aborting: Future[Any], timeout_s: float) -> None:
    try:
        await asyncio.wait([asyncio.wrap_future(aborting)], timeout=timeout_s)
    except asyncio.CancelledError:
        return
