"""An engine of this kernel: vLLM's processes, the edits on them, and what a caller does with them.

Everything a caller does becomes a `Call` on the driver's thread; results, interrupts, deaths and
errors are turned into this package's terms here, once, for sync and async callers alike. Twins are
spelled ``x`` and ``ax``; both work on either kind of engine.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.stubs import BlockEngine
from nnsight_lab.engine import processes, results
from nnsight_lab.engine.async_driver import AsyncDriver
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.config import EngineConfig
from nnsight_lab.engine.driver import Driver
from nnsight_lab.engine.edits import Edits, EditVersion
from nnsight_lab.engine.homecoming import size_of
from nnsight_lab.engine.log import EngineLog
from nnsight_lab.engine.sampling import prompt_list, refusal, sampling_params
from nnsight_lab.engine.starting import Start
from nnsight_lab.engine.status import EngineStatus, StartProgress, StopReport
from nnsight_lab.engine.stream import Stream
from nnsight_lab.engine.sync_driver import SyncDriver
from nnsight_lab.engine.tracer import EditTracer, LabTracer, Watcher
from nnsight_lab.engine.waiting import Watch, await_, wait
from nnsight_lab.errors import EngineDied, EngineNotStarted, LabError, RequestRefused
from nnsight_lab.wire.keys import BUDGET_KEY, CLEAR, COUNT, EDITS_KEY, REGISTER, TRACE_BLOCK, TRACE_KEY

#: Settings of a request that are not vLLM's sampling.
_OWN_SETTINGS = ("lora_request", "save_budget")


class LocalEngine:
    """One vLLM engine of this process.

    Made by `nnsight_lab.start`; use it as ``with engine.trace(prompt):``, ``with
    engine.edit("probe") as (tracer, edit):`` and ``engine.generate(prompts)``.

    Attributes:
        name: What the manager calls it.
        config: Model, mode and options.
        edits: The edits installed on it.
        log: Its log file.
        already_running: Whether the last `nnsight_lab.start` found it alive with the same configuration.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        self.edits = Edits(self)
        self.already_running = False
        self._state = "stopped"
        self._stop_lock = threading.Lock()
        self._fresh()

    def _fresh(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.log = EngineLog.new(self.name)
        self._driver: Driver = AsyncDriver() if self.config.mode == "async" else SyncDriver()
        self._ready_at = 0.0
        self._cause = ""
        self._used = False

    # -- life ----------------------------------------------------------------------------------

    def start(self, progress: Callable[[StartProgress], None] | None = None) -> LocalEngine:
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
        try:
            Start(self.id, self.config, self.log, self._driver, progress).run()
        except BaseException:
            self._state = "stopped"
            self._clean_up()
            self._used = True
            raise
        self.model.lab_engine = weakref.proxy(self)
        self._state = "ready"
        self._ready_at = time.monotonic()
        for method, args in self.edits.reinstall_steps():
            self.rpc(method, *args)
        return self

    def restart(self, progress: Callable[[StartProgress], None] | None = None) -> LocalEngine:
        """Stop what is left of the engine, start it again, and put its edits back."""
        __tracebackhide__ = True
        self.stop()
        return self.start(progress)

    def stop(self) -> StopReport:
        """End the engine's processes and see them gone; a second time is harmless."""
        with self._stop_lock:
            began = time.monotonic()
            alive = processes.engine_processes(self.id)
            left = self._clean_up() if self._state != "stopped" or alive else []
            self._state, self._used = "stopped", True
            return StopReport(
                name=self.name,
                pids=tuple(p.pid for p in alive),
                left=tuple(left),
                freed_bytes=sum(p.rss_bytes for p in alive if p.pid not in left),
                elapsed_s=time.monotonic() - began,
            )

    def _clean_up(self) -> list[int]:
        self._driver.stop()
        left = processes.wait_gone(self.id, timeout_s=5.0)
        still = processes.end([p.pid for p in left]) if left else []
        self._driver.home.close()
        self._driver.close()
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

    def status(self) -> EngineStatus:
        """The engine as it stands."""
        alive = processes.engine_processes(self.id)
        state, cause = self._state, ""
        if state == "ready":
            dead = self.died()
            running = self._driver.unfinished()
            state, cause = ("dead", dead.cause) if dead else ("busy" if running else "ready", "")
        device = dtype = ""
        if getattr(self._driver, "model", None) is not None and self._state == "ready":
            config = self._vllm_config()
            device = str(config.device_config.device_type)
            dtype = str(config.model_config.dtype).removeprefix("torch.")
        return EngineStatus(
            name=self.name,
            state=state,
            model=self.config.model,
            mode=self.mode,
            device=device,
            dtype=dtype,
            up_s=time.monotonic() - self._ready_at if self._state == "ready" else 0.0,
            running=self._driver.unfinished(),
            edits=tuple(f"{e.name} ({'on' if e.on else 'off'})" for e in self.edits),
            pids=tuple(p.pid for p in alive),
            memory_bytes=sum(p.rss_bytes for p in alive),
            log=str(self.log.path),
            options=self.config.options,
            cause=cause,
        )

    def _vllm_config(self) -> Any:
        entry = self.model.vllm_entrypoint
        return getattr(entry, "llm_engine", entry).vllm_config

    def __reduce__(self) -> Any:
        # In a block, `engine.model` is the worker's own; nothing else of an engine travels.
        return BlockEngine, (self.model,)

    def __repr__(self) -> str:
        return f"<LocalEngine {self.name!r}: {self.config.model}, {self.mode}, {self._state}>"

    # -- what users do -------------------------------------------------------------------------

    def trace(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        **sampling: Any,
    ) -> LabTracer:
        """A block that runs inside the forward passes of ``prompts``: ``with engine.trace("…") as tracer:``.

        What the block marks with ``.save()`` is bound in the surrounding scope when it ends: one
        value for one prompt, a list in prompt order for a list of prompts (the block is then sent
        once, as an edit of this call alone). Without a prompt, write ``with tracer.invoke("…"):``
        blocks inside.

        Args:
            *prompts: Text, token ids, one of vLLM's prompt dictionaries, or a list of them.
            edits: Which edits these requests run, in that order; all that are on by default.
            watch: Called in this thread, at most 20 times a second, with the requests as they stand.
            **sampling: vLLM's ``SamplingParams``; and ``save_budget="100MB"``, past which the request
                fails instead of bringing its saves home.

        Raises:
            TraceError: When the block fails in the worker, at the block's own line.
            RequestRefused, UnknownEdit, NotPicklable: Before anything is submitted.
        """
        __tracebackhide__ = True
        self._require()
        listed, several = prompt_list(prompts)
        self.edits.chosen(edits)
        sampling_params({k: v for k, v in sampling.items() if k not in _OWN_SETTINGS})
        return LabTracer(self, listed, several=several, edits=edits, watch=watch, settings=sampling)

    def edit(self, name: str | None = None, **unknown: Any) -> EditTracer:
        """A block that stays on the engine: ``with engine.edit("probe") as (tracer, edit):``.

        Every request that names it, or names no edits while it is on, gets a run of the block of its
        own; what it saves is on that request's output, ``output.saves["hidden"]``. Running it again
        under the same name replaces it; requests in flight keep the version they came with.

        Raises:
            EditRefused: When the name is missing or cannot be one.
        """
        __tracebackhide__ = True
        self._require()
        if unknown:
            raise RequestRefused(
                f"{next(iter(unknown))!r} is not an option of an edit; it takes a name only."
            )
        return EditTracer(self, self.edits.declared(name))

    def generate(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        errors: str = "raise",
        **sampling: Any,
    ) -> list[Any]:
        """Run prompts, with the edits chosen, and return vLLM's outputs in prompt order.

        Args:
            *prompts: As for `trace`.
            edits: As for `trace`.
            watch: As for `trace`.
            errors: ``"raise"`` a failed edit after all requests are done (the error has
                ``.outputs``), or ``"keep"`` it on ``output.error``.
            **sampling: vLLM's ``SamplingParams``.

        Returns:
            ``RequestOutput`` of each prompt; ``output.saves`` and ``output.outputs[i].saves`` hold
            what the edits saved for it.

        Raises:
            EditError: When an edit's block failed, once, with a count.
        """
        __tracebackhide__ = True
        call = self._generation(prompts, edits, watch, errors, sampling)
        self.wait(call, watch)
        return self._generated(call, errors)

    async def agenerate(
        self,
        *prompts: Any,
        edits: Sequence[str] | None = None,
        watch: Watcher | None = None,
        errors: str = "raise",
        **sampling: Any,
    ) -> list[Any]:
        """`generate`, awaited: other tasks of the caller's loop go on meanwhile."""
        __tracebackhide__ = True
        call = self._generation(prompts, edits, watch, errors, sampling)
        await self.await_(call, watch)
        return self._generated(call, errors)

    def stream(self, *prompts: Any, edits: Sequence[str] | None = None, **sampling: Any) -> Stream:
        """Outputs as they grow: ``async for output in engine.stream("…")`` (or a plain ``for``).

        Each item is a ``RequestOutput`` with all the text so far; with several prompts
        ``output.index`` says whose. The finished one carries ``.saves``. Leaving the loop early
        aborts the request.
        """
        listed, _ = prompt_list(prompts)
        if not listed:
            raise RequestRefused('There is no prompt: engine.stream("…").')
        chosen = self.edits.chosen(edits)
        return Stream(self, Call([self.request(p, sampling, chosen) for p in listed], live=True))

    def _generation(
        self,
        prompts: Sequence[Any],
        edits: Sequence[str] | None,
        watch: Watcher | None,
        errors: str,
        sampling: Mapping[str, Any],
    ) -> Call:
        __tracebackhide__ = True
        if errors not in ("raise", "keep"):
            raise RequestRefused(f'errors={errors!r} is neither "raise" nor "keep".')
        listed, _ = prompt_list(prompts)
        if not listed:
            raise RequestRefused('There is no prompt: engine.generate("…") or engine.generate([…]).')
        chosen = self.edits.chosen(edits)
        call = Call([self.request(p, sampling, chosen) for p in listed], live=watch is not None)
        self.submit(call)
        return call

    def _generated(self, call: Call, errors: str) -> list[Any]:
        __tracebackhide__ = True
        outputs = self.outputs(call)
        if errors == "raise":
            self.raise_errors(call, outputs)
        return outputs

    def request_count(self) -> int:
        """How many requests with blocks the workers still track; 0 when nothing runs."""
        return max(self.rpc(COUNT), default=0)

    # -- what tracers need ---------------------------------------------------------------------

    def request(
        self,
        prompt: Any,
        settings: Mapping[str, Any],
        versions: tuple[EditVersion, ...],
        block: Block | None = None,
    ) -> LabRequest:
        """One request with its blocks aboard."""
        settings = dict(settings)
        lora_request = settings.pop("lora_request", None)
        budget = settings.pop("save_budget", None)
        params = sampling_params(settings)
        extra = dict(params.extra_args or {})
        if budget is not None:
            extra[BUDGET_KEY] = size_of(budget, name="save_budget")
        if versions:
            extra[EDITS_KEY] = [version.id for version in versions]
        if block is not None:
            extra[TRACE_KEY] = block.dumps()
        if versions or block is not None:
            params.extra_args = extra
            # A token served from the prefix cache has no forward pass, so no block would see it.
            if hasattr(params, "skip_reading_prefix_cache"):
                params.skip_reading_prefix_cache = True
        wants = any(v.wants_result for v in versions) or (block is not None and ".result" in block.source)
        return LabRequest(
            self.model._prompt(prompt),
            params,
            edits=versions,
            traced=block is not None,
            wants_result=wants,
            lora_request=lora_request,
        )

    def version_of(self, name: str, block: Block) -> EditVersion:
        """A version of an edit, pickled, not installed yet."""
        if self._vllm_config().cache_config.enable_prefix_caching and name != TRACE_BLOCK:
            warnings.warn(
                f"Prefix caching is on: what edit {name!r} writes into the KV cache is served to later "
                "requests without it. Start the engine without enable_prefix_caching=True to edit safely.",
                stacklevel=6,
            )
        return EditVersion(name, block.dumps(), wants_result=".result" in block.source)

    def scoped_edit(self, block: Block) -> tuple[EditVersion, Future[list[Any]]]:
        """Install a block for the requests of one call only; `drop` takes it off.

        Not waited for: the workers take it before the requests that follow it. The future says
        whether they could.
        """
        version = self.version_of(TRACE_BLOCK, block)
        return version, self._driver.rpc(REGISTER, version.id, version.payload, version.name)

    def drop(self, version: EditVersion) -> None:
        """Take a scoped edit off; not waited for."""
        if self.alive:
            self._driver.rpc(CLEAR, [version.id])

    def submit(self, call: Call) -> None:
        """Hand a call to the driver; its edits are held until it is over."""
        self._require()
        versions = [version for request in call.requests for version in request.edits]
        self.edits.hold(versions)
        call.future.add_done_callback(lambda _: self._let_go(versions))
        self._driver.submit(call)

    def _let_go(self, versions: Iterable[EditVersion]) -> None:
        gone = self.edits.let_go(versions)
        if gone and self.alive:
            self._driver.rpc(CLEAR, gone)

    def wait(self, call: Call, watch: Watcher | None = None) -> None:
        """Wait for a call in this thread."""
        __tracebackhide__ = True
        try:
            wait(call.future, self._watch(call, watch))
        except Exception as error:
            raise self._mapped(error) from None
        self._last_look(call, watch)

    async def await_(self, call: Call, watch: Watcher | None = None) -> None:
        """Wait for a call without blocking the caller's loop."""
        __tracebackhide__ = True
        try:
            await await_(call.future, self._watch(call, watch))
        except Exception as error:
            raise self._mapped(error) from None
        self._last_look(call, watch)

    def _watch(self, call: Call, watch: Watcher | None) -> Watch:
        tick = None if watch is None else (lambda: watch(call.progress()))
        return Watch(died=self.died, abort=lambda: self.abort(call), tick=tick)

    def _last_look(self, call: Call, watch: Watcher | None) -> None:
        if watch is not None:
            watch(call.progress())

    def abort(self, call: Call) -> Future[None] | None:
        """Abort what is left of a call."""
        return self._driver.abort(call) if self.alive else None

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank and wait."""
        __tracebackhide__ = True
        self._require()
        try:
            return wait(self._driver.rpc(method, *args), Watch(died=self.died))
        except Exception as error:
            raise self._mapped(error) from None

    async def arpc(self, method: str, *args: Any) -> list[Any]:
        """`rpc`, awaited."""
        __tracebackhide__ = True
        self._require()
        try:
            return await await_(self._driver.rpc(method, *args), Watch(died=self.died))
        except Exception as error:
            raise self._mapped(error) from None

    # -- what comes home -----------------------------------------------------------------------

    def outputs(self, call: Call) -> list[Any]:
        """The outputs of a finished call, with ``.saves`` and ``.error`` on each; edits' runs are counted."""
        outputs = []
        for request in call.requests:
            if request.output is None:
                raise EngineDied(
                    f"Engine {self.name!r} returned nothing for a request (log: {self.log.path})."
                )
            results.attach(request.output, request.saves)
            for name, error in results.runs(request.saves).items():
                self.edits.count(name, error)
            outputs.append(request.output)
        return outputs

    def raise_errors(self, call: Call, outputs: Sequence[Any]) -> None:
        """Raise the first block error of a call's requests, once, with how many failed.

        Raises:
            TraceError: When it is the trace's own block.
            EditError: When it is an edit's.
        """
        __tracebackhide__ = True
        error = results.failure([request.saves for request in call.requests], outputs)
        if error is not None:
            raise error from None

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
        dead = self.died()
        if dead is not None:
            return dead
        if type(error).__name__ == "EngineDeadError":
            self._cause = self.log.root_cause() or "vLLM reports that the engine is dead"
            return EngineDied(
                f"Engine {self.name!r} died: {self._cause}. `%engine restart` brings it back with its edits "
                f"(log: {self.log.path}).",
                cause=self._cause,
            )
        return refusal(error) or error
