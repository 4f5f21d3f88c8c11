"""The tokens of a running `%%trace` cell, as they come.

One output, drawn again in place at most twenty times a second (a front end drops messages past about a
thousand a second for the whole server), whose last state stays in the saved notebook. So it is small
whatever ran: one request shows its text up to a limit and says what it left out, many show counts and the
first few. The outputs themselves are on `tracer.outputs`.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence

from nnsight_lab.magics.contract import Progress
from nnsight_lab.magics.drawing import CODE_STYLE, DIM_STYLE, Canvas, Drawing
from nnsight_lab.wire.sizes import shown_bytes

#: Twenty updates a second.
MIN_INTERVAL_S = 0.05
#: What stays of a long prompt, half of it from either end.
PROMPT_CHARS = 400
#: What stays of a long text, from its end.
TEXT_CHARS = 20_000
#: Of many requests, this many are listed, each with this much of its text.
LISTED_REQUESTS = 8
LISTED_CHARS = 80


class TokenView:
    """A `watch` callable that shows what it is told."""

    def __init__(self, canvas: Canvas | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._canvas = canvas or Canvas()
        self._clock = clock
        self._began_s = clock()
        self._drawn_s = float("-inf")
        self._pending: Sequence[Progress] = ()
        self._done = False

    def __call__(self, requests: Sequence[Progress]) -> None:
        """Takes the state of every request of the trace."""
        if self._done or not requests:
            return
        self._pending = tuple(requests)
        if all(request.finished for request in requests):
            self.finish()
            return
        now_s = self._clock()
        if now_s - self._drawn_s >= MIN_INTERVAL_S:
            self._drawn_s = now_s
            self._canvas.draw(drawn(self._pending, now_s - self._began_s))

    def finish(self) -> None:
        """Draws the last state; also after an interrupt, when not every request finished."""
        if self._done or not self._pending:
            return
        self._done = True
        self._canvas.finish(drawn(self._pending, self._clock() - self._began_s))


def drawn(requests: Sequence[Progress], elapsed_s: float) -> Drawing:
    """The state of the requests of one trace."""
    if len(requests) == 1:
        return _one(requests[0], elapsed_s)
    return _many(requests, elapsed_s)


def _one(request: Progress, elapsed_s: float) -> Drawing:
    prompt = _middle_out(request.prompt, PROMPT_CHARS)
    text, note = request.text, _speed(request.tokens, elapsed_s) + _bringing(request)
    if len(text) > TEXT_CHARS:
        note += f"; the last {TEXT_CHARS:,} of {len(text):,} characters, `tracer.outputs` has all"
        text = "…" + text[-TEXT_CHARS:]
    return Drawing(
        f'<div style="{CODE_STYLE}"><span style="{DIM_STYLE}">{html.escape(prompt)}</span>'
        f"<span>{html.escape(text)}</span></div>"
        f'<div style="{DIM_STYLE}">{html.escape(note)}</div>',
        prompt + text,
    )


def _many(requests: Sequence[Progress], elapsed_s: float) -> Drawing:
    finished = sum(request.finished for request in requests)
    tokens = sum(request.tokens for request in requests)
    counted = f"{finished} of {len(requests)} requests, {_speed(tokens, elapsed_s)}{_bringing(requests[0])}"
    bar = ""
    if finished < len(requests):
        bar = (
            f'<progress value="{finished}" max="{len(requests)}" aria-label="requests finished"></progress> '
        )
    texts, rows = [counted], []
    for request in requests[:LISTED_REQUESTS]:
        prompt = _flat(_middle_out(request.prompt, LISTED_CHARS // 2))
        text = _flat(request.text)
        text = text if len(text) <= LISTED_CHARS else "…" + text[-LISTED_CHARS:]
        texts.append(f"{request.index:>4}  {prompt}{text}")
        rows.append(
            f'<div><span style="{DIM_STYLE}">{request.index:>4}  {html.escape(prompt)}</span>'
            f"<span>{html.escape(text)}</span></div>"
        )
    if len(requests) > LISTED_REQUESTS:
        more = f"      and {len(requests) - LISTED_REQUESTS} more in `tracer.outputs`"
        texts.append(more)
        rows.append(f'<div style="{DIM_STYLE}">{more}</div>')
    return Drawing(
        f'<div>{bar}{html.escape(counted)}</div><div style="{CODE_STYLE}">{"".join(rows)}</div>',
        "\n".join(texts),
    )


def _speed(tokens: int, elapsed_s: float) -> str:
    rate = f", {tokens / elapsed_s:,.0f} tok/s" if elapsed_s > 0 and tokens else ""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}{rate}"


def _bringing(first: Progress) -> str:
    """How much of large saves is still on its way."""
    if first.brought_bytes >= first.home_bytes:
        return ""
    return f"; saves: {shown_bytes(first.brought_bytes)} of {shown_bytes(first.home_bytes)} are here"


def _flat(text: str) -> str:
    """On one line, with line ends shown."""
    return text.replace("\r", "").replace("\n", "⏎")


def _middle_out(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[-(limit // 2) :]}"
