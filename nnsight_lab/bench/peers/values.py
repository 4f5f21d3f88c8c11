"""Whether a peer's values are Hugging Face's: the speed of wrong values is not told.

The measure is the largest difference of any row ``[hidden]``, as a part of that row's own norm: a residual
stream has a few components hundreds of times larger than all others, and a difference over the largest
value would hide everything else. A stream without its residual is off by about 1, float32 by some 1e-5,
bfloat16 by some 1e-2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

#: Up to which values are the same ones.
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}


def difference(mine: Path, theirs: Path) -> float:
    """The largest relative difference of a row; infinite where the shapes are not the same.

    Args:
        mine: A file of tensors ``[..., hidden]``, one for each prompt that was looked at.
        theirs: The reference's.
    """
    import torch  # only where there is something to compare

    pairs = zip(torch.load(mine, weights_only=True), torch.load(theirs, weights_only=True), strict=True)
    return max(_difference(one, other) for one, other in pairs)


def _difference(one: Any, other: Any) -> float:
    if one.shape != other.shape:
        return float("inf")
    rows = (one - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(1e-12)
    return float(rows.nan_to_num(float("inf")).max())


def same_tokens(mine: list[list[int]], theirs: list[list[int]]) -> float:
    """The part of the new tokens that are the reference's, up to the first that is not in each prompt."""
    same = total = 0
    for one, other in zip(mine, theirs, strict=True):
        total += len(other)
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            same += 1
    return same / total if total else 1.0
