"""A small static table in a notebook's own colours: what is shown where no widget can be.

Styles are inline and colours are the theme's variables, so a saved notebook reads the same in JupyterLab, VS
Code and on the web, light or dark, and every number is also text in the cell's title.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from nnsight_lab.lens.tokens import shortened, visible

#: What one table shows at the most; the last columns are kept, where a prompt ends.
MAX_COLUMNS = 32
#: Of more rows every second, third, … is shown, and the first.
MAX_ROWS = 40
_WIDEST = 10

#: What cells inherit is said once, by their table: there are a thousand of them.
_TABLE = (
    "border-collapse:collapse;font-size:var(--jp-ui-font-size0,11px);white-space:pre;"
    "font-family:var(--jp-code-font-family,monospace);color:inherit"
)
_CELL = "padding:1px 4px;text-align:left"
#: Laid over the page's own colour, at seven tenths at most, it leaves the page's text a contrast above 4.5 on
#: light and dark. Numbers and no variable: a notebook that is not trusted loses those.
_STRONGEST = "25,118,210"


class Cell(NamedTuple):
    """One cell.

    Attributes:
        text: What it says.
        share: How strong its colour is, 0 to 1.
        title: What it says when pointed at.
    """

    text: str
    share: float
    title: str


def grid(
    *,
    caption: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Callable[[int], Cell]]],
) -> str:
    """The table as html.

    Args:
        caption: One line above it.
        columns: Their heads.
        rows: A head, and the cell of a column; asked for what is shown only.
    """
    first = max(0, len(columns) - MAX_COLUMNS)
    if first:
        caption += f"; the last {MAX_COLUMNS} of {len(columns)} positions"
    every = -(-len(rows) // MAX_ROWS)
    if every > 1:
        caption += f"; 1 of {every} layers of {len(rows)}"
    shown = range(first, len(columns))
    heads = "".join(f'<th scope="col" style="{_CELL}">{_short(columns[c])}</th>' for c in shown)
    lines = []
    for name, cell in rows[:: every or 1]:
        cells = "".join(_cell(cell(column)) for column in shown)
        lines.append(f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th>{cells}</tr>')
    return (
        '<div style="overflow-x:auto">'
        f'<table style="{_TABLE}">'
        f'<caption style="caption-side:top;text-align:left">{escape(caption)}</caption>'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    strength = round(min(1.0, max(0.0, cell.share)) * 0.7, 2)
    style = f"{_CELL};background-color:rgba({_STRONGEST},{strength})"
    return f'<td title="{escape(cell.title)}" style="{style}">{_short(cell.text)}</td>'


def _short(text: str) -> str:
    return escape(shortened(visible(text), _WIDEST)) or "∅"
