"""The end of a server: what runs is let finish, for a while, and nothing new begins.

vLLM's own handler of SIGTERM shuts the engine down with whatever runs. Ours takes its place once vLLM has
set it. A first SIGTERM refuses new requests (503, with when to come again) and waits for those that run; when
they are done, or the time is over, the rest is aborted. A second one, or SIGINT, ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.notes import note

_TICK_S = 0.1
#: How long answers may take to be written after their requests were aborted.
_ABORTED_S = 5.0


class Ending:
    """Of one server.

    Args:
        state: vLLM's app's; its ``server`` is uvicorn's.
        desk: Knows what runs.
        drain_s: How long requests may go on.
    """

    def __init__(self, state: Any, desk: Desk, drain_s: float) -> None:
        self._state = state
        self._desk = desk
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Take the signals from now on."""
        # vLLM sets its handlers and this attribute in one go, without a turn of the loop between.
        while not hasattr(self._state, "server"):
            await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.end, self._drain_s)
        loop.add_signal_handler(signal.SIGINT, self.end, 0.0)

    def end(self, drain_s: float) -> None:
        """Begin the end, or hurry it."""
        if self._draining is None:
            CONDITION.end(drain_s + CONDITION.start_s)
            note("ending", drain_s=drain_s, requests=self._running())
            self._draining = asyncio.ensure_future(self._drain(drain_s))
        else:
            self._draining.cancel()
            self._quit(force=True)

    async def _drain(self, drain_s: float) -> None:
        loop = asyncio.get_running_loop()
        over = loop.time() + drain_s
        while self._running() and loop.time() < over and not self._desk.driver.dead():
            await asyncio.sleep(_TICK_S)
        left = self._running()
        if left:
            note("aborting", requests=left)
            self._desk.abort_all()
            over = loop.time() + _ABORTED_S
            while self._running() and loop.time() < over:
                await asyncio.sleep(_TICK_S)
        self._quit(force=bool(self._running()))

    def _running(self) -> int:
        return int(self._desk.ledger.figures()["requests"])

    def _quit(self, *, force: bool) -> None:
        self._state.server.force_exit = force
        self._state.server.should_exit = True
