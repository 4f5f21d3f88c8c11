"""NaN that a block wrote does not outlive its request in the KV cache.

vLLM's CPU attention multiplies whole cache blocks: a position past a sequence's end has the weight zero, but
zero times NaN is NaN. Cache blocks are handed on as they are, so what a request of one user left (NaN or
infinity written by a block spreads to the keys and values of every layer above) made later requests of
anybody return garbage. So when a request
that blocks rode ends or is put off, its cache is looked at in the last layer, where all that spreads arrives;
what is not finite there is cleared in all layers when those cache blocks get a new owner.

Not before: with the prefix cache on they may be served again as they are, to a request that runs the same
edits, and NaN is seen where zeros would not be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)


class Poison:
    """The cache blocks of one worker that hold what is not finite."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def look(self, caches: Sequence[torch.Tensor], blocks: Iterable[int], request_id: str) -> bool:
        """Look at the cache blocks of a request that is over; whether something in them is not finite.

        Args:
            caches: Of each layer, in order: ``[block, ...]``.
            blocks: The request's.
            request_id: For the log.
        """
        numbers = sorted({*blocks} - self._blocks)
        if not caches or not numbers or not caches[-1].dtype.is_floating_point:
            return False
        last = caches[-1]
        found = _raw(last).index_select(0, torch.tensor(numbers, device=last.device)).view(last.dtype)
        finite = torch.isfinite(found.float()).flatten(1).all(1).tolist()
        poisoned = [number for number, whole in zip(numbers, finite, strict=True) if not whole]
        self._blocks.update(poisoned)
        if poisoned:
            _log.info("request %s left values in the KV cache that are not finite", request_id)
        return bool(poisoned)

    def clear(self, caches: Sequence[torch.Tensor], blocks: Iterable[int]) -> None:
        """Clear those of ``blocks``, which get a new owner, that are known not to be finite."""
        if not self._blocks:
            return
        found = self._blocks.intersection(blocks)
        if not found:
            return
        self._blocks -= found
        index = torch.tensor(sorted(found), device=caches[-1].device)
        for cache in caches:
            _raw(cache).index_fill_(0, index, 0)


def handed_out(scheduled: Any, block_size: int) -> list[int]:
    """The cache blocks that a step gives to requests to write into; not those it serves from the cache.

    Args:
        scheduled: vLLM's ``SchedulerOutput``.
        block_size: Tokens of a cache block.
    """
    found: list[int] = []
    for new in scheduled.scheduled_new_reqs:
        for group in new.block_ids:
            found += group[new.num_computed_tokens // block_size :]
    cached = scheduled.scheduled_cached_reqs
    for request_id, groups, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        kept = computed // block_size if request_id in cached.resumed_req_ids else 0
        for group in groups or ():
            found += group[kept:]
    return found


def _raw(cache: torch.Tensor) -> torch.Tensor:
    """A cache in a dtype that can be picked from and filled; float8 cannot."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
