"""A quantity over a setting: steering strength, layer, number of examples; with how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import channels
from nnsight_lab.plots.axes import escaped
from nnsight_lab.plots.figure import finished, gaps_note
from nnsight_lab.plots.heatmap import literal
from nnsight_lab.plots.lines import MAX_LINES, styled
from nnsight_lab.plots.still import Figure
from nnsight_lab.plots.values import matrix_of

#: A band, and how it is called in the figure.
BANDS: Final = {
    "std": "standard deviation",
    "sem": "standard error of the mean",
    "range": "least to greatest",
    "none": "",
}
#: Points of all lines of a figure.
_MAX_POINTS: Final = 15_000


class Band(NamedTuple):
    """One line of a sweep, each ``[point]``, float64.

    Attributes:
        middle: The mean over repeats, or the values themselves.
        low: The lower edge of its band; None where there is none.
        high: The upper edge.
        repeats: How many values the mean is of.
        gaps: How many values are NaN, and how many infinite.
    """

    middle: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64] | None
    high: npt.NDArray[np.float64] | None
    repeats: int
    gaps: tuple[int, int]


def sweep(
    x: Any,
    y: Any,
    *,
    error: Any = None,
    band: str = "std",
    x_name: str = "setting",
    value_name: str = "value",
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    theme: str = "auto",
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Lines over a setting, with bands of error.

    Args:
        x: The settings ``[point]``: numbers, or texts, which are drawn evenly in their order.
        y: The values ``[point]`` of one line, or ``[repeat, point]``, whose mean is drawn; or a dict of those
            by name, one line each.
        error: Half the height of the band ``[point]``, or a dict of those by name; else it is made of the
            repeats.
        band: Of repeats: ``"std"`` (divided by one less than their number), ``"sem"``, ``"range"`` or
            ``"none"``.
        x_name: What the settings are.
        value_name: What the values are.
        title: Above the figure.
        log_x: A logarithmic scale of settings, which must be above zero.
        log_y: A logarithmic scale of values.
        theme: ``"auto"``, ``"light"`` or ``"dark"``.
        width: In pixels.
        height: In pixels.

    Raises:
        PlotRefused: Lengths that do not fit, or a setting that a logarithmic scale does not have.
    """
    __tracebackhide__ = True
    if band not in BANDS:
        raise PlotRefused(f"band={band!r} is not known: write one of {', '.join(map(repr, BANDS))}.")
    places, order = _settings(x, log_x)
    series = y if isinstance(y, Mapping) else {"": y}
    errors = error if isinstance(error, Mapping) else dict.fromkeys(series, error)
    if not 0 < len(series) <= MAX_LINES:
        raise PlotRefused(f"{len(series):,} lines: a figure has between one and {MAX_LINES}")
    if len(places) * len(series) > _MAX_POINTS:
        raise PlotRefused(
            f"{len(series):,} lines of {len(places):,} settings are over {_MAX_POINTS:,} points: draw fewer"
        )
    unknown = [str(name) for name in errors if name not in series]
    if unknown:
        raise PlotRefused(f"error= names lines that y does not have: {', '.join(unknown)}")
    figure = Figure(layout={"template": None})
    notes = []
    nan = infinite = 0
    for number, (name, values) in enumerate(series.items()):
        found = _band(str(name), values, errors.get(name), band, order)
        nan, infinite = nan + found.gaps[0], infinite + found.gaps[1]
        style = styled(number, len(series), ordered=False)
        for trace in _traces(places, found, str(name), style, x_name, value_name, log_y):
            figure.add_trace(trace)
        if found.low is not None and errors.get(name) is None:
            notes.append(f"mean of {found.repeats} repeats, band: {BANDS[band]}")
        elif found.low is not None:
            notes.append("band: the error as given")
    return finished(
        figure,
        title=title,
        notes=[*dict.fromkeys(notes), gaps_note(nan, infinite)],
        theme=theme,
        width=width,
        height=height or 400,
        xaxis={
            "title": {"text": escaped(x_name)},
            "type": "log" if log_x else "category" if isinstance(places, list) else "linear",
            "showgrid": False,
        },
        yaxis={"title": {"text": escaped(value_name)}, "type": "log" if log_y else "linear"},
        showlegend=len(series) > 1,
        hovermode="closest",
    )


