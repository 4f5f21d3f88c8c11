"""A saved tensor in a few points, for one cell of a table.

A table has a hundred thousand rows and a tensor may have billions of values, so a fixed number of them is
read: what is drawn is a sample wherever there are more, and its words say so. Matrices are drawn as the
length of their rows, since a mean of a hidden state is nearly zero and tells nothing; one line of values as
they are.
"""

from __future__ import annotations

import itertools
import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.widgets.reduce import numbers
from nnsight_lab.widgets.sources import Source

POINTS: Final = 32
#: Up to this many values a tensor is read whole.
_WHOLE: Final = 2**16
#: Of a row or a piece of a larger one.
_PIECE: Final = 2**10
_HEIGHTS: Final = "0123456789abcdef"


class Sparkline(NamedTuple):
    """Some points of a tensor.

    Attributes:
        points: A digit per point, ``0`` to ``f``, from the lowest to the highest; ``.`` where there is none.
        words: What the points are.
    """

    points: str
    words: str


def sparkline(source: Source) -> Sparkline:
    """The points of a tensor of any shape; none of one that has no line to draw."""
    shape = source.shape
    rows, columns = math.prod(shape[:-1]) if shape else 1, shape[-1] if shape else 1
    if rows * columns < 2:
        return Sparkline("", "")
    if rows > 1:
        heights = _lengths(source, rows, columns)
        many = "" if rows <= POINTS else f", {POINTS} of them"
        sampled = " in a sample of each" if rows * columns > _WHOLE and columns > _PIECE else ""
        return Sparkline(_digits(heights), f"root mean square of {rows:,} rows{many}{sampled}")
    heights = _means(source, columns)
    if columns <= POINTS:
        return Sparkline(_digits(heights), f"its {columns} values")
    sampled = "" if columns <= _WHOLE else ", sampled"
    return Sparkline(_digits(heights), f"means of {columns:,} values in {POINTS} pieces{sampled}")


def _lengths(source: Source, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """The root mean square ``[point]`` of rows at even distances, of finite values."""
    count = min(rows, POINTS)
    places = [at * (rows - 1) // (count - 1) for at in range(count)]
    if rows * columns <= _WHOLE:
        whole = _read(source, tuple(slice(0, size) for size in source.shape)).reshape(rows, columns)
        parts = [whole[at] for at in places]
    else:
        step = max(1, columns // _PIECE)
        parts = []
        for at in places:
            lead = tuple(int(index) for index in np.unravel_index(at, source.shape[:-1]))
            # Slices of one, since a source gives as many dimensions as it has.
            index = (*(slice(one, one + 1) for one in lead), slice(0, columns, step))
            parts.append(_read(source, index).reshape(-1))
    return np.array([_mean(np.square(part)) for part in parts]) ** 0.5


def _means(source: Source, columns: int) -> npt.NDArray[np.float64]:
    """The mean ``[point]`` of pieces of one row, of finite values."""
    count = min(columns, POINTS)
    lead = (slice(0, 1),) * (len(source.shape) - 1)
    ends = [at * columns // count for at in range(count + 1)]
    if columns <= _WHOLE:
        whole = _read(source, (*lead, slice(0, columns))).reshape(-1)
        parts = [whole[first:last] for first, last in itertools.pairwise(ends)]
    else:
        parts = [
            _read(source, (*lead, slice(first, last, max(1, (last - first) // _PIECE)))).reshape(-1)
            for first, last in itertools.pairwise(ends)
        ]
    return np.array([_mean(part) for part in parts])


def _read(source: Source, index: tuple[int | slice, ...]) -> npt.NDArray[np.float64]:
    read: npt.NDArray[np.float64] = numbers(source.read(index)).cpu().to(torch.float64).numpy()
    return read


def _mean(values: npt.NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _digits(heights: npt.NDArray[np.float64]) -> str:
    finite = heights[np.isfinite(heights)]
    if not finite.size:
        return "." * heights.size
    low, high = float(finite.min()), float(finite.max())
    middle = len(_HEIGHTS) // 2

    def digit(height: float) -> str:
        if not math.isfinite(height):
            return "."
        # Halves, since the distance between the largest floats is no float.
        share = (height / 2 - low / 2) / (high / 2 - low / 2) if high > low else -1.0
        return _HEIGHTS[middle if share < 0 else round(share * (len(_HEIGHTS) - 1))]

    return "".join(map(digit, heights))
