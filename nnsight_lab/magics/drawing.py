"""Small outputs that read well in a notebook, in a terminal, and in a saved file.

Every drawing has an html and a plain form. The hard facts behind this file: a saved notebook keeps the last
state of an output only if it was updated in place through one display handle, and html in a notebook has no
say in its theme, so colours are inherited, and dimmed by opacity alone. Without a kernel nothing can be
updated in place: there the last state is printed, once.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

#: IPython leaves it untyped.
_display: Callable[..., Any] = display
#: Inherits the theme's colours; keeps whitespace; breaks long words rather than the page.
CODE_STYLE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;"
    "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
)
DIM_STYLE = "opacity:.65"
_CELL_STYLE = "text-align:left;padding:.2em .8em .2em 0;vertical-align:top;white-space:pre-wrap"
_BORDER_STYLE = "border-bottom:var(--jp-border-width,1px) solid var(--jp-border-color2,currentColor)"


@dataclass(frozen=True)
class Drawing:
    """One output in its two forms."""

    html: str
    text: str

    def bundle(self) -> dict[str, str]:
        """The forms by their mime types."""
        return {"text/html": self.html, "text/plain": self.text}


def in_notebook() -> bool:
    """Whether outputs go to a kernel's client, where they can be html and be updated."""
    return getattr(get_ipython(), "kernel", None) is not None


def show(drawing: Drawing) -> None:
    """Shows a drawing that will not change."""
    if in_notebook():
        _display(drawing.bundle(), raw=True)
    else:
        print(drawing.text)


def show_bundle(forms: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Shows an output that has more forms than a drawing's two, in a notebook."""
    _display(forms, metadata=metadata, raw=True)


def sentence(text: str) -> Drawing:
    """One line, or several, as they are."""
    return Drawing(f'<div style="{CODE_STYLE}">{html.escape(text)}</div>', text)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Drawing:
    """A small table."""
    cells = [[str(value) for value in row] for row in rows]
    titled = any(heads)
    widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(len(heads))]
    text = "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        for line in [list(heads), *cells]
    )
    head = "".join(
        f'<th scope="col" style="{_CELL_STYLE};{_BORDER_STYLE}">{html.escape(value)}</th>'
        if value
        else f'<td style="{_CELL_STYLE};{_BORDER_STYLE}"></td>'  # a heading that says nothing heads nothing
        for value in heads
    )
    body = "".join(
        "<tr>"
        + "".join(_cell(value, heading=not titled and not column) for column, value in enumerate(row))
        + "</tr>"
        for row in cells
    )
    # Without a heading there is no line above the first row, and each row begins with what it is about.
    top = f"<thead><tr>{head}</tr></thead>" if titled else ""
    return Drawing(f"<table>{top}<tbody>{body}</tbody></table>", text)


def _cell(text: str, *, heading: bool) -> str:
    if heading:
        return f'<th scope="row" style="{_CELL_STYLE};font-weight:inherit">{html.escape(text)}</th>'
    return f'<td style="{_CELL_STYLE}">{html.escape(text)}</td>'


class Canvas:
    """One output that is drawn again in place, and whose last state is what stays."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: Drawing | None = None
        self._on_line = 0

    def draw(self, drawing: Drawing) -> None:
        """Draws a state that is not the last: nothing in a terminal, unless it is one short line there."""
        if not in_notebook():
            self._overwrite(drawing.text)
        else:
            self._update(drawing)

    def finish(self, drawing: Drawing) -> None:
        """Draws the last state."""
        if in_notebook():
            self._update(drawing)
            return
        if self._on_line:
            print("\r" + " " * self._on_line + "\r", end="")
            self._on_line = 0
        print(drawing.text, flush=True)

    def _update(self, drawing: Drawing) -> None:
        if drawing == self._shown:
            return
        self._shown = drawing
        if self._handle is None:
            self._handle = _display(drawing.bundle(), raw=True, display_id=True)
        else:
            self._handle.update(drawing.bundle(), raw=True)

    def _overwrite(self, text: str) -> None:
        if not sys.stdout.isatty() or "\n" in text or len(text) > 100:
            return
        print("\r" + text.ljust(self._on_line), end="", flush=True)
        self._on_line = len(text)
