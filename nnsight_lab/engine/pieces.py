"""A look at a model, cut into pieces that take a fraction of a second each.

The worker does one thing at a time and cannot be interrupted at it. So a look is read in messages sized by
how long the last ones took there, never in one that holds the engine for a minute: whoever interrupts has it
back when the piece at hand is done, and whoever else uses it is served between two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: What a piece is to take, and by how much the next may be larger than the last.
_PIECE_S: Final = 0.4
_GROWTH: Final = 4.0
#: Of the first piece: a slow core multiplies that in half a second.
_FIRST_FLOPS: Final = 10**10


class Pieces:
    """How much of a look is asked for at once.

    Args:
        flops: Of one unit: one row of a lens, one number of a pattern.
        most: Units that one message may carry.
        total: Units of the whole look.
        progress: Called after each piece with the share that is done, 0 to 1.
    """

    def __init__(
        self, *, flops: float, most: int, total: int, progress: Callable[[float], None] | None = None
    ) -> None:
        self._most = max(1, most)
        self._total = max(1, total)
        self._progress = progress
        self._done = 0
        self.units = max(1, min(int(_FIRST_FLOPS / flops), self._most))

    def took(self, units: int, seconds: float) -> None:
        """Note how long the worker was at a piece; the next is sized by it."""
        self._done += units
        wanted = units * _PIECE_S / max(seconds, 1e-4)
        self.units = int(max(1, min(wanted, self.units * _GROWTH, self._most)))
        if self._progress is not None:
            self._progress(min(1.0, self._done / self._total))
