"""Matrices too large to draw: each cell stands for a block of values, and the figure says so.

A browser takes about a quarter of a million cells, and a saved notebook two megabytes. Leaving rows out would
fit too, and would hide the one row that matters; so nothing is left out, values are put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nnsight_lab.errors import PlotRefused

#: Cells of a matrix in one figure.
MAX_CELLS: Final = 250_000
#: Cells along one side: more than a screen has pixels. See `axes` before raising it: past 5,000 plotly takes
#: neighbours for one place.
MAX_SIDE: Final = 4_000
HOW: Final = {"mean": "mean", "max": "largest", "absmax": "value furthest from zero"}


class Readable(Protocol):
    """A matrix that is read some rows at a time, as `values.Matrix` is."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def exact_in_float32(self) -> bool: ...
    def chunks(self, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.float64]]]: ...


class Cells(NamedTuple):
    """What is drawn.

    Attributes:
        values: ``[row, column]``, float64: NaN and infinities as they were; NaN for a block without a
            finite value.
        rows: How many of the matrix's rows a cell stands for.
        columns: How many columns.
        nan: How many values of the matrix are not a number.
        infinite: How many are infinite.
        note: What was done, in words; empty where each cell is a value.
    """

    values: npt.NDArray[np.float64]
    rows: int
    columns: int
    nan: int
    infinite: int
    note: str

    @property
    def aggregated(self) -> bool:
        return self.rows * self.columns > 1


def cells_of(matrix: Readable, how: str = "mean", *, by_row: bool = True) -> Cells:
    """A matrix in at most `MAX_CELLS` cells; half of that where its values need float64.

    Args:
        matrix: Of any size.
        how: What a cell is of its block's finite values: ``"mean"``, ``"max"`` or ``"absmax"``.
        by_row: Whether neighbouring rows may become one, as neighbouring columns may.

    Raises:
        PlotRefused: ``how`` is none of those.
    """
    found = _cells_of(matrix, how, MAX_CELLS, by_row)
    # What is not exact in float32 is drawn to seven digits, but not as zero or infinity.
    if found.values.size > MAX_CELLS // 2 and not fits_float32(found.values):
        return _cells_of(matrix, how, MAX_CELLS // 2, by_row)
    if found.values.size > MAX_CELLS // 2 and not matrix.exact_in_float32 and not found.aggregated:
        return found._replace(note="values to 7 digits")
    return found


def fits_float32(values: npt.NDArray[np.float64]) -> bool:
    """Whether a float32 has the size of each value, if not all of its digits."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    limits = np.finfo(np.float32)
    return sizes.size == 0 or bool(sizes.max() <= limits.max and sizes.min() >= limits.smallest_subnormal)


def _cells_of(matrix: Readable, how: str, max_cells: int, by_row: bool) -> Cells:
    if how not in HOW:
        raise PlotRefused(f"aggregate={how!r} is not known: write one of {', '.join(map(repr, HOW))}.")
    rows, columns = block_shape(matrix.rows, matrix.columns, max_cells, by_row=by_row)
    parts = []
    nan = infinite = 0
    for _, values in matrix.chunks(rows):
        if not np.isfinite(values).all():
            nan += int(np.isnan(values).sum())
            infinite += int(np.isinf(values).sum())
        parts.append(values if rows * columns == 1 else blocks_of(values, rows, columns, how))
    note = ""
    if rows * columns > 1:
        note = f"each cell is the {HOW[how]} of {rows:,} × {columns:,} values"
        if matrix.rows % rows or matrix.columns % columns:
            note += ", of fewer at the end"
    return Cells(np.concatenate(parts), rows, columns, nan, infinite, note)


def block_shape(
    rows: int, columns: int, max_cells: int = MAX_CELLS, *, by_row: bool = True
) -> tuple[int, int]:
    """The smallest blocks, in powers of two, that make a matrix fit; the longer side goes first."""
    tall = wide = 1
    while True:
        height, width = -(-rows // tall), -(-columns // wide)
        if height * width <= max_cells and max(height, width) <= MAX_SIDE:
            return tall, wide
        if width >= height or not by_row:
            wide *= 2
        else:
            tall *= 2


def blocks_of(
    values: npt.NDArray[np.float64], rows: int, columns: int, how: str = "mean"
) -> npt.NDArray[np.float64]:
    """One value for each block of ``[row, column]``: of its finite values, NaN where it has none."""
    finite = np.isfinite(values)
    starts = np.arange(0, values.shape[0], rows), np.arange(0, values.shape[1], columns)

    def over(ufunc: np.ufunc, of: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        by_column = ufunc.reduceat(of, starts[1], axis=1)
        return np.asarray(ufunc.reduceat(by_column, starts[0], axis=0), dtype=np.float64)

    count = over(np.add, finite.astype(np.float64))
    if how == "mean":
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(count > 0, over(np.add, np.where(finite, values, 0.0)) / count, np.nan)
    most = over(np.maximum, np.where(finite, values, -np.inf))
    if how == "absmax":
        least = over(np.minimum, np.where(finite, values, np.inf))
        most = np.where(np.abs(least) > np.abs(most), least, most)
    return np.where(count > 0, most, np.nan)
