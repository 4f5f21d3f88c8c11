"""The palette's claims, measured: even lightness, and ends that stay apart without red or green cones."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsight_lab.lens import palette
from nnsight_lab.lens.palette import channels, colour_at, contrast, luminance, text_on

Rgb = npt.NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[2]
COLOURS = st.tuples(*[st.integers(0, 255)] * 3).map(lambda c: "#" + bytes(c).hex())
SCALES = {
    "sequential": palette.SEQUENTIAL,
    "amount": palette.AMOUNT,
    "amount-dark": palette.AMOUNT_DARK,
}
TWO_SIDED = {"light": palette.DIVERGING, "dark": palette.DIVERGING_DARK}
#: Linear RGB as dichromats see it: Viénot, Brettel and Mollon 1999, "Digital video colourmaps for checking
#: the legibility of displays by dichromats", for sRGB's primaries.
SIGHTS: dict[str, Rgb] = {
    "trichromat": np.eye(3),
    "protanope": np.array(
        [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]
    ),
    "deuteranope": np.array(
        [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]
    ),
}  # fmt: skip


def seen(colour: str, sight: str = "trichromat") -> Rgb:
    """CIE L*a*b* (D65) of a colour as somebody sees it."""
    share = np.array(channels(colour)) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = np.clip(SIGHTS[sight] @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one: str, other: str, sight: str) -> float:
    """Delta E (1976): 2.3 is just seen, 20 is plainly another colour."""
    return float(np.linalg.norm(seen(one, sight) - seen(other, sight)))


def steps(colours: tuple[str, ...], count: int = 65) -> list[str]:
    return [colour_at(colours, number / (count - 1)) for number in range(count)]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("name", SCALES)
def test_lightness_goes_one_way_from_low_to_high(name: str, sight: str) -> None:
    light = np.diff([seen(colour, sight)[0] for colour in steps(SCALES[name])])
    assert (light * np.sign(light.sum()) > -0.2).all(), light  # a fifth of what an eye can tell
    assert abs(light.sum()) > 60


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_diverging_scale_goes_one_way_on_either_side_of_zero(name: str, sight: str) -> None:
    light = np.array([seen(colour, sight)[0] for colour in steps(TWO_SIDED[name])])
    toward = 1 if name == "light" else -1  # the middle is the page
    assert (np.diff(light[:33]) * toward > -0.2).all()
    assert (np.diff(light[32:]) * -toward > -0.2).all()


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("name", [*SCALES, *TWO_SIDED])
def test_ends_stay_apart_for_the_colour_blind(name: str, sight: str) -> None:
    colours = {**SCALES, **TWO_SIDED}[name]
    assert apart(colours[0], colours[-1], sight) > 20
    if name in TWO_SIDED:
        # Below and above zero, as far from it, are told apart all the way but for the step next to it.
        for number in range(1, len(colours) // 2 - 1):
            assert apart(colours[number], colours[-1 - number], sight) > 20


@pytest.mark.parametrize("sight", SIGHTS)
def test_lines_and_special_values_are_told_apart(sight: str) -> None:
    for colours in (palette.LINES, tuple(palette.SPECIAL.values())):
        for number, one in enumerate(colours):
            for other in colours[:number]:
                assert apart(one, other, sight) > 10, (one, other)


def test_a_simulation_leaves_grey_alone() -> None:
    for sight in SIGHTS:
        assert np.linalg.norm(seen("#808080", sight) - seen("#808080")) < 0.5
    # And takes from red and green what a dichromat does not see.
    assert apart("#b00000", "#4f5c00", "trichromat") > 2 * apart("#b00000", "#4f5c00", "protanope")


@given(COLOURS)
def test_text_is_readable_on_any_colour(colour: str) -> None:
    assert contrast(text_on(colour), colour) >= 4.5  # WCAG 2, level AA


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert channels("#0a0b0c") == (10, 11, 12)
    assert luminance("#ffffff") == pytest.approx(1)


def test_no_other_file_has_colours_of_its_own() -> None:
    anchors = {colour for scale in (*SCALES.values(), *TWO_SIDED.values()) for colour in scale}
    files = [*(ROOT / "nnsight_lab").rglob("*.py"), *(ROOT / "labextension/src").rglob("*.ts")]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if path.name != "palette.py"
        and len(anchors & set(re.findall(r"#[0-9a-f]{6}\b", path.read_text("utf-8").lower()))) > 1
    ]
    assert found == []
