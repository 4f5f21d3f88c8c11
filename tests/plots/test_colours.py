from __future__ import annotations

import numpy as np
import pytest

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import channels
from nnsight_lab.plots.colours import colouring


def test_values_on_both_sides_of_zero_have_a_symmetric_range() -> None:
    found = colouring(np.array([[-1.0, 5.0, np.nan, np.inf]]))
    assert (found.scale, found.low, found.high) == ("diverging", -5.0, 5.0)
    assert found.of(0.0) == "#f7f7f7"
    assert colouring(np.array([[1.0, 5.0]])).scale == "sequential"
    given = colouring(np.array([[1.0]]), span=(-1, 3))
    assert (given.low, given.high) == (-3, 3)


def test_outliers_are_left_out_of_the_range_and_counted() -> None:
    values = np.ones((10, 100)) * np.linspace(0, 1, 100)
    values[0, 0] = 1000.0
    found = colouring(values)
    assert found.high <= 1.0
    assert "of 1,000 cells lie outside the colours' range" in found.note
    assert colouring(values, robust=False).high == 1000.0
    signed = colouring(np.where(np.arange(1000).reshape(10, 100) % 2, values, -values))
    assert signed.low == -signed.high
    assert signed.high <= 1.0


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
@pytest.mark.parametrize("scale", ["auto", "sequential", "diverging"])
def test_equal_values_have_a_range(value: float, scale: str) -> None:
    found = colouring(np.full((2, 2), value), scale)
    assert found.low < found.high
    assert found.low <= value <= found.high


def test_a_logarithmic_scale_is_linear_in_the_logarithm() -> None:
    found = colouring(np.array([[1e-6, 1.0, -1.0]]), "log")
    assert (found.low, found.high) == (1e-6, 1.0)
    middle = colouring(np.array([[0.0, 1.0]]), "sequential").of(0.5)
    apart = [abs(a - b) for a, b in zip(channels(found.of(1e-3)), channels(middle), strict=True)]
    assert max(apart) <= 2
    places = [place for place, _ in found.colours]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 1.0)


def test_nothing_finite_still_has_a_range() -> None:
    assert colouring(np.array([[np.nan, np.inf]])).low < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": "log"}, "there are none"),
        ({"scale": "rainbow"}, "not known"),
        ({"span": (1, 1)}, "no range"),
        ({"span": (0, 1), "scale": "log"}, "logarithm"),
    ],
)
def test_what_has_no_colours_is_refused(options: dict[str, object], said: str) -> None:
    values = np.array([[-1.0, 0.0]]) if options == {"scale": "log"} else np.array([[1.0]])
    with pytest.raises(PlotRefused, match=said):
        colouring(values, **options)  # type: ignore[arg-type]
