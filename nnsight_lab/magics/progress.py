"""How far a long look is, under its cell: a bar once it takes longer than anybody waits without asking.

A look reads a model in pieces and tells the share that is done after each (`nnsight_lab.engine.pieces`).
What is over before that shows nothing; what was not leaves one line that says how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from nnsight_lab.magics.drawing import CODE_STYLE, Canvas, Drawing, sentence

#: Before that nothing is shown, and afterwards not more often.
_QUIET_S: Final = 2.0
_APART_S: Final = 0.25


class LookProgress:
    """Told the share of a look that is done.

    Args:
        what: What it is called, as in ``"Logit lens"``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._drawn = time.monotonic()
        self._canvas: Canvas | None = None
        self._share = 0.0

    def __call__(self, share: float) -> None:
        self._share = share
        now = time.monotonic()
        if now - self._began < _QUIET_S or now - self._drawn < _APART_S:
            return
        self._drawn = now
        self._canvas = self._canvas or Canvas()
        left_s = (now - self._began) * (1 - share) / max(share, 1e-6)
        text = f"{self._what}: {share:.0%}, about {left_s:.0f} s left"
        bar = f'<progress value="{share:.3f}" max="1" aria-label="{self._what}"></progress>'
        self._canvas.draw(Drawing(f'<div style="{CODE_STYLE}">{bar} {text}</div>', text))

    def finish(self, *, done: bool) -> None:
        """Leave one line, where there was a bar."""
        if self._canvas is not None:
            seconds = time.monotonic() - self._began
            ended = f"took {seconds:.0f} s" if done else f"ended at {self._share:.0%}, after {seconds:.0f} s"
            self._canvas.finish(sentence(f"{self._what}: {ended}."))


@contextmanager
def shown(what: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of a look, with its progress shown while the block runs."""
    progress = LookProgress(what)
    done = False
    try:
        yield {**options, "progress": progress}
        done = True
    finally:
        progress.finish(done=done)
