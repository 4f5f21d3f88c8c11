"""Every colour that stands for a number, once, for eyes of every kind; plots and widgets take theirs here.

The sources: viridis (Smith and van der Walt, matplotlib, CC0), whose lightness grows evenly and which was
made for colour-blind readers; ColorBrewer's RdBu and Blues (Brewer, Apache 2), both marked "colorblind
safe" there; berlin (Crameri 2018, doi:10.5194/gmd-11-2541-2018) for the dark page's diverging scale, whose
middle is the page's own colour, since a white glow in the middle of a dark page would say "large"; Okabe and
Ito's colours for lines (2008). `tests/lens/test_palette.py` measures them: lightness is monotonic, and the
ends stay apart as those see them who lack the red or the green cones (Viénot, Brettel and Mollon 1999).

Anchors stand at even distances and are joined in sRGB, as browsers and plotly join them.
"""

from __future__ import annotations

from typing import Final

#: From low to high.
SEQUENTIAL: Final = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c",
    "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
#: Blue below zero, red above it, on a light and on a dark page.
DIVERGING: Final = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7",
    "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip
DIVERGING_DARK: Final = (
    "#b8d0ff", "#83b0f5", "#4f8fd8", "#2e6ba6", "#1e4468", "#1b1b1e",
    "#5c2619", "#974128", "#cf6a4b", "#f09a80", "#ffd0c2",
)  # fmt: skip
#: From nothing to much, behind text: nothing is the page's colour.
AMOUNT: Final = (
    "#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b",
)  # fmt: skip
AMOUNT_DARK: Final = (
    "#232323", "#16304f", "#1a4478", "#2159a0", "#3573b9", "#5590cc", "#7fb0df", "#b0d0ee", "#e3f0fb",
)  # fmt: skip
#: For lines, without black and yellow, which one of the two backgrounds swallows.
LINES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Values that no scale has a place for; minus infinity, which every causal mask is full of, has a quiet one.
SPECIAL: Final = {"nan": "#e93cc8", "posinf": "#ff9f0a", "neginf": "#8a8f99"}


def colour_at(colours: tuple[str, ...], position: float) -> str:
    """The colour ``#rrggbb`` at a position from 0 to 1 along evenly spaced ones."""
    place = min(max(position, 0.0), 1.0) * (len(colours) - 1)
    first = min(int(place), len(colours) - 2)
    part = place - first
    one, other = channels(colours[first]), channels(colours[first + 1])
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(one, other, strict=True))


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in channels(colour))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21, as WCAG 2 defines it; text needs 4.5."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def text_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour: one of them always has a contrast above 4.5."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, colour))
