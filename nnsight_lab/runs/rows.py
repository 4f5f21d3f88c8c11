"""What a block appended step by step, as rows that stand for positions of the sequence.

The hard fact: the first step sees the whole prompt and every later one a single token, so a block that
appends what it reads appends `[prompt, hidden]` once and `[1, hidden]` from then on. Joined, they have a row
for each position. A block that appends one number or one vector a step has said nothing of the prompt's
earlier tokens: its first row is the prompt's last token, whose forward pass gave the first new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """Values that stand for positions.

    Attributes:
        values: ``[position]``, or ``[position, …]`` of two dimensions.
        first: The position of the first.
    """

    values: torch.Tensor
    first: int


def rows_of(items: Sequence[Any], prompt_count: int) -> Rows | str:
    """What was appended, joined; or why it cannot be.

    Args:
        items: Numbers, and tensors of at most two dimensions; of anything else it says so.
        prompt_count: How many tokens the prompt has.
    """
    for item in items:
        if not isinstance(item, bool | int | float) and not (
            isinstance(item, torch.Tensor) and item.dim() <= 2 and not item.is_complex()
        ):
            return f"it holds {type(item).__name__}"
    tensors = [torch.as_tensor(item).detach().cpu() for item in items]
    if not tensors:
        return "nothing was appended yet"
    dims = {tensor.dim() for tensor in tensors}
    if len(dims) > 1:
        return "its elements have different numbers of dimensions"
    (dim,) = dims
    if dim == 1:
        lengths = [len(tensor) for tensor in tensors]
        # Vectors of one length are a row each; else it is numbers of several positions at a time.
        together = len(set(lengths)) > 1 or (len(lengths) == 1 and 1 < lengths[0] == prompt_count)
        parts = tensors if together else [tensor[None] for tensor in tensors]
    else:
        parts = [tensor[None] for tensor in tensors] if dim == 0 else tensors
    if len({part.shape[1:] for part in parts}) > 1:
        return "its elements have different widths"
    if any(part.dtype != parts[0].dtype for part in parts):
        parts = [part.to(torch.float64) for part in parts]
    values = torch.cat(list(parts))
    if values.dim() == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return Rows(values, max(prompt_count - len(parts[0]), 0))
