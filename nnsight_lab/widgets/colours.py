"""From codes to colours, for a saved picture; the browser does the same for a living one.

It gets the anchors with a widget's state, so they are said once, in `nnsight_lab.lens.palette`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from nnsight_lab.lens import palette
from nnsight_lab.lens.png import png
from nnsight_lab.widgets.spans import CODE_NAN, CODE_NEGINF, CODE_NONE, CODE_POSINF, TOP

PALETTES: Final[dict[str, tuple[str, ...]]] = {
    "sequential": palette.SEQUENTIAL,
    "diverging-light": palette.DIVERGING,
    "diverging-dark": palette.DIVERGING_DARK,
}
SPECIAL: Final = palette.SPECIAL
_SPECIAL_CODES: Final = {"nan": CODE_NAN, "posinf": CODE_POSINF, "neginf": CODE_NEGINF}


def lookup(name: str) -> npt.NDArray[np.uint8]:
    """The colours ``[code, rgba]`` of all codes."""
    anchors = np.array([palette.channels(anchor) for anchor in PALETTES[name]], dtype=np.float64)
    found = np.zeros((256, 4), dtype=np.uint8)
    at = np.linspace(0, len(anchors) - 1, TOP + 1)
    for channel in range(3):
        found[: TOP + 1, channel] = np.rint(np.interp(at, np.arange(len(anchors)), anchors[:, channel]))
    found[: TOP + 1, 3] = 255
    for special, code in _SPECIAL_CODES.items():
        found[code] = (*palette.channels(SPECIAL[special]), 255)
    found[CODE_NONE] = 0
    return found


def picture(codes: npt.NDArray[np.uint8], name: str) -> bytes:
    """A picture of codes ``[row, column]`` as PNG, a byte per pixel."""
    return png(codes, lookup(name))
