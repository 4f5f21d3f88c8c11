"""NaN that a block wrote does not outlive its request in the KV cache.

vLLM's CPU attention multiplies whole cache blocks: a position past a sequence's end has the weight zero, but
zero times NaN is NaN. Cache blocks are handed on as they are, so what a request of one user left (NaN or
infinity written by a block spreads to the keys and values of every layer above) made later requests of
anybody return garbage. So when a request that blocks rode ends, its cache is looked at in the last layer,
where all that spreads arrives; what is not finite is cleared in all layers before the cache blocks have a
new owner.

With prefix caching on nothing is cleared: then cached blocks may be served again, and NaN is seen where zeros
would not be. The blocks of a request that is preempted are not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

_log = logging.getLogger(__name__)


def clear_poisoned(caches: Sequence[torch.Tensor], blocks: Sequence[int], request_id: str) -> bool:
    """Clear the cache blocks of an ended request where they are not finite; whether they were not.

    Args:
        caches: Of each layer, in order: ``[block, ...]``.
        blocks: The request's.
        request_id: For the log.
    """
    if not caches or not blocks:
        return False
    last = caches[-1]
    if not last.dtype.is_floating_point:
        return False
    index = torch.tensor(sorted(set(blocks)), device=last.device)
    found = _raw(last).index_select(0, index).view(last.dtype)
    if bool(torch.isfinite(found.float()).all()):
        return False
    for cache in caches:
        _raw(cache).index_fill_(0, index, 0)
    _log.info("request %s left values in the KV cache that are not finite: cleared", request_id)
    return True


def _raw(cache: torch.Tensor) -> torch.Tensor:
    """A cache in a dtype that can be picked from and filled; float8 cannot."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
