"""What a call would save is looked at before it runs: asked for, or because it may be too much.

A call that cannot come near the budgets is let through by one multiplication. Any other is measured
on tiny requests, once for each block, and stopped where its saves would not fit: before it has cost
minutes of forward passes. The worker's own check stays the last word on everything that is let through.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from nnsight_lab.engine import probe
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.estimate import (
    Demand,
    Estimate,
    Growth,
    Growths,
    Tally,
    named,
    shown,
    totals,
)
from nnsight_lab.engine.homecoming import Room
from nnsight_lab.engine.pace import ENOUGH_STEPS, ENOUGH_TOKENS, steps_of
from nnsight_lab.engine.sampling import prompt_list
from nnsight_lab.engine.service import EngineService
from nnsight_lab.errors import OverBudget, RequestRefused
from nnsight_lab.wire.keys import BUDGET_KEY, TRACE_BLOCK

T = TypeVar("T")
#: Calls to run and work to do on the way to a result; sync and async callers do them each in their way.
Steps: TypeAlias = Generator[Call | Callable[[], Any], Any, T]

#: How many times the residual streams of all layers a block may save before anybody looks.
_GENEROUS = 10
_REMEMBERED = 256


class EngineGuard(EngineService):
    """An engine that can say what a call would save."""

    def _fresh(self) -> None:
        super()._fresh()
        self._growths: OrderedDict[tuple[Any, ...], Growths] = OrderedDict()
        self._token_bytes = 0

    # -- asked for ------------------------------------------------------------------------------

    def estimate(
        self,
        *prompts: Any,
        layers: str | Sequence[int] = "all",
        positions: str = "all",
        edits: Sequence[str] | None = None,
        **sampling: Any,
    ) -> Estimate:
        """What saving would cost, before any of it is run: bytes and seconds.

        Without ``edits``, of the residual streams of ``layers``, by formula: tokens x layers x hidden x
        the dtype's bytes, for the prompt's forward pass. With ``edits``, of what those edits save, measured
        on a few requests of at most 64 tokens. What a block of your own would save is
        ``with engine.trace(prompts, estimate=True) as tracer:`` and ``tracer.estimate``.

        Seconds come from the calls the engine has run (two short ones are run where it has run none
        that tell) and count neither a block's own work nor other callers.

        Args:
            *prompts: As for `trace`; they are only counted.
            layers: ``"all"``, or the indices of decoder layers (negative ones count from the end).
            positions: ``"all"`` of a prompt's tokens, or the ``"last"`` one.
            edits: Names of installed edits, measured instead of layers.
            **sampling: As for `trace`; ``max_tokens`` and ``n`` make a difference.

        Returns:
            The estimate; print it for one or two lines.

        Raises:
            RequestRefused: For layers or positions the model does not have, or a prompt that is neither
                text nor tokens.
            UnknownEdit: For a name nothing is installed under.
        """
        __tracebackhide__ = True
        return self.run_steps(self._asked(prompts, layers, positions, edits, sampling))

    async def aestimate(
        self,
        *prompts: Any,
        layers: str | Sequence[int] = "all",
        positions: str = "all",
        edits: Sequence[str] | None = None,
        **sampling: Any,
    ) -> Estimate:
        """`estimate`, awaited."""
        __tracebackhide__ = True
        return await self.arun_steps(self._asked(prompts, layers, positions, edits, sampling))

    def _asked(
        self,
        prompts: Sequence[Any],
        layers: str | Sequence[int],
        positions: str,
        edits: Sequence[str] | None,
        sampling: Mapping[str, Any],
    ) -> Steps[Estimate]:
        __tracebackhide__ = True
        self._require()
        listed, _ = prompt_list(prompts)
        if not listed:
            raise RequestRefused("There is no prompt: engine.estimate([…]).")
        if edits is not None:
            chosen = self.edits.chosen(edits)
            requests = [self.request(prompt, sampling, chosen) for prompt in listed]
            return (yield from self.estimate_steps(requests))
        count = len(self._layers(layers))
        if positions not in ("all", "last"):
            raise RequestRefused(f'positions={positions!r} is neither "all" nor "last".')
        requests = [self.request(prompt, sampling, ()) for prompt in listed]
        ids = yield from self._ids(requests)
        if ids is None:
            raise RequestRefused("A prompt that is neither text nor tokens cannot be counted.")
        demands = self._demands(requests, ids)
        nbytes = float(self._stream_bytes() * count)
        growth = Growth(0, nbytes) if positions == "all" else Growth(nbytes, 0)
        name = f"the residual stream of {count} layer{'' if count == 1 else 's'}"
        growths = Growths({TRACE_BLOCK: growth}, {(TRACE_BLOCK, name): growth})
        tally = Tally()
        for one in demands:
            tally.add(one, growths)
        return (yield from self._estimate(demands, ids, tally, how="layers"))

    def _layers(self, layers: str | Sequence[int]) -> Sequence[int]:
        there = self._layer_count()
        if layers == "all":
            return range(there)
        if not isinstance(layers, Sequence | range) or isinstance(layers, str):
            raise RequestRefused(f'layers={layers!r} is neither "all" nor a list of layers.')
        for layer in layers:
            if not isinstance(layer, int) or not -there <= layer < there:
                raise RequestRefused(f"There is no layer {layer!r}: the model has {there}, 0 to {there - 1}.")
        return layers

    def estimate_steps(self, requests: Sequence[LabRequest]) -> Steps[Estimate]:
        """What these requests' blocks would save, measured now; ``unknown`` where that fails."""
        ids = yield from self._ids(requests)
        if ids is None:
            raise RequestRefused("A prompt that is neither text nor tokens cannot be counted.")
        demands = self._demands(requests, ids)
        found = yield from self._measured(requests, ids, demands, again=True)
        tally = Tally()
        for index, growths in found.items():
            tally.add(demands[index], growths)
        unknown = next((growths.unknown for growths in found.values() if growths.unknown), "")
        early = any(
            growths.grows and not requests[index].params.ignore_eos for index, growths in found.items()
        )
        return (yield from self._estimate(demands, ids, tally, how="probe", unknown=unknown, at_most=early))

    def _estimate(
        self,
        demands: Sequence[Demand],
        ids: Sequence[Sequence[int]],
        tally: Tally,
        *,
        how: str,
        unknown: str = "",
        at_most: bool = False,
    ) -> Steps[Estimate]:
        prompt_tokens, new = totals(demands)
        steps = self._engine_steps(demands)
        pace = self._driver.pace
        if not pace.knows(prompt_tokens, steps):
            longest = max(ids, key=len)
            most = max(1, min(ENOUGH_TOKENS, self._context() - 1))
            yield Call([probe.plain(longest, min(8, most), ENOUGH_STEPS + 1)])
            yield Call([probe.plain(longest, most, 1)])
        room = self._room()
        return Estimate(
            requests=len(demands),
            prompt_tokens=prompt_tokens,
            new_tokens=new,
            saved_bytes=None if unknown else tally.saved_bytes,
            packed_bytes=None if unknown else tally.packed_bytes,
            seconds=pace.seconds(prompt_tokens, steps, tally.packed_bytes),
            budget_bytes=room.memory_bytes + room.spill_bytes,
            memory_budget_bytes=room.memory_bytes,
            fits=None if unknown else self._within(tally, room),
            names=() if unknown else tally.names,
            how=how,
            at_most=at_most,
            unknown=unknown,
        )

    # -- because it may be too much ---------------------------------------------------------------

    def may_exceed(self, requests: Sequence[LabRequest]) -> bool:
        """Whether a call over several prompts must be measured before it runs: next to no work.

        False where nothing it saves could come near what is left, judged by an upper bound: ten times
        the residual streams of all layers, at as many tokens as the prompts have bytes.
        """
        if len(requests) < 2:
            return False
        token_bytes = self._generous_bytes()
        total = 0
        context = self._context()
        for request in requests:
            if not request.has_blocks:
                continue
            tokens = probe.tokens_bound(request.prompt)
            if tokens is None:
                return False  # nobody can say: the worker will
            params = request.params
            nbytes = (tokens + min(params.max_tokens or context, context)) * token_bytes
            allowed = params.extra_args.get(BUDGET_KEY)
            if allowed is not None and nbytes > allowed:
                return True
            total += nbytes * params.n
        room = self._room()
        return total > room.memory_bytes + room.spill_bytes

    def submit_checked(self, call: Call, *, own_budgets: bool = True) -> None:
        """Measure a call that may exceed its budgets, and submit it.

        Args:
            call: Over several prompts.
            own_budgets: Whether a request that would be over its own ``save_budget`` stops the call, too.

        Raises:
            OverBudget: Naming what would be saved, before anything is submitted.
        """
        __tracebackhide__ = True
        with self._holding(call):
            self.run_steps(self._check(call.requests, own_budgets))
            self.submit(call)

    async def asubmit_checked(self, call: Call, *, own_budgets: bool = True) -> None:
        """`submit_checked`, awaited."""
        __tracebackhide__ = True
        with self._holding(call):
            await self.arun_steps(self._check(call.requests, own_budgets))
            self.submit(call)

    @contextlib.contextmanager
    def _holding(self, call: Call) -> Iterator[None]:
        """Keep the call's edits as they are while it is looked at."""
        versions = [version for request in call.requests for version in request.edits]
        self.edits.hold(versions)
        try:
            yield
        finally:
            self._let_go(versions)

    def _check(self, requests: Sequence[LabRequest], own_budgets: bool) -> Steps[None]:
        __tracebackhide__ = True
        ids = yield from self._ids(requests)
        if ids is None:
            return
        demands = self._demands(requests, ids)
        if not self._near(demands):
            return
        found = yield from self._measured(requests, ids, demands, again=False)
        tally = Tally()
        for index, growths in found.items():
            if growths.over:
                raise OverBudget(f"Not run: already a few tokens are too much, {growths.unknown}.")
            if not own_budgets:
                demands[index] = demands[index]._replace(allowed_bytes=None)
            tally.add(demands[index], growths)
        cure = "Ask fewer prompts at once, save less (a row, a mean), raise {}, or pass save_check=False."
        if tally.first_refused is not None:
            nbytes, allowed = tally.first_refused
            raise OverBudget(
                f"Not run: {tally.refused} of {len(requests)} requests would save more than their "
                f"save_budget (the first {shown(nbytes)} of {shown(allowed)}): {named(tally.names)} in all. "
                + cure.format("it")
            )
        if self._within(tally, self._room()):
            return
        gc.collect()  # what only a cycle still holds is nobody's
        room = self._room()
        if not self._within(tally, room):
            raise OverBudget(
                f"Not run: {len(requests)} requests would save {shown(tally.packed_bytes)}, the engine has "
                f"{shown(room.memory_bytes + room.spill_bytes)} left: {named(tally.names)}. "
                + cure.format("the engine's save_budget or spill_budget")
            )

    def _near(self, demands: Sequence[Demand]) -> bool:
        """`may_exceed` once the tokens are counted."""
        token_bytes = self._generous_bytes()
        room = self._room()
        sizes = [(one.prompt_tokens + one.new_tokens) * token_bytes for one in demands]
        own = any(
            d.allowed_bytes is not None and s > d.allowed_bytes for d, s in zip(demands, sizes, strict=True)
        )
        total = sum(size * one.sequences for size, one in zip(sizes, demands, strict=True))
        return own or total > room.memory_bytes + room.spill_bytes

    # -- measuring --------------------------------------------------------------------------------

    def _measured(
        self,
        requests: Sequence[LabRequest],
        ids: Sequence[Sequence[int]],
        demands: Sequence[Demand],
        *,
        again: bool,
    ) -> Steps[dict[int, Growths]]:
        """What each request with blocks would save, by its place; ``again`` looks even where it is known."""
        found: dict[int, Growths] = {}
        kinds = probe.kinds(requests, ids, demands, self._context())
        new = [kind for kind in kinds if again or kind.key not in self._growths]
        if new:
            refused = yield Call([request for kind in new for request in kind.probes.values()])
            for kind in new:
                growths = kind.growths() if refused is None else Growths(unknown=str(refused))
                self._growths[kind.key] = growths
        for kind in kinds:
            found.update(dict.fromkeys(kind.members, self._growths[kind.key]))
        while len(self._growths) > _REMEMBERED:
            self._growths.popitem(last=False)
        return found

    def _ids(self, requests: Sequence[LabRequest]) -> Steps[list[Sequence[int]] | None]:
        """The tokens of the prompts; None where they cannot be counted."""
        prompts = [request.prompt for request in requests]
        tokenizer = self.tokenizer
        found: list[Sequence[int]] | None = yield lambda: probe.token_ids(prompts, tokenizer)
        return found

    def _demands(self, requests: Sequence[LabRequest], ids: Sequence[Sequence[int]]) -> list[Demand]:
        context = self._context()
        return [
            probe.demand(request, len(tokens), context) for request, tokens in zip(requests, ids, strict=True)
        ]

    def run_steps(self, steps: Steps[T]) -> T:
        """Do the steps in this thread; a probe is a call like any other, and can be interrupted."""
        __tracebackhide__ = True
        answer: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                answer = None
                if not isinstance(step, Call):
                    answer = step()
                    continue
                self.submit(step)
                try:
                    self.wait(step)
                except RequestRefused as refused:
                    answer = refused

    async def arun_steps(self, steps: Steps[T]) -> T:
        """`run_steps` without blocking the caller's loop."""
        __tracebackhide__ = True
        answer: Any = None
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(answer)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                answer = None
                if not isinstance(step, Call):
                    answer = await asyncio.to_thread(step)
                    continue
                self.submit(step)
                try:
                    await self.await_(step)
                except RequestRefused as refused:
                    answer = refused

    # -- the engine's own figures -------------------------------------------------------------------

    def _room(self) -> Room:
        """What is left for saves, over the stages of a pipeline: each brings its own layers' home."""
        room = self._driver.home.room()
        stages = int(self._vllm_config().parallel_config.pipeline_parallel_size)
        return room if stages == 1 else Room(room.memory_bytes * stages, room.spill_bytes * stages)

    @staticmethod
    def _within(tally: Tally, room: Room) -> bool:
        return tally.packed_bytes <= room.memory_bytes + room.spill_bytes

    def _context(self) -> int:
        return int(self._vllm_config().model_config.max_model_len)

    def _layer_count(self) -> int:
        return int(self._vllm_config().model_config.hf_text_config.num_hidden_layers)

    def _stream_bytes(self) -> int:
        """Bytes of one layer's residual stream ``[token, hidden]`` for one token."""
        config = self._vllm_config().model_config
        return int(config.get_hidden_size()) * int(config.dtype.itemsize)

    def _generous_bytes(self) -> int:
        if not self._token_bytes:
            self._token_bytes = _GENEROUS * self._layer_count() * self._stream_bytes()
        return self._token_bytes

    def _engine_steps(self, demands: Sequence[Demand]) -> int:
        return steps_of(
            max((one.new_tokens for one in demands), default=0),
            sum(one.sequences for one in demands),
            self._at_once(),
        )
