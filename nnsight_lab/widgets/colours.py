"""Colours of numbers, for eyes of every kind.

Viridis for numbers from low to high; blue to red for numbers around zero, whose middle is the page's own
colour, so there are two: a white glow in the middle of a dark page would say "large". Special values have
colours that neither has; minus infinity, which every causal mask is full of, has a quiet one. The browser
gets these anchors with a widget's state, so they are said once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from nnsight_lab.lens.png import png
from nnsight_lab.widgets.spans import CODE_NAN, CODE_NEGINF, CODE_NONE, CODE_POSINF, TOP

#: Anchors at even distances. Viridis is matplotlib's; the others are after ColorBrewer's RdBu, and Crameri's
#: berlin with its dark middle.
PALETTES: Final[dict[str, tuple[str, ...]]] = {
    "sequential": (
        "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c",
        "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
    ),
    "diverging-light": (
        "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7",
        "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
    ),
    "diverging-dark": (
        "#b8d0ff", "#83b0f5", "#4f8fd8", "#2e6ba6", "#1e4468", "#1b1b1e",
        "#5c2619", "#974128", "#cf6a4b", "#f09a80", "#ffd0c2",
    ),
}  # fmt: skip
SPECIAL: Final = {"nan": "#e93cc8", "posinf": "#ff9f0a", "neginf": "#8a8f99"}
_SPECIAL_CODES: Final = {"nan": CODE_NAN, "posinf": CODE_POSINF, "neginf": CODE_NEGINF}


def lookup(palette: str) -> npt.NDArray[np.uint8]:
    """The colours ``[code, rgba]`` of all codes."""
    anchors = np.array([_rgb(anchor) for anchor in PALETTES[palette]], dtype=np.float64)
    found = np.zeros((256, 4), dtype=np.uint8)
    at = np.linspace(0, len(anchors) - 1, TOP + 1)
    for channel in range(3):
        found[: TOP + 1, channel] = np.rint(np.interp(at, np.arange(len(anchors)), anchors[:, channel]))
    found[: TOP + 1, 3] = 255
    for name, code in _SPECIAL_CODES.items():
        found[code] = (*_rgb(SPECIAL[name]), 255)
    found[CODE_NONE] = 0
    return found


def picture(codes: npt.NDArray[np.uint8], palette: str) -> bytes:
    """A picture of codes ``[row, column]`` as PNG, a byte per pixel."""
    return png(codes, lookup(palette))


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)
