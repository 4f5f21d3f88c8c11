"""A matrix as colours: layers by positions, tokens by neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from nnsight_lab.errors import PlotRefused
from nnsight_lab.plots.axes import Axis, escaped
from nnsight_lab.plots.blocks import MAX_CELLS, Cells, cells_of
from nnsight_lab.plots.colours import Colouring, colouring
from nnsight_lab.plots.figure import finished, gap_marks, gaps_note
from nnsight_lab.plots.given import given_tokens
from nnsight_lab.plots.still import Figure
from nnsight_lab.plots.values import Matrix, matrix_of
from nnsight_lab.saves.store import SavesStore

#: Cells drawn as float64 where the values need it; past these as float32, so that the figure stays small.
MAX_EXACT: Final = MAX_CELLS // 2
_MAX_MARKS: Final = 500


def heatmap(
    values: Any,
    *,
    dims: tuple[str, str] | None = None,
    tokens: Any = None,
    token_ids: Sequence[int] | None = None,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    title: str = "",
    value_name: str = "value",
    scale: str = "auto",
    robust: bool | None = None,
    span: tuple[float, float] | None = None,
    aggregate: str = "mean",
    ragged: str = "refuse",
    store: SavesStore | None = None,
    theme: str = "auto",
    width: int | None = None,
    height: int | None = None,
) -> go.Figure:
    """A matrix as colours.

    Args:
        values: A tensor or array ``[row, column]`` or ``[column]`` of any dtype, a list of rows (over layers
            or steps), or labels of saved values. Of complex numbers the magnitude is drawn. Axes of a saved
            value, given as it came home or by label, are named by its label.
        dims: What rows and columns are: ``("layer", "position")``. A ``"layer"`` axis goes upward.
        tokens: A token's text for each place of one side: that whose length fits, the columns if both do
            (both, of queries and keys). Or whatever has them: ``lab.tokens(…)``, a lens, an `Attention`.
        token_ids: Their ids, shown in the hover.
        rows: What each row is called: numbers or texts. Counted from zero where it is not given.
        columns: What each column is called.
        title: Above the figure.
        value_name: Beside the colours and in the hover.
        scale: ``"sequential"``, ``"diverging"`` (symmetric about zero), ``"log"``, or ``"auto"``: diverging
            where there are values on both sides of zero.
        robust: True: the colours leave out the outermost hundredth of the values at each end; None: only
            where outliers would leave all others one colour. The figure says how many lie outside.
        span: The range of the colours, in values.
        aggregate: What a cell is of its block, where there are more than 250,000 values or 4,000 along a
            side: ``"mean"``, ``"max"`` or ``"absmax"``. The figure says so.
        ragged: Of rows whose lengths differ: ``"refuse"``, or ``"pad"`` them with gaps at their ends.
        store: Where labels are looked up; that of their engine where it is None.
        theme: ``"auto"``, ``"light"`` or ``"dark"``: the page that the figure is on.
        width: In pixels; that of the page where it is None.
        height: In pixels.

    Raises:
        PlotRefused: The values cannot be drawn so; the message says how they can.
    """
    __tracebackhide__ = True
    matrix = matrix_of(values, store=store, ragged=ragged)
    sides = Sides.of(matrix, dims, tokens, token_ids, rows, columns)
    cells = cells_of(matrix, aggregate)
    colours = colouring(cells.values, scale, robust=robust, span=span)
    down, across = sides.axes(cells)
    figure = Figure(layout={"template": None})
    exact = matrix.exact_in_float32 and not cells.aggregated
    figure.add_trace(
        heat(cells.values, down, across, colours, value_name, exact=exact, whole=matrix.whole_numbers)
    )
    notes = [
        matrix.said(),
        matrix.known.note,
        cells.note,
        gaps_note(cells.nan, cells.infinite),
        colours.note,
    ]
    if colours.scale == "log":
        figure.add_trace(log_bar(colours, value_name))
        below = int((cells.values <= 0).sum())
        notes.append(f"{below:,} cells at or below zero are gaps" if below else "")
        figure.update_layout(legend={"visible": False})
    marks = _marks(cells, matrix, down, across, theme)
    if marks is not None:
        figure.add_trace(marks)
    upward = down.name == "layer"
    return finished(
        figure,
        title=title or matrix.name,
        notes=notes,
        theme=theme,
        width=width,
        height=height or fitting_height(down.cells, sides.tokens is not None),
        xaxis=across.layout("x"),
        yaxis=down.layout("y", reverse=not upward),
    )


class Sides(NamedTuple):
    """What is known of a matrix's two sides; ``token_sides`` says which of them have the tokens."""

    shape: tuple[int, int]
    dims: tuple[str, str]
    labels: tuple[Sequence[Any] | None, Sequence[Any] | None]
    tokens: Sequence[str] | None
    token_ids: Sequence[int] | None
    token_sides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        matrix: Matrix,
        dims: tuple[str, str] | None,
        tokens: Any,
        token_ids: Sequence[int] | None,
        rows: Sequence[Any] | None,
        columns: Sequence[Any] | None,
        *,
        side: int | None = None,
        unnamed: tuple[str, str] = ("row", "column"),
    ) -> Sides:
        """Find the side that tokens belong to, where it is not said, and name sides that have no name."""
        shape = (matrix.rows, matrix.columns)
        known = matrix.known
        texts, ids = given_tokens(tokens, token_ids)
        given = texts if texts is not None else ids
        square = given is not None and shape == (len(given), len(given))
        if dims is None and hasattr(tokens, "patterns") and given is not None and shape[1] == len(given):
            dims = ("query", "key")
            rows = tokens.queries if rows is None and shape[0] == len(tokens.queries) else rows
        sides: tuple[int, ...]
        if given is None:
            sides = (known.token_side,) if known.tokens is not None else ()
            texts, ids = known.tokens, None if known.tokens is None else known.tokens.ids
        elif square and dims is not None and tuple(dims) == ("query", "key"):
            sides = (0, 1)
        elif side is not None:
            sides = (side,)
        else:
            fits = [number for number in (1, 0) if shape[number] == len(given)]
            if not fits:
                raise PlotRefused(f"{len(given):,} tokens fit neither side of the values, {list(shape)}")
            sides = (fits[0],)
        if dims is None:
            named = [mine or other for mine, other in zip(known.dims, unnamed, strict=True)]
            for number in sides:
                named[number] = "position"
            dims = (named[0], named[1])
        if isinstance(dims, str) or len(dims) != 2:
            raise PlotRefused(f'dims={dims!r}: give two names, as in dims=("layer", "position")')
        if rows is None:
            rows = known.rows
        return cls(shape, (str(dims[0]), str(dims[1])), (rows, columns), texts, ids, sides)

    def axes(self, cells: Cells) -> tuple[Axis, Axis]:
        """The rows' and the columns' axis."""
        down, across = (
            Axis(
                self.dims[side],
                self.shape[side],
                self.labels[side],
                self.tokens if side in self.token_sides else None,
                self.token_ids if side in self.token_sides else None,
                per_cell,
            )
            for side, per_cell in ((0, cells.rows), (1, cells.columns))
        )
        return down, across


