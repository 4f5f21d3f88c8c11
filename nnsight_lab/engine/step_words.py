"""How steps ran, in words: for a status, and in one line for whoever wonders why a call was slow.

A location is said as it is written in ``taps=``, without the tree's own name before it. Steps with a prompt
run module by module on every engine with graphs, so they are counted and never held against anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.step_figures import FIRST, PROMPT, SOMEBODY, StepFigures

#: Reasons that stand for themselves; the others are locations, or what a block names beside a tap.
_WORDS = {PROMPT, FIRST, "a barrier", "tracer.cache()"}
_LAYER = re.compile(r"^(?P<layers>.*?)\.\d+\.")

#: What is said where nothing is ever replayed.
NO_GRAPHS_ON_CPU = "no graphs on a CPU"
NO_GRAPHS = "no graphs: every step runs module by module, as enforce_eager=True asks"


@dataclass(frozen=True)
class RanSteps:
    """How the steps of one request ran; ``print(output.steps)`` says it in a line.

    Attributes:
        replayed: Steps that replayed a whole CUDA graph.
        tapped: Steps that replayed a graph which stops at taps.
        module_by_module: Steps that ran every module, each of which could be read.
        reasons: Why those did, commonest first: what was asked for, by which edit (``"trace"`` for the
            trace's own block, ``""`` where it was no block of this request), and how many steps.
        no_graphs: Why nothing is replayed on this engine, and nothing counted; "" where steps are.
    """

    replayed: int = 0
    tapped: int = 0
    module_by_module: int = 0
    reasons: tuple[tuple[str, str, int], ...] = ()
    no_graphs: str = ""

    @classmethod
    def of(cls, figures: StepFigures | None, no_graphs: str = "") -> RanSteps | None:
        """What is known of a request; None where nothing is.

        Args:
            figures: What the workers said; None where they count nothing, or it was not told.
            no_graphs: Why they count nothing.
        """
        if figures is None:
            return cls(no_graphs=no_graphs) if no_graphs else None
        reasons = tuple((plain(why), asker, steps) for why, asker, steps in figures.reasons)
        return cls(figures.replayed, figures.tapped, figures.eager, reasons)

    @property
    def total(self) -> int:
        """All steps."""
        return self.replayed + self.tapped + self.module_by_module

    @property
    def slowed(self) -> int:
        """Steps that ran module by module for a block, and not for a prompt."""
        return sum(steps for why, _, steps in self.reasons if why not in (PROMPT, FIRST))

    def __str__(self) -> str:
        if self.no_graphs:
            return self.no_graphs
        if not self.slowed:
            taps = f", {self.tapped} of them stopping at taps" if self.tapped else ""
            return f"{self.replayed + self.tapped} of {self.total} steps replayed{taps}"
        why, asker, _ = next(reason for reason in self.reasons if reason[0] not in (PROMPT, FIRST))
        return f"{self.slowed} of {self.total} steps ran module by module: {_blamed(why, asker)}"


def longest(ran: Iterable[RanSteps | None]) -> RanSteps | None:
    """Of requests that ran together, the one with the most steps."""
    known = [steps for steps in ran if steps is not None]
    return max(known, key=lambda steps: steps.total, default=None)


def counted(figures: StepFigures | None, no_graphs: str) -> str:
    """The steps by kind; "" where nothing is known of them.

    Args:
        figures: As they were last told; None where they were not.
        no_graphs: Why nothing is counted.
    """
    if figures is None or not figures.graphs:
        return no_graphs or (NO_GRAPHS if figures is not None else "")
    if not figures.total:
        return "none yet"
    kinds = ((figures.replayed, "replayed"), (figures.tapped, "replayed with taps"))
    parts = [f"{count:,} {kind}" for count, kind in (*kinds, (figures.eager, "module by module")) if count]
    return f"{figures.total:,}: {', '.join(parts)}"


def reasons(figures: StepFigures, most: int = 3) -> str:
    """The commonest reasons why steps ran module by module."""
    found = [f"{steps:,} {_said(plain(why), asker)}" for why, asker, steps in figures.reasons[:most]]
    left = figures.eager - sum(steps for _, _, steps in figures.reasons[:most])
    return "; ".join([*found, *([f"{left:,} for other reasons"] if found and left > 0 else [])])


def plain(why: str) -> str:
    """A reason as people write it: a location without the tree's name."""
    root, dot, rest = why.partition(".")
    return rest if root and dot and why not in _WORDS else why


def _said(why: str, asker: str) -> str:
    if why == PROMPT:
        return "with a prompt"
    if why in _WORDS:
        return why if asker == SOMEBODY else f"{why} of {_whose(asker)}"
    if "." in why.lstrip("."):
        return f"{why} asked by {_whose(asker)}" if asker else why
    return f"since the block of {_whose(asker)} names {why}" if asker else f"since a block names {why}"


def _blamed(why: str, asker: str) -> str:
    """What to do about a reason, of the request's own blocks or of another's."""
    if why == "tracer.cache()":
        return "tracer.cache() sees every module; save what you need of taps instead"
    if why == "a barrier":
        return "a block waits at a barrier"
    other = "" if asker else " (another request asked for it)"
    if "." not in why.lstrip("."):
        return f"the block names `{why}`, which may lead to a module that is no tap{other}"
    if why.endswith(".skip"):
        return f"a module is skipped (`{why}`), which no replay can{other}"
    layer = _LAYER.match(why)
    taps = [f"{layer['layers']}.*.output", why] if layer else ["…", why]
    listed = ", ".join(f'"{tap}"' for tap in taps)
    return f"`{why}` is not a tap{other}; an engine started with taps=[{listed}] would replay them"


def _whose(asker: str) -> str:
    if asker == SOMEBODY:
        return "another request"
    return "the trace" if asker == TRACE_BLOCK else f"edit {asker}"
