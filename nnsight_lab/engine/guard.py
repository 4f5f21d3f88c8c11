"""A call whose saves would not fit is stopped before it runs.

A call that cannot come near the budgets is let through by one multiplication. Any other is measured
on tiny requests, once for each block, and stopped where its saves would not fit: before it has cost
minutes of forward passes. The worker's own check stays the last word on everything that is let through.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

from nnsight_lab.engine import probe
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.estimate import Demand, Tally, named
from nnsight_lab.engine.homecoming import Room
from nnsight_lab.engine.measure import EngineMeasure, Steps
from nnsight_lab.errors import OverBudget
from nnsight_lab.wire.keys import BUDGET_KEY
from nnsight_lab.wire.sizes import shown_bytes as shown

#: How many times the residual streams of all layers a block may save before anybody looks.
_GENEROUS = 10
_CURE = "Ask fewer prompts at once, save less (a row, a mean), raise {}, or pass save_check=False."


class EngineGuard(EngineMeasure):
    """An engine that looks at what a call would save before it runs it."""

    def _fresh(self) -> None:
        super()._fresh()
        self._token_bytes = 0

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
        at_most = ""
        for index, growths in found.items():
            if growths.over:
                raise OverBudget(f"Not run: already a few tokens are too much, {growths.unknown}.")
            if not own_budgets:
                demands[index] = demands[index]._replace(allowed_bytes=None)
            if growths.grows and not requests[index].params.ignore_eos:
                at_most = " if none stops early"
            tally.add(demands[index], growths)
        count = len(requests)
        if tally.first_refused is not None:
            nbytes, allowed = tally.first_refused
            raise OverBudget(
                f"Not run: {tally.refused} of {count} requests would save more than their save_budget"
                f"{at_most} (the first {shown(nbytes)} of {shown(allowed)}): {named(tally.names)} in all. "
                + _CURE.format("it")
            )
        if self._within(tally, self._room()):
            return
        yield self._let_go_of_memory
        room = self._room()
        if not self._within(tally, room):
            left = shown(room.memory_bytes + room.spill_bytes)
            raise OverBudget(
                f"Not run: {count} requests would save {shown(tally.packed_bytes)}{at_most}, the engine has "
                f"{left} left: {named(tally.names)}. "
                + _CURE.format("the engine's save_budget or spill_budget")
            )

    def _let_go_of_memory(self) -> None:
        """Give up what nobody looks at: what only a cycle holds, and what the store can read from files."""
        self.saves.spill()
        gc.collect()

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

    @staticmethod
    def _within(tally: Tally, room: Room) -> bool:
        return tally.packed_bytes <= room.memory_bytes + room.spill_bytes

    def _generous_bytes(self) -> int:
        if not self._token_bytes:
            self._token_bytes = _GENEROUS * self._layer_count() * self._stream_bytes()
        return self._token_bytes
