"""A prompt that is answered while one looks on: ``lab.live("…", max_tokens=200)``.

It begins at once and waits for nobody: the cell may end, and the tokens go on coming. Whoever wants the
output awaits it, waits for it, or takes it token by token; that is also what an interrupt of the cell stops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from nnsight_lab.engine.feed import Feed
from nnsight_lab.engine.peeks import APART_S
from nnsight_lab.live.view import LiveView

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
        self.display()
        call = self._its_call()
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
        self.display()
        call = self._its_call()
        try:
            await self._engine.await_(call)
        except BaseException as error:
            self.ends(error)
            raise
        return self._settled()

    def __iter__(self) -> Iterator[Any]:
        self.display()
        seen = 0
        while not self._its_call().future.done():
            Feed(self._engine, self._its_call()).wait(APART_S)
            output = self.output
            if output is not None and not output.finished and len(output.outputs[0].token_ids) > seen:
                seen = len(output.outputs[0].token_ids)
                yield output
        yield self.wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
        self.display()
        seen = 0
        future = asyncio.wrap_future(self._its_call().future)
        try:
            while not future.done():
                await asyncio.wait([future], timeout=APART_S)
                output = self.output
                if output is not None and not output.finished and len(output.outputs[0].token_ids) > seen:
                    seen = len(output.outputs[0].token_ids)
                    yield output
        except asyncio.CancelledError as error:
            self._engine.abort(self._its_call())
            self.ends(error)
            raise
        yield await self

    # -- its end -------------------------------------------------------------------------------

    def finished(self) -> None:
        """The engine has nothing more; where nobody waits for it, this is its end."""
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
        call = self._its_call()
        if call.aborted.is_set():
            self._pressed = True
            self.ends()
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

    def _its_call(self) -> Call:
        assert self._call is not None
        return self._call
