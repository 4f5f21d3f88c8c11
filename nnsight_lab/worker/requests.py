"""The blocks riding this worker's requests: who runs what, and what goes home.

Policy, where nnsight's differs: a request without a list of edits runs none (nnsight: all of
them), the list is followed in its own order and by version, so a request in flight keeps the
edit it came with; an edit's errors, reads out of order among them, are reported like a trace's;
and a request no block rides is not tracked at all, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from greenlet import error as greenlet_error
from nnsight.intervention.interleaver import dangling_unwind
from nnsight.intervention.serialization import loads
from nnsight.modeling.vllm.model_runners.GPUModelRunner import Request, Requests

from nnsight_lab.blocks import errors
from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.stackable import Stackable, stackable
from nnsight_lab.errors import EditRefused
from nnsight_lab.wire.keys import (
    BUDGET_KEY,
    CONTENT_KEY,
    DECLARED_KEY,
    EDITS_KEY,
    REACH_KEY,
    SHARE_KEY,
    TRACE_BLOCK,
    TRACE_KEY,
    has_blocks,
)
from nnsight_lab.wire.many import ManySaves
from nnsight_lab.wire.messages import BlockSaves, RequestSaves, WorkerError
from nnsight_lab.wire.step_figures import StepFigures
from nnsight_lab.wire.touch import Reach
from nnsight_lab.worker.captured import Captured
from nnsight_lab.worker.courier import Courier, Parcel
from nnsight_lab.worker.declarations import Declarations
from nnsight_lab.worker.greenlets import BlockMediator, aside_of
from nnsight_lab.worker.leaving import Over, pack_runs, told
from nnsight_lab.worker.stacked import Seat
from nnsight_lab.worker.stacks import Stacks
from nnsight_lab.worker.stages import Stages
from nnsight_lab.worker.step_counts import Mark
from nnsight_lab.worker.steps import Need, Steps

#: Marks of values that are gone are sorted out once there are so many.
_MARKS = 64


class Template(NamedTuple):
    """An installed edit, or a trace's block that is kept: what every request's run of it is built from.

    Attributes:
        block: Of a trace, what gives each run its own values; an edit's runs share them.
        home: The pipeline stage on which it runs alone; None where it runs on all, or there is one.
        stackable: How it is run for many requests at once; None where it is not.
    """

    name: str
    block: Block | Captured
    code: Any
    wide: str
    home: int | None = None
    stackable: Stackable | None = None

    @property
    def stacks(self) -> bool:
        """Whether it may be run for many requests at once."""
        return self.stackable is not None and not self.stackable.unfit

    def mediator(self, *, alone: bool = False) -> BlockMediator:
        """A run of the block; ``alone``, where it is not one of a call's many."""
        block = self.block.own(alone=alone) if isinstance(self.block, Captured) else self.block
        return BlockMediator(block, self.code, self.wide, self.home)


class LabRequest(Request):
    """A tracked request; ``copies`` is keyed by registration id, in the order the edits run."""

    __slots__ = (
        "allowed_bytes",
        "away",
        "began",
        "block_errors",
        "both",
        "ended",
        "inbound",
        "names",
        "outbound",
        "reach",
        "riders",
        "share",
        "step",
    )

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        #: Its blocks, an edit's before the trace's.
        self.riders: list[Any] = []
        #: The last step that it was part of; and, where it sits steps out, what had been reached by then.
        self.step = 0
        self.away: dict[str, int] | None = None
        self.names: dict[str, str] = {}
        self.allowed_bytes: int | None = None
        self.share = ""
        #: What of its prompt its blocks touch, as whoever submitted it read them.
        self.reach = Reach.PROMPT
        self.block_errors: dict[str, WorkerError] = {}
        #: How steps had run before its first one and after its last one; None where nothing is counted.
        self.began: Mark | None = None
        self.ended: Mark | None = None
        #: Whether of its blocks the stage before tells this one, this one the next, the last one all others.
        self.inbound = self.outbound = self.both = False

    def workers(self) -> list[Any]:
        return self.riders


