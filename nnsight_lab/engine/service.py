"""What a trace, an edit and a stream need of an engine: requests with their blocks, waiting, results.

Everything becomes a `Call` on the driver's thread; interrupts, deaths and errors are turned into
this package's terms here, once, for sync and async callers alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.blocks.module_paths import roots_of
from nnsight_lab.blocks.reach import touch_of
from nnsight_lab.engine import processes, results
from nnsight_lab.engine.arrivals import arrivals
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.edits import EditVersion
from nnsight_lab.engine.known_blocks import KnownBlocks, content_id
from nnsight_lab.engine.life import EngineLife
from nnsight_lab.engine.pace import steps_of
from nnsight_lab.engine.prefixes import reading, refuse_long, salted
from nnsight_lab.engine.probe import token_ids, tokens_bound
from nnsight_lab.engine.sampling import sampling_params
from nnsight_lab.engine.sleeping import EngineSleep
from nnsight_lab.engine.step_words import longest
from nnsight_lab.engine.tracer import Watcher
from nnsight_lab.engine.waiting import Watch, await_, wait
from nnsight_lab.errors import EngineDied, Interrupted
from nnsight_lab.saves.budget import size_of
from nnsight_lab.wire.keys import (
    BUDGET_KEY,
    CLEAR,
    CONTENT_KEY,
    DECLARED_KEY,
    EDITS_KEY,
    REACH_KEY,
    REGISTER,
    STOP_SIGNAL,
    TRACE_BLOCK,
    TRACE_KEY,
    stop_file,
)
from nnsight_lab.wire.touch import Reach, Touch, together


class EngineService(EngineSleep):
    """An engine as the tracers see it."""

    def _fresh(self) -> None:
        super()._fresh()
        self._crowd = threading.Lock()
        self._under_way: dict[int, Call] = {}
        #: Whether a call was aborted since the last one began: a step of it may still be running.
        self._disturbed = False
        #: What this engine has of traces' blocks; nothing, when it is new.
        self._blocks = KnownBlocks()

    # -- requests -------------------------------------------------------------------------------

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
        params = self.sampling(settings)
        extra = dict(params.extra_args or {})
        if budget is not None:
            extra[BUDGET_KEY] = size_of(budget, name="save_budget")
        if versions:
            extra[EDITS_KEY] = [version.id for version in versions]
        payload = b"" if block is None else block.dumps()
        content = ""
        if isinstance(block, DeclaredBlock):
            extra[DECLARED_KEY] = payload
        elif block is not None:
            extra[TRACE_KEY] = payload
            if self._keeps_blocks():
                extra[CONTENT_KEY] = content = content_id(payload)
        touches = [version.touch for version in versions]
        if block is not None:
            touches.append(touch_of(block, EngineLife))
        reach = together(touches)
        if reach is not None:
            extra[REACH_KEY] = reach.value
            params.extra_args = extra
            reading(params, reach)
        wants = any(v.wants_result for v in versions) or (block is not None and ".result" in block.source)
        prompt = self.model._prompt(prompt)
        self._fits(prompt, params, reach)
        request = LabRequest(
            self._apart(prompt, touches),
            params,
            edits=versions,
            traced=block is not None,
            wants_result=wants,
            source="" if block is None else block.source,
            content=content,
            lora_request=lora_request,
            settings=settings,
            block_source="" if block is None else block.text,
            block_roots=None if block is None else _roots(block),
            block_reach="prompt" if block is None else touches[-1].reach.value,
        )
        if content and self._blocks.use(content, len(payload), request):
            del extra[TRACE_KEY]
        return request

    def _keeps_blocks(self) -> bool:
        # Of several replicas a request reaches one.
        return self._driver.keeps_blocks and dict(self.config.options).get("data_parallel_size") in (None, 1)

    def _apart(self, prompt: Any, touches: Sequence[Touch]) -> Any:
        """A prompt kept apart in the prefix cache from those that other blocks ran on."""
        return salted(prompt, touches) if self.facts().prefix_caching else prompt

    def _fits(self, prompt: Any, params: Any, reach: Reach | None) -> None:
        """Refuse a prompt that has to run in one step and cannot; tokens are counted where that is close."""
        facts = self.facts()
        if reach is None or not reach.whole or not 0 < facts.step_tokens < facts.context:
            return
        if getattr(params, "truncate_prompt_tokens", None):
            return
        bound = tokens_bound(prompt)
        if bound is not None and bound > facts.step_tokens:
            (ids,) = token_ids([prompt], self.model.tokenizer) or [()]
            refuse_long(len(ids), facts.step_tokens, reach)

    def sampling(self, settings: Mapping[str, Any]) -> Any:
        """VLLM's ``SamplingParams``, or what stands for it here.

        Raises:
            RequestRefused: For a setting that there is not, or a value it cannot have.
        """
        return sampling_params(settings)

    def version_of(self, name: str, block: Block) -> EditVersion:
        """A version of an edit, pickled, not installed yet."""
        wants_result = ".result" in block.source
        touch = touch_of(block, EngineLife)
        return EditVersion(
            name, block.dumps(), block.text, _roots(block), touch=touch, wants_result=wants_result
        )

    def shown_options(self) -> tuple[tuple[str, object], ...]:
        """What people are told of how it runs."""
        return self.config.options

    def scoped_edit(self, block: Block) -> tuple[EditVersion, Future[list[Any]]]:
        """Have a block ready for the requests of one call; `drop` when they are over.

        Where the workers do not have it, it is sent, and not waited for: they take it before the requests
        that follow it. The future says whether they could.
        """
        version = self.version_of(TRACE_BLOCK, block)
        if not self._keeps_blocks():
            return version, self._driver.rpc(REGISTER, version.id, version.payload, version.name)
        payload, version.payload = version.payload, b""
        content = version.id = content_id(payload)
        if self._blocks.use(content, len(payload), version):
            sent: Future[list[Any]] = Future()
            sent.set_result([])
            return version, sent
        sent = self._driver.rpc(REGISTER, content, payload, version.name)
        self._blocks.arrived(content)  # before whatever is sent from now on
        sent.add_done_callback(lambda done: self._sent(content, done))
        return version, sent

    def _sent(self, content: str, done: Future[list[Any]]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._blocks.lost(content)

    def drop(self, version: EditVersion) -> None:
        """A scoped edit is not needed any more; not waited for. What the workers keep goes when it is old."""
        if not self.alive:
            return
        gone = self._blocks.gone() if self._keeps_blocks() else [version.id]
        if gone:
            self._driver.rpc(CLEAR, gone)

    def submit(self, call: Call) -> None:
        """Hand a call to the driver; its edits are held until it is over. An engine that sleeps is woken."""
        self._require()
        versions = [version for request in call.requests for version in request.edits]
        self.edits.hold(versions)
        call.future.add_done_callback(lambda _: self._let_go(versions))
        self._enter_crowd(call)
        call.began, call.home_s = time.perf_counter(), self._driver.home_s
        if self._asleep:
            call.crowded = True  # its seconds say nothing of the engine's pace
            self._wake().add_done_callback(lambda waking: self._awake_for(call, waking))
        else:
            self._driver.submit(call)

    def _awake_for(self, call: Call, waking: Future[None]) -> None:
        error = waking.exception()
        if error is None:
            self._driver.submit(call)
        else:
            call.resolve(error)

    def _enter_crowd(self, call: Call) -> None:
        with self._crowd:
            call.crowded = self._disturbed or bool(self._under_way)
            self._disturbed = False
            for other in self._under_way.values():
                other.crowded = True
            self._under_way[id(call)] = call
        # Not the call: its future would hold it, and with it its saves, until the next collection of garbage.
        key, aborted = id(call), call.aborted
        call.future.add_done_callback(lambda _: self._leave_crowd(key, aborted))

    def _leave_crowd(self, key: int, aborted: threading.Event) -> None:
        with self._crowd:
            self._under_way.pop(key, None)
            self._disturbed = self._disturbed or aborted.is_set()
        self._touched = time.monotonic()

    def _timed(self, call: Call) -> None:
        """Note how fast a call was that had the engine to itself, without its way home."""
        outputs = [request.output for request in call.requests if request.output is not None]
        if call.crowded:
            return
        if call.aborted.is_set() or not outputs or not all(output.finished for output in outputs):
            return
        seconds = call.ended - call.began - (self._driver.home_s - call.home_s)
        lengths = [len(one.token_ids) for output in outputs for one in output.outputs]
        steps = steps_of(max(lengths, default=1), len(lengths), self._at_once())
        tokens = sum(len(o.prompt_token_ids or ()) - (o.num_cached_tokens or 0) for o in outputs)
        self._driver.pace.call(tokens, steps, max(seconds, 1e-6))

    def _at_once(self) -> int:
        """How many sequences the engine runs together."""
        return self.facts().at_once

    def abort_all(self) -> int:
        """Abort every call of this kernel; whoever waits for one gets `Interrupted`. Not waited for.

        Returns:
            How many there were.
        """
        with self._crowd:
            calls = list(self._under_way.values())
        for call in calls:
            self.abort(call)
        return len(calls)

    def _let_go(self, versions: Iterable[EditVersion]) -> None:
        gone = self.edits.let_go(versions)
        if gone and self.alive:
            self._driver.rpc(CLEAR, gone)

    def wait(self, call: Call, watch: Watcher | None = None) -> None:
        """Wait for a call in this thread."""
        __tracebackhide__ = True
        try:
            wait(call.future, self.watch(call, watch))
        except Exception as error:
            raise self._mapped(error) from None
        self._timed(call)
        self._last_look(call, watch)

    async def await_(self, call: Call, watch: Watcher | None = None) -> None:
        """Wait for a call without blocking the caller's loop."""
        __tracebackhide__ = True
        try:
            await await_(call.future, self.watch(call, watch))
        except Exception as error:
            raise self._mapped(error) from None
        self._timed(call)
        self._last_look(call, watch)

    def watch(self, call: Call, watch: Watcher | None) -> Watch:
        """What to look at while a call is waited for."""
        tick = None if watch is None else (lambda: watch(call.progress()))
        return Watch(
            died=self.died,
            abort=lambda: self.abort(call),
            break_off=lambda: self.break_off(call),
            tick=tick,
        )

    def _last_look(self, call: Call, watch: Watcher | None) -> None:
        if watch is not None:
            watch(call.progress())

    def abort(self, call: Call) -> Future[None] | None:
        """Abort what is left of a call."""
        return self._driver.abort(call) if self.alive else None

    def break_off(self, call: Call) -> None:
        """End the block of this call that runs at this moment, if one does: it may never end by itself."""
        if self.alive:
            stop_file(self.log.path).write_text("\n".join(request.id for request in call.requests))
            processes.send(self.id, STOP_SIGNAL)

    # -- what comes home ------------------------------------------------------------------------

    def outputs(self, call: Call) -> list[Any]:
        """The outputs of a finished call, with ``.saves`` and ``.error`` on each.

        Edits' runs are counted, and what was saved enters the engine's store.
        """
        if call.aborted.is_set() and not all(
            r.output is not None and r.output.finished for r in call.requests
        ):
            raise Interrupted("the requests were aborted from elsewhere; the engine is still loaded.")
        self._enter(call)
        no_graphs = self.no_graphs()
        self._note_blocks(call)
        outputs = []
        for request in call.requests:
            if request.output is None:
                raise EngineDied(
                    f"Engine {self.name!r} returned nothing for a request (log: {self.log.path})."
                )
            results.attach(request.output, request.saves, no_graphs)
            for name, error in results.runs(request.saves).items():
                self.edits.count(name, error)
            outputs.append(request.output)
        self.last_steps = longest(output.steps for output in outputs) or self.last_steps
        return outputs

    def _note_blocks(self, call: Call) -> None:
        """The workers have the blocks whose requests came home; what is too old there goes."""
        for request in call.requests:
            if request.content and request.saves is not None and request.saves.error is None:
                self._blocks.arrived(request.content)
        gone = self._blocks.gone()
        if gone and self.alive:
            self._driver.rpc(CLEAR, gone)

    def _enter(self, call: Call) -> None:
        """Before the caller gets the values: the store takes copies of their lists and dictionaries."""
        try:
            self.saves.enter(arrivals(call, self._origin))
        except Exception as error:  # a call does not fail for what is kept of it
            self.saves.missed(len(call.requests), error)

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


def _roots(block: Block) -> tuple[tuple[str, str], ...]:
    return roots_of(block.glbls, block.lcls, engines=EngineLife)
