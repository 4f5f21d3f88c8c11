"""How the steps of an engine ran, in figures that may travel.

A step replays a CUDA graph, or one that stops at taps, or runs module by module, since a block waits for what
no replay serves. Workers count, and nobody waits for them to say so. There are no words here: those are
`nnsight_lab.engine.step_words`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnsight_lab.wire.registry import register

#: Why steps ran module by module that no block is to blame for.
PROMPT = "a prompt"
FIRST = "the first step with a block"
#: Stands for the block of somebody else's request.
SOMEBODY = ""


@register
@dataclass(frozen=True)
class StepFigures:
    """Steps by kind, and why some did not replay.

    Attributes:
        graphs: Whether there are graphs to replay; without any nothing is counted.
        replayed: Steps that replayed a whole graph.
        tapped: Steps that replayed a graph which stops at taps.
        eager: Steps that ran module by module.
        reasons: Why, commonest first: a location or what a block names, whose block it was (an edit's name,
            or ``"trace"``; `SOMEBODY` where that is not told), and how many steps.
    """

    graphs: bool = False
    replayed: int = 0
    tapped: int = 0
    eager: int = 0
    reasons: tuple[tuple[str, str, int], ...] = ()

    @property
    def total(self) -> int:
        """All steps."""
        return self.replayed + self.tapped + self.eager

    def without_names(self) -> StepFigures:
        """The same for somebody who is not to know what others call their edits."""
        counts: dict[str, int] = {}
        for why, _, steps in self.reasons:
            counts[why] = counts.get(why, 0) + steps
        reasons = sorted(((why, SOMEBODY, steps) for why, steps in counts.items()), key=lambda r: -r[2])
        return StepFigures(self.graphs, self.replayed, self.tapped, self.eager, tuple(reasons))
