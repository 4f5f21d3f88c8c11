"""The engines of this kernel, by name: started once, found again, stopped with the kernel.

Re-running a start cell must cost nothing and must never replace a loaded model behind the user's
back, so the same configuration returns the live engine and another one is refused by what differs.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

from nnsight_lab.engine import kept
from nnsight_lab.engine.config import EngineConfig
from nnsight_lab.engine.ending import report
from nnsight_lab.engine.keeping import where
from nnsight_lab.engine.kept_engine import KeptEngine
from nnsight_lab.engine.local import Engine, LocalEngine
from nnsight_lab.engine.recent import note_model
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.engine.status import StartProgress, StopReport
from nnsight_lab.errors import CellUsageError, EngineMismatch, EngineNotStarted, nearest

DEFAULT_NAME = "main"


class EngineManager:
    """Every engine of this process.

    Attributes:
        current: The name a call without one means: the last started or used by name.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._lock = threading.RLock()
        self.current: str | None = None
        atexit.register(self.stop_all)

    def start(
        self,
        model: str,
        *,
        name: str = DEFAULT_NAME,
        mode: str = "auto",
        restart: bool = False,
        keep: bool = False,
        idle_minutes: float = kept.IDLE_MINUTES,
        progress: Callable[[StartProgress], None] | None = None,
        **options: Any,
    ) -> Engine:
        """The engine ``name`` with this configuration, started if it is not alive.

        Raises:
            EngineMismatch: When one of that name is alive with another configuration.
        """
        __tracebackhide__ = True
        config = EngineConfig.of(model, mode, options)
        if keep:
            check_kept(name, idle_minutes)
            config = EngineConfig.of(where(model), mode, options)
        with self._lock:
            known = self._engines.get(name)
            if known is not None and known.alive and not restart:
                if mode == "auto":
                    config = EngineConfig.of(config.model, known.mode, options)
                different = known.config.differences(config)
                if keep != isinstance(known, KeptEngine):
                    different.append("keep: False -> True" if keep else "keep: True -> False")
                if different:
                    raise EngineMismatch(
                        f"Engine {name!r} is already running with another configuration "
                        f"({'; '.join(different)}). Add --restart (restart=True) to replace it, or name=… to "
                        "start a second one."
                    )
                known.already_running = True
                self.current = name
                return known
            engine: Engine = LocalEngine(name, config)
            if keep:
                engine = KeptEngine(name, config, idle_minutes=idle_minutes)
            if known is not None:
                # One that died is over already; of a kept one its successor is found, and not ended here.
                let_go(known) if not restart else known.stop()
                engine.edits.adopt(known.edits)
                engine.saves = known.saves
            self._engines[name] = engine
            try:
                engine.start(progress)
            except BaseException:
                if known is None:
                    del self._engines[name]
                else:
                    self._engines[name] = known  # stopped, with its edits: `restart` brings it back
                raise
            self.current = name
            note_model(model)
            return engine

    def attach(self, url: str | None = None, *, name: str | None = None, token: str | None = None) -> Engine:
        """An engine that a server runs, or one that this user keeps: by its name, or the only one.

        Raises:
            ServerError: The server is not there, or does not let this kernel in.
            EngineNotStarted: No engine is kept under that name, or it is to be said which of several.
            EngineMismatch: Another engine of that name is alive.
        """
        __tracebackhide__ = True
        if url is None or kept.named_well(url):
            found = kept.chosen(url)
            return self._attached(KeptEngine.of(name or found.name, found))
        return self._attached(RemoteEngine(name or DEFAULT_NAME, url, token))

    def _attached(self, engine: RemoteEngine) -> Engine:
        name = engine.name
        with self._lock:
            known = self._engines.get(name)
            if known is not None and known.alive:
                if isinstance(known, RemoteEngine) and known.url == engine.url:
                    known.already_running = True
                    self.current = name
                    return known
                raise EngineMismatch(
                    f"Engine {name!r} is running already ({known.config.model}): stop it, or attach under "
                    "another name=…."
                )
            if known is not None:
                let_go(known)
                engine.edits.adopt(known.edits)
                engine.saves = known.saves
            engine.start()
            self._engines[name] = engine
            self.current = name
            return engine

    def engine(self, name: str | None = None) -> Engine:
        """The engine of that name, or the current one.

        Raises:
            EngineNotStarted: When there is none.
        """
        wanted = name or self.current
        if wanted is None or wanted not in self._engines:
            if name is None:
                raise EngineNotStarted(kept.none_here())
            raise EngineNotStarted(f"No engine is called {name!r}.{nearest(name, self._engines)}")
        return self._engines[wanted]

    def engines(self) -> dict[str, Engine]:
        """All of them, by name."""
        return dict(self._engines)

    def restart(
        self, name: str | None = None, progress: Callable[[StartProgress], None] | None = None
    ) -> Engine:
        """Start the engine again with the configuration and the edits it had."""
        __tracebackhide__ = True
        engine = self.engine(name)
        with self._lock:
            engine.already_running = False
            return engine.restart(progress)

    def stop(self, name: str | None = None) -> StopReport:
        """Stop an engine and forget it; of a kept one everything ends, whether this kernel has it or not."""
        if name is not None and name not in self._engines:
            found = kept.named(name)
            if found is not None:
                return report(name, found, time.monotonic())
        engine = self.engine(name)
        with self._lock:
            stopped = engine.stop()
            self._forget(engine)
            return stopped

    def detach(self, name: str | None = None) -> Engine:
        """Let go of an engine that runs elsewhere, and forget it; it goes on.

        Raises:
            EngineMismatch: It is this kernel's own.
        """
        engine = self.engine(name)
        if not isinstance(engine, RemoteEngine):
            raise EngineMismatch(
                f"Engine {engine.name!r} is this kernel's own, and ends with it. One that goes on is started "
                "by %engine start MODEL --keep."
            )
        with self._lock:
            engine.detach()
            self._forget(engine)
            return engine

    def _forget(self, engine: Engine) -> None:
        self._engines.pop(engine.name, None)
        if self.current == engine.name:
            self.current = next(iter(self._engines), None)

    def stop_all(self) -> None:
        """At the kernel's end: stop what is its own, and let go of what is not."""
        for name, engine in list(self._engines.items()):
            let_go(engine)
            self._engines.pop(name, None)


def let_go(engine: Engine) -> None:
    """End what a kernel has of an engine: the engine itself where it is its own."""
    engine.detach() if isinstance(engine, RemoteEngine) else engine.stop()


def check_kept(name: str, idle_minutes: object) -> None:
    """Refuse a kept engine's name and idle time that cannot be.

    Raises:
        CellUsageError: Saying what can.
    """
    if not kept.named_well(name):
        raise CellUsageError(
            f"A kept engine cannot be called {name!r}: letters, digits, and _ . - in between, 64 at most."
        )
    if isinstance(idle_minutes, bool) or not isinstance(idle_minutes, int | float) or idle_minutes < 0:
        raise CellUsageError(
            f"idle_minutes={idle_minutes!r} is not a number of minutes; 0 keeps an engine for ever."
        )


manager = EngineManager()
