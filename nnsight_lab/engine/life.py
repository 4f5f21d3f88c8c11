"""The life of an engine of this kernel: started, watched, found dead, stopped, started again.

vLLM's processes are somebody else's code in somebody else's memory, so an engine is always taken to
be able to die; what died and why is said once, here, with the way back.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import Self

from nnsight_lab.blocks.stubs import BlockEngine
from nnsight_lab.engine import homecoming, processes, shared_queues
from nnsight_lab.engine.arrivals import Origin
from nnsight_lab.engine.async_driver import AsyncDriver
from nnsight_lab.engine.config import EngineConfig
from nnsight_lab.engine.driver import Driver, Flight
from nnsight_lab.engine.edits import Edits
from nnsight_lab.engine.facts import facts
from nnsight_lab.engine.log import EngineLog
from nnsight_lab.engine.sampling import refusal
from nnsight_lab.engine.starting import Start
from nnsight_lab.engine.status import EngineStatus, StartProgress, StopReport
from nnsight_lab.engine.step_words import NO_GRAPHS, NO_GRAPHS_ON_CPU, RanSteps, counted, reasons
from nnsight_lab.engine.sync_driver import SyncDriver
from nnsight_lab.engine.waiting import Watch, await_, wait
from nnsight_lab.errors import EngineDied, EngineNotStarted, LabError
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.wire.serving import EngineFacts
from nnsight_lab.wire.step_figures import StepFigures

T = TypeVar("T")

#: How long after a failed call a death may take to show.
_DEATH_SHOWS_S = 1.5
#: How long a status waits for a worker: it answers between two steps, and one that hangs never does.
_STEPS_S = 0.2


class EngineLife:
    """A vLLM engine of this process, from its start to its end.

    Attributes:
        name: What the manager calls it.
        config: Model, mode and options.
        edits: The edits installed on it.
        saves: What the requests of its calls saved, by label; lives on when the engine is stopped.
        log: Its log file.
        already_running: Whether the last `nnsight_lab.start` found it alive with the same configuration.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        self.edits = Edits(self)
        self.saves = SavesStore()
        self._budgeted = False
        self.already_running = False
        self._state = "stopped"
        self._stop_lock = threading.Lock()
        self._fresh()

    def _fresh(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.log = EngineLog.new(self.name)
        self._driver: Driver = self._new_driver()
        self._ready_at = 0.0
        self._cause = ""
        self._used = False
        self._facts: EngineFacts | None = None
        #: How the steps ran of the last call that had blocks.
        self.last_steps: RanSteps | None = None
        #: How far the start is; the last word of it once it is over.
        self.progress = StartProgress("", 0.0)
        self._touched = time.monotonic()
        self._origin = Origin(self.name, self.config)

    def _new_driver(self) -> Driver:
        return AsyncDriver() if self.config.mode == "async" else SyncDriver()

    def start(self, progress: Callable[[StartProgress], None] | None = None) -> Self:
        """Bring the engine up and install its edits.

        Raises:
            ModelNotFound: Before anything is started.
            EngineStartFailed: With the root cause; nothing is left behind.
            Interrupted: When the start was interrupted; nothing is left behind.
        """
        __tracebackhide__ = True
        if self._state != "stopped":
            return self
        if self._used:  # the log of a failed or stopped engine stays until the next start
            self._fresh()
        self._state = "starting"

        def told(state: StartProgress) -> None:
            self.progress = state
            if progress is not None:
                progress(state)

        start = Start(self.id, self.config, self.log, self._driver, told)
        try:
            start.run()
        except BaseException:
            self._state = "stopped"
            self._clean_up()
            self._used = True
            raise
        if not self._budgeted:  # what somebody set since is left alone
            # The workers put the next call's saves into the other half.
            self.saves.budget_bytes = start.save_budget_bytes // 2
            self.saves.disk_bytes = dict(self.config.options).get("spill_budget")
            self._budgeted = True
        self._origin.tokenizer = getattr(self.model, "tokenizer", None)
        self.model.lab_engine = weakref.proxy(self)
        self.log.started()
        self._state = "ready"
        self._ready_at = self._touched = time.monotonic()
        for method, args in self.edits.reinstall_steps():
            self.rpc(method, *args)
        return self

    def give_up(self) -> None:
        """End a start that is under way: whoever waits for it gets `Interrupted`."""
        self._driver.given_up.set()

    def restart(self, progress: Callable[[StartProgress], None] | None = None) -> Self:
        """Stop what is left of the engine, start it again, and put its edits back."""
        __tracebackhide__ = True
        self.stop()
        return self.start(progress)

    def stop(self) -> StopReport:
        """End the engine's processes and see them gone; a second time is harmless."""
        with self._stop_lock:
            began = time.monotonic()
            alive = processes.engine_processes(self.id)
            on_gpu = processes.gpu_bytes(p.pid for p in alive)
            if self.alive:  # what a call of another thread is told
                self._cause = "it was stopped or restarted while it was needed"
            left = self._clean_up() if self._state != "stopped" or alive else []
            self._state, self._used = "stopped", True
            return StopReport(
                name=self.name,
                pids=tuple(p.pid for p in alive),
                left=tuple(left),
                freed_bytes=sum(p.rss_bytes for p in alive if p.pid not in left),
                elapsed_s=time.monotonic() - began,
                freed_gpu_bytes=0 if left else on_gpu,
            )

    def _clean_up(self) -> list[int]:
        self._driver.stop()
        left = processes.wait_gone(self.id, timeout_s=5.0)
        still = processes.end([p.pid for p in left]) if left else []
        self._driver.home.close()
        self._driver.close()
        homecoming.remove(self.id)  # what a killed worker left
        if not still:
            shared_queues.reclaim_of(self.id)
        return still

    @property
    def mode(self) -> str:
        """``"sync"`` or ``"async"``."""
        return self.config.mode

    @property
    def model(self) -> Any:
        """The envoy tree: what a block reads and writes, ``model.model.layers[3].output``."""
        model = getattr(self._driver, "model", None)
        if model is None:
            raise EngineNotStarted(f"Engine {self.name!r} is not running: %engine restart {self.name}.")
        return model

    @property
    def default_edits(self) -> list[str] | None:
        """Names of the edits that requests run which name none; None where all run that are switched on.

        ``engine.default_edits = ["probe"]`` runs exactly that one, whatever else is on, ``[]`` none.
        """
        return None if self.edits.default is None else list(self.edits.default)

    @default_edits.setter
    def default_edits(self, names: Sequence[str] | None) -> None:
        self.edits.default = names

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def alive(self) -> bool:
        """Whether the engine can take requests."""
        return self._state == "ready" and not self._driver.dead()

    def died(self) -> EngineDied | None:
        """The error to raise when a process of the engine has ended, or None."""
        if self._state != "ready" or not self._driver.dead():
            return None
        if not self._cause:
            self._cause = self.log.root_cause() or (
                "a process was ended from outside (killed; the system's out-of-memory killer does that too)"
            )
        return EngineDied(
            f"Engine {self.name!r} died: {self._cause}. `%engine restart` brings it back with its edits "
            f"(log: {self.log.path}).",
            cause=self._cause,
        )

    def state(self) -> tuple[str, str]:
        """``starting``, ``ready``, ``busy``, ``dead`` or ``stopped``; and why, where it is dead."""
        if self._state != "ready":
            return self._state, ""
        dead = self.died()
        if dead is not None:
            return "dead", dead.cause
        return "busy" if self._driver.unfinished() else "ready", ""

    def flight(self) -> Flight:
        """Its requests as its front end knows them; nothing is asked of a worker."""
        if self._state != "ready":
            return Flight()
        return self._driver.flight(self.facts().block_size)

    def kv_blocks(self) -> int:
        """How many blocks its KV cache has; 0 where that is not known."""
        return 0 if self._state != "ready" else self.facts().kv_blocks

    def attach_line(self) -> str:
        """The line that attaches another kernel to it; "" where none can: it is this kernel's own."""
        return ""

    def up_s(self) -> float:
        """Seconds since it was ready; 0 where it is not."""
        return time.monotonic() - self._ready_at if self._state == "ready" else 0.0

    def idle_s(self) -> float:
        """Seconds since its last request ended or was submitted; 0 while one is under way."""
        if self._state != "ready" or self._driver.unfinished():
            return 0.0
        return time.monotonic() - self._touched

    def no_graphs(self) -> str:
        """Why nothing is replayed on it, in words; "" where steps are, or where that is not known."""
        if self._state != "ready":
            return ""
        if self.facts().device == "cpu":
            return NO_GRAPHS_ON_CPU
        return "" if self.model.taps else NO_GRAPHS

    def steps(self, wait_s: float = 0.0) -> StepFigures | None:
        """How its steps ran, as far as that is known without waiting long; None where it is not.

        Args:
            wait_s: How long to wait for the workers' answer; 0 has them asked, for the next look.
        """
        if not self.alive or self.state()[0] == "asleep":
            return self._driver.steps.figures
        return self._driver.steps.look(wait_s)

    def shown_steps(self, wait_s: float = 0.0) -> tuple[str, str]:
        """How its steps ran, and why some ran module by module; "" for what is not known."""
        figures = self.steps(wait_s)
        why = "" if figures is None or not figures.graphs else reasons(figures)
        return counted(figures, self.no_graphs()), why

    def status(self) -> EngineStatus:
        """The engine as it stands."""
        alive = processes.engine_processes(self.id)
        state, cause = self.state()
        device = dtype = ""
        if getattr(self._driver, "model", None) is not None and self._state == "ready":
            known = self.facts()
            device, dtype = known.device, known.dtype
        status = EngineStatus(
            name=self.name,
            state=state,
            model=self.config.model,
            mode=self.mode,
            device=device,
            dtype=dtype,
            up_s=self.up_s(),
            running=self._driver.unfinished(),
            edits=tuple(f"{e.name} ({self.edits.standing(e)})" for e in self.edits),
            pids=tuple(p.pid for p in alive),
            memory_bytes=sum(p.rss_bytes for p in alive),
            gpu_bytes=processes.gpu_bytes(p.pid for p in alive),
            log=str(self.log.path),
            options=self.config.options,
            cause=cause,
        )
        return self._with_steps(status)

    def _with_steps(self, status: EngineStatus) -> EngineStatus:
        """A status that says of steps what is known of them."""
        steps, why = self.shown_steps(_STEPS_S)
        last = self.last_steps
        slow = last is not None and last.slowed > 0
        return replace(status, steps=steps, module_by_module=why, last_call=str(last) if slow else "")

    def facts(self) -> EngineFacts:
        """What there is to know of it without asking it."""
        if self._facts is None:
            entry = self.model.vllm_entrypoint
            self._facts = facts(getattr(entry, "llm_engine", entry).vllm_config)
        return self._facts

    def __reduce__(self) -> Any:
        # In a block, `engine.model` is the worker's own; nothing else of an engine travels.
        return BlockEngine, (self.model,)

    def __repr__(self) -> str:
        state = "dead" if self._state == "ready" and self._driver.dead() else self._state
        return f"<LocalEngine {self.name!r}: {self.config.model}, {self.mode}, {state}>"

    # -- asking the workers ---------------------------------------------------------------------

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank and wait."""
        __tracebackhide__ = True
        self._require()
        return self.waited(self._driver.rpc(method, *args))

    def waited(self, answer: Future[T]) -> T:
        """What a message to the workers was answered."""
        __tracebackhide__ = True
        try:
            return wait(answer, Watch(died=self.died))
        except Exception as error:
            raise self._mapped(error) from None

    async def arpc(self, method: str, *args: Any) -> list[Any]:
        """`rpc`, awaited."""
        __tracebackhide__ = True
        self._require()
        return await self.awaited(self._driver.rpc(method, *args))

    async def awaited(self, answer: Future[T]) -> T:
        """`waited`, awaited."""
        __tracebackhide__ = True
        try:
            return await await_(answer, Watch(died=self.died))
        except Exception as error:
            raise self._mapped(error) from None

    def _require(self) -> None:
        __tracebackhide__ = True
        dead = self.died()
        if dead is not None:
            raise dead
        if self._state != "ready":
            raise EngineNotStarted(f"Engine {self.name!r} is {self._state}: %engine restart {self.name}.")

    def _mapped(self, error: Exception) -> BaseException:
        """A foreign error in this package's terms; the one place they enter."""
        if isinstance(error, LabError):
            return error
        refused = refusal(error)
        if refused is not None:
            return refused
        # A worker that is killed fails the call under way before anybody says that it is dead.
        deadline = time.monotonic() + _DEATH_SHOWS_S
        while (dead := self.died()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead is not None:
            return dead
        if type(error).__name__ == "EngineDeadError":
            self._cause = self.log.root_cause() or "vLLM reports that the engine is dead"
            return EngineDied(
                f"Engine {self.name!r} died: {self._cause}. `%engine restart` brings it back with its edits "
                f"(log: {self.log.path}).",
                cause=self._cause,
            )
        return error
