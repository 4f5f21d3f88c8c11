"""Tokens with scores behind them, as HTML that needs no script and no kernel.

The hard fact: a saved notebook is read on pages that run no script, by JupyterLab's sanitizer, which takes
styles to pieces (a notebook that is not trusted keeps plain colours, and loses variables, style sheets and
the keyboard's way in), and by readers who see no colour. So every token carries its words (position, id,
text, score) where a screen reader and the keyboard find them, its colour is a plain one in its own style, and
text is black or white, whichever is read better on it. A page that says that it is dark gets darker colours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import AMOUNT, AMOUNT_DARK, DIVERGING, DIVERGING_DARK, colour_at, text_on
from nnsight_lab.lens.tokens import as_html, shortened, visible
from nnsight_lab.plots.colours import Colouring, colouring
from nnsight_lab.plots.given import given_tokens
from nnsight_lab.plots.theme import MONOSPACE
from nnsight_lab.plots.values import matrix_of
from nnsight_lab.saves.store import SavesStore

MAX_TOKENS: Final = 1_000
MAX_ROWS: Final = 64
#: Cells of a strip of several rows.
MAX_CELLS: Final = 4_000
#: Shades of a scale: odd, so that zero has one of its own.
_SHADES: Final = 33
_PRINTED: Final = 24

#: On a light and on a dark page: from nothing to much, and from below zero to above it.
_MUCH: Final = (AMOUNT, AMOUNT_DARK)
_BOTH: Final = (DIVERGING, DIVERGING_DARK)
_CSS: Final = """
.lab-strip{font:13px/1.35 %(font)s;color:inherit;padding-bottom:2em;direction:ltr}
.lab-strip [tabindex]{position:relative}
.lab-strip [tabindex]:focus{outline:2px solid
 var(--vscode-focusBorder,var(--jp-brand-color1,#1976d2));outline-offset:1px;z-index:2}
.lab-strip [tabindex]:focus::after{content:attr(aria-label);position:absolute;left:0;z-index:3;
top:calc(100%% + 3px);white-space:pre;padding:2px 6px;border-radius:3px;background:#1f1f1f;color:#fff;
font-size:12px;font-weight:400}
.lab-strip-rows{overflow-x:auto;padding-bottom:2em}
.lab-strip-rows th[scope=row]{position:sticky;left:0;z-index:1;
background:var(--vscode-editor-background,var(--jp-layout-color0,Canvas))}
"""
_TOKEN: Final = "display:inline-block;white-space:pre;padding:1px 2px;margin:1px 0;border-radius:2px"
_CELL: Final = "padding:1px 4px;text-align:center;white-space:pre;font-weight:400"
_GAP: Final = "outline:1px dotted;outline-offset:-1px"
_DARK: Final = ("[data-jp-theme-light=false]", ".vscode-dark", ".lab-dark")


class TokenStrip:
    """Tokens and their scores; made by `token_strip`.

    Attributes:
        tokens: Each token's text.
        token_ids: Their ids; None where they were not given.
        scores: ``[row, token]``, float64.
        rows: What each row is called; empty for a single one without a name.
        colours: How scores become colours.
        score_name: What the scores are.
        title: Above the tokens.
        start: The first token shown.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        token_ids: Sequence[int] | None,
        scores: npt.NDArray[np.float64],
        rows: Sequence[str],
        colours: Colouring,
        *,
        start: int,
        shown: int,
        score_name: str,
        title: str,
    ) -> None:
        self.tokens = tuple(tokens)
        self.token_ids = None if token_ids is None else tuple(token_ids)
        self.scores = scores
        self.rows = tuple(rows)
        self.colours = colours
        self.start = start
        self.score_name = score_name
        self.title = title
        self._stop = min(start + shown, len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def anchors(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Evenly spaced colours from the lowest score to the highest, on a light and on a dark page."""
        return _BOTH if self.colours.scale == "diverging" else _MUCH

    # -- in words ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        head = f"<TokenStrip: {self._size()}, {self.score_name} {self._span()}>"
        places = range(self.start, min(self.start + _PRINTED, self._stop))
        texts = [shortened(visible(self.tokens[place]), 12) for place in places]
        table = [["", *texts]] if self.rows else [texts]
        for row, scores in enumerate(self.scores[:MAX_ROWS]):
            cells = [_short(scores[place]) for place in places]
            table.append([self.rows[row], *cells] if self.rows else cells)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        more = len(self.tokens) - len(places)
        rest = [f"({more:,} of {len(self.tokens):,} tokens are not shown)"] if more else []
        return "\n".join([head, *lines, *rest])

    def _size(self) -> str:
        count = f"{len(self.tokens):,} token{'s' if len(self.tokens) != 1 else ''}"
        return f"{count}, {len(self.scores)} rows" if len(self.scores) > 1 else count

    def _span(self) -> str:
        finite = self.scores[np.isfinite(self.scores)]
        if finite.size == 0:
            return "without a finite value"
        return f"{_short(float(finite.min()))} to {_short(float(finite.max()))}"

    def _said(self, row: int, place: int) -> str:
        """``row a, token 5, id 42, ' cat', score 0.31``."""
        text = " ".join(map(visible, self.tokens[place].split(" ")))
        parts = [self.rows[row]] if self.rows else []
        parts.append(f"token {place}")
        if self.token_ids is not None:
            parts.append(f"id {self.token_ids[place]}")
        parts += [f"'{text}'", f"{self.score_name} {_long(self.scores[row, place])}"]
        return ", ".join(parts)

    def _ends(self) -> str:
        """The highest and the lowest score of a single row, for a page that takes colours away."""
        scores = self.scores[0, self.start : self._stop]
        finite = np.isfinite(scores)
        if len(self.scores) > 1 or self.rows or np.unique(scores[finite]).size < 2:
            return ""
        highest = int(np.where(finite, scores, -np.inf).argmax())
        lowest = int(np.where(finite, scores, np.inf).argmin())
        ends = (
            f"{_short(scores[place])} at token {self.start + place:,} "
            f"'{shortened(' '.join(map(visible, self.tokens[self.start + place].split(' '))), 24)}'"
            for place in (highest, lowest)
        )
        return f"highest {self.score_name} {', lowest '.join(ends)}"

    def _hidden(self) -> str:
        """What is not shown, in words; empty where nothing is."""
        count = len(self.tokens)
        hidden = count - (self._stop - self.start)
        if not hidden:
            return ""
        said = f"{hidden:,} of {count:,} tokens are not shown: these are {self.start:,} to {self._stop - 1:,}"
        outside = np.abs(self.scores)
        outside[:, self.start : self._stop] = -1
        outside[~np.isfinite(outside)] = -1
        row, place = np.unravel_index(int(outside.argmax()), outside.shape)
        if outside[row, place] >= 0:
            largest = _long(self.scores[row, place])
            said += f"; the largest {self.score_name} elsewhere is {largest}, at token {place:,}"
        return said

    # -- as HTML -------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        kind = "both" if self.colours.scale == "diverging" else "much"
        body = self._table() if len(self.scores) > 1 or self.rows else self._flow()
        title = f"<div><strong>{html.escape(self.title)}</strong></div>" if self.title else ""
        notes = [note for note in (self._ends(), self.colours.note, self._hidden()) if note]
        rest = f"<div>{html.escape('; '.join(notes))}</div>" if notes else ""
        style = f"<style>{_CSS % {'font': MONOSPACE}}{_dark(kind)}</style>"
        return f'<div class="lab-strip lab-strip-{kind}">{style}{title}{self._legend()}{body}{rest}</div>'

    def _flow(self) -> str:
        parts = []
        for place in range(self.start, self._stop):
            attributes = self._attributes(0, place, _TOKEN)
            parts.append(f'<span role="listitem" {attributes}>{as_html(self.tokens[place])}</span>')
            if "\n" in self.tokens[place]:
                parts.append("<br>")
        label = html.escape(f"{self._size()} with {self.score_name}")
        return f'<div role="list" aria-label="{label}">{"".join(parts)}</div>'

    def _table(self) -> str:
        places = range(self.start, self._stop)
        head = "".join(
            f'<th scope="col" style="{_CELL}">{html.escape(shortened(visible(self.tokens[place]), 24))}</th>'
            for place in places
        )
        lines = []
        for row, scores in enumerate(self.scores):
            name = html.escape(self.rows[row])
            cells = "".join(
                f"<td {self._attributes(row, place, _CELL)}>{_short(scores[place])}</td>" for place in places
            )
            lines.append(f'<tr><th scope="row" style="{_CELL};text-align:left">{name}</th>{cells}</tr>')
        return (
            '<div class="lab-strip-rows"><table style="border-collapse:separate;border-spacing:1px">'
            f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        )

    def _attributes(self, row: int, place: int, style: str) -> str:
        said = html.escape(self._said(row, place))
        score = float(self.scores[row, place])
        words = f'tabindex="0" title="{said}" aria-label="{said}"'
        if not math.isfinite(score):
            return f'{words} style="{style};{_GAP}"'
        shade = self._shade(score)
        return f'{words} class="lab-{shade}" style="{style};{self._style(shade)}"'

    def _shade(self, score: float) -> int:
        low, high = self.colours.low, self.colours.high
        if self.colours.scale == "log":
            score, low, high = math.log(max(score, low)), math.log(low), math.log(high)
        place = min(max((score - low) / (high - low), 0.0), 1.0)
        return round(place * (_SHADES - 1))

    def _style(self, shade: int) -> str:
        background = _shades(self.colours.scale == "diverging", 0)[shade]
        # Both are ours, so a system that forces its own colours may leave them: they are the score.
        return f"background-color:{background};color:{text_on(background)};forced-color-adjust:none"

    def _legend(self) -> str:
        """The colours in a row, with the values at their ends; for the eye only."""
        boxes = "".join(
            f'<span class="lab-{shade}" style="padding:0 5px;{self._style(shade)}"> </span>'
            for shade in range(0, _SHADES, 4)
        )
        ends = html.escape(_short(self.colours.low)), html.escape(_short(self.colours.high))
        return (
            f'<div aria-hidden="true" style="font-size:12px">{html.escape(self.score_name)} '
            f"{ends[0]}&nbsp;{boxes}&nbsp;{ends[1]}</div>"
        )


def token_strip(
    tokens: Any,
    scores: Any,
    *,
    token_ids: Sequence[int] | None = None,
    rows: Sequence[Any] | None = None,
    scale: str = "auto",
    robust: bool | None = None,
    span: tuple[float, float] | None = None,
    score_name: str = "score",
    title: str = "",
    start: int = 0,
    max_tokens: int = MAX_TOKENS,
    store: SavesStore | None = None,
) -> TokenStrip:
    """Tokens with their scores as colours, for a notebook: HTML without a script, and text.

    Args:
        tokens: Each token's text, or what has them: ``lab.tokens(…)``, a lens, an `Attention`.
        scores: ``[token]``, or ``[row, token]`` for one row per layer or head; or a dict of rows by name.
        token_ids: The tokens' ids, said beside their text.
        rows: What each row is called.
        scale: ``"sequential"``, ``"diverging"``, ``"log"`` or ``"auto"``, as for a heatmap.
        robust: As for a heatmap.
        span: The range of the colours, in scores.
        score_name: What the scores are.
        title: Above the tokens.
        start: The first token shown.
        max_tokens: How many are shown; of several rows fewer, at most 4,000 cells. It says how many are not.
        store: Where labels are looked up; that of their engine where it is None.

    Raises:
        PlotRefused: There are no tokens, or the scores do not fit them.
    """
    __tracebackhide__ = True
    found, token_ids = given_tokens(tokens, token_ids)
    texts = list(found or ())
    if isinstance(scores, Mapping):
        rows = list(scores) if rows is None else rows
        scores = list(scores.values())
    if not texts:
        raise PlotRefused("there is nothing to show: no tokens")
    matrix = matrix_of(scores, store=store)
    if matrix.columns != len(texts):
        raise PlotRefused(f"scores of shape {list(matrix.shape)} do not fit {len(texts):,} tokens")
    if token_ids is not None and len(token_ids) != len(texts):
        raise PlotRefused(f"{len(token_ids):,} token ids do not fit {len(texts):,} tokens")
    if matrix.rows > MAX_ROWS:
        raise PlotRefused(f"{matrix.rows:,} rows are too many to read, at most {MAX_ROWS}: choose some")
    if rows is not None and len(rows) != matrix.rows:
        raise PlotRefused(f"{len(rows):,} names were given for {matrix.rows:,} rows of scores")
    if not 0 <= start < len(texts) or max_tokens < 1:
        raise PlotRefused(f"start={start}, max_tokens={max_tokens} show none of {len(texts):,} tokens")
    names = [] if rows is None else [visible(str(row)).replace("·", " ") for row in rows]
    if not names and matrix.rows > 1:
        names = [f"row {row}" for row in range(matrix.rows)]
    values = matrix.read()
    return TokenStrip(
        texts,
        None if token_ids is None else [int(token_id) for token_id in token_ids],
        values,
        names,
        colouring(values, scale, robust=robust, span=span),
        start=start,
        shown=max_tokens if matrix.rows == 1 else max(min(max_tokens, MAX_CELLS // matrix.rows), 1),
        score_name=score_name,
        title=title,
    )


def _shades(diverging: bool, dark: int) -> list[str]:
    colours = (_BOTH if diverging else _MUCH)[dark]
    return [colour_at(colours, shade / (_SHADES - 1)) for shade in range(_SHADES)]


def _dark(kind: str) -> str:
    """The style sheet of a dark page; on a light one the colours are in each token's own style."""
    pages = f":is({','.join(_DARK)}) .lab-strip-{kind}"
    shades = "".join(
        f"{pages} .lab-{shade}{{background-color:{colour}!important;color:{text_on(colour)}!important}}"
        for shade, colour in enumerate(_shades(kind == "both", 1))
    )
    return f"{pages}{{color-scheme:dark}}{shades}"


def _short(value: float) -> str:
    return _number(value, 3)


def _long(value: float) -> str:
    return _number(value, 9)


def _number(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "−inf"
    return f"{value:.{digits}g}".replace("-", "−", 1) if value < 0 else f"{value:.{digits}g}"
