"""Two saved tensors of one shape, row by row: how alike their directions are, and how their lengths compare.

Rows lie along the last dimension, as hidden states do. Only a few megabytes are in float64 at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from nnsight_lab.errors import SavesError
from nnsight_lab.widgets.jobs import Stopped
from nnsight_lab.widgets.reduce import numbers
from nnsight_lab.widgets.sources import Source

#: Of what is read at a time, and of rows at all.
_CHUNK_VALUES: Final = 2**20
_MAX_ROWS: Final = 2**20


class Likeness(NamedTuple):
    """What rows of two tensors have in common.

    Attributes:
        cosine: ``[row]``, float64; NaN where a row of either is zero or not finite.
        norm_ratio: The first's norm over the second's, ``[row]``, float64.
        largest: The largest magnitude of their difference, finite ones only.
    """

    cosine: torch.Tensor
    norm_ratio: torch.Tensor
    largest: float


def likeness(one: Source, other: Source, stopped: Callable[[], bool] = lambda: False) -> Likeness:
    """Compare the rows of two tensors; leading dimensions are flattened.

    Raises:
        SavesError: Their shapes differ, or they have too many rows to be compared one by one.
        Stopped: Nobody waits.
    """
    if one.shape != other.shape:
        raise SavesError(
            f"shapes must match to be compared, and these are {list(one.shape)} and {list(other.shape)}"
        )
    rows = math.prod(one.shape[:-1])
    if rows > _MAX_ROWS:
        raise SavesError(f"{rows:,} rows are too many to be compared one by one")
    cosines, ratios, largest = [], [], 0.0
    for index in _pieces(one.shape):
        if stopped():
            raise Stopped
        first, second = (_rows(source.read(index)) for source in (one, other))
        norms, others = first.norm(dim=1), second.norm(dim=1)
        cosines.append((first * second).sum(1) / (norms * others))
        ratios.append(norms / others)
        apart = (first - second).abs()
        apart = apart[apart.isfinite()]
        largest = max(largest, float(apart.max()) if apart.numel() else 0.0)
    if not cosines:
        empty = torch.empty(0, dtype=torch.float64)
        return Likeness(empty, empty, 0.0)
    return Likeness(torch.cat(cosines).clamp(-1, 1), torch.cat(ratios), largest)


def _rows(raw: torch.Tensor) -> torch.Tensor:
    values = numbers(raw).cpu().double()
    return values.reshape(1, -1) if values.dim() < 2 else values.reshape(-1, values.shape[-1])


def _pieces(shape: tuple[int, ...]) -> list[tuple[int | slice, ...]]:
    """Indices that cover a tensor in order, whole rows each."""
    if 0 in shape:
        return []
    if len(shape) < 2:
        return [tuple(slice(None) for _ in shape)]
    *leads, rows, columns = shape
    step = max(1, _CHUNK_VALUES // columns)
    places: list[tuple[int, ...]] = [()]
    for size in leads:
        places = [(*place, at) for place in places for at in range(size)]
    return [
        (*place, slice(row, min(row + step, rows)), slice(None))
        for place in places
        for row in range(0, rows, step)
    ]
