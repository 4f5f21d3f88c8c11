"""`engine.estimate`: what saving would cost, for those who ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnsight_lab.engine import probe
from nnsight_lab.engine.call import Call, LabRequest
from nnsight_lab.engine.estimate import Demand, Estimate, Growth, Growths, Tally, totals
from nnsight_lab.engine.guard import EngineGuard
from nnsight_lab.engine.measure import Steps
from nnsight_lab.engine.pace import ENOUGH_STEPS, ENOUGH_TOKENS, steps_of
from nnsight_lab.engine.sampling import prompt_list
from nnsight_lab.errors import RequestRefused
from nnsight_lab.wire.keys import TRACE_BLOCK


class EngineEstimates(EngineGuard):
    """An engine that can say what a call would save."""

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
        longest = max(ids, key=len)
        most = max(1, min(ENOUGH_TOKENS, self._context() - 1))
        # Again, where the first ones ran beside others or what an interrupt left.
        for _ in range(2):
            if pace.knows(prompt_tokens, steps):
                break
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
            fits=None if unknown else self._within(tally, room) and not tally.refused,
            names=() if unknown else tally.names,
            how=how,
            refused=tally.refused,
            at_most=at_most,
            unknown=unknown,
        )

    def _engine_steps(self, demands: Sequence[Demand]) -> int:
        return steps_of(
            max((one.new_tokens for one in demands), default=0),
            sum(one.sequences for one in demands),
            self._at_once(),
        )
