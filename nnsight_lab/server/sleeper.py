"""Puts an idle engine to sleep: its weights in the machine's memory, its GPU free for others.

The next request wakes it, and waits for that. vLLM's sleep mode frees memory of a GPU only, so a server on a
CPU refuses to be started with it (see `nnsight_lab.engine.sleeping`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nnsight_lab.server.notes import note


class Sleeper:
    """Of one engine.

    Args:
        llm: vLLM's engine client.
        after_s: Idle for that long, it is put to sleep.
    """

    def __init__(self, llm: Any, after_s: float) -> None:
        self._llm = llm
        self._after_s = after_s
        self._used = time.monotonic()
        self._asleep = False
        self._changing = asyncio.Lock()

    @property
    def asleep(self) -> bool:
        """Whether it sleeps."""
        return self._asleep

    async def look(self) -> None:
        """Put it to sleep where it has been idle for long enough."""
        if self._llm.output_processor.request_states:
            self._used = time.monotonic()
        if self._asleep or time.monotonic() - self._used < self._after_s:
            return
        async with self._changing:
            if time.monotonic() - self._used < self._after_s:
                return
            await self._llm.sleep(level=1)
            self._asleep = True
        note("engine asleep", idle_s=round(time.monotonic() - self._used, 1))

    async def awake(self) -> None:
        """Return once it is awake."""
        self._used = time.monotonic()
        if not self._asleep and not self._changing.locked():
            return
        began = time.monotonic()
        async with self._changing:
            if self._asleep:
                await self._llm.wake_up()
                self._asleep = False
                note("engine awake", took_s=round(time.monotonic() - began, 1))

    def renewed(self) -> None:
        """The engine is another, and awake."""
        self._asleep = False
        self._used = time.monotonic()
