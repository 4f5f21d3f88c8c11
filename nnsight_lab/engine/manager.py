"""The engines of this kernel, by name: started once, found again, stopped with the kernel.

Re-running a start cell must cost nothing and must never replace a loaded model behind the user's
back, so the same configuration returns the live engine and another one is refused by what differs.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from nnsight_lab.engine.config import EngineConfig
from nnsight_lab.engine.hub_service import address, checked
from nnsight_lab.engine.local import Engine, LocalEngine
from nnsight_lab.engine.recent import note_model
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.engine.status import StartProgress, StopReport
from nnsight_lab.errors import EngineMismatch, EngineNotStarted, nearest

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
        progress: Callable[[StartProgress], None] | None = None,
        **options: Any,
    ) -> Engine:
        """The engine ``name`` with this configuration, started if it is not alive.

        Raises:
            EngineMismatch: When one of that name is alive with another configuration.
        """
        __tracebackhide__ = True
        config = EngineConfig.of(model, mode, options)
        with self._lock:
            known = self._engines.get(name)
            if known is not None and known.alive and not restart:
                if mode == "auto":
                    config = EngineConfig.of(model, known.mode, options)
                different = known.config.differences(config)
                if different:
                    raise EngineMismatch(
                        f"Engine {name!r} is already running with another configuration "
                        f"({'; '.join(different)}). Add --restart (restart=True) to replace it, or name=… to "
                        "start a second one."
                    )
                known.already_running = True
                self.current = name
                return known
            engine = LocalEngine(name, config)
            if known is not None:
                known.stop()
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

    def attach(self, url: str | None = None, *, name: str = DEFAULT_NAME, token: str | None = None) -> Engine:
        """An engine that a server runs; this JupyterHub's where no address is given.

        Raises:
            ServerError: The server is not there, or does not let this kernel in.
            EngineMismatch: Another engine of that name is alive.
        """
        __tracebackhide__ = True
        url = checked(address() if url is None else url)
        with self._lock:
            known = self._engines.get(name)
            if known is not None and known.alive:
                if isinstance(known, RemoteEngine) and known.url == url:
                    known.already_running = True
                    self.current = name
                    return known
                raise EngineMismatch(
                    f"Engine {name!r} is running already ({known.config.model}): stop it, or attach under "
                    "another name=…."
                )
            engine = RemoteEngine(name, url, token)
            if known is not None:
                known.stop()
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
                raise EngineNotStarted(
                    "No engine is running: %engine start demo (or a Hugging Face id or path)."
                )
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
        """Stop an engine and forget it."""
        engine = self.engine(name)
        with self._lock:
            report = engine.stop()
            self._engines.pop(engine.name, None)
            if self.current == engine.name:
                self.current = next(iter(self._engines), None)
            return report

    def stop_all(self) -> list[StopReport]:
        """Stop every engine, as at the kernel's end."""
        return [self.stop(name) for name in list(self._engines)]


manager = EngineManager()
