"""How a worker's steps ran, counted: over its life, and between two moments of it, which is a request's.

A request is charged nothing of its own at a step. What ran from its first step to its last is the difference
of two marks, since each of those steps had it aboard (or had it wait for its place). So a request costs two
marks, however long it runs, and the requests of a step share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.step_figures import FIRST, PROMPT, SOMEBODY, StepFigures

if TYPE_CHECKING:
    from nnsight_lab.worker.requests import LabRequests

#: So many reasons are told, and remembered: edits may be called anything, and come and go.
_TOLD = 8
_REMEMBERED = 256

_NOBODY = (PROMPT, FIRST)


class Mark(NamedTuple):
    """The counts at a moment."""

    replayed: int
    tapped: int
    eager: int
    reasons: dict[tuple[str, str], int]


class StepCounts:
    """The counts of one worker.

    Args:
        graphs: Whether there are graphs.
    """

    def __init__(self, graphs: bool) -> None:
        self.graphs = graphs
        self.replayed = 0
        self.tapped = 0
        self.eager = 0
        #: Why, and whose block.
        self.reasons: Counter[tuple[str, str]] = Counter()
        self._mark: Mark | None = None

    def ran(self, *, tapped: bool) -> None:
        """A step replayed."""
        self._mark = None
        if tapped:
            self.tapped += 1
        else:
            self.replayed += 1

    def ran_eagerly(self, why: str, asker: str) -> None:
        """A step ran module by module."""
        self._mark = None
        self.eager += 1
        self.reasons[why, asker] += 1
        if len(self.reasons) > _REMEMBERED:
            self.reasons = Counter(dict(self.reasons.most_common(_REMEMBERED // 2)))

    def mark(self) -> Mark:
        """This moment."""
        if self._mark is None:
            self._mark = Mark(self.replayed, self.tapped, self.eager, dict(self.reasons))
        return self._mark

    def since(self, began: Mark, ended: Mark | None, names: Collection[str]) -> StepFigures:
        """The steps between two moments.

        Args:
            began: The earlier one.
            ended: The later one; None for now.
            names: Of the blocks that may be named; others are somebody's.
        """
        now = ended or self.mark()
        counts: Counter[tuple[str, str]] = Counter()
        for (why, asker), count in now.reasons.items():
            steps = count - began.reasons.get((why, asker), 0)
            if steps > 0:
                counts[why, asker if asker in names else SOMEBODY] += steps
        return StepFigures(
            self.graphs,
            now.replayed - began.replayed,
            now.tapped - began.tapped,
            now.eager - began.eager,
            _commonest(counts),
        )

    def figures(self) -> StepFigures:
        """Over the worker's life."""
        return StepFigures(self.graphs, self.replayed, self.tapped, self.eager, _commonest(self.reasons))


def asked_by(requests: LabRequests, mediators: Iterable[Any], why: str) -> str:
    """Whose block made a step run module by module, by its edit's name; `SOMEBODY` where no block did."""
    if why in _NOBODY:
        return SOMEBODY
    for mediator in mediators:
        pending = mediator.pending
        waits = pending is not None and why in (pending.provider, mediator.wide)
        if not (waits or mediator.caches):
            continue
        request = requests.requests.get(mediator.rider_of)
        if request is None:
            continue
        for registration_id, copy in request.copies.items():
            if copy is mediator:
                return str(request.names[registration_id])
        return TRACE_BLOCK
    return SOMEBODY


def _commonest(counts: Counter[tuple[str, str]]) -> tuple[tuple[str, str, int], ...]:
    return tuple((why, asker, steps) for (why, asker), steps in counts.most_common(_TOLD))
