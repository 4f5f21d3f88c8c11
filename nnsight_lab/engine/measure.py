"""What an engine can find out about requests before they run: their tokens, and what their blocks save.

Everything here is steps: calls to wait for and work to do, in a generator, so that sync and async
callers share one text and a probe is a call like any other, to be interrupted and found dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from nnsight_lab.engine import probe
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.estimate import Demand, Growths
from nnsight_lab.engine.homecoming import Room
from nnsight_lab.engine.service import EngineService
from nnsight_lab.errors import RequestRefused

T = TypeVar("T")
#: Calls to run and work to do on the way to a result; sync and async callers do each in their own way.
Steps: TypeAlias = Generator[Call | Callable[[], Any], Any, T]

_REMEMBERED = 256


class EngineMeasure(EngineService):
    """An engine that can measure what requests would save."""

    def _fresh(self) -> None:
        super()._fresh()
        self._growths: OrderedDict[tuple[Any, ...], Growths] = OrderedDict()

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
                found.update(dict.fromkeys(kind.members, growths))
                if not growths.over:  # what was too much then may not be next time
                    self._growths[kind.key] = growths
        for kind in kinds:
            if kind not in new:
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
        for index, (request, tokens) in enumerate(zip(requests, ids, strict=True)):
            if len(tokens) >= context and not getattr(request.params, "truncate_prompt_tokens", None):
                which = "The prompt" if len(ids) == 1 else f"Prompt {index}"
                raise RequestRefused(
                    f"{which} has {len(tokens):,} tokens, and the engine's context is {context:,}, one of "
                    "which is for what is generated: shorten it, or start the engine with a larger "
                    "max_model_len."
                )
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
        """What is left for saves; of a pipeline on the last stage, which brings home what spans several."""
        return self._driver.home.room()

    def _context(self) -> int:
        return self.facts().context

    def _layer_count(self) -> int:
        return self.facts().layers

    def _stream_bytes(self) -> int:
        """Bytes of one layer's residual stream ``[token, hidden]`` for one token."""
        known = self.facts()
        return known.hidden * known.itemsize
