"""Outputs as they grow, for ``async for`` and ``for``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from nnsight_lab.engine.waiting import Watch, astopped, stopped

if TYPE_CHECKING:
    from nnsight_lab.engine.call import Call
    from nnsight_lab.engine.service import EngineService

_TICK_S = 0.05


class Stream:
    """The outputs of one call, each with all its text so far; the finished ones carry ``.saves``.

    Made by ``engine.stream(...)``; read once, by ``async for`` or by ``for``.
    """

    def __init__(self, engine: EngineService, call: Call) -> None:
        self._engine = engine
        self._call = call
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: list[Any] = []
        call.on_output = self._took
        engine.submit(call)

    def _took(self, index: int, output: Any) -> None:
        output.index = index
        self._items.put(output)

    def _ready(self) -> list[Any]:
        """What arrived since the last look; finished outputs wait until their saves are home."""
        ready: list[Any] = []
        while True:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                return ready
            (self._held if item.finished else ready).append(item)

    def _last(self) -> list[Any]:
        outputs = self._engine.outputs(self._call)
        for index, output in enumerate(outputs):
            output.index = index
        return outputs

    def __iter__(self) -> Iterator[Any]:
        done = False
        try:
            while not self._call.future.done():
                self._wait_a_tick()
                yield from self._ready()
            self._engine.wait(self._call)
            done = True
            outputs = self._last()
            yield from outputs
            self._engine.raise_errors(self._call, outputs)
        finally:
            if not done:
                self._engine.abort(self._call)

    def _wait_a_tick(self) -> None:
        __tracebackhide__ = True
        try:
            concurrent.futures.wait([self._call.future], timeout=_TICK_S)
            dead = self._engine.died()
            if dead is not None and not self._call.future.done():
                raise dead
        except KeyboardInterrupt:
            raise stopped(self._watch()) from None

    async def _await_a_tick(self, future: asyncio.Future[None]) -> None:
        __tracebackhide__ = True
        try:
            await asyncio.wait([future], timeout=_TICK_S)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise (await astopped(self._watch())) from None

    def _watch(self) -> Watch:
        return self._engine.watch(self._call, None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        done = False
        future = asyncio.wrap_future(self._call.future)
        try:
            while not future.done():
                await self._await_a_tick(future)
                for item in self._ready():
                    yield item
                dead = self._engine.died()
                if dead is not None and not future.done():
                    raise dead
            await self._engine.await_(self._call)
            done = True
            outputs = self._last()
            for item in outputs:
                yield item
            self._engine.raise_errors(self._call, outputs)
        finally:
            if not done:
                self._engine.abort(self._call)
