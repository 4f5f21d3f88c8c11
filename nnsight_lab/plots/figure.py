"""What every figure has: a title, what should be known of it in words, and room for both.

A note is the figure's honesty (how many values are gaps, that a cell is a mean): it is part of the picture,
so that it is there when the figure is copied out of its notebook.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any, Final

import plotly.graph_objects as go

from nnsight_lab.plots.axes import escaped
from nnsight_lab.plots.theme import ink, template

#: What a saved notebook takes of one figure.
MAX_BYTES: Final = 2_000_000
_LINE: Final = 118
_LINE_PX: Final = 16


def finished(
    figure: go.Figure,
    *,
    title: str,
    notes: Iterable[str],
    theme: str,
    width: int | None = None,
    height: int | None = None,
    **layout: Any,
) -> go.Figure:
    """The figure with its title, its notes and its theme."""
    said = "; ".join(note for note in notes if note)
    lines = textwrap.wrap(said, _LINE)
    head: dict[str, Any] = {"text": escaped(title)}
    if lines:
        head["subtitle"] = {"text": "<br>".join(map(escaped, lines)), "font": {"size": 11}}
    top = 24 + (22 if title else 0) + _LINE_PX * len(lines)
    # From the top of the container, in pixels: plotly's own place is a fraction of the height.
    head.update(yref="container", y=1, yanchor="top", pad={"t": 12, "l": 12})
    figure.update_layout(
        template=template(theme),
        title=head,
        margin={"t": top + 16, "l": 12, "r": 12, "b": 12},
        width=width,
        height=height,
        **layout,
    )
    return figure


def gaps_note(nan: int, infinite: int) -> str:
    """How many values are not shown."""
    parts = []
    if nan:
        parts.append(f"{nan:,} NaN")
    if infinite:
        parts.append(f"{infinite:,} infinite")
    if not parts:
        return ""
    return f"{' and '.join(parts)}, shown as {'a gap' if nan + infinite == 1 else 'gaps'}"


def gap_marks(rows: Any, columns: Any, texts: list[str], theme: str, **places: Any) -> go.Scatter:
    """Crosses on cells that have no colour, so that a gap is not taken for background."""
    return go.Scatter(
        x=columns,
        y=rows,
        mode="markers",
        marker={"symbol": "x-thin", "size": 6, "line": {"width": 1.5, "color": ink(theme)}},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        **places,
    )
