"""vLLM's scheduler, with prompts that blocks read kept whole.

Chunked prefill cuts a long prompt into pieces over several steps, so that others generate meanwhile. A block
that reads the prompt has to see it in one step. vLLM's switch is for all requests or none; here every request
has its own: where a piece of such a prompt is all that is left room for, its place in the cache is refused,
which vLLM takes as "not in this step", and the next step has room for it.

By default the buffers hold any prompt of the model, as without chunked prefill, and a step takes no more of
them than `split_tokens`, but for a prompt that has to be whole. Where the engine's own options make the
buffers smaller than such a prompt, it is cut after all, and the worker makes that its blocks' error. Nothing
waits for ever: who is held back is the first in line, and nobody passes.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from nnsight_lab import pins
from nnsight_lab.wire.keys import REACH_KEY, SCHEDULE_CONFIG, has_blocks
from nnsight_lab.wire.touch import Reach


def scheduler(*args: Any, **settings: Any) -> Any:
    """The scheduler that vLLM would have taken, with whole prompts."""
    pins.check(pins.SCHEDULER)
    asynchronous = settings["vllm_config"].scheduler_config.async_scheduling
    return (LabAsyncScheduler if asynchronous else LabScheduler)(*args, **settings)


def reads_prompt(request: Any) -> bool:
    """Whether blocks ride a request that must see its prompt whole."""
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return has_blocks(extra) and Reach.said(extra.get(REACH_KEY)).whole


class WholePrompts:
    """Mixed into a scheduler of vLLM's."""

    scheduler_config: Any
    kv_cache_manager: Any
    waiting: Any
    running: list[Any]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        config, vllm_config = self.scheduler_config, settings["vllm_config"]
        #: What a step takes at most, and what it takes of prompts that may be cut.
        self._most_tokens = self._step_tokens = self.max_num_scheduled_tokens
        told = (vllm_config.additional_config or {}).get(SCHEDULE_CONFIG) or {}
        split = told.get("split_tokens")
        # Attention over what is in the cache already is what both need: a platform without has neither.
        if split and not config.enable_chunked_prefill and vllm_config.cache_config.enable_prefix_caching:
            config.enable_chunked_prefill = True
            self._step_tokens = min(self._most_tokens, max(split, 2 * config.max_num_seqs))
        #: Tokens that this step has so far; the longest prompt that it could not take whole.
        self._taken = self._held = 0
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_whole

    def schedule(self, *args: Any, **settings: Any) -> Any:
        """The next step's requests."""
        wanted, self._held, self._taken = self._held, 0, 0
        first = self.waiting.peek_request() if self.waiting else None
        if first is not None and reads_prompt(first):
            wanted = max(wanted, first.num_tokens)
        self.max_num_scheduled_tokens = self._step_tokens
        if wanted:
            running = sum(
                max(0, one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens)
                for one in self.running
            )
            # Else a prompt that is under way in pieces would take all of the room at once.
            if running <= self._step_tokens:
                needed = min(self._most_tokens, running + wanted)
                self.max_num_scheduled_tokens = max(self._step_tokens, needed)
        config = self.scheduler_config
        threshold = config.long_prefill_token_threshold
        if not wanted or not threshold:
            return super().schedule(*args, **settings)  # type: ignore[misc]
        config.long_prefill_token_threshold = 0
        try:
            return super().schedule(*args, **settings)  # type: ignore[misc]
        finally:
            config.long_prefill_token_threshold = threshold

    def _allocate_whole(self, request: Any, num_new_tokens: int, *args: Any, **settings: Any) -> Any:
        """Slots of the cache as vLLM allocates them; none for a piece of a prompt that has to be whole."""
        if request.status != RequestStatus.RUNNING and reads_prompt(request):
            known = settings.get("num_new_computed_tokens", 0) + settings.get(
                "num_external_computed_tokens", 0
            )
            left = request.num_tokens - request.num_computed_tokens - known
            room = self.max_num_scheduled_tokens - self._taken
            threshold = self.scheduler_config.long_prefill_token_threshold
            # Cut for another reason (a model's own state), it would be cut in every step: not held back.
            cut = left > room or 0 < threshold < left
            if num_new_tokens < left <= self._most_tokens and cut and not settings.get("delay_cache_blocks"):
                self._held = max(self._held, request.num_tokens)
                return None
        found = self._allocate(request, num_new_tokens, *args, **settings)
        if found is not None:
            self._taken += num_new_tokens
        return found


class LabScheduler(WholePrompts, Scheduler):
    """For an engine that waits for each step."""


class LabAsyncScheduler(WholePrompts, AsyncScheduler):
    """For an engine that prepares a step while the last one runs."""
