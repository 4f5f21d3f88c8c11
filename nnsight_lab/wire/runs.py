"""Lists of many small tensors of one kind: a number or a row for each token.

Taken one by one, a list of 64 costs 0.3 ms to take apart and as much to put together, for each of a hundred
requests that end in one step. A list whose items are all alike is one entry, moved as one and cut by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch

from nnsight_lab.wire.refusals import Stuck
from nnsight_lab.wire.tensors import has_its_memory, plain

#: A run of so many tensors or more, each of so few bytes or less, is moved as one.
RUN: Final = 4
SMALL: Final = 4096
#: Dtypes that torch stacks on every device.
STACKED: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    }
)


def alike(values: Sequence[object]) -> bool:
    """Whether these are plain tensors that can be moved as one; whatever is odd is left to others."""
    if len(values) < RUN:
        return False
    one = values[0]
    if type(one) is not torch.Tensor or one.dtype not in STACKED or not 0 < one.nbytes <= SMALL:
        return False
    try:
        plain(one)
    except Stuck:
        return False
    if set(map(type, values)) != {torch.Tensor}:
        return False
    dtype, shape, device, strided = one.dtype, one.shape, one.device, torch.strided
    itemsize, nbytes, count, dims = one.itemsize, one.nbytes, one.numel(), one.dim()
    for value in cast(Sequence[torch.Tensor], values):
        if (
            value.dtype is not dtype
            or value.numel() != count
            or value.dim() != dims
            or (dims > 1 and value.shape != shape)
            or value.layout is not strided
            or value.requires_grad
            or value.is_nested
            or value.device != device
        ):
            return False
        if value.is_contiguous():  # as `has_its_memory` has it, without a call for each
            if value.storage_offset() * itemsize + nbytes > value.untyped_storage().nbytes():
                return False
        elif not has_its_memory(value):
            return False
    return True
