"""The engine of vLLM's server as a driver: the same submitting, collecting and aborting as in a kernel."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from nnsight_lab.engine.async_driver import LoopDriver


class ServedDriver(LoopDriver):
    """Drives an engine that vLLM's server started, and ends.

    Args:
        loop: The server's.
        llm: Its engine client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, llm: Any) -> None:
        super().__init__(loop)
        self._llm = llm

    def start(self, model: str, options: dict[str, Any]) -> Future[None]:
        """Refused: the engine is there."""
        raise NotImplementedError

    def stop(self) -> None:
        """Nothing: the server ends its engine."""

    def close(self) -> None:
        """Nothing: the loop is the server's."""

    def stir(self, event: asyncio.Event) -> None:
        """Set an event of the loop, from whatever thread."""
        self._loop.call_soon_threadsafe(event.set)
