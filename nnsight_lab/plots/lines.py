"""Rows of a matrix as lines: a norm per layer, a score per position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import LINES, SEQUENTIAL, colour_at
from nnsight_lab.plots.axes import escaped
from nnsight_lab.plots.blocks import cells_of
from nnsight_lab.plots.figure import finished, gaps_note
from nnsight_lab.plots.heatmap import MAX_EXACT, Sides, literal
from nnsight_lab.plots.still import Figure
from nnsight_lab.plots.values import matrix_of
from nnsight_lab.saves.store import SavesStore

#: More lines than these cannot be followed.
MAX_LINES: Final = 64
_DASHES: Final = ("solid", "dash", "dot")
#: Points up to which each has a mark.
_MARKED: Final = 40


def lines(
    values: Any,
    *,
    dims: tuple[str, str] | None = None,
    tokens: Any = None,
    token_ids: Sequence[int] | None = None,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    title: str = "",
    value_name: str = "value",
    log: bool = False,
    aggregate: str = "mean",
    ragged: str = "refuse",
    store: SavesStore | None = None,
    theme: str = "auto",
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """Each row of a matrix as a line over its columns.

    Args:
        values: ``[line, place]`` or ``[place]``, as for `heatmap`; at most 64 lines.
        dims: What lines and places are: ``("layer", "position")``.
        tokens: A token's text for each place, or what has them, as for `heatmap`.
        token_ids: Their ids.
        rows: What each line is called.
        columns: What each place is called.
        title: Above the figure.
        value_name: What the values are.
        log: A logarithmic scale of values.
        aggregate: What a point is of its block, where there are more than 250,000 points or 4,000 in a line.
        ragged: As for `heatmap`.
        store: Where labels are looked up; that of their engine where it is None.
        theme: ``"auto"``, ``"light"`` or ``"dark"``.
        width: In pixels.
        height: In pixels.

    Raises:
        PlotRefused: The values cannot be drawn so.
    """
    __tracebackhide__ = True
    matrix = matrix_of(values, store=store, ragged=ragged)
    if matrix.rows > MAX_LINES:
        raise PlotRefused(
            f"{matrix.rows:,} lines cannot be told apart, at most {MAX_LINES}: draw a heatmap or choose rows"
        )
    sides = Sides.of(matrix, dims, tokens, token_ids, rows, columns, side=1, unnamed=("line", "place"))
    cells = cells_of(matrix, aggregate, by_row=False)
    down, across = sides.axes(cells)
    figure = Figure(layout={"template": None})
    exact = matrix.exact_in_float32 and not cells.aggregated
    number = ".9~g" if exact else ".15~g"
    shown = np.where(np.isfinite(cells.values), cells.values, np.nan)
    below = 0
    if log:
        below = int((shown <= 0).sum())
        shown[shown <= 0] = np.nan
    names = down.names()
    places = {("dx" if what == "d" else f"x{what}"): given for what, given in across.spaced().items()}
    for line, name in enumerate(names):
        said = sides.labels[0] is not None and not isinstance(sides.labels[0][line], int)
        named = (
            name.partition(": ")[2] or name if rows is not None or said else f"{escaped(down.name)} {name}"
        )
        figure.add_trace(
            go.Scatter(
                y=shown[line].astype(np.float32) if exact or shown.size > MAX_EXACT else shown[line],
                mode="lines+markers" if cells.values.shape[1] <= _MARKED else "lines",
                name=named,
                line=styled(line, len(names), ordered=down.name == "layer" or len(names) > len(LINES) * 3),
                marker={"size": 5},
                connectgaps=False,
                hovertemplate=(
                    f"{literal(across.name)} %{{x}}<br>{literal(value_name)} <b>%{{y:{number}}}</b>"
                    f"<extra>{named.replace('%{', '%&#123;') if len(names) > 1 else ''}</extra>"
                ),
                **places,
            )
        )
    points = cells.note.replace("each cell", "each point").replace("1 × ", "")
    notes = [matrix.said(), matrix.known.note, points, gaps_note(cells.nan, cells.infinite)]
    notes.append(f"{below:,} at or below zero are gaps" if below else "")
    layout = {**across.layout("x"), **across.listed()}
    return finished(
        figure,
        title=title or matrix.name,
        notes=notes,
        theme=theme,
        width=width,
        height=height or 400,
        xaxis=layout,
        yaxis={"title": {"text": escaped(value_name)}, "type": "log" if log else "linear"},
        showlegend=len(names) > 1,
        hovermode="closest",
    )


def styled(line: int, count: int, *, ordered: bool) -> dict[str, Any]:
    """A line's colour and dash: along viridis where the lines are a sequence, apart where they are not."""
    if ordered and count > 2:
        # Not up to its yellow, which a white page swallows.
        return {"width": 1.75, "color": colour_at(SEQUENTIAL, 0.25 + 0.6 * line / (count - 1))}
    dash = _DASHES[line // len(LINES) % len(_DASHES)]
    return {"width": 2, "color": LINES[line % len(LINES)], "dash": dash}
