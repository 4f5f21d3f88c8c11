"""An engine that sleeps: its weights in the machine's memory, its GPU free for others, and awake in seconds.

The hard fact is vLLM's: on a CPU its workers log "not supported, ignore it" and the engine reports that
it sleeps all the same, with every byte still held. So what cannot free memory is refused here. A request
wakes the engine, and waits for that. Only vLLM's first level is used: the second throws the weights away,
and a stop does that better.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from nnsight_lab.engine.life import EngineLife
from nnsight_lab.errors import SleepRefused


class EngineSleep(EngineLife):
    """An engine that can be put to sleep.

    The awaited forms are not called ``asleep`` and ``awake``, as others here would be:
    ``if engine.asleep():`` would always be true.
    """

    def _fresh(self) -> None:
        super()._fresh()
        self._asleep = False
        self._waking: Future[None] | None = None
        self._sleep_lock = threading.RLock()

    def no_sleep(self) -> str:
        """Why it cannot sleep, in one line; "" where it can."""
        if self._state != "ready":
            return f"Engine {self.name!r} is {self._state}."
        known = self.facts()
        if known.device == "cpu":
            return (
                f"Engine {self.name!r} runs on the CPU, and vLLM's sleep mode frees GPU memory only: "
                f"`%engine stop {self.name}` frees this one's."
            )
        if not known.sleep_mode:
            return f"Engine {self.name!r} was started without enable_sleep_mode=True, so vLLM cannot free it."
        return ""

    def state(self) -> tuple[str, str]:
        """As of any engine, or ``asleep``."""
        state, cause = super().state()
        return ("asleep" if self._asleep and state in ("ready", "busy") else state), cause

    def sleep(self) -> None:
        """Free the GPU: the weights wait in the machine's memory. A second time is harmless.

        The next request wakes it, as `wake` does.

        Raises:
            SleepRefused: On a CPU, without ``enable_sleep_mode=True``, or while requests are under way.
        """
        __tracebackhide__ = True
        falling = self._fall_asleep()
        if falling is not None:
            self.waited(falling)

    async def sleep_async(self) -> None:
        """`sleep`, awaited."""
        __tracebackhide__ = True
        falling = self._fall_asleep()
        if falling is not None:
            await self.awaited(falling)

    def wake(self) -> None:
        """Bring it back; harmless where it is awake."""
        __tracebackhide__ = True
        self._require()
        if self._asleep:
            self.waited(self._wake())

    async def wake_async(self) -> None:
        """`wake`, awaited."""
        __tracebackhide__ = True
        self._require()
        if self._asleep:
            await self.awaited(self._wake())

    def _fall_asleep(self) -> Future[None] | None:
        __tracebackhide__ = True
        self._require()
        refused = self.no_sleep()
        if refused:
            raise SleepRefused(refused)
        with self._sleep_lock:
            if self._asleep and self._waking is None:
                return None
            busy = self._driver.unfinished()
            if busy or self._waking is not None:
                raise SleepRefused(
                    f"Engine {self.name!r} is busy: let its requests end, or interrupt them, and ask again."
                )
            # From here on a request wakes it again, after it fell asleep.
            self._asleep = True
            falling = self._driver.sleep()

        def fell(done: Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._asleep = False

        falling.add_done_callback(fell)
        return falling

    def _wake(self) -> Future[None]:
        """The waking that is under way, or a new one; none where it was awake before this one came to it."""
        with self._sleep_lock:
            if self._waking is not None:
                return self._waking
            if not self._asleep:
                awake: Future[None] = Future()
                awake.set_result(None)
                return awake
            waking = self._waking = self._driver.wake()

        def awoke(done: Future[Any]) -> None:
            with self._sleep_lock:
                self._waking = None
                if not done.cancelled() and done.exception() is None:
                    self._asleep = False

        waking.add_done_callback(awoke)
        return waking
