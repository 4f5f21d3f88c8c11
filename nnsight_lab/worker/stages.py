"""Blocks on a pipeline of stages: each runs the whole block, and is told what the others' modules gave it.

A block is Python that cannot be moved once it has begun, and a stage has its own layers only. So a block that
reaches several stages runs on each of them, in step: what it is given at a module is told to the other
stages, down the pipeline with the activations and, by the last stage, back up before the next step. A stage
that is told of a visit serves its own run of the block as if the module were its own, but what the block
writes there stays in the copy that was sent: the stage that has the module has done it already. So every
stage knows all that the block knows, and the last one, which knows it first, answers for it.

A block that names modules of one stage only runs there and nowhere else, and only that it is over is told.
Where a block's code needs what only a later stage has (the final norm's weights, say), it ends on the earlier
one, which from then on tells whatever the block may come to ask for; the later stage goes on, and may read
there but no longer write.

Both sides of a message must agree that there is one. They know from the same facts: where blocks are at home,
and what was last said of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnsight.intervention.interleaver import EarlyStopException, Interleaver
from nnsight.intervention.source import NO_SKIP

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.home import draws, places_of, stage_of
from nnsight_lab.worker.channel import Channel
from nnsight_lab.worker.elsewhere import OnAnotherStage, StandIns
from nnsight_lab.worker.greenlets import BlockMediator, aside_of
from nnsight_lab.worker.stepping import locations
from nnsight_lab.worker.told import Group, names_asked, packed, unpacked, versions

if TYPE_CHECKING:
    from nnsight_lab.worker.requests import LabRequest, LabRequests


class StageFailed(RuntimeError):
    """A block failed on the stage that has the module it was at."""


class Stages:
    """The blocks of one stage, and its talk with the others.

    Args:
        stand_ins: Which stage has what.
        channel: To the other stages.
        stage: This one's number, from 0.
        count: Of all.

    Attributes:
        requests: Those of this worker.
        listening: Whether this step's visits may have to be told.
        watches: Whether an earlier stage tells all that a block may ask for.
        after: Whether the forward of this step is over: a value has a row for each request.
    """

    requests: LabRequests

    def __init__(self, stand_ins: StandIns, channel: Channel, stage: int, count: int) -> None:
        self.stand_ins = stand_ins
        self.channel = channel
        self.stage, self.last = stage, count - 1
        self.listening = self.watches = self.after = False
        self._here: list[LabRequest] = []
        self._inbound = self._outbound = self._both = False
        #: Visits of this step, here and on the stages that told of theirs; and by stage how often each
        #: location was reached.
        self._told: list[dict[str, Any]] = []
        self._reached: dict[int, dict[str, int]] = {}
        self._before: dict[str, int] = {}
        #: The blocks of this step that are told, each with its rows of tokens and its row of answers.
        self._frames: list[tuple[BlockMediator, list[int], int]] = []
        self._total = self._rows = 0

    # -- where a block lives -----------------------------------------------------------------------

    def home(self, block: Block) -> int | None:
        """The stage on which a block runs alone; None where it runs on all."""
        places = frozenset(locations(block)) if "steps" in block.lcls else places_of(block)
        if places is not None and not places:
            return self.last  # it asks no module: it is where the answers are
        return stage_of(places, self.stand_ins.of)

    def settle(self, request: LabRequest) -> None:
        """Say which of a new request's blocks run here, and what its stages will tell each other."""
        homes = [mediator.home for mediator in request.riders]
        spans = None in homes
        for mediator in request.riders:
            mediator.spans = spans
            mediator.elsewhere = not spans and mediator.home != self.stage
            drawn = draws(mediator.code) if spans else ""
            if drawn:
                mediator.refusal = (
                    f"the block reaches several pipeline stages, and {drawn!r} would give each of them other "
                    "numbers: draw them before the block, and use the tensor in it"
                )
        known = [home for home in homes if home is not None]
        request.both = spans
        request.inbound = self.stage > 0 and (spans or any(home < self.stage for home in known))
        request.outbound = self.stage < self.last and (spans or any(home <= self.stage for home in known))

    def answers(self, mediator: Any) -> bool:
        """Whether this stage brings home what a block saved."""
        return self.stage == (self.last if mediator.spans or mediator.home is None else mediator.home)

    # -- a step ------------------------------------------------------------------------------------

    def begin(self, here: Sequence[LabRequest], total: int, rows: int) -> None:
        """Learn what the stages before were asked for in this step; its blocks have their rows."""
        self._here = [one for one in here if one.inbound or one.outbound or one.both]
        self._inbound = any(one.inbound for one in self._here)
        self._outbound = any(one.outbound for one in self._here)
        self._both = self.listening = any(one.both for one in self._here)
        self.after = self.watches = False
        if not self._here:
            return
        self._told, self._reached = [], {}
        self._total, self._rows = total, rows
        self._frames = [
            (mediator, mediator.batch_group, mediator.row)
            for one in self._here
            if one.both
            for mediator in one.riders
            if mediator.batch_group is not None
        ]
        interleaver = self.requests.interleaver
        if self._inbound:
            self._hear(self.stage - 1)
        self._before = dict(interleaver.counts)
        self.watches = any(self._is_blind(mediator) for mediator, _, _ in self._frames)

    def forwarded(self) -> None:
        """Tell the next stage; this one's forward is launched."""
        self.after = True
        if not self._outbound:
            return
        over: list[str] = []
        failed: list[str] = []
        blind: list[tuple[str, int, int, str]] = []
        for request in self._here:
            if request.both:
                for at, mediator in enumerate(request.riders):
                    blind += [(request.id, at, *one) for one in mediator.cut.items()]
                    if self._is_blind(mediator):
                        blind.append((request.id, at, self.stage, _said(mediator.exception)))
                continue
            if request.mediator is not None and request.mediator.exception is not None:
                failed.append(request.id)
            mine = [m for m in request.riders if m.home is not None and m.home <= self.stage]
            if request.outbound and not request.inbound and not any(map(_lives, mine)):
                request.outbound = False
                over.append(request.id)
        self._reached[self.stage] = self._since()
        self._say(self.stage + 1, -1, over=over, failed=failed, blind=blind)

    def sampled(self) -> None:
        """The step is over: the last stage tells the others what they were not there for."""
        self.listening = False
        if not self._both:
            return
        if self.stage < self.last:
            over = self._hear(self.last)
        else:
            self._reached[self.stage] = self._since()
            over = [one.id for one in self._here if one.both and not any(map(_lives, one.riders))]
            for stage in range(self.last):
                self._say(stage, stage, over=over)
        for request in self._here:
            if request.id in over:
                request.both = request.inbound = request.outbound = False

    def _say(
        self,
        to: int,
        known: int,
        *,
        over: Sequence[str],
        failed: Sequence[str] = (),
        blind: Sequence[tuple[str, int, int, str]] = (),
    ) -> None:
        """Send what stages after ``known`` were asked for."""
        told = [one for one in self._told if one["stage"] > known]
        reached = {str(stage): seen for stage, seen in self._reached.items() if stage > known}
        message = {"told": told, "reached": reached, "over": over, "failed": failed, "blind": blind}
        self.channel.send(to, message)

    def _since(self) -> dict[str, int]:
        before = self._before
        return {
            at: count - before.get(at, 0)
            for at, count in self.requests.interleaver.counts.items()
            if count != before.get(at, 0)
        }

    # -- telling -----------------------------------------------------------------------------------

    def note(self, interleaver: Any, provider: str, value: Any) -> dict[str, Any] | None:
        """Keep what blocks are about to be given here, for the other stages; returned for `failed`."""
        observed = interleaver.observers.get(provider, ())
        if provider not in interleaver.parked and not observed and not self.watches:
            return None
        count = interleaver.counts.get(provider, 0)
        watching = {id(mediator) for mediator, *_ in observed}
        ready: dict[str, Group] = {}
        blind: dict[str, Group] = {}
        for request in self._here:
            for mediator in request.riders if request.both else ():
                group = mediator.batch_group
                if group is None:
                    continue
                if _waits(mediator, provider, count) or id(mediator) in watching:
                    ready[request.id] = (group[0], group[1])
                elif self._is_blind(mediator) and _may_ask(mediator, provider):
                    blind[request.id] = (group[0], group[1])
        groups = [ready] if ready else []
        # One by one: of these it must be known who wrote.
        groups += [{one: group} for one, group in blind.items() if one not in ready]
        if not groups:
            return None
        whole = interleaver.whole(provider, value)
        found = [self._kept(interleaver, provider, whole, group, count) for group in groups]
        return found[0] if ready else None

    def _kept(
        self, interleaver: Any, provider: str, value: Any, rows: Mapping[str, Group], count: int
    ) -> dict[str, Any]:
        batcher = interleaver.batcher
        groups = sorted(set(rows.values()))
        told = {
            "at": provider,
            "nth": count - self._before.get(provider, 0),
            "after": self.after,
            "stage": self.stage,
            "requests": sorted(rows),
            "groups": groups,
            "value": packed(value, groups, batcher.total, batcher._token_dim),
            "failed": [],
        }
        self._told.append(told)
        return told

    def failed(self, told: dict[str, Any]) -> None:
        """Tell also what a block gave a module that does not fit; what its code does is known everywhere."""
        for request in self._here:
            for at, mediator in enumerate(request.riders if request.id in told["requests"] else ()):
                if mediator.exception is not None and mediator.lab_error is None and mediator.alive:
                    self.requests.record(mediator)
                    told["failed"].append((request.id, at, mediator.lab_error))
                self.watches = self.watches or self._is_blind(mediator)

    def _is_blind(self, mediator: BlockMediator) -> bool:
        """Whether a block has ended here and may go on at a later stage."""
        error = mediator.exception
        return (
            self.stage < self.last
            and error is not None
            and not mediator.alive
            and not mediator.refusal
            and not isinstance(error, EarlyStopException)
        )

    # -- being told --------------------------------------------------------------------------------

    def _hear(self, stage: int) -> Sequence[str]:
        """Live what another stage tells; which requests' blocks are over."""
        interleaver = self.requests.interleaver
        batcher, counts = interleaver.batcher, interleaver.counts
        before = interleaver.mediators, interleaver.fragments, batcher.total
        by_id = {one.id: one for one in self._here}
        with aside_of(interleaver):  # what blocks are given is theirs
            message = self.channel.receive(stage)
            for request_id, at, whose, why in message["blind"]:
                by_id[request_id].riders[at].cut[whose] = why
            base: dict[str, int] = {}
            interleaver.fragments = None  # what is told is whole
            try:
                for told in message["told"]:
                    provider = told["at"]
                    counts[provider] = base.setdefault(provider, counts.get(provider, 0)) + told["nth"]
                    self._live(interleaver, told, [by_id[one] for one in told["requests"]])
            finally:
                self._place(after=self.after)
                interleaver.mediators, interleaver.fragments, batcher.total = before
                interleaver.reindex()
            for whose, reached in message["reached"].items():
                self._reached[int(whose)] = reached
                for at, count in reached.items():
                    counts[at] = base.get(at, counts.get(at, 0)) + count
            for mediator, _, _ in self._frames:
                self._miss(mediator)
        for request_id in message["failed"]:
            mediator = by_id[request_id].mediator
            if mediator is not None and mediator.exception is None:
                mediator.exception = StageFailed("its block failed on an earlier stage")
        if stage < self.stage:
            for request_id in message["over"]:
                by_id[request_id].inbound = False
        found: Sequence[str] = message["over"]
        return found

    def _live(self, interleaver: Any, told: dict[str, Any], requests: Sequence[LabRequest]) -> None:
        """Serve a visit that another stage had."""
        self._place(after=told["after"])
        total = interleaver.batcher.total
        riders = [m for one in requests for m in one.riders if m.batch_group is not None]
        interleaver.mediators = [m for m in riders if m.alive or m.caches]
        interleaver.reindex()
        skip = told["at"].endswith(".skip")
        value = NO_SKIP if skip else unpacked(told["value"], told["groups"], total)
        written = versions(value)
        given = Interleaver.handle(interleaver, told["at"], value)
        interleaver.batcher.partial_skip = []
        for request_id, at, error in told["failed"]:
            mediator = next(one for one in requests if one.id == request_id).riders[at]
            if mediator.exception is None:
                mediator.exception, mediator.lab_error = StageFailed(error.message), error
                mediator.pending = None
        self._told.append(told)
        if given is not value or versions(value) != written:
            for mediator in interleaver.mediators:
                if told["stage"] in mediator.cut:
                    _throw(mediator, f"{told['at']} was written", told["stage"], mediator.cut)

    def _place(self, *, after: bool) -> None:
        """Give the blocks that are told their rows of tokens, or of answers."""
        for mediator, group, row in self._frames:
            mediator.batch_group = [row, 1] if after else group
        self.requests.interleaver.batcher.total = self._rows if after else self._total

    def _miss(self, mediator: BlockMediator) -> None:
        """End a block that waits for what a stage on which it ended will not tell any more."""
        while mediator.cut and mediator.pending is not None and mediator.pending.provider is not None:
            pending = mediator.pending
            stage = self.stand_ins.of(pending.provider)
            if stage not in mediator.cut or pending.iteration >= mediator.occurrence(pending.provider):
                return
            _throw(mediator, f"{pending.provider} was asked for", stage, mediator.cut)


def _lives(mediator: BlockMediator) -> bool:
    waits = mediator.worker is None and mediator.exception is None
    return waits or mediator.alive or bool(mediator.caches)


def _waits(mediator: BlockMediator, provider: str, count: int) -> bool:
    pending = mediator.pending
    return (
        pending is not None
        and pending.provider == provider
        and pending.iteration == count - mediator.counts_at_start.get(provider, 0)
    )


def _may_ask(mediator: BlockMediator, provider: str) -> bool:
    if mediator.names is None:
        mediator.names = names_asked(mediator.code, mediator.lcls)
    parts = provider.split(".")[1:]
    return all(part.isdigit() or part in mediator.names for part in parts)


def _said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _throw(mediator: BlockMediator, what: str, stage: int, cut: Mapping[int, str]) -> None:
    error = OnAnotherStage(
        f"{what}, which is on pipeline stage {stage + 1}; there the block could not go on ({cut[stage]}), so "
        "that stage can no longer do what it says"
    )
    try:
        mediator.pending = mediator.worker.throw(error)
    except Exception as thrown:
        mediator.exception, mediator.pending = thrown, None
