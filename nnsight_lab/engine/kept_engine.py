"""A kept engine of this user, as a kernel has it: a server's, but this user's to start and to end.

Its processes are on this machine, so that what became of them is seen and not guessed from a silence. Letting
go of it leaves it running, and so does the end of the kernel; ``stop`` ends it, with everything of it, for
every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Self

from nnsight_lab.engine import keeping, kept, processes
from nnsight_lab.engine.config import EngineConfig, Mode, loop_is_running
from nnsight_lab.engine.driver import Driver
from nnsight_lab.engine.ending import report
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.log import EngineLog, consequence
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.engine.remote_driver import RemoteDriver
from nnsight_lab.engine.status import EngineStatus, StartProgress, StopReport
from nnsight_lab.errors import EngineDied, EngineMismatch, ServerError

_KILLED = "a process was ended from outside (killed; the system's out-of-memory killer does that too)"
#: How long after its silence a server's death may take to show.
_DEATH_SHOWS_S = 1.5
_ENDED = "its server was ended, by another kernel, from outside, or since nobody used it"


class KeptEngine(RemoteEngine):
    """A kept engine; made by ``nnsight_lab.start(…, keep=True)`` and `nnsight_lab.attach`.

    Args:
        name: What it is called in this kernel.
        config: Its model and options.
        kept_name: What it is called by its record; ``name`` where it is "".
        idle_minutes: As in a new one's record.
        found: The running one; None where one is to be found or started.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        kept_name: str = "",
        idle_minutes: float = kept.IDLE_MINUTES,
        found: Kept | None = None,
    ) -> None:
        self.kept_name = kept_name or name
        self.idle_minutes = idle_minutes
        self._kept: Kept | None = None
        super().__init__(name, "unix:", None, config)
        if found is not None:
            self._take(found)

    @classmethod
    def of(cls, name: str, found: Kept) -> Self:
        """One that runs already."""
        mode: Mode = "async" if loop_is_running() else "sync"
        config = EngineConfig(found.model, mode, tuple(sorted(found.options.items())))
        return cls(name, config, kept_name=found.name, idle_minutes=found.idle_minutes, found=found)

    def _take(self, found: Kept) -> None:
        """This is the one."""
        self._kept = found
        self.id, self.url = found.engine, found.url
        if self.log.path != Path(found.log):
            if not self.log.text():
                self.log.path.unlink(missing_ok=True)
            self.log = EngineLog(Path(found.log))
        self._remote.close()
        self._driver = self._new_driver()

    def _new_driver(self) -> Driver:
        given_up = getattr(getattr(self, "_driver", None), "given_up", None)
        self._remote = RemoteDriver(self.url, "")
        if given_up is not None and self._kept is not None:
            self._remote.given_up = given_up
        return self._remote

    # -- its life ----------------------------------------------------------------------------------

    def start(self, progress: Callable[[StartProgress], None] | None = None) -> Self:
        """Find it, or start it, and attach.

        Raises:
            EngineMismatch: One of that name runs with another configuration.
            EngineStartFailed: With the root cause; nothing is left of it.
            Interrupted: By the stop button; nothing is left of it.
        """
        __tracebackhide__ = True
        if self._state != "stopped":
            return self
        if self._used:
            self._kept = None
            self._fresh()
        began = time.monotonic()

        def told(state: StartProgress) -> None:
            self.progress = state
            if progress is not None:
                progress(state)

        self._state = "starting"
        launched = self.id if self._kept is None else ""  # a record that is found has another mark
        try:
            record = self._found_or_launched(told)
            if not (record.ready and keeping.answers(record)):
                mine = record.engine == launched
                keeping.wait(record, told, self._driver.given_up, began, mine=mine)
            else:
                self.already_running = True
        except BaseException:
            self._used = True
            self._remote.home.close()
            self._remote.close()
            raise
        finally:
            self._state = "stopped"
        return super().start(progress)

    def _found_or_launched(self, told: Callable[[StartProgress], None]) -> Kept:
        if self._kept is not None:
            return self._kept
        told(StartProgress("finding the model", 0.0))
        options = keeping.plain_options(dict(self.config.options))
        model = keeping.check(self.config.model, options)
        with kept.claimed():
            record = kept.named(self.kept_name)
            if record is None:
                record = keeping.launch(
                    self.kept_name,
                    model,
                    options,
                    engine=self.id,
                    log=self.log,
                    idle_minutes=self.idle_minutes,
                )
            else:
                self._same(record, model, options)
        self._take(record)
        return record

    def _same(self, record: Kept, model: str, options: dict[str, Any]) -> None:
        mine = EngineConfig(model, self.config.mode, tuple(sorted(options.items())))
        theirs = EngineConfig(record.model, self.config.mode, tuple(sorted(record.options.items())))
        different = theirs.differences(mine)
        if different:
            raise EngineMismatch(
                f"You keep an engine called {record.name!r} with another configuration "
                f"({'; '.join(different)}): take it with {record.attach_line}, end it with %engine stop "
                f"{record.name}, or add name=… to keep a second one."
            )

    def restart(self, progress: Callable[[StartProgress], None] | None = None) -> Self:
        """End it and start it again, and put this kernel's edits back; other kernels lose it."""
        __tracebackhide__ = True
        self.stop()
        return self.start(progress)

    def stop(self) -> StopReport:
        """End it, with everything of it, for every kernel that has it."""
        began = time.monotonic()
        self.detach()
        record = self._kept
        if record is None:
            return StopReport(self.name, (), (), 0, 0.0)
        return report(self.name, record, began)

    def give_up(self) -> None:
        """End a start that is under way."""
        self._driver.given_up.set()

    # -- what became of it --------------------------------------------------------------------------

    def died(self) -> EngineDied | None:
        """The error to raise when its server has ended, or None."""
        if self._state != "ready" or not (self._remote.dead() or not self._lives()):
            return None
        return self._lost()

    def _lives(self) -> bool:
        return self._kept is not None and self._kept.alive()

    def _lost(self) -> EngineDied:
        if not self._cause:
            said = self.log.root_cause()
            if not said or consequence(said):
                said = _KILLED if said or self._lives() else _ENDED
            self._cause = said
        return EngineDied(
            f"Engine {self.name!r} died: {self._cause}. `%engine restart` starts it again with this kernel's "
            f"edits (log: {self.log.path}).",
            cause=self._cause,
        )

    def _mapped(self, error: Exception) -> BaseException:
        found = super()._mapped(error)
        # The server knows only that its engine is gone; its log knows why.
        if isinstance(found, EngineDied):
            return self._lost()
        if isinstance(found, ServerError) and found.status == 0 and self._ends_within(_DEATH_SHOWS_S):
            return self._lost()
        return found

    def _ends_within(self, limit_s: float) -> bool:
        """Whether its server is gone, or goes: one that answers nothing may only be slow."""
        deadline = time.monotonic() + limit_s
        while self._lives():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def status(self) -> EngineStatus:
        """The engine as it stands, with its processes."""
        alive = processes.engine_processes(self.id)
        return replace(
            super().status(),
            model=self.config.model,
            options=(*self.config.options, ("keep", True)),
            pids=tuple(process.pid for process in alive),
            memory_bytes=sum(process.rss_bytes for process in alive),
            gpu_bytes=processes.gpu_bytes(process.pid for process in alive),
            log=str(self.log.path),
        )

    def up_s(self) -> float:
        """Seconds since its start was asked for, by whatever kernel."""
        if self._kept is None or self._state != "ready":
            return 0.0
        return max(0.0, time.time() - self._kept.since)

    def attach_line(self) -> str:
        """The line that attaches another kernel to it."""
        return f"%engine attach {self.kept_name}"

    def no_sleep(self) -> str:
        """Why it cannot sleep, in one line."""
        return f"Engine {self.name!r} is kept: other kernels may use it. `%engine stop` frees its memory."

    def __repr__(self) -> str:
        return f"<KeptEngine {self.name!r}: {self.config.model}, {self.state()[0]}>"
