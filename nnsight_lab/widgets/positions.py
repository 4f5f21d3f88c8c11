"""A view of a sequence of tokens, whose chosen position is that of every other view of the sequence.

In the page the views tell each other (`labextension/src/widgets/position.ts`), so a choice shows at once and
without a kernel too; each also tells its own widget here, so that a cell can read the choice or make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import traitlets

from nnsight_lab.errors import CellUsageError
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import Answer, LabWidget, Question, answers


class Positioned(LabWidget):
    """A widget that shows a position of a sequence.

    Attributes:
        sequence: The sequence's key; empty where it shows none (see `nnsight_lab.widgets.sequences`).
        position: The place in the sequence that is chosen, on the page or here; None where none is. Negative
            ones count from the end.
    """

    _quiet = False

    sequence = traitlets.Unicode().tag(sync=True)
    position = traitlets.Int(None, allow_none=True).tag(sync=True)

    def positions(self) -> range:
        """The places of the sequence that can be chosen here."""
        return range(0)

    @traitlets.validate("position")
    def _one_of_them(self, proposal: Any) -> int | None:
        value: int | None = proposal["value"]
        if value is None:
            return None
        there = self.positions()
        if not there:
            raise CellUsageError(f"{self.plain()} knows no tokens, so it has no position {value}")
        place = value + there.stop if value < 0 else value
        if place not in there:
            raise CellUsageError(f"position {value} is not one of {there.start} to {there.stop - 1}")
        return place

    @answers(kinds.CHOOSE)
    def _chosen(self, question: Question) -> Answer:
        place = question.get("position")
        # Another view of the sequence may show more of it than this one does.
        self.position = None if place is None or int(place) not in self.positions() else int(place)
        return Answer()

    # -- for those that grow -------------------------------------------------------------------

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Traits set inside are not sent to the pages."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def send_state(self, key: Any = None) -> None:
        """As ipywidgets has it, but for traits that the pages are told in another way."""
        if not self._quiet:
            super().send_state(key)