class LabRequests(Requests):
    """nnsight's bookkeeping of spans and steps, with this package's policy on what runs."""

    templates: dict[str, Template]

    def __init__(
        self,
        interleaver: Any,
        courier: Courier,
        steps: Steps,
        *,
        answers: bool,
        stages: Stages | None = None,
        stacks: bool = True,
    ) -> None:
        super().__init__()
        self.steps = steps
        #: How the step under way is run; None where nothing is replayed at all.
        self.need: Need | None = None
        #: Whether this rank answers for its stage; else it only winds blocks up.
        self._answers = answers
        #: The pipeline's; None where there is one stage.
        self.stages = stages
        if stages is not None:
            stages.requests = self
        #: Requests that read answers only, and whose prompt this step runs a piece of.
        self._waiting: set[str] = set()
        #: nnsight's, of this worker: it knows the order in which locations were reached.
        self.interleaver = interleaver
        self.courier = courier
        #: Blocks that run for many requests at once; None where none may, as on a pipeline's stages.
        self.stacks: Stacks | None = None
        if stacks and stages is None and interleaver is not None:
            self.stacks = interleaver.stacks = Stacks(self)
        #: Builds the blocks that travel as data, and says whether any others run here.
        self.declared: Declarations | None = None
        #: How steps ran, of requests that are being collected.
        self._figures: dict[tuple[object, ...], StepFigures] = {}
        #: What was collected and may still be on its way into shared memory.
        self.leaving: list[Parcel] = []
        #: Steps so far, but for those that were as the one before; and the blocks of the one under way.
        self.step = 0
        #: The step before, where it was of a token each; and whether its requests run other blocks by now.
        self._spans: list[tuple[str, int]] | None = None
        self.changed = False
        self.scheduled: list[BlockMediator] = []
        #: Blocks whose code has run since they were last packed; None where packing early gains nothing.
        self.ended: list[BlockMediator] | None = [] if courier.overlaps else None

    # -- edits ---------------------------------------------------------------------------------

    def register(
        self,
        registration_id: str,
        payload: bytes,
        persistent_objects: dict[str, Any],
        name: str | None = None,
    ) -> None:
        if name == TRACE_BLOCK:
            self._keep(registration_id, payload, persistent_objects)
            return
        block = self._unpickled(payload, persistent_objects)
        code = block.compile()
        wide = self.steps.is_wide(block, code)
        self.templates[registration_id] = Template(
            name or registration_id, block, code, wide, self._home(block), stackable(block)
        )
        self.names[registration_id] = name

    def _keep(self, content: str, payload: bytes, persistent_objects: dict[str, Any]) -> Template:
        """Read a trace's block, to be kept until it is unregistered."""
        captured = Captured(lambda: self._unpickled(payload, persistent_objects), len(payload))
        block = captured.first()
        code = block.compile()
        wide = self.steps.is_wide(block, code)
        kept = Template(TRACE_BLOCK, captured, code, wide, self._home(block), stackable(block))
        self.templates[content], self.names[content] = kept, TRACE_BLOCK
        return kept

    def _kept(self, content: str, payload: bytes | None, persistent_objects: dict[str, Any]) -> Template:
        """A trace's block by what it is called; read now, where it came along and is not there yet."""
        kept = self.templates.get(content)
        if kept is not None:
            return kept
        if payload is None:
            raise EditRefused("the engine does not have the block any more: run the cell again")
        return self._keep(content, payload, persistent_objects)

    def declare(self, registration_id: str, payload: bytes, name: str) -> None:
        """Install an edit that was told as data."""
        assert self.declared is not None
        block = self.declared.block(payload)
        wide = self.declared.wide(block, self.steps)
        self.templates[registration_id] = Template(name, block, block.compile(), wide, self._home(block))
        self.names[registration_id] = name

    def _home(self, block: Block) -> int | None:
        return None if self.stages is None else self.stages.home(block)

    def answers(self, mediator: BlockMediator | Seat) -> bool:
        """Whether this rank brings home what a block saved."""
        return self._answers and (self.stages is None or self.stages.answers(mediator))

    def _unpickled(self, payload: bytes, persistent_objects: dict[str, Any]) -> Block:
        if self.declared is not None:
            self.declared.refuse_code()
        block: Block = loads(payload, persistent_objects=persistent_objects)
        return block

    def unregister(self, registration_id: str) -> None:
        """Stop giving the edit to new requests; those that run it keep it to their end."""
        self.templates.pop(registration_id, None)
        self.names.pop(registration_id, None)

    # -- requests ------------------------------------------------------------------------------

    def add(self, new_requests: list[Any], persistent_objects: dict[str, Any]) -> None:
        """Give each new request its blocks; one that cannot be built is that request's error."""
        for data in new_requests:
            if data.req_id in self.requests:
                continue  # preempted and resumed: its blocks go on
            extra = getattr(data.sampling_params, "extra_args", None) or {}
            if not has_blocks(extra):
                continue
            self._add(data.req_id, extra, persistent_objects)
            if self.stages is not None:
                self.stages.settle(self.requests[data.req_id])

    def _add(self, request_id: str, extra: dict[str, Any], persistent_objects: dict[str, Any]) -> None:
        wanted = extra.get(EDITS_KEY) or ()
        payload, declared = extra.get(TRACE_KEY), extra.get(DECLARED_KEY)
        content = extra.get(CONTENT_KEY)
        request = self.requests[request_id] = LabRequest(request_id)
        request.began = self.steps.ran.mark() if self.steps.ran.graphs else None
        request.allowed_bytes = extra.get(BUDGET_KEY)
        request.share = extra.get(SHARE_KEY, "")
        request.reach = Reach.said(extra.get(REACH_KEY))
        seats: list[Seat] = []
        for registration_id in wanted:
            template = self.templates.get(registration_id)
            if template is None:
                request.error = WorkerError(
                    "EditNotFound", f"edit {registration_id} is no longer installed", (), False, (), ()
                )
                continue
            request.names[registration_id] = template.name
            if template.stacks and self.stacks is not None:
                request.copies[registration_id] = seat = Seat(template, request.id)
                request.riders.append(seat)
                seats.append(seat)
                continue
            try:
                request.copies[registration_id] = self._aboard(template.mediator(), request)
            except Exception as exception:
                request.error = errors.capture(exception)
        traced = payload is not None or declared is not None or content is not None
        # What one block of a request writes is there for its next one.
        if seats and self.stacks is not None and (traced or len(seats) < len(request.riders)):
            for seat in seats:
                self.stacks.alone(request, seat)
        if not traced:
            return
        try:
            if content is not None:
                kept = self._kept(content, payload, persistent_objects)
                request.mediator = self._aboard(kept.mediator(alone=True), request)
                return
            if declared is not None:
                assert self.declared is not None
                block = self.declared.block(declared)
                wide = self.declared.wide(block, self.steps)
            else:
                assert payload is not None
                block = self._unpickled(payload, persistent_objects)
                wide = ""
            code = block.compile()
            wide = wide or self.steps.is_wide(block, code)
            mediator = BlockMediator(block, code, wide, self._home(block))
            request.mediator = self._aboard(mediator, request)
        except Exception as exception:
            request.error = errors.capture(exception)

    def _aboard(self, mediator: BlockMediator, request: LabRequest) -> BlockMediator:
        self.put_aboard(mediator, request)
        request.riders.append(mediator)
        return mediator

    def put_aboard(self, mediator: BlockMediator, request: LabRequest) -> None:
        """Tell a block whose it is."""
        mediator.rider_of, mediator.ended = request.id, self.ended
        mediator.answers_only = request.reach is Reach.ANSWERS
        mediator.to_the_end = request.reach is Reach.ROWS

    def refuse_chunked(self, spans: list[tuple[str, int]], states: dict[str, Any]) -> None:
        """Look at prompts that arrive in pieces: who reads them has an error, who reads answers only waits.

        The scheduler cuts none that has to be whole, unless it is longer than a step may be.
        """
        self._waiting = set()
        if not self.requests or spans == self._spans:
            return  # nobody to look at, or one token each, as in the last step
        for request_id, scheduled in spans:
            request = self.requests.get(request_id)
            if request is None or not request.riders:
                continue
            state = states.get(request_id)
            if state is None:
                continue
            # As vLLM itself tells the pieces whose samples it drops; past the prompt, of one that is resumed.
            if state.num_computed_tokens + scheduled >= state.num_tokens or request.reach is Reach.ROWS:
                continue
            if request.reach is Reach.ANSWERS:
                self._waiting.add(request_id)  # its logits are of a token that is followed by a known one
                continue
            error = WorkerError(
                "ChunkedPrompt",
                f"the {state.num_prompt_tokens}-token prompt was split across steps by chunked prefill "
                f"({scheduled} tokens in this one), so no block could see it whole: raise "
                "max_num_batched_tokens above the prompt, or start the engine without it",
                (),
                False,
                (),
                (),
            )
            # Each block's own, so that an edit's is counted and raised as the edit's.
            request.block_errors = dict.fromkeys(request.names.values(), error)
            if request.mediator is not None:
                request.block_errors[TRACE_BLOCK] = error
            if self.stacks is not None:
                self.stacks.leave(request)
            request.mediator = None
            request.copies = {}
            request.riders = []
            request.inbound = request.outbound = request.both = False

    # -- steps ---------------------------------------------------------------------------------

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        """Give every block of this step its rows, in one pass over the requests.

        What nnsight's does, which counts for each block that sits a step out every location that the model
        has: milliseconds a step, for requests that are over and not collected yet. Here that is counted when
        a request comes back.
        """
        interleaver = model.interleaver
        if spans == self._spans and not self.changed:
            self._same_step(interleaver)
            return
        counts = interleaver.counts
        self.step = step = self.step + 1
        scheduled: list[BlockMediator] = []
        new: list[BlockMediator] = []
        here: list[LabRequest] = []
        start = 0
        requests, waiting, stacks = self.requests, self._waiting, self.stacks
        if stacks is not None:
            stacks.begin_step()
        for row, (request_id, tokens) in enumerate(spans):
            # The blocks of a prompt that is not whole yet are not in this step; its rows are.
            request = None if request_id in waiting else requests.get(request_id)
            if request is not None:
                request.step = step
                here.append(request)
                if request.away is not None:
                    _came_back(request, counts)
                group = [start, tokens]
                for mediator in request.riders:
                    if type(mediator) is Seat:
                        assert stacks is not None
                        stacks.seat(mediator, group, row)
                        continue
                    worker = mediator.worker
                    if mediator.elsewhere:
                        # It may end its request from there.
                        mediator.batch_group, mediator.row = group, row
                        if mediator.exception is not None:
                            scheduled.append(mediator)
                    elif worker is None:
                        mediator.batch_group, mediator.row = group, row
                        scheduled.append(mediator)
                        new.append(mediator)
                    elif worker or mediator.caches or mediator.exception is not None:
                        # One that failed keeps its row, so that its request can be ended at every step.
                        mediator.batch_group, mediator.row = group, row
                        scheduled.append(mediator)
                    else:
                        mediator.batch_group = None
            start += tokens
        if stacks is not None:
            for seat, group, row in stacks.seated():
                mediator = stacks.alone(requests[seat.rider_of], seat)
                mediator.batch_group, mediator.row = group, row
                scheduled.append(mediator)
                new.append(mediator)
                scheduled.sort(key=lambda mediator: mediator.batch_group[0])
        if new:
            with aside_of(interleaver):  # once for all of them
                for mediator in new:
                    self.begin(mediator, interleaver)
        reached: dict[str, int] | None = None
        for request in requests.values():
            if request.step != step and request.away is None:
                reached = request.away = reached or dict(counts)
                for mediator in request.riders:
                    if type(mediator) is not Seat:
                        mediator.batch_group = None
        interleaver.batcher.total = start
        interleaver.mediators = self.scheduled = scheduled
        interleaver.reindex()
        self.nrows = len(spans)
        if self.stages is not None:
            self.stages.begin(here, start, self.nrows)
        # One token each: the next step, of the same requests, is this one again.
        again = start == len(spans) and not waiting and self.stages is None
        self._spans = spans if again else None
        self.changed = False

    def _same_step(self, interleaver: Any) -> None:
        """A step of the same requests in the same order, a token each, as the last one was."""
        alive = [m for m in self.scheduled if m.worker or m.caches or m.exception is not None]
        if len(alive) < len(self.scheduled):
            for mediator in self.scheduled:
                if not (mediator.worker or mediator.caches or mediator.exception is not None):
                    mediator.batch_group = None
        interleaver.batcher.total = self.nrows
        interleaver.mediators = self.scheduled = alive
        interleaver.reindex()
        if self.stacks is not None:
            self.stacks.same_step()

    def begin(self, mediator: BlockMediator, interleaver: Any) -> None:
        """Run a block up to what it waits for first."""
        try:
            mediator.start(interleaver)
        except Exception as exception:
            if not interleaver.defer_exceptions:
                raise
            mediator.exception = exception

    # -- the end of a request ------------------------------------------------------------------

    def harvest(self, finished: set[str]) -> None:
        """Note when these ended; their blocks are wound up when they are collected."""
        for request_id in finished:
            request = self.requests.get(request_id)
            if request is not None and request.began is not None:
                request.ended = self.steps.ran.mark()

    def record(self, mediator: BlockMediator) -> None:
        """Note which names were saved, and the error if there is one, on the block's own thread."""
        bound = {name: id(value) for name, value in mediator.lcls.items()}
        mediator.nnsight_saved = {name for name, mark in bound.items() if mark in mediator.marks}
        # A mark without a name is of a value that is gone; its id will be another value's.
        mediator.marks.intersection_update(bound.values())
        if mediator.exception is not None and mediator.lab_error is None:
            mediator.lab_error = self._capture(mediator, mediator.exception)

    def finish_dangling(self, mediator: Any, taps: frozenset[str] = frozenset(), quiet: bool = False) -> None:
        """End a block still parked when its request is over: an error, unless a loop outran the request."""
        if mediator is None or not mediator.alive or mediator.pending is None:
            return
        mediator.note_late()
        error, expected = dangling_unwind(mediator)
        try:
            with aside_of(mediator.interleaver):  # what the block does on its way out
                mediator.worker.throw(error)
        except greenlet_error:
            return  # another thread (Ray collects on its own): dropped without a word
        except BaseException as thrown:
            if expected is None or thrown is not error:
                mediator.lab_error = self._capture(mediator, thrown)

    def unflatten(self, model: Any) -> None:
        """After the forward: count what a replay reached, then go from tokens to rows."""
        if self.need in (Need.NOTHING, Need.TAPS) and model.interleaver.mediators:
            self.steps.passed(model.interleaver, self.need)
        super().unflatten(model)

    def record_saves(self) -> None:
        """At the end of a step: note errors, and begin to copy what ended blocks saved.

        What was saved is noted when a block is packed, not at each step: marks are the block's own here,
        and a block that loops over a thousand tokens would be looked through a thousand times.
        """
        for mediator in self.scheduled:
            failed = mediator.exception is not None and mediator.lab_error is None
            if failed or len(mediator.marks) > _MARKS:
                self.record(mediator)
        self.pack_ended()

    def pack_ended(self) -> None:
        """Begin to copy what blocks saved that have ended.

        Asked for as soon as the forward is launched too: sampling waits for the device, and hundreds of
        copies that are enqueued only after that keep it waiting.
        """
        if not self.ended:
            return
        with self.courier.together():
            while self.ended:
                mediator = self.ended.pop()
                request = self.requests.get(mediator.rider_of)
                if request is None:
                    continue  # collected or aborted meanwhile
                # An open cache goes on to see every step until the request is over.
                if self.answers(mediator) and mediator.parcel is None and not mediator.caches:
                    self.record(mediator)
                    self._pack(mediator, request)

    def collect(self, ids: set[str], outputs: dict[str, Any]) -> list[RequestSaves | ManySaves]:
        """Wind up the finished requests named by ``ids`` and take what their blocks saved.

        What is returned may be looked at after `settle` only.

        Args:
            ids: As the engine knows them.
            outputs: Engine id -> the finished record, for blocks parked on ``tracer.result``.
        """
        named = [(request, request.key(ids)) for request in self.requests.values() if request.named(ids)]
        for request, (engine_id, _) in named:
            self._wind_up(request, outputs.get(engine_id))
        over = [Over(request, engine_id, index, self._ran(request)) for request, (engine_id, index) in named]
        many: list[ManySaves] = []
        # Apart from that: nothing of a block runs any more.
        with self.courier.together():
            if self._answers and self.stacks is not None:
                many, parcels, done = pack_runs(over, self.courier)
                self.leaving += parcels
                over = [one for one in over if one.request.id not in done]
            saves = [self._saves(one.request) for one in over]
        alike, others = told(over, saves)
        self._figures.clear()
        for request, _ in named:
            self.leaving += [m.parcel for m in request.workers() if m.parcel is not None]
            self._forget(request)
        return [*many, *alike, *others]

    def _ran(self, request: LabRequest) -> StepFigures | None:
        """How a request's steps ran; the same object for those who share them."""
        if request.began is None:
            return None
        key = (id(request.began), id(request.ended), *request.names)
        found = self._figures.get(key)
        if found is None:
            names = {TRACE_BLOCK, *request.names.values()}
            found = self._figures[key] = self.steps.ran.since(request.began, request.ended, names)
        return found

    def settle(self) -> None:
        """Wait until everything that was collected is where its message says."""
        for parcel in self.leaving:
            parcel.settle()
        self.leaving.clear()  # what is copied from had to live until here

    def free(self, ids: set[str]) -> None:
        """Forget aborted requests, and give back what was already packed of them."""
        for request in list(self.requests.values()):
            if not request.named(ids):
                continue
            for mediator in request.workers():
                self.finish_dangling(mediator)
                if mediator.parcel is not None:
                    self.courier.take_back(mediator.parcel)
            self._forget(request)

    def _forget(self, request: LabRequest) -> None:
        if self.stacks is not None:
            self.stacks.leave(request)
        self.changed = True
        del self.requests[request.id]

    def _wind_up(self, request: LabRequest, output: Any) -> None:
        """End a request's blocks, which may run some more of them."""
        for mediator in request.workers():
            if output is not None:
                self.serve_result(mediator, output)
            self.finish_dangling(mediator)

    def _saves(self, request: LabRequest) -> list[BlockSaves]:
        """What a request's ended blocks saved, but for those that another rank answers for."""
        found = [BlockSaves(block, {}, error) for block, error in request.block_errors.items()]
        for registration_id, mediator in request.copies.items():
            name = request.names[registration_id]
            found += self._saves_of(mediator, request, name)
        if request.mediator is not None:
            found += self._saves_of(request.mediator, request, TRACE_BLOCK)
        return found

    def _saves_of(self, mediator: BlockMediator | Seat, request: LabRequest, block: str) -> list[BlockSaves]:
        if not self.answers(mediator):
            if mediator.parcel is not None:
                self.courier.take_back(mediator.parcel)
                mediator.parcel = None
            # Each stage of a pipeline names all blocks, so that they come together in their order.
            return [BlockSaves(block, {})] if self.stages is not None and self._answers else []
        if mediator.parcel is None:
            if isinstance(mediator, BlockMediator) and mediator.worker is not None:
                self.record(mediator)
            self._pack(mediator, request)
        parcel = mediator.parcel
        assert parcel is not None
        return [BlockSaves(block, parcel.values, mediator.lab_error or parcel.error, parcel.packed)]

    def _pack(self, mediator: BlockMediator | Seat, request: LabRequest) -> None:
        """Take what an ended block saved, and nothing else it holds."""
        values = mediator.values()
        mediator.parcel = self.courier.pack(values, allowed_bytes=request.allowed_bytes, share=request.share)

    def _capture(self, mediator: BlockMediator, exception: BaseException) -> WorkerError:
        requested = list(mediator.requested.items())
        if mediator.late is not None:  # last, which is how the kernel knows it
            requested.append(mediator.late)
        return errors.capture(
            exception,
            requested=requested,
            order=self.interleaver.counts if self.interleaver is not None else (),
        )


def _came_back(request: LabRequest, counts: Mapping[str, int]) -> None:
    """What was reached while a request sat steps out is not its own."""
    away, request.away = request.away or {}, None
    for mediator in request.riders:
        if mediator.worker is not None:
            base = mediator.counts_at_start
            for location, count in counts.items():
                base[location] = base.get(location, 0) + count - away.get(location, 0)
