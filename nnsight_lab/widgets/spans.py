"""From a number to a colour's place: the range that colours span, and codes of one byte.

A code says where between the ends a number lies, so that the browser can change colours without asking. The
ends are the middle 98 % by default: one outlier, which every residual stream has, would else leave all the
rest in one colour. Special values have codes of their own and can never look like numbers.
"""

from __future__ import annotations

import math
import sys
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Scale: TypeAlias = Literal["auto", "sequential", "diverging", "log"]
Clip: TypeAlias = Literal["robust", "full"]

SCALES: Final[tuple[Scale, ...]] = ("auto", "sequential", "diverging", "log")
CLIPS: Final[tuple[Clip, ...]] = ("robust", "full")

#: Codes 0 to `TOP` are numbers.
TOP: Final = 249
CODE_NONE: Final = 250
CODE_NAN: Final = 251
CODE_POSINF: Final = 252
CODE_NEGINF: Final = 253

_ROBUST: Final = (1.0, 99.0)
_LEAST: Final = math.ulp(0.0)
_MOST: Final = sys.float_info.max


class Span(NamedTuple):
    """What the colours span.

    Attributes:
        low: The number at the first colour.
        high: The number at the last.
        scale: ``"sequential"``, ``"diverging"`` (zero in the middle) or ``"log"`` (of magnitudes).
    """

    low: float
    high: float
    scale: str


def scale_of(sample: npt.NDArray[np.float64]) -> str:
    """Diverging where numbers lie on both sides of zero, for a ``sample`` ``[value]``, all finite."""
    if sample.size == 0:
        return "sequential"
    low, high = np.percentile(sample, _ROBUST)
    return "diverging" if low < 0 < high and min(-low, high) > 0.05 * max(-low, high) else "sequential"


def span_of(sample: npt.NDArray[np.float64], scale: str, *, robust: bool) -> Span:
    """The span of a ``sample`` ``[value]``, all finite; its middle 98 %, or (not ``robust``) all of it."""
    if scale == "log":
        sample = np.abs(sample[sample != 0])
    if sample.size == 0:
        return (
            Span(1.0, 10.0, scale)
            if scale == "log"
            else Span(-1.0 if scale == "diverging" else 0.0, 1.0, scale)
        )
    low, high = float(sample.min()), float(sample.max())
    if robust:
        inner_low, inner_high = (float(end) for end in np.percentile(sample, _ROBUST))
        if inner_low < inner_high and (scale != "log" or inner_low > 0):
            low, high = inner_low, inner_high
    if scale == "diverging":
        high = max(abs(low), abs(high)) or 1.0
        return Span(-high, high, scale)
    if low == high:  # one number: somewhere in the middle of the colours
        if scale == "log":
            return Span(max(low / 2, _LEAST), min(high * 2, _MOST), scale)
        apart = abs(low) or 1.0
        return Span(max(low - apart, -_MOST), min(high + apart, _MOST), scale)
    return Span(low, high, scale)


def encode(
    values: npt.NDArray[np.floating], flags: npt.NDArray[np.uint8], span: Span
) -> npt.NDArray[np.uint8]:
    """The codes of numbers and their flags, of the same shape.

    Args:
        values: Float32 or float64; NaN where there is no finite number.
        flags: As in `nnsight_lab.widgets.reduce.Blocks`: a block with any special value in it shows that.
        span: What the colours span.
    """
    wide = values.astype(np.float64, copy=False)
    low, high = span.low, span.high
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if span.scale == "log":
            wide, low, high = np.log(np.abs(wide)), math.log(low), math.log(high)
        # Halved, since the distance between the ends of float64 is more than float64 holds.
        apart = high / 2 - low / 2
        place = (wide / 2 - low / 2) / apart if apart > 0 else np.full(wide.shape, 0.5)
        codes: npt.NDArray[np.uint8] = np.rint(np.clip(np.nan_to_num(place, nan=0.0), 0, 1) * TOP).astype(
            np.uint8
        )
    codes[np.isnan(values)] = CODE_NONE
    if flags.any():
        codes[(flags & 4) > 0] = CODE_NEGINF
        codes[(flags & 2) > 0] = CODE_POSINF
        codes[(flags & 1) > 0] = CODE_NAN
    return codes
