"""Axes with names: what each row and column is called, on its tick and in the hover.

Two hard facts of plotly. Categories of one name are one category, and a text has many tokens of one name; so
a place's name begins with its position. And a tick's text replaces the name in the hover where the two
coincide; so ticks stand a hair beside their place, and the hover keeps the whole name.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.tokens import shortened, visible
from nnsight_lab.plots.theme import MONOSPACE

#: More ticks than these are not read: tokens, and all else.
_MAX_TOKENS: Final = 64
_MAX_TICKS: Final = 16
#: Characters of a token on its tick.
_TICK_CHARACTERS: Final = 12
#: Characters of tokens in all the names of one axis, so that a long prompt stays a small figure.
_NAME_CHARACTERS: Final = 40_000


class Axis:
    """One side of a matrix.

    Args:
        name: What its places are: ``"layer"``, ``"position"``.
        size: How many the matrix has.
        labels: What each is called: numbers or texts, ``size`` of them; None counts from zero.
        tokens: The token at each.
        token_ids: Their ids.
        per_cell: How many places one cell stands for.
    """

    def __init__(
        self,
        name: str,
        size: int,
        labels: Sequence[Any] | None = None,
        tokens: Sequence[str] | None = None,
        token_ids: Sequence[int] | None = None,
        per_cell: int = 1,
    ) -> None:
        self.name = name
        self._size = size
        self._per_cell = per_cell
        self._labels = None if labels is None else [_plain(label) for label in labels]
        self._tokens = None if tokens is None else [visible(str(token)) for token in tokens]
        self._ids = None if token_ids is None else [int(token_id) for token_id in token_ids]
        for what, given in (("labels", self._labels), ("tokens", self._tokens), ("token ids", self._ids)):
            if given is not None and len(given) != size:
                raise PlotRefused(f"{len(given):,} {what} were given for {size:,} places along {name!r}")

    @property
    def cells(self) -> int:
        return -(-self._size // self._per_cell)

    @property
    def _counted(self) -> bool:
        """Whether the places are a plain count, which plotly draws by itself."""
        return self._labels is None and self._tokens is None and self._ids is None and self._per_cell == 1

    def places(self) -> dict[str, Any]:
        """The trace's arguments ``x`` or ``y``, as a dict of what comes after that letter."""
        return {"0": 0, "d": 1} if self._counted else {"": self.names()}

    def spaced(self) -> dict[str, Any]:
        """As `places`, for traces that are many: only the first place, the axis has the names (`listed`)."""
        return {"0": 0 if self._counted else self.names()[0], "d": 1}

    def listed(self) -> dict[str, Any]:
        """The layout of an axis whose traces have their places by `spaced`."""
        return {} if self._counted else {"categoryorder": "array", "categoryarray": self.names()}

    def names(self) -> list[str]:
        """What each cell is called in the hover, escaped; all different."""
        limit = min(max(_NAME_CHARACTERS // self.cells, 6), 48)
        return [self._name(start, limit) for start in range(0, self._size, self._per_cell)]

    def _name(self, start: int, limit: int) -> str:
        last = min(start + self._per_cell, self._size) - 1
        named = shortened(self._label(start), limit)
        if last > start:
            named += f" to {shortened(self._label(last), limit)}"
        if self._labels is not None and not isinstance(self._labels[start], int):
            named = f"{start}: {named}"  # texts may be equal
        parts = [escaped(named)]
        if self._tokens is not None:
            texts = [shortened(text, limit) for text in self._tokens[start : last + 1][:3]]
            more = " …" if last - start > 2 else ""
            parts.append(escaped(" | ".join(texts) + more))
        if self._ids is not None and last == start:
            parts.append(f"id {self._ids[start]}")
        return "  ".join(parts)

    def _label(self, place: int) -> str:
        return str(place if self._labels is None else self._labels[place])

    def at(self, cells: Iterable[int]) -> list[Any]:
        """The places of some cells, as the axis counts or names them."""
        if self._counted:
            return [int(cell) for cell in cells]
        names = self.names()
        return [names[cell] for cell in cells]

    def layout(self, letter: str, *, reverse: bool = False) -> dict[str, Any]:
        """The layout of this axis as plotly's ``xaxis`` or ``yaxis``."""
        title = f"{self.name} (token)" if self._tokens is not None else self.name
        base: dict[str, Any] = {"title": {"text": escaped(title)}, "showgrid": False}
        ends = [-0.5, self.cells - 0.5]
        base["range"] = ends[::-1] if reverse else ends
        if self._counted:
            base["tickformat"] = "d"
            if self._size <= 16:
                base["dtick"] = 1
            return base
        every = -(-self.cells // (_MAX_TICKS if self._tokens is None else _MAX_TOKENS))
        cells = range(0, self.cells, every)
        # Off by more than what plotly takes for the same place: a ten-thousandth of the range.
        aside = max(0.02, 1.1e-4 * self.cells)
        base.update(
            type="category",
            tickmode="array",
            tickvals=[cell + aside for cell in cells],
            ticktext=[self._tick(cell) for cell in cells],
        )
        if self._tokens is not None:
            base["tickfont"] = {"family": MONOSPACE, "size": 11}
            if letter == "x":
                base["tickangle"] = -60 if self.cells > 8 else 0
        return base

    def _tick(self, cell: int) -> str:
        start = cell * self._per_cell
        if self._tokens is not None:
            return escaped(shortened(self._tokens[start], _TICK_CHARACTERS))
        return escaped(shortened(self._label(start), 24))


def _plain(label: Any) -> int | str:
    """A label as a whole number, or as text that can be seen."""
    if isinstance(label, (int, np.integer)):
        return int(label)
    item = getattr(label, "item", None)
    if item is not None and callable(item) and getattr(label, "ndim", 1) == 0:
        return _plain(item())
    return shortened(str(label).replace("\n", " "), 60)


def escaped(text: str) -> str:
    """Text for plotly, which reads some HTML, and ``$`` as the start of a formula."""
    return html.escape(text, quote=False).replace("$", "&#36;")
