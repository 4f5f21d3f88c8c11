"""Keeps the engine alive: a dead one is started again, and a block that never ends is broken off.

The HTTP server, its books and its leases outlive the engine: a kernel that is attached is told that its
request failed, and goes on a little later with the edits that it had. vLLM's handlers all hold one engine
client, so the new engine is put into that object and nobody is told. An engine that dies again and again is
not started for ever: the process ends with a line that says why, and what runs it (systemd, Kubernetes)
decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from nnsight_lab.engine import homecoming
from nnsight_lab.server.condition import CONDITION
from nnsight_lab.server.desk import Desk
from nnsight_lab.server.notes import note
from nnsight_lab.server.sleeper import Sleeper
from nnsight_lab.wire.keys import DECLARE, REGISTER, SAVES_CONFIG

_TICK_S = 0.25
#: How long a broken off block's worker may take to go on.
_GOES_ON_S = 5.0


class Keeper:
    """Of one engine.

    Args:
        llm: vLLM's engine client.
        arguments: The server's own, of which an engine is made.
        desk: Whose books say what is installed.
        step_limit_s: How long a step may hold everybody up.
        restarts: How often the engine may be started again within `within_s`.
        within_s: Seconds.
        sleeper: Puts an idle engine to sleep; None where it never sleeps.
        give_up: Ends the server.
    """

    def __init__(
        self,
        llm: Any,
        arguments: Any,
        desk: Desk,
        *,
        step_limit_s: float,
        restarts: int,
        within_s: float = 600.0,
        sleeper: Sleeper | None = None,
        give_up: Callable[[], object] = lambda: None,
    ) -> None:
        self._llm = llm
        self._arguments = arguments
        self._desk = desk
        self._step_limit_s = step_limit_s
        self._restarts = restarts
        self._within_s = within_s
        self._sleeper = sleeper
        self._give_up = give_up
        self._deaths: deque[float] = deque()
        self._seen: Any = None
        self._moved = time.monotonic()
        self._broke_off = 0.0
        self._killed_for = ""
        self._known = False
        self._cause = ""
        desk.noticed = self._notice
        #: Lets go of the thread that started the engine: Linux ends the engine with it.
        self._release = threading.Event()

    async def run(self) -> None:
        """Look after the engine until the server ends."""
        while not CONDITION.ending:
            await asyncio.sleep(_TICK_S)
            try:
                if self._llm.errored:
                    await self._died()
                else:
                    self._look()
                    if self._sleeper is not None:
                        await self._sleeper.look()
            except Exception as error:  # what looks after the engine goes on
                note("keeper failed", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(1.0)

    # -- blocks that never end -----------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        states = self._llm.output_processor.request_states
        asked = getattr(self._llm.engine_core, "utility_results", {})
        tokens = sum(
            0 if one.detokenizer is None else one.detokenizer.num_output_tokens()
            for one in list(states.values())
        )
        seen = (tokens, frozenset(states), frozenset(asked))
        if seen != self._seen or not (states or asked):
            self._seen, self._moved, self._broke_off = seen, now, 0.0
            return
        still_s = now - self._moved
        if still_s < self._step_limit_s:
            return
        suspects = sorted({turn.user for turn in self._desk.turns.running.values() if turn.blocks})
        if not self._broke_off:
            self._broke_off = now
            note("step over its limit", still_s=round(still_s, 1), users=suspects)
            self._desk.stopper.break_off_whichever()
        elif now - self._broke_off > max(_GOES_ON_S, self._step_limit_s):
            self._broke_off = now
            # Everybody is told; whose block it was stands in the log only.
            self._killed_for = f"{'a block' if suspects else 'a step'} held it up for {still_s:.0f} s"
            note("worker killed", still_s=round(still_s, 1), users=suspects)
            self._desk.stopper.kill()

    # -- engines that died -----------------------------------------------------------------------------

    def _notice(self) -> None:
        """Say that the engine died, once."""
        if self._known or CONDITION.ending:
            return
        self._known = True
        self._cause, self._killed_for = self._killed_for or _cause(self._llm), ""
        CONDITION.deaths += 1
        CONDITION.restarting(self._cause)
        self._tell()

    async def _died(self) -> None:
        self._notice()
        if CONDITION.ending:
            return
        cause = self._cause
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > self._within_s:
            self._deaths.popleft()
        note("engine died", cause=cause, deaths=len(self._deaths), within_s=self._within_s)
        if len(self._deaths) > self._restarts:
            CONDITION.failed = (
                f"The engine died {len(self._deaths)} times in {self._within_s / 60:.0f} minutes, and is not "
                f"started again. The last time: {cause}."
            )
            self._give_up()
            return
        began = time.monotonic()
        await asyncio.to_thread(self._desk.stopper.kill)
        try:
            self._put(await self._build())
        except Exception as error:
            note("engine not started", error=f"{type(error).__name__}: {error}")
            self._known = False  # it is dead still, and counts once more
            return
        await self._desk.trust.again()  # before anything of a user's
        for edit in self._desk.ledger.installed():
            method = REGISTER if edit.steps is None else DECLARE
            with contextlib.suppress(Exception):
                await self._llm.collective_rpc(method, args=(edit.registration, edit.payload, edit.name))
        self._seen, self._moved, self._known = None, time.monotonic(), False
        CONDITION.start_s = time.monotonic() - began
        CONDITION.ready()
        note("engine started again", took_s=round(CONDITION.start_s, 1))

    def _tell(self) -> None:
        """Tell everybody who waits for the dead engine; not every death does."""
        from vllm.v1.engine.exceptions import EngineDeadError

        error = EngineDeadError(suppress_context=True)
        self._llm.output_processor.propagate_error(error)
        for answer in list(getattr(self._llm.engine_core, "utility_results", {}).values()):
            if not answer.done():
                answer.set_exception(error)

    async def _build(self) -> Any:
        """Another engine, made in a thread of its own, which lives as long as the engine."""
        release, self._release = self._release, threading.Event()
        mine = self._release
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Any] = loop.create_future()

        def build() -> None:
            try:
                found, error = self._another(), None
            except BaseException as raised:
                found, error = None, raised
            loop.call_soon_threadsafe(_settle, built, found, error)
            mine.wait()

        threading.Thread(target=build, daemon=True, name="nnsight-lab-engine").start()
        try:
            return await built
        finally:
            release.set()

    def _another(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = copy.copy(self._arguments)
        told = dict(arguments.additional_config or {})
        # Of another name: the last engine's memory is not to be mistaken for this one's.
        told[SAVES_CONFIG] = {**told[SAVES_CONFIG], "name": secrets.token_hex(6)}
        homecoming.remove(self._arguments.additional_config[SAVES_CONFIG]["name"])
        arguments.additional_config = told
        self._arguments = arguments
        return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))

    def _put(self, made: Any) -> None:
        """Let everybody who holds the engine's client have the new engine."""
        mine = self._llm.__dict__
        handler = mine.get("output_handler")
        if handler is not None:
            handler.cancel()
        with contextlib.suppress(Exception):
            mine["engine_core"].shutdown(timeout=0)
        mine.update(made.__dict__)
        made.__dict__ = {}  # its own end would shut the engine down
        self._llm.output_handler = None
        self._llm._run_output_handler()
        self._desk.driver.renewed()
        if self._sleeper is not None:
            self._sleeper.renewed()


def _settle(future: asyncio.Future[Any], found: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


def _cause(llm: Any) -> str:
    """Why an engine died, as far as its process tells."""
    processes: Callable[[], Any] = lambda: llm.engine_core.resources.engine_manager.processes  # noqa: E731
    with contextlib.suppress(Exception):
        for process in processes():
            code = process.exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                more = (
                    " (the system's out-of-memory killer does that, too)" if code == -signal.SIGKILL else ""
                )
                return f"its process was ended by {name}{more}"
    return "a process of it ended"
