"""How saves look when a notebook shows them: a line of text, or a small table of the newest.

The table has no colours of its own but JupyterLab's variables, with fallbacks that follow the text, so it
reads on light and dark alike and in a saved notebook.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.wire.sizes import shown_bytes

ROWS: Final = 20
_PROMPT_CHARS: Final = 40
_BORDER = "border-bottom:1px solid var(--jp-border-color2, currentColor)"
_CELL = "padding:2px 10px 2px 0;text-align:left;color:inherit;background:transparent"


class Row(NamedTuple):
    """One saved value in a table."""

    request: str
    block: str
    name: str
    shape: str
    dtype: str
    size: str
    prompt: str
    age: str


def age(created_s: float) -> str:
    """How long ago that was, from seconds since 1970: ``"5 s"``, ``"3 min"``, ``"2 h"``, ``"4 d"``."""
    seconds = max(time.time() - created_s, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def rows_of(saves: Iterable[Sequence[SaveLabel]], most: int = ROWS) -> list[Row]:
    """A row per saved value, given the labels of each; the first ``most``."""
    return [_row(labels) for labels in islice((labels for labels in saves if labels), most)]


def _row(labels: Sequence[SaveLabel]) -> Row:
    first = labels[0]
    tensors = [label for label in labels if label.kind in ("tensor", "array")]
    shapes = {label.shape for label in tensors}
    dtypes = {label.dtype for label in tensors} or {first.dtype}
    shape = ""
    if tensors:
        count = f" × {len(tensors):,}" if len(tensors) > 1 else ""
        shape = (str(list(tensors[0].shape)) if len(shapes) == 1 else "several") + count
    return Row(
        first.request_id,
        first.block,
        first.name if not first.sequence else f"{first.name} (sequence {first.sequence})",
        shape,
        ", ".join(sorted(dtypes)),
        shown_bytes(sum(label.bytes for label in labels)) if tensors else "",
        _beginning(first.prompt),
        age(first.created),
    )


def _beginning(text: str) -> str:
    line = " ".join(text[: 2 * _PROMPT_CHARS].split())
    return line if len(line) <= _PROMPT_CHARS else f"{line[: _PROMPT_CHARS - 1]}…"


def as_html(title: str, rows: Sequence[Row], more: str) -> str:
    """The table, and in words what is not in it."""
    head = "".join(f'<th style="{_CELL};{_BORDER}">{name}</th>' for name in Row._fields)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    rest = f"<div>and {html.escape(more)}</div>" if more else ""
    return (
        f'<div style="color:inherit"><div>{html.escape(title)}</div>'
        f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"{rest}</div>"
    )
