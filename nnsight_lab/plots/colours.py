"""The range of values that a figure's colours span.

The colours themselves are `nnsight_lab.lens.palette`'s. A diverging scale is symmetric about zero, or its
middle would lie. Residual streams have a few values hundreds of times larger than all others; a range that
spans them shows nothing else, so then it spans most of the values, and the figure says how many lie outside.
"""

from __future__ import annotations

import bisect
import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import DIVERGING, SEQUENTIAL, colour_at

SCALES: Final = ("auto", "sequential", "diverging", "log")
#: The part of the values, at each end, that a robust range leaves out.
_TAIL: Final = 0.01
#: A range is made robust when it would be this much wider than what most values need.
_OUTLYING: Final = 8.0
#: Steps of a logarithmic scale: twelve decades in pieces of a tenth.
_STOPS: Final = 128


class Colouring(NamedTuple):
    """How values become colours.

    Attributes:
        scale: ``"sequential"``, ``"diverging"`` or ``"log"``.
        low: The value of the first colour.
        high: That of the last.
        colours: Positions from 0 to 1, each with its colour; linear in the values, for ``"log"`` too.
        note: What should be known of the range, in words; may be empty.
    """

    scale: str
    low: float
    high: float
    colours: tuple[tuple[float, str], ...]
    note: str

    def of(self, value: float) -> str:
        """The colour ``#rrggbb`` of a value; white for a gap."""
        if not math.isfinite(value):
            return "#ffffff"
        place = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        after = max(bisect.bisect_left(self.colours, place, key=lambda stop: stop[0]), 1)
        (start, one), (end, other) = self.colours[after - 1], self.colours[after]
        return colour_at((one, other), (place - start) / (end - start) if end > start else 0.0)


def colouring(
    values: npt.NDArray[np.float64],
    scale: str = "auto",
    *,
    robust: bool | None = None,
    span: tuple[float, float] | None = None,
) -> Colouring:
    """The colours of values ``[row, column]``.

    Args:
        values: NaN and infinities are not counted.
        scale: ``"auto"`` is diverging where there are values on both sides of zero.
        robust: Whether the range leaves out the outermost hundredth at each end; None: where outliers would
            leave all others one colour.
        span: The range itself, in values.

    Raises:
        PlotRefused: There is no such scale; or a logarithmic one is asked for and no value is above zero.
    """
    if scale not in SCALES:
        raise PlotRefused(f"scale={scale!r} is not known: write one of {', '.join(map(repr, SCALES))}.")
    finite = values[np.isfinite(values)]
    if scale == "auto":
        both = finite.size > 0 and float(finite.min()) < 0 < float(finite.max())
        scale = "diverging" if both or (span is not None and span[0] < 0 < span[1]) else "sequential"
    if scale == "log":
        finite = finite[finite > 0]
        if finite.size == 0:
            raise PlotRefused("a logarithmic scale shows values above zero, and there are none")
    low, high, note = _range(finite, scale, robust) if span is None else (*_checked(span, scale), "")
    return Colouring(scale, low, high, _colours(scale, low, high), note)


def _checked(span: tuple[float, float], scale: str) -> tuple[float, float]:
    low, high = float(span[0]), float(span[1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise PlotRefused(f"span={span!r} is no range: give two numbers, the lower one first")
    if scale == "log" and low <= 0:
        raise PlotRefused(f"span={span!r} begins at or below zero, where a logarithm is not")
    if scale == "diverging":
        most = max(abs(low), abs(high))
        return -most, most
    return low, high


def _range(finite: npt.NDArray[np.float64], scale: str, robust: bool | None) -> tuple[float, float, str]:
    if finite.size == 0:
        return 0.0, 1.0, ""
    seen = np.abs(finite) if scale == "diverging" else finite
    low, high = float(seen.min()), float(seen.max())
    note = ""
    if robust or (robust is None and scale != "log"):
        tail = _TAIL if scale != "diverging" else 2 * _TAIL
        inner = np.quantile(seen, [_TAIL, 1 - tail])
        inner_low, inner_high = float(inner[0]), float(inner[1])
        width = inner_high if scale == "diverging" else inner_high - inner_low
        whole = high if scale == "diverging" else high - low
        if width > 0 and (robust or whole > _OUTLYING * width):
            low, high = inner_low, inner_high
            outside = int((seen > high).sum()) + (int((seen < low).sum()) if scale != "diverging" else 0)
            if outside:
                note = f"{outside:,} of {finite.size:,} cells lie outside the colours' range"
    if scale == "diverging":
        low = -high
    if not low < high:  # all are equal
        margin = abs(high) / 2 or 1.0
        low, high = (low / 2, high * 2) if scale == "log" else (low - margin, high + margin)
    return low, high, note


def _colours(scale: str, low: float, high: float) -> tuple[tuple[float, str], ...]:
    if scale == "diverging":
        return _even(DIVERGING)
    if scale == "sequential":
        return _even(SEQUENTIAL)
    stops = np.geomspace(low, high, _STOPS + 1)
    found = [
        (min(max((float(stop) - low) / (high - low), 0.0), 1.0), colour_at(SEQUENTIAL, number / _STOPS))
        for number, stop in enumerate(stops)
    ]
    found[0], found[-1] = (0.0, SEQUENTIAL[0]), (1.0, SEQUENTIAL[-1])
    return tuple(found)


def _even(colours: tuple[str, ...]) -> tuple[tuple[float, str], ...]:
    return tuple((number / (len(colours) - 1), colour) for number, colour in enumerate(colours))