def heat(
    values: npt.NDArray[np.float64],
    down: Axis,
    across: Axis,
    colours: Colouring,
    value_name: str,
    *,
    exact: bool = False,
    whole: bool = False,
    **more: Any,
) -> go.Heatmap:
    """The trace of a matrix of cells; ``exact`` says that float32 holds the values."""
    shown = np.where(np.isfinite(values), values, np.nan)
    if colours.scale == "log":
        shown[shown <= 0] = np.nan
    narrow = exact or values.size > MAX_EXACT
    number = ",d" if whole and not np.isnan(shown).all() and _whole(shown) else ".9~g" if narrow else ".15~g"
    arguments: dict[str, Any] = {
        "z": shown.astype(np.float32) if narrow else shown,
        "zmin": colours.low,
        "zmax": colours.high,
        "colorscale": colours.colours,
        "colorbar": {"title": {"text": escaped(value_name), "side": "top"}},
        "showscale": colours.scale != "log",
        "hoverongaps": False,
        "hovertemplate": (
            f"{literal(down.name)} %{{y}}<br>{literal(across.name)} %{{x}}<br>"
            f"{literal(value_name)} <b>%{{z:{number}}}</b><extra></extra>"
        ),
    }
    for letter, axis in (("x", across), ("y", down)):
        for what, given in axis.places().items():
            arguments[f"d{letter}" if what == "d" else letter + what] = given
    return go.Heatmap(**{**arguments, **more})


def _whole(values: npt.NDArray[np.float64]) -> bool:
    finite = values[np.isfinite(values)]
    return bool((finite == np.rint(finite)).all())


def literal(text: str) -> str:
    """Text in a hover's template, where ``%{`` would begin a variable."""
    return escaped(text).replace("%{", "%&#123;")


def log_bar(colours: Colouring, value_name: str, **more: Any) -> go.Scatter:
    """A colour bar by powers of ten: a trace without points, since a heatmap's own bar is linear."""
    low, high = np.log10(colours.low), np.log10(colours.high)
    step = max(round((high - low) / 6), 1)
    powers = list(range(int(np.ceil(low)), int(np.floor(high)) + 1, step))
    if len(powers) < 2:
        ticks = list(np.linspace(low, high, 4))
    else:
        ticks = [float(power) for power in powers]
    texts = [f"{10.0**tick:.3g}" for tick in ticks]
    even = [(number / 128, colour) for number, (_, colour) in enumerate(colours.colours)]
    bar = {
        "title": {"text": escaped(value_name), "side": "top"},
        "tickvals": ticks,
        "ticktext": texts,
        "outlinewidth": 0,
        "thickness": 12,
    }
    marker = {
        "color": [low],
        "cmin": low,
        "cmax": high,
        "colorscale": even,
        "showscale": True,
        "colorbar": bar,
    }
    return go.Scatter(
        x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False, **more
    )


def _marks(cells: Cells, matrix: Matrix, down: Axis, across: Axis, theme: str) -> go.Scatter | None:
    rows, columns = np.nonzero(~np.isfinite(cells.values))
    if not 0 < len(rows) <= _MAX_MARKS:
        return None
    names = down.names(), across.names()
    texts = [
        f"{escaped(down.name)} {names[0][row]}<br>{escaped(across.name)} {names[1][column]}<br>"
        f"<b>{'no finite value' if cells.aggregated else _special(cells.values[row, column])}</b>"
        for row, column in zip(rows, columns, strict=True)
    ]
    return gap_marks(down.at(rows), across.at(columns), texts, theme)


def _special(value: float) -> str:
    return "NaN" if np.isnan(value) else "+inf" if value > 0 else "−inf"


def fitting_height(cells: int, tokens: bool) -> int:
    """A height in pixels for so many rows."""
    return int(min(max(140 + 22 * cells, 240), 640)) + (60 if tokens else 0)
