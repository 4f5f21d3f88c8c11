"""The results that one view shows, one of several prompts at a time, and for how long it holds them.

ipywidgets keeps every widget that was ever made, those of a cell that was run again too. A result of a
hundred layers is tens of megabytes, so a view holds it only while somebody looks; closed, it finds it again
as long as anybody else (a name, the notebook's ``Out``) has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from nnsight_lab.errors import CellUsageError, SavesError
from nnsight_lab.lens.tokens import shortened, visible

T = TypeVar("T")

#: How many prompts are listed by their words; more are gone to by number.
MAX_LISTED: Final = 100
_LISTED_CHARACTERS: Final = 60


class Prompts(Generic[T]):
    """Results of one or several prompts.

    Args:
        results: One, or a list of them.
        kind: What each must be.

    Raises:
        CellUsageError: There is none, or one is something else.
    """

    def __init__(self, results: Any, kind: type[T]) -> None:
        given = list(results) if isinstance(results, Sequence) else [results]
        for index, one in enumerate(given):
            if not isinstance(one, kind):
                place = f"item {index} of the list" if isinstance(results, Sequence) else "this"
                raise CellUsageError(
                    f"{place} is {type(one).__name__}; expected {kind.__name__}, or a list of them"
                )
        if not given:
            raise CellUsageError(f"an empty list has no {kind.__name__} to show")
        self.count = len(given)
        self._held: list[T] | None = given
        self._known = [weakref.ref(one) for one in given]

    def __getitem__(self, index: int) -> T:
        """The result of a prompt.

        Raises:
            CellUsageError: There is no such prompt.
            SavesError: It is gone.
        """
        if not 0 <= index < self.count:
            raise CellUsageError(f"there is no prompt {index}: there are {self.count:,}")
        found = self._known[index]() if self._held is None else self._held[index]
        if found is None:
            raise SavesError(
                "the result is gone: nothing else held it while this view was closed. "
                "Run the cell that made it again."
            )
        return found

    def first(self, count: int) -> list[T]:
        """The results of the first prompts, that many at the most."""
        return [self[index] for index in range(min(count, self.count))]

    def loosen(self) -> None:
        """Nobody looks: hold nothing."""
        self._held = None

    def hold(self) -> None:
        """Somebody looks: hold what is still there."""
        there = [found for one in self._known if (found := one()) is not None]
        if len(there) == self.count:
            self._held = there


def listed(all_tokens: Sequence[Sequence[str]]) -> list[str]:
    """How each prompt is called in a list of them; empty where there is one, or too many to list."""
    if not 1 < len(all_tokens) <= MAX_LISTED:
        return []
    return [_beginning(tokens) for tokens in all_tokens]


def _beginning(tokens: Sequence[str]) -> str:
    text = "".join(tokens[: _LISTED_CHARACTERS + 1])[: _LISTED_CHARACTERS + 1]
    return shortened(visible(text).replace("·", " "), _LISTED_CHARACTERS) or "a stream"