def _settings(x: Any, log_x: bool) -> tuple[list[str] | npt.NDArray[np.float64], npt.NDArray[np.intp] | None]:
    """The settings in the order in which they are drawn, and that order."""
    if isinstance(x, Sequence) and x and all(isinstance(place, str) for place in x):
        if len(set(x)) < len(x):
            raise PlotRefused("two settings have one name: give each its own")
        if log_x:
            raise PlotRefused("settings that are texts have no logarithm: leave log_x out")
        return [escaped(place) for place in x], None
    matrix = matrix_of(x)
    if matrix.rows != 1:
        raise PlotRefused(f"the settings have shape {list(matrix.shape)}: give one per point")
    places = matrix.read()[0]
    if not np.isfinite(places).all():
        raise PlotRefused("a setting is NaN or infinite, and has no place on the axis")
    if log_x and (places <= 0).any():
        raise PlotRefused(f"log_x needs settings above zero, and the least is {places.min():g}")
    order = np.argsort(places, kind="stable")
    return places[order], order


def _band(name: str, values: Any, error: Any, band: str, order: npt.NDArray[np.intp] | None) -> Band:
    matrix = matrix_of(values, ragged="pad")
    points = matrix.columns if order is None else len(order)
    called = f"{name!r}" if name else "y"
    if matrix.columns != points:
        turned = ": its dimensions seem to be [point, repeat], pass its .T" if matrix.rows == points else ""
        raise PlotRefused(f"{called} has shape {list(matrix.shape)} for {points:,} settings{turned}")
    read = matrix.read() if order is None else matrix.read()[:, order]
    gaps = int(np.isnan(read).sum()), int(np.isinf(read).sum())
    finite = np.where(np.isfinite(read), read, np.nan)
    count = np.isfinite(finite).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = np.where(count > 0, np.nansum(finite, axis=0) / count, np.nan)
        if error is not None:
            given = matrix_of(error)
            if given.rows != 1 or given.columns != points:
                raise PlotRefused(f"error has shape {list(given.shape)} for {points:,} settings of {called}")
            half = given.read()[0] if order is None else given.read()[0][order]
            if (half < 0).any():
                raise PlotRefused(f"the error of {called} is below zero somewhere")
            return Band(middle, middle - half, middle + half, matrix.rows, gaps)
        if matrix.rows == 1 or band == "none":
            return Band(middle, None, None, matrix.rows, gaps)
        if band == "range":
            low = np.where(count > 0, np.nanmin(np.where(count > 0, finite, 0.0), axis=0), np.nan)
            high = np.where(count > 0, np.nanmax(np.where(count > 0, finite, 0.0), axis=0), np.nan)
            return Band(middle, low, high, matrix.rows, gaps)
        squares = np.nansum((finite - middle) ** 2, axis=0)
        # One repeat alone says nothing of its spread.
        half = np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
        if band == "sem":
            half = half / np.sqrt(np.maximum(count, 1))
    return Band(middle, middle - half, middle + half, matrix.rows, gaps)


def _traces(
    places: list[str] | npt.NDArray[np.float64],
    found: Band,
    name: str,
    style: dict[str, Any],
    x_name: str,
    value_name: str,
    log_y: bool,
) -> list[go.Scatter]:
    shown = escaped(name)
    hover = f"{literal(x_name)} %{{x}}<br>{literal(value_name)} <b>%{{y:.15~g}}</b>"
    traces = []
    if found.low is not None and found.high is not None:
        hover += "<br>%{customdata[0]:.6~g} to %{customdata[1]:.6~g}"
        red, green, blue = channels(style["color"])
        fill = f"rgba({red},{green},{blue},0.2)"
        # One closed outline for each piece between gaps, or the fill would cross them.
        for start, stop in _pieces(np.isfinite(found.low) & np.isfinite(found.high)):
            low, high = found.low[start:stop], found.high[start:stop]
            if log_y:
                low = np.where(low > 0, low, np.nanmin([*found.middle[found.middle > 0], 1.0]) / 10)
            there = places[start:stop]
            around = (
                [*there, *there[::-1]] if isinstance(there, list) else np.concatenate([there, there[::-1]])
            )
            traces.append(
                go.Scatter(
                    x=around,
                    y=np.concatenate([high, low[::-1]]),
                    fill="toself",
                    fillcolor=fill,
                    line={"width": 0},
                    mode="lines",
                    hoverinfo="skip",
                    showlegend=False,
                    legendgroup=shown,
                )
            )
    spread = None
    if found.low is not None and found.high is not None:
        spread = np.stack([found.low, found.high], axis=1)
    traces.append(
        go.Scatter(
            x=places,
            y=found.middle,
            customdata=spread,
            mode="lines+markers" if len(places) <= 100 else "lines",
            line=style,
            marker={"size": 6},
            name=shown,
            legendgroup=shown,
            hovertemplate=f"{hover}<extra>{literal(name)}</extra>",
        )
    )
    return traces


def _pieces(there: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of true values: from, to."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], there, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
