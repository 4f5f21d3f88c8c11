"""Which steps run module by module, so that blocks can be served, and which replay a CUDA graph.

The hard fact: a replayed graph runs no Python, so no module hands anything to a block; running every step
module by module costs a small model most of its speed. So before each step the blocks that live are asked
what they wait for. Nobody waits on a module: the whole graph is replayed. Somebody waits on a tap (an input
or output of a decoder layer): the graph that stops at taps is. Anything else: the step runs module by module.

A block is ordinary Python, and may ask for another module once it was served at a tap, when the replay has
begun and that module can no longer be reached. So a block is read first: one that names a module that is no
tap keeps every step it takes part in from replaying. What slips through (a name made at run time) is that
request's error, never a later step's value.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from nnsight.intervention.envoy import Envoy

from nnsight_lab.wire.step_figures import FIRST
from nnsight_lab.worker.step_counts import StepCounts

if TYPE_CHECKING:
    from nnsight_lab.blocks.block import Block
    from nnsight_lab.worker.stages import Stages

_SIDES: Final = ("input", "output", "skip")
#: Ways to a module that no reader of the source can follow.
_ANY: Final = frozenset(
    {"getattr", "modules", "named_modules", "children", "named_children", "cache", "barrier"}
)
_INSIDE: Final = frozenset({"source", "skip"})


class Need(Enum):
    """What a step needs: no module, the taps, or every module's hand-over."""

    NOTHING = "replayed"
    TAPS = "replayed with taps"
    HOOKS = "module by module"


class MissedByReplay(RuntimeError):
    """A block asked for a module that is no tap in a step that was being replayed."""


def is_module_location(location: str) -> bool:
    """Whether a location is a module's input, output or skip, or lies inside a module."""
    return location.rpartition(".")[2] in _SIDES or ".source." in location


class Steps:
    """Decides before each step, and keeps the books that a replayed step does not keep itself.

    Args:
        taps: Locations that a replay can serve.
        paths: Of every module of the model.

    Attributes:
        ran: How many steps ran in each way, and why.
    """

    def __init__(self, taps: frozenset[str], paths: Iterable[str]) -> None:
        self.taps = taps
        #: The pipeline's (see `nnsight_lab.worker.stages`); None where there is one stage.
        self.stages: Stages | None = None
        self.ran = StepCounts(bool(taps))
        #: Location -> how often one forward reaches it.
        self.visits: dict[str, int] = {}
        self._in_module: dict[str, bool] = {}
        self._known = 0
        self._before: dict[str, int] | None = None
        self._tapped = frozenset(tap.rpartition(".")[0] for tap in taps)
        ways = {part for path in self._tapped for part in path.split(".")}
        self._modules = frozenset(part for path in paths for part in path.split(".")) - ways

    # -- before a step -------------------------------------------------------------------------

    def need(self, interleaver: Any) -> tuple[Need, str]:
        """What the blocks of this step wait for, and the location that decided it."""
        if interleaver.observers:
            return Need.HOOKS, "tracer.cache()"
        stages = self.stages
        if stages is not None and stages.watches:
            return Need.HOOKS, "a block that ended on one stage"
        if not self.visits and interleaver.mediators:
            # A prompt of one token may replay, and what a replay passes could not be counted yet.
            return Need.HOOKS, FIRST
        found = Need.NOTHING, ""
        counts, in_module = interleaver.counts, self._in_module
        for mediator in interleaver.mediators:
            pending = mediator.pending
            if pending is None or not mediator.worker:
                continue
            location = pending.provider
            if location is None:
                return Need.HOOKS, "a barrier"
            if location not in in_module:
                in_module[location] = is_module_location(location)
            if not in_module[location]:
                continue
            if stages is not None and stages.stand_ins.lacks(location, stages.stage):
                continue
            reached = counts.get(location, 0) - mediator.counts_at_start.get(location, 0)
            if not reached <= pending.iteration < reached + self.visits.get(location, 1):
                continue  # of a later step, or one that is never reached again
            if location not in self.taps:
                return Need.HOOKS, location
            if mediator.wide:
                return Need.HOOKS, mediator.wide
            found = Need.TAPS, location
        return found

    def is_wide(self, block: Block, code: CodeType) -> str:
        """What in a block names a module that a replay could not serve; empty where nothing does."""
        if not self.taps:
            return ""
        tree = ast.parse(block.source)
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                inside = node.attr in _INSIDE
                if inside or node.attr in _ANY or (node.attr in self._modules and id(node) not in called):
                    return f".{node.attr}"
            elif isinstance(node, ast.Name) and node.id in _ANY:
                return node.id
        return self._captured(block.glbls, code) or self._captured(block.lcls, code)

    def _captured(self, scope: Mapping[str, Any], code: CodeType) -> str:
        names = set(_names(code))
        for name, value in scope.items():
            if name not in names:
                continue
            if isinstance(value, Envoy) and not self._leads_to_taps(value.path):
                return name
            if isinstance(value, FunctionType):
                named = set(_names(value.__code__))
                if named & (_ANY | _INSIDE | self._modules):
                    return f"{name}()"
        return ""

    def _leads_to_taps(self, path: str) -> bool:
        return path in self._tapped or any(tap.startswith(f"{path}.") for tap in self._tapped)

    # -- after a step --------------------------------------------------------------------------

    def watch(self, counts: Mapping[str, int]) -> None:
        """Note what was reached before a step that runs module by module, to learn from it."""
        self._before = dict(counts)

    def learn(self, after: Mapping[str, int]) -> None:
        """Note how often the step that was watched reached each location."""
        before, self._before = self._before, None
        if before is None or len(after) == self._known:
            return
        self._known = len(after)
        for location, count in after.items():
            seen = count - before.get(location, 0)
            if seen > self.visits.get(location, 0) and is_module_location(location):
                self.visits[location] = seen

    def passed(self, interleaver: Any, need: Need) -> None:
        """Count what a replayed step reached in silence, and end blocks that wait for it.

        A location is counted also where nobody is served: the third visit is the third, whichever way
        the two before were run.
        """
        counts = interleaver.counts
        served = self.taps if need is Need.TAPS else frozenset()
        for location, visits in self.visits.items():
            if location not in served:
                counts[location] = counts.get(location, 0) + visits
        for mediator in interleaver.mediators:
            pending = mediator.pending
            if pending is None or not mediator.worker:
                continue
            location = pending.provider
            if location is None or location in self.taps:
                continue
            if self.stages is not None and self.stages.stand_ins.lacks(location, self.stages.stage):
                continue
            if is_module_location(location) and pending.iteration < mediator.occurrence(location):
                _miss(mediator, location)

    def figures(self) -> dict[str, Any]:
        """The counts as plain values."""
        ran = self.ran
        kinds = {Need.NOTHING: ran.replayed, Need.TAPS: ran.tapped, Need.HOOKS: ran.eager}
        reasons = Counter[str]()
        for (why, _), count in ran.reasons.items():
            reasons[why] += count
        return {
            "steps": {need.value: count for need, count in kinds.items() if count},
            "reasons": dict(reasons.most_common(20)),
        }


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    yield from code.co_freevars
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _miss(mediator: Any, location: str) -> None:
    error = MissedByReplay(
        f"{location} was asked for in a step that was already replaying a CUDA graph, after a value that "
        "replays serve; name the module in the block itself, or start the engine with enforce_eager=True"
    )
    try:
        mediator.worker.throw(error)
    except Exception as thrown:
        mediator.exception = thrown
        mediator.pending = None
