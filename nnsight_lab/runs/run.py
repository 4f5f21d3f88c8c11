"""A prompt that is answered while one looks on: ``lab.live("…", max_tokens=200)``.

It begins at once and waits for nobody: the cell may end, and the tokens go on coming. Whoever wants the
output awaits it, waits for it, or takes it token by token; that is also what an interrupt of the cell stops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nnsight_lab.engine.feed import Feed
from nnsight_lab.engine.peeks import APART_S
from nnsight_lab.engine.waiting import INTERRUPTED, InterruptedTask
from nnsight_lab.errors import Interrupted
from nnsight_lab.runs.view import LiveView

if TYPE_CHECKING:
    from nnsight_lab.engine.call import Call
    from nnsight_lab.engine.service import EngineService


class LiveRun(LiveView):
    """A request, its output and a view of both; made by ``engine.live``.

    As a cell's last expression it shows itself. ``await run`` and ``run.wait()`` give the output;
    ``async for output in run`` (or a plain ``for``) gives it as it grows; each shows it first, where nobody
    has. What was stopped in the view gives what there was of it.
    """

    def __init__(self, engine: EngineService, score: Any, title: str) -> None:
        super().__init__(score, title=title)
        self._engine = engine
        self._call: Call | None = None
        self._outputs: list[Any] | None = None
        self._settling = threading.Lock()
        #: How many wait for it.
        self._waiting = 0

    def start(self, call: Call) -> None:
        """Submit its call, and watch it."""
        self._call = call
        self._engine.submit(call)
        self.begins(Feed(self._engine, call))

    @property
    def output(self) -> Any:
        """VLLM's output as it stands, with ``.saves`` once it is home; None before the first token."""
        return None if self._call is None else self._call.requests[0].output

    # -- waiting -------------------------------------------------------------------------------

    def wait(self) -> Any:
        """The output, once it is whole.

        Raises:
            Interrupted: The cell was interrupted; the request is aborted, and the view says so.
            EditError: An edit's block failed.
        """
        __tracebackhide__ = True
        with self._waited_for() as call:
            try:
                self._engine.wait(call)
            except BaseException as error:
                self.ends(error)
                raise
            return self._settled()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        __tracebackhide__ = True
        with self._waited_for() as call:
            try:
                await self._engine.await_(call)
            except BaseException as error:
                self.ends(error)
                raise
            return self._settled()

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        with self._waited_for() as call:
            while not call.future.done():
                try:
                    Feed(self._engine, call).wait(APART_S)
                except KeyboardInterrupt:
                    self._engine.abort(call)
                    self.ends(KeyboardInterrupt())
                    raise Interrupted(INTERRUPTED) from None
                output = self.output
                if output is not None and not output.finished and len(output.outputs[0].token_ids) > seen:
                    seen = len(output.outputs[0].token_ids)
                    yield output
            yield self.wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
        seen = 0
        with self._waited_for() as call:
            future = asyncio.wrap_future(call.future)
            future.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # raised by the last wait
            while not future.done():
                try:
                    await asyncio.wait([future], timeout=APART_S)
                except asyncio.CancelledError:
                    self._engine.abort(call)
                    self.ends(KeyboardInterrupt())
                    raise InterruptedTask(INTERRUPTED) from None
                output = self.output
                if output is not None and not output.finished and len(output.outputs[0].token_ids) > seen:
                    seen = len(output.outputs[0].token_ids)
                    yield output
            yield await self

    @contextmanager
    def _waited_for(self) -> Iterator[Call]:
        """Somebody waits, and says how it ended; shown first, where nobody has."""
        self.display()
        assert self._call is not None
        with self._settling:
            self._waiting += 1
        try:
            yield self._call
        finally:
            with self._settling:
                self._waiting -= 1
            if self._call.future.done():
                self.finished()

    # -- its end -------------------------------------------------------------------------------

    def finished(self) -> None:
        """The engine has nothing more; where nobody waits for it, this is its end."""
        if self._waiting or self.over:
            return
        feed = self._feed
        error = None if feed is None else feed.failure()
        if error is not None:
            self.ends(error)
            return
        try:
            self._settled()
        except BaseException as failed:  # shown in the view; whoever waits gets it as well
            self.ends(failed)

    def _settled(self) -> Any:
        """Take its output home, once, whoever comes first; and raise what failed, to each."""
        __tracebackhide__ = True
        call = self._call
        assert call is not None
        if call.aborted.is_set():
            self.ends(KeyboardInterrupt())
            return self.output
        with self._settling:
            if self._outputs is None:
                self._outputs = self._engine.outputs(call)
        try:
            self._engine.raise_errors(call, self._outputs)
        except BaseException as error:
            self.ends(error)
            raise
        self.ends()
        return self._outputs[0]
