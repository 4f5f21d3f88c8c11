"""What a server does that is a kept engine: its record is true, and it ends itself when nobody uses it.

An attached kernel uses it, however silent, as its lease says; so does a request, however long it runs. The
time counts from when the last of them was gone. A server whose socket was removed can be reached by nobody,
and ends as soon as nobody is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from nnsight_lab.engine import kept
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.starting import cpu_kv_cache_gib
from nnsight_lab.server.ledger import Ledger
from nnsight_lab.wire.keys import KEPT_ENV

_TICK_S = 5.0

#: This process's, where it is a kept engine's server.
_record: Kept | None = None


def taken(environment: MutableMapping[str, str]) -> Kept | None:
    """The record that a kernel left for this process, taken off the environment; None elsewhere."""
    global _record
    told = environment.pop(KEPT_ENV, None)
    found = kept.of_text(told) if told else None
    if found is not None:
        os.umask(0o077)
        _record = kept.process_of(replace(found, pid=os.getpid()))
    return _record


def surroundings(flags: Sequence[str]) -> None:
    """What an engine of a kernel's own is started in, for a kept one: it is started in its place."""
    if _record is not None:
        named = {flag.partition("=")[0].removeprefix("--").replace("-", "_"): None for flag in flags}
        space = cpu_kv_cache_gib(named)
        if space is not None:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)


def begin(ledger: Ledger) -> asyncio.Task[None] | None:
    """The engine is up: say so in the record, and watch for its time to be over."""
    global _record
    if _record is None:
        return None
    with contextlib.suppress(OSError):
        os.chmod(_record.socket, 0o600)
    _record = replace(_record, ready=True)
    kept.write(_record)
    return asyncio.create_task(Watch(_record, ledger).run())


def over() -> None:
    """The process ends."""
    if _record is not None:
        kept.forget(_record)


class Watch:
    """Watches for a kept engine's time to be over.

    Args:
        record: Its.
        ledger: Who uses it.
        clock: Of seconds.
    """

    def __init__(self, record: Kept, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._ledger = ledger
        self._clock = clock
        self._used = clock()
        self._begun = ledger.begun

    async def run(self) -> None:
        """Look every few seconds; end this process by the signal that ends any server."""
        tick_s = min(_TICK_S, self._record.idle_minutes * 60 / 4 or _TICK_S)
        while True:
            await asyncio.sleep(tick_s)
            why = self.over()
            if why:
                print(f"nnsight-lab: the kept engine {self._record.name!r} ends: {why}", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def over(self) -> str:
        """Why its time is over; "" while it is not."""
        figures = self._ledger.figures()
        if figures["leases"] or figures["requests"] or self._ledger.begun != self._begun:
            self._used, self._begun = self._clock(), self._ledger.begun
            return ""
        if not Path(self._record.socket).exists():
            return "its socket was removed, so that nobody can reach it"
        with contextlib.suppress(OSError):  # what cleans old files up leaves these alone
            os.utime(kept.path_of(self._record))
        idle_s = self._record.idle_minutes * 60
        if idle_s and self._clock() - self._used >= idle_s:
            return f"no kernel and no request for {self._record.idle_minutes:g} minutes"
        return ""
