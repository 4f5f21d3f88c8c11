"""Tokens with scores behind them, to walk through and to choose a position in; it may still be growing.

Where no widget runs the same tokens stand as html (`nnsight_lab.plots.token_strip`): this is a view of such
a strip, which it is given, and which has checked the tokens and found the colours. The page asks for the
tokens it shows; while the strip grows it is sent what is new, as one message an update. A few hundred tokens
are in the saved state as well, for a page that has no kernel.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import traitlets

from nnsight_lab.errors import CellUsageError
from nnsight_lab.lens.tokens import visible
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import Answer, Question, answers
from nnsight_lab.widgets.positions import Positioned
from nnsight_lab.widgets.sequences import sequence_key

#: What one message may hold: cells of scores, eight bytes each.
_MESSAGE_CELLS: Final = 64_000
#: Of the tokens that the saved state holds.
_KEPT_BYTES: Final = 30_000


class Colours(Protocol):
    """How scores become colours."""

    @property
    def scale(self) -> str: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def note(self) -> str: ...


class Still(Protocol):
    """The same strip as html that needs no kernel: `nnsight_lab.plots.token_strip.TokenStrip`."""

    tokens: tuple[str, ...]
    token_ids: tuple[int, ...] | None
    scores: npt.NDArray[np.float64]
    rows: tuple[str, ...]
    score_name: str
    title: str
    start: int

    @property
    def colours(self) -> Colours: ...
    @property
    def anchors(self) -> tuple[tuple[str, ...], tuple[str, ...]]: ...
    def _repr_html_(self) -> str: ...


class State(NamedTuple):
    """What a growing strip says of itself.

    Attributes:
        words: One line: what it does, or how it ended.
        running: Whether more may come.
        ended: ``"done"``, ``"stopped"`` or ``"failed"``; empty while it runs, and for one that never ran.
    """

    words: str = ""
    running: bool = False
    ended: str = ""


class TokenStrip(Positioned):
    """Tokens with their scores as colours; made by `nnsight_lab.token_strip` and `nnsight_lab.live`.

    Args:
        still: What it shows.
        prompt: Token ids that name its sequence, where those are not all of its tokens: of a prompt whose
            answer it shows too.
        stop: Called when somebody presses its stop button.

    Attributes:
        tokens: Each token's text.
        token_ids: Their ids; None where they are not known.
        scores: ``[row, token]``, float64.
        rows: What each row is called; empty for a single one without a name.
        position: The token chosen, here or in any view of the same tokens; None where none is. Setting it
            chooses.
    """

    module: ClassVar[str] = "token_strip"

    heading = traitlets.Unicode().tag(sync=True)
    score_name = traitlets.Unicode().tag(sync=True)
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    colours = traitlets.Dict().tag(sync=True)
    count = traitlets.Int().tag(sync=True)
    first_shown = traitlets.Int().tag(sync=True)
    prompt_count = traitlets.Int().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    kept = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        still: Still | None,
        *,
        prompt: Sequence[int] | None = None,
        stop: Callable[[], object] | None = None,
        state: State | None = None,
    ) -> None:
        self._still = still
        self._stop = stop
        self._prompt = None if prompt is None else list(prompt)
        super().__init__(
            state=(state or State())._asdict(),
            sequence=self._key(),
            kept=self._worth_keeping(),
            **self._about(still),
        )

    # -- what it shows -------------------------------------------------------------------------

    @property
    def still(self) -> Still | None:
        """The strip as html; None before there is a token."""
        return self._still

    @property
    def tokens(self) -> tuple[str, ...]:
        """Each token's text."""
        return () if self._still is None else self._still.tokens

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """Their ids."""
        return None if self._still is None else self._still.token_ids

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """Of each row and token."""
        return np.zeros((1, 0)) if self._still is None else self._still.scores

    @property
    def rows(self) -> tuple[str, ...]:
        """What each row is called."""
        return () if self._still is None else self._still.rows

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self) -> range:
        """Every token."""
        return range(len(self.tokens))

    def plain(self) -> str:
        """The tokens and scores as text."""
        said = f" ({self.state['words']})" if self.state["words"] else ""
        return f"TokenStrip without a token{said}" if self._still is None else f"{self._still!r}{said}"

    def __repr__(self) -> str:
        return self.plain()

    def _repr_html_(self) -> str:
        return self.fallback()

    def fallback(self) -> str:
        """The strip as html, and how it ended."""
        body = "" if self._still is None else self._still._repr_html_()
        said = f"<div>{html.escape(self.state['words'])}</div>" if self.state["words"] else ""
        return f"<div>{body}{said}</div>"

    # -- growing -------------------------------------------------------------------------------

    def show(self, still: Still | None, state: State, *, prompt: Sequence[int] | None = None) -> None:
        """Show more of the same, or the same in another state: one message to the pages, if anything changed.

        Args:
            still: What it shows now.
            state: What it says of itself.
            prompt: As for the class, once that is known.
        """
        before, self._still = self._still, still
        if prompt is not None and self._prompt is None:
            self._prompt = list(prompt)
        about, key = self._about(still), self._key()
        first = _same(before, still)
        grown = {name: value for name, value in about.items() if getattr(self, name) != value} | (
            {"sequence": key} if key != self.sequence else {}
        )
        ended = not state.running and self.state["running"]
        if not grown and first == len(self) and state._asdict() == self.state and not ended:
            return
        # The pages hear of it by one message, not by one for each trait and one for the tokens.
        with self.untold():
            self.set_trait("state", state._asdict())
            for name, value in grown.items():
                self.set_trait(name, value)
        content, buffer = self._part(first, len(self))
        self.send(
            {kinds.KIND: kinds.GREW, **content, "traits": {**grown, "state": state._asdict()}}, [buffer]
        )
        if ended:
            with self.untold():
                self.kept = self._worth_keeping()
            self.send_state([*self._about(still), "state", "sequence", "kept"])

    def _about(self, still: Still | None) -> dict[str, Any]:
        if still is None:
            return {}
        colours = still.colours
        return {
            "heading": still.title,
            "score_name": still.score_name,
            "names": list(still.rows),
            "count": len(still.tokens),
            "first_shown": still.start,
            "prompt_count": len(self._prompt or ()),
            "colours": {
                "scale": colours.scale,
                "low": colours.low,
                "high": colours.high,
                "note": colours.note,
                "light": list(still.anchors[0]),
                "dark": list(still.anchors[1]),
            },
        }

    def _key(self) -> str:
        if self._prompt is not None:
            return sequence_key(self._prompt)
        return "" if self._still is None else sequence_key(self._still.token_ids or (), self._still.tokens)

    def _worth_keeping(self) -> dict[str, Any]:
        """As many tokens as a notebook may well save."""
        most = min(len(self), 600 // max(1, len(self.scores)))
        while True:
            content, _ = self._part(0, most)
            content["scores"] = [[_plain(score) for score in row] for row in self.scores[:, :most]]
            if len(json.dumps(content)) <= _KEPT_BYTES or most <= 1:
                return content
            most //= 2

    def _part(self, first: int, last: int) -> tuple[dict[str, Any], bytes]:
        """Some tokens as the page takes them: ``[id, text, said, line break]``; and their scores."""
        ids = self.token_ids
        tokens = [
            [None if ids is None else ids[place], *_words(self.tokens[place])] for place in range(first, last)
        ]
        scores = np.ascontiguousarray(self.scores[:, first:last])
        return {"first": first, "tokens": tokens, "rows": len(scores)}, scores.tobytes()

    # -- questions -----------------------------------------------------------------------------

    @answers(kinds.TOKENS)
    def _give_tokens(self, question: Question) -> Answer:
        first = max(0, int(question["first"]))
        most = max(1, _MESSAGE_CELLS // max(1, len(self.scores)))
        last = min(len(self), int(question["last"]), first + most)
        content, buffer = self._part(first, max(first, last))
        return Answer({**content, "count": len(self)}, (buffer,))

    @answers(kinds.STOP)
    def _give_up(self, question: Question) -> Answer:
        del question
        if self._stop is None:
            raise CellUsageError("nothing runs here that could be stopped")
        self._stop()
        return Answer()

    def released(self) -> None:
        """Let go of what it could stop."""
        self._stop = None


def _words(text: str) -> tuple[str, str | int, int]:
    """A token as it is seen, as it is said (0: the same but for spaces), and whether it ends a line."""
    seen = visible(text)
    said = " ".join(map(visible, text.split(" ")))
    return seen, 0 if seen.replace("·", " ") == said else said, int("\n" in text)


def _plain(score: float) -> float | str:
    """A score as JSON has it."""
    return float(score) if np.isfinite(score) else str(float(score))


def _same(before: Still | None, now: Still | None) -> int:
    """How many tokens from the start are as they were, their scores too."""
    if before is None or now is None or before.rows != now.rows or len(before.scores) != len(now.scores):
        return 0
    common = min(len(before.tokens), len(now.tokens))
    one, other = before.scores[:, :common], now.scores[:, :common]
    differ = ~((one == other) | (np.isnan(one) & np.isnan(other))).all(axis=0)
    if before.tokens[:common] != now.tokens[:common]:
        differ |= np.array([a != b for a, b in zip(before.tokens[:common], now.tokens[:common], strict=True)])
    return int(differ.argmax()) if differ.any() else common
