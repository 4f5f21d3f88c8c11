"""One request as it runs, in a notebook's output: its tokens, and pictures of the lists it saves.

A thread of its own looks at what there is, at most twenty times a second, and sends what is new: the cell may
be blocked, may await, or may have ended long ago. The pages never hear of single tokens. What is shown last
is what a saved notebook keeps, so when the run is over its output is written once more, as html too.
"""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import display

from nnsight_lab.engine.feed import Feed, Seen, blamed
from nnsight_lab.engine.peeks import APART_S
from nnsight_lab.lens.tokens import token_texts, visible
from nnsight_lab.runs.rows import Rows, rows_of
from nnsight_lab.runs.scores import score_names, scored
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.token_strip import State, TokenStrip

logger = logging.getLogger("nnsight_lab.runs")

#: IPython leaves it untyped.
_display: Callable[..., Any] = display
#: So many pictures fit on a page.
MOST_PICTURES: Final = 8
_PICTURE_HEIGHT: Final = 260


class LiveView:
    """What is seen of one request while it runs, and after.

    Args:
        score: What tokens are coloured by: True or ``"logprob"``, ``"probability"``, ``"rank"``, the name of
            a list that a block appends a number (or a short vector) to at every step, or a list of these for
            a row each.
        title: Above the tokens.

    Attributes:
        strip: The tokens; ``strip.position`` is the one chosen.
        heatmaps: By name, pictures of the lists that its blocks save.

    Raises:
        RequestRefused: There is no such score.
    """

    def __init__(self, score: Any = True, *, title: str = "") -> None:
        self.names = score_names(score)
        self.strip = TokenStrip(None, state=State("Waiting for the first token.", True), stop=self.stop)
        self.heatmaps: dict[str, Heatmap] = {}
        self._box = ipywidgets.VBox([self.strip])
        self._title = title
        self._feed: Feed | None = None
        self._handle: Any = None
        self._prints = False
        self._texts: list[str] = []
        self._began_s = 0.0
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._pressed = False

    @property
    def over(self) -> bool:
        """Whether it will show nothing more."""
        return self._done.is_set()

    def stop(self) -> None:
        """Abort the request; what came stays."""
        self._pressed = True
        if self._feed is not None:
            self._feed.stop()

    # -- its run -------------------------------------------------------------------------------

    def begins(self, feed: Feed) -> None:
        """The request was submitted: watch it."""
        self._feed, self._began_s = feed, time.monotonic()
        threading.Thread(target=self._watch, args=(feed,), daemon=True, name="nnsight-lab live").start()

    def ends(self, error: BaseException | None = None) -> None:
        """The request is over, by an error where there is one: show the last of it."""
        with self._lock:
            if self._done.is_set():
                return
            self._done.set()
            seen = Seen() if self._feed is None else self._feed.seen()
            self._show(seen, self._last_words(seen, error))
        if self._handle is not None:
            forms, metadata = self._bundle()
            self._handle.update(forms, metadata=metadata, raw=True)
        elif self._prints:
            print(repr(self))

    def _watch(self, feed: Feed) -> None:
        while not feed.over and not self._done.is_set():
            with self._lock:
                if self._done.is_set():
                    return
                seen = feed.seen()
                self._show(seen, State(self._running_words(seen), True))
            feed.wait(APART_S)
        self.finished()

    def finished(self) -> None:
        """Nothing more comes from the engine; a cell that waits says itself how it ended."""

    def _show(self, seen: Seen, state: State) -> None:
        """Show it; a view that fails is no reason for a request to."""
        try:
            self._shown(seen, state)
        except Exception as error:
            logger.exception("a live view failed")
            self.strip.show(self.strip.still, state._replace(words=f"This view failed: {blamed(error)}"))

    def _shown(self, seen: Seen, state: State) -> None:
        self._texts += token_texts(
            self._feed.tokenizer if self._feed is not None else None,
            [*seen.prompt_ids, *seen.token_ids][len(self._texts) :],
        )
        found = scored(self.names, seen, self._texts, self._title)
        if found is None:
            self.strip.show(None, state)
        else:
            words = " ".join([state.words, *found.notes])
            self.strip.show(found.strip, state._replace(words=words), prompt=seen.prompt_ids)
        self._draw(seen, state.running)

    def _draw(self, seen: Seen, running: bool) -> None:
        """The lists that are no scores, as pictures."""
        count = len(self._box.children)
        for one in seen.watched:
            if one.name in self.names or (one.name not in self.heatmaps and count > MOST_PICTURES):
                continue
            rows = rows_of(one.items, len(seen.prompt_ids)) if seen.prompt_ids else ""
            if not isinstance(rows, Rows) or rows.values.numel() == 0:
                continue
            on: dict[str, Any] = {
                "tokens": self._texts,
                "token_ids": seen.prompt_ids,
                "first": rows.first,
                "running": running,
            }
            heatmap = self.heatmaps.get(one.name)
            if heatmap is None:
                heatmap = Heatmap.growing(rows.values, name=one.name, height=_PICTURE_HEIGHT, **on)
                self.heatmaps[one.name] = heatmap
                self._box.children = (*self._box.children, heatmap)
            else:
                heatmap.grow(rows.values, **on)

    # -- words ---------------------------------------------------------------------------------

    def _running_words(self, seen: Seen) -> str:
        if not seen.token_ids:
            return "Waiting for the first token."
        elapsed_s = time.monotonic() - self._began_s
        return (
            f"Generating: {_counted(len(seen.token_ids))}, {len(seen.token_ids) / elapsed_s:,.0f} a second."
        )

    def _last_words(self, seen: Seen, error: BaseException | None) -> State:
        after = f"after {_counted(len(seen.token_ids))}"
        if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "CancelledError" or self._pressed:
            done = "Stopped" if self._pressed else "Interrupted"
            return State(f"{done} {after}: the request was aborted, and this is what came.", ended="stopped")
        if error is not None:
            return State(f"Failed {after}: {blamed(error)}", ended="failed")
        elapsed_s = time.monotonic() - self._began_s
        return State(f"{_counted(len(seen.token_ids))} in {elapsed_s:,.1f} s.", ended="done")

    # -- showing -------------------------------------------------------------------------------

    def display(self) -> None:
        """Show it here, once; in a terminal's IPython when it is over, in a script not at all."""
        shell = get_ipython()
        self._prints = shell is not None and getattr(shell, "kernel", None) is None
        if self._handle is None and getattr(shell, "kernel", None) is not None:
            forms, metadata = self._bundle()
            self._handle = _display(forms, metadata=metadata, raw=True, display_id=True)

    def _ipython_display_(self) -> None:
        if getattr(get_ipython(), "kernel", None) is None:
            print(repr(self))
        elif self._handle is None:
            self.display()
        else:
            forms, metadata = self._bundle()
            _display(forms, metadata=metadata, raw=True)

    def _bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        found: Any = self._box._repr_mimebundle_()
        data, metadata = found if isinstance(found, tuple) else (found, {})
        return {**data, "text/html": self._html(), "text/plain": repr(self)}, metadata

    def _html(self) -> str:
        pictures = [
            f"<div>{html.escape(visible(name))}</div>{heatmap.fallback()}"
            for name, heatmap in self.heatmaps.items()
        ]
        return "".join([self.strip.fallback(), *pictures])

    def _repr_html_(self) -> str:
        return self._html()

    def __repr__(self) -> str:
        return self.strip.plain()

    def close(self) -> None:
        """Close its widgets; a request that still runs is aborted."""
        if not self._done.is_set():
            self.stop()
            self._done.set()
        with self._lock:
            for widget in (self.strip, *self.heatmaps.values()):
                widget.close()
            self._box.layout.close()
            self._box.close()


def _counted(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"
