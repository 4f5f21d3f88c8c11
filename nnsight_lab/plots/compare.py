"""Two matrices of one shape: where they differ, and whether by direction or by length.

A wrong sum of a residual stream has nearly the right direction, and a wrong direction may have the right
length: neither number alone finds both. So the difference, the cosine and the ratio of norms are shown side
by side, all computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import torch

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import LINES
from nnsight_lab.plots.axes import escaped
from nnsight_lab.plots.blocks import blocks_of, cells_of
from nnsight_lab.plots.colours import colouring
from nnsight_lab.plots.figure import finished, gaps_note
from nnsight_lab.plots.heatmap import Sides, fitting_height, heat, literal
from nnsight_lab.plots.still import Figure
from nnsight_lab.plots.values import Matrix, matrix_of
from nnsight_lab.saves.store import SavesStore

#: Pairs of values read at a time.
_CHUNK: Final = 2**21


class Pairs:
    """Two matrices of one shape, read together some rows at a time; what is known of them when all were read.

    Attributes:
        cosine: Between the two, ``[row]``; NaN where either is zero or not finite.
        ratio: The norm of the second, divided by that of the first, ``[row]``.
        largest: The largest finite magnitude of a difference.
        where: The row and column of that.
        equal: Whether all values are equal, NaN to NaN.
    """

    exact_in_float32 = False

    def __init__(self, one: Matrix, other: Matrix) -> None:
        self._one, self._other = one, other
        self.rows, self.columns = one.rows, one.columns
        self._complex = one.tensor.dtype.is_complex or other.tensor.dtype.is_complex
        self._forget()

    def _forget(self) -> None:
        self.cosine = np.full(self.rows, np.nan)
        self.ratio = np.full(self.rows, np.nan)
        self.largest = 0.0
        self.where = (0, 0)
        self.equal = True

    def chunks(self, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """The differences, some rows at a time; of complex values their magnitudes."""
        self._forget()
        step = max(_CHUNK // self.columns // multiple, 1) * multiple
        for start in range(0, self.rows, step):
            parts = self._one.tensor[start : start + step], self._other.tensor[start : start + step]
            dtype = parts[0].dtype
            whole = dtype == parts[1].dtype and not dtype.is_floating_point and not dtype.is_complex
            # float64 does not tell every int64 from the next
            self.equal = self.equal and (not whole or bool((parts[0] == parts[1]).all()))
            yield (
                start,
                self._difference(start, _wide(parts[0], self._complex), _wide(parts[1], self._complex)),
            )

    def _difference(self, start: int, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            change = y - x
            change[x == y] = 0  # equal infinities do not differ
            self.equal = self.equal and bool(((x == y) | (np.isnan(x) & np.isnan(y))).all())
            # Scaled by the largest, so that squares neither vanish nor overflow.
            x, first = _scaled(x)
            y, second = _scaled(y)
            norms = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
            inner = np.real(np.sum(np.conj(x) * y, axis=1))
            rows = slice(start, start + len(x))
            self.cosine[rows] = np.clip(inner / (norms[0] * norms[1]), -1, 1)
            self.ratio[rows] = (norms[1] / norms[0]) * (second / first)
        size: npt.NDArray[np.float64] = np.abs(change)
        finite = np.where(np.isfinite(size), size, -1)
        most = int(finite.argmax())
        if finite.flat[most] > self.largest:
            self.largest = float(finite.flat[most])
            self.where = (start + most // self.columns, most % self.columns)
        return size if self._complex else np.asarray(change, dtype=np.float64)


def compare(
    a: Any,
    b: Any,
    *,
    names: tuple[str, str] = ("a", "b"),
    dims: tuple[str, str] | None = None,
    tokens: Any = None,
    token_ids: Sequence[int] | None = None,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    title: str = "",
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
    """Two matrices side by side: ``b - a``, and per row the cosine and the ratio of norms, ``|b| / |a|``.

    Args:
        a: As for `heatmap`.
        b: Of the same shape; of any dtype.
        names: What the two are called.
        dims: As for `heatmap`, like all else.
        tokens: A token's text for each place of one side, or what has them.
        token_ids: Their ids.
        rows: What each row is called.
        columns: What each column is called.
        title: Above the figure.
        scale: Of the differences.
        robust: Of the differences' colours.
        span: Of the differences' colours.
        aggregate: Of the differences, where there are too many to draw. Cosine and ratio are of whole rows;
            where a cell stands for several rows, their mean is drawn.
        ragged: Of rows whose lengths differ.
        store: Where labels are looked up; that of their engine where it is None.
        theme: ``"auto"``, ``"light"`` or ``"dark"``.
        width: In pixels.
        height: In pixels.

    Raises:
        PlotRefused: The shapes differ, or the values cannot be drawn so.
    """
    __tracebackhide__ = True
    one = matrix_of(a, store=store, ragged=ragged)
    other = matrix_of(b, store=store, ragged=ragged)
    if (one.rows, one.columns) != (other.rows, other.columns):
        raise PlotRefused(
            f"{names[0]} has shape {list(one.shape)} and {names[1]} {list(other.shape)}: only values of one "
            "shape can be compared; cut both to what they share"
        )
    if one.known.tokens != other.known.tokens:  # two prompts: neither's tokens are those of both
        one = replace(one, known=one.known._replace(tokens=None, token_side=-1))
    sides = Sides.of(one, dims, tokens, token_ids, rows, columns)
    found = Pairs(one, other)
    cells = cells_of(found, aggregate)
    if scale == "auto" and found.equal:
        scale = "diverging"
    colours = colouring(cells.values, scale, robust=robust, span=span)
    if colours.scale == "log":
        raise PlotRefused("differences have signs, which a logarithmic scale does not show")
    down, across = sides.axes(cells)
    change = f"{names[1]} − {names[0]}"
    figure = Figure(layout={"template": None})
    # The names may be long, so they stand along the bar, and not over what is beside it.
    bar = {"title": {"text": escaped(change), "side": "right"}, "x": 0.55, "xanchor": "left"}
    figure.add_trace(heat(cells.values, down, across, colours, change, colorbar=bar))
    # Each is of a row; where a cell stands for several rows, its point is their mean.
    both = blocks_of(np.stack([found.cosine, found.ratio], axis=1), cells.rows, 1)
    at: dict[str, Any] = {
        ("dy" if what == "d" else f"y{what}"): given for what, given in down.spaced().items()
    }
    for number, (name, values) in enumerate((("cosine", both[:, 0]), ("norm ratio", both[:, 1])), 2):
        figure.add_trace(
            go.Scatter(
                x=np.where(np.isfinite(values), values, np.nan),
                mode="lines+markers" if len(values) <= 100 else "lines",
                line={"color": LINES[number - 2], "width": 1.75},
                marker={"size": 5},
                xaxis=f"x{number}",
                showlegend=False,
                hovertemplate=f"{literal(down.name)} %{{y}}<br>{name} <b>%{{x:.9~g}}</b><extra></extra>",
                **at,
            )
        )
    if found.equal:
        largest = "all values are equal"
    else:
        row, column = found.where
        largest = f"largest difference {found.largest:.6g} at row {row}, column {column}"
    if np.isfinite(found.cosine).any():
        least = int(np.nanargmin(found.cosine))
        largest += f", least cosine {found.cosine[least]:.6g} at row {least}" if not found.equal else ""
    lost = int((~np.isfinite(found.cosine)).sum())
    notes = [
        one.said() if one.said() == other.said() else f"{one.said()} and {other.said()}",
        one.known.note if one.known.note == other.known.note else "",
        largest,
        f"norm ratio: |{names[1]}| / |{names[0]}|",
        cells.note,
        gaps_note(cells.nan, cells.infinite),
        f"{lost:,} row{'s' if lost > 1 else ''} without a cosine (zero or not finite)" if lost else "",
        colours.note,
    ]
    upward = down.name == "layer"
    beside: dict[str, Any] = {"showgrid": True, "zeroline": False, "nticks": 4}
    reference = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1}}
    layout: dict[str, Any] = {
        "xaxis": {**across.layout("x"), "domain": [0, 0.54]},
        "xaxis2": {
            **beside,
            "domain": [0.7, 0.84],
            "title": {"text": "cosine"},
            "range": _around(both[:, 0]),
        },
        "xaxis3": {
            **beside,
            "domain": [0.87, 0.985],
            "title": {"text": "norm ratio"},
            "range": _around(both[:, 1]),
        },
        "yaxis": {**down.layout("y", reverse=not upward), **down.listed()},
        "shapes": [
            {
                **reference,
                "xref": f"x{number}",
                "yref": "paper",
                "line": {"dash": "dot", "width": 1, "color": "#888"},
            }
            for number in (2, 3)
        ],
    }
    return finished(
        figure,
        title=title or f"{names[1]} compared with {names[0]}",
        notes=notes,
        theme=theme,
        width=width,
        height=height or max(fitting_height(down.cells, sides.tokens is not None), 320),
        **layout,
    )


def _wide(part: torch.Tensor, complex_: bool) -> npt.NDArray[Any]:
    wide: npt.NDArray[Any] = part.to(torch.complex128 if complex_ else torch.float64).numpy()
    return wide.copy() if wide.base is not None else wide


def _scaled(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    size = np.abs(values).max(axis=1)
    size[(size == 0) | ~np.isfinite(size)] = 1.0
    return values / size[:, None], size


def _around(values: npt.NDArray[np.float64]) -> list[float] | None:
    """A range that has 1 in it, and is not so narrow that rounding looks like a difference."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    low, high = min(float(finite.min()), 1.0), max(float(finite.max()), 1.0)
    margin = max((high - low) * 0.08, 1e-3)
    return [low - margin, high + margin]
