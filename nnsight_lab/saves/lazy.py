"""Rows of a saved tensor, without the rest of it.

Memory is looked at as integers of the same width, since torch cannot index every dtype it has (float8 by a
list, for one); of a mapped file only the pages under the rows are read. What comes back owns its memory: a
row never keeps a request or a file alive.
"""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt
import torch

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take(leaf: torch.Tensor | npt.NDArray[Any], index: Any) -> torch.Tensor:
    """``leaf[index]`` as a tensor of its own, whatever torch can index with.

    An array of the other byte order comes back in this machine's.
    """
    if isinstance(leaf, torch.Tensor):
        return _take(leaf, index)
    native = leaf.dtype.newbyteorder("=")
    taken = _take(torch.from_numpy(leaf.view(native)), index)
    if native == leaf.dtype:
        return taken
    return torch.from_numpy(taken.numpy().view(leaf.dtype).astype(native))


def _take(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    # A tensor over one element may have any strides, and can only be viewed as its own dtype's width.
    integers = _INTEGERS.get(tensor.dtype.itemsize)
    whole = tensor if integers is None else tensor.view(integers)
    part = whole[index]
    if part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        part = part.clone(memory_format=torch.contiguous_format)
    return part if integers is None else part.view(tensor.dtype)
