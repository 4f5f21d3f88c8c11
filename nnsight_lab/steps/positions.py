"""Which rows of a request's forward passes a step is about.

The first pass of a request has a row for each token of its prompt, every later one a row for the token that
was generated before it. Places count in the prompt, negative ones from its end.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from nnsight_lab.errors import EditRefused
from nnsight_lab.steps.step import MAX_PLACES

WORDS: Final = ("all", "last", "prompt", "generated")
_FORMS: Final = (
    "positions are 'all', 'last', 'prompt', 'generated', a place in the prompt (0, -1), a range of places "
    "('2:5'), or a list of these"
)


class Where(NamedTuple):
    """Positions, sorted out.

    Attributes:
        everything: Whether every row of the prompt.
        places: Rows of the prompt by number.
        ranges: Rows of the prompt from, to.
        generated: Whether rows of generated tokens.
    """

    everything: bool
    places: tuple[int, ...]
    ranges: tuple[tuple[int | None, int | None], ...]
    generated: bool

    @property
    def in_prompt(self) -> bool:
        """Whether any row of the prompt."""
        return self.everything or bool(self.places or self.ranges)

    def rows(self, count: int) -> list[int] | None:
        """Rows of a prompt of ``count``, ascending; None for all of them.

        Raises:
            IndexError: The prompt has no such place.
        """
        if self.everything:
            return None
        found: set[int] = set()
        for place in self.places:
            if not -count <= place < count:
                raise IndexError(f"position {place} is not in the prompt, which has {count} tokens")
            found.add(place % count)
        for start, stop in self.ranges:
            found.update(range(*slice(start, stop).indices(count)))
        return None if len(found) == count else sorted(found)


def positions_of(given: Any) -> tuple[Any, ...]:
    """Positions in the form in which they travel.

    Raises:
        EditRefused: It is none.
    """
    if isinstance(given, str | slice | range) or not hasattr(given, "__iter__"):
        listed = [given]
    else:
        listed = given.tolist() if hasattr(given, "tolist") else list(given)
    if not listed or len(listed) > MAX_PLACES:
        raise EditRefused(f"There are {len(listed)} positions; 1 to {MAX_PLACES} can be named.")
    return tuple(_one(one) for one in listed)


def _one(given: Any) -> Any:
    if isinstance(given, str):
        if given in WORDS or _range(given) is not None:
            return given
    elif isinstance(given, slice | range):
        if given.step in (None, 1):
            return f"{_said(given.start)}:{_said(given.stop)}"
    elif not isinstance(given, bool):
        try:
            return operator.index(given)
        except TypeError:
            pass
    raise EditRefused(f"positions={given!r:.60} cannot be: {_FORMS}.")


def _said(end: Any) -> str:
    return "" if end is None else str(operator.index(end))


def _range(text: str) -> tuple[int | None, int | None] | None:
    start, colon, stop = text.partition(":")
    ends = []
    for end in (start.strip(), stop.strip()):
        if not colon or len(end) > 20 or (end and not end.removeprefix("-").isdecimal()):
            return None
        ends.append(int(end) if end else None)
    return ends[0], ends[1]


def where(positions: Sequence[Any]) -> Where:
    """Positions, sorted out.

    Raises:
        EditRefused: They are none.
    """
    positions = positions_of(tuple(positions))
    places, ranges = [], []
    for one in positions:
        if isinstance(one, int):
            places.append(one)
        elif one == "last":
            places.append(-1)
        elif one not in WORDS:
            found = _range(one)
            assert found is not None
            ranges.append(found)
    everything = "all" in positions or "prompt" in positions
    return Where(everything, tuple(places), tuple(ranges), "all" in positions or "generated" in positions)
