"""One block running for one request: nnsight's mediator with private reads and a memory of what it asked.

What it asked, and at which line, is what an out-of-order error needs to print the order that
works; it is read off the parked greenlet's frame, which costs about a microsecond a read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any, Final

from greenlet import GreenletExit, getcurrent
from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.model_runners.GPUModelRunner import Request

from nnsight_lab.blocks.block import Block
from nnsight_lab.wire.messages import WorkerError
from nnsight_lab.worker.batching import LabBatcher, Visit
from nnsight_lab.worker.caches import plain
from nnsight_lab.worker.courier import Parcel
from nnsight_lab.worker.steps import is_module_location

_HERE: Final = nullcontext()
#: Reads remembered for error messages; a loop over tokens asks for the same few again and again.
_REMEMBERED = 64


def aside_of(interleaver: Any) -> AbstractContextManager[None]:
    """Where blocks compute (see `nnsight_lab.worker.aside`), to be entered."""
    return getattr(interleaver, "aside", None) or _HERE


class ExitedBlock(Exception):
    """A block left by an exception that is meant to end a process: here it ends the block."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(original)
        self.original = original
        self.__intervention_tb__ = original.__traceback__


class UnreadPrompt(RuntimeError):
    """A block asked for a module that it does not name; its prompt may have been in the cache."""


#: What is then said.
UNREAD = (
    "by a block that names no module, so its prompt may have been served from the cache and not run: write "
    "the module in the block itself, as model.model.layers[5]"
)


class BlockStopped(BaseException):
    """Raised in a block whose request was given up; not an `Exception`, which blocks catch."""


#: Requests that were given up while a block of theirs did not end (see `nnsight_lab.worker.stopping`): what
#: is left of their blocks does not run either. The latest ones named; empty but for that.
GIVEN_UP: set[str] = set()


def given_up(request_id: str) -> bool:
    """Whether a request of the worker's is one of those."""
    return bool(GIVEN_UP) and Request(request_id).named(GIVEN_UP)


class Marks(set[int]):
    """The ids of saved values that still live: without its value, an id is the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, Any] = {}

    def mark(self, value: Any) -> None:
        """Add a value, and take it out when it dies; one that cannot say so lives until the step ends."""
        mark, mine = id(value), weakref.ref(self)  # not itself: the values go with their block, at once

        def died(_: Any) -> None:
            marks = mine()
            if marks is not None:
                marks.discard(mark)

        self.add(mark)
        try:
            self._held[mark] = weakref.ref(value, died)
        except TypeError:
            self._held[mark] = value

    def intersection_update(self, *others: Iterable[Any]) -> None:
        super().intersection_update(*others)
        self._held = {mark: held for mark, held in self._held.items() if mark in self}


class BlockMediator(Mediator):
    """A block's greenlet.

    Attributes:
        block: What it runs; lives while it does.
        requested: Location -> the line that first asked for it, in order of asking.
        marks: The ids of the values it marked with ``.save()`` (see `nnsight_lab.pins.marks_by_block`).
        nnsight_saved: The names it saved, as of the last step.
        lab_error: What it raised, as data.
        parcel: What it saved, packed to leave; None until then.
        rider_of: The id of the request that it runs for.
        ended: Where it puts itself down once its code has run; None where nobody asks.
        late: What it was still waiting for, and the line, when its request was over.
        answers_only: Whether it was read to touch logits, samples and the result only (see
            `nnsight_lab.blocks.reach`): it may have no more of its prompt's rows than vLLM happens to run.
        to_the_end: Whether it is never broken off: others read from the cache what it writes.
        wide: What in it names a module that no replay serves (see `nnsight_lab.worker.steps`).
        visit: What it was given at a visit at which it asks for more; None where it does not.
        before: What was saved before it began, by one run for many (see `nnsight_lab.worker.stacks`).
        home: The pipeline stage on which it runs alone; None where it runs on all.
        spans: Whether it runs on all stages, which tell each other what it was given (see
            `nnsight_lab.worker.stages`).
        elsewhere: Whether it runs on another stage and not on this one.
        refusal: Why it may not run; empty where it may.
        cut: Of each stage on which it ended before its time, why.
        names: By which it may ask for modules; None where nobody wanted to know.
    """

    pending: Any

    def __init__(self, block: Block, code: CodeType, wide: str = "", home: int | None = None) -> None:
        super().__init__(code, block.glbls, dict(block.lcls))
        self.block = block
        self.presaved = set(block.presaved)
        self.requested: dict[str, int] = {}
        self.filename = code.co_filename
        self.marks = Marks()
        self.nnsight_saved: set[str] = set()
        self.lab_error: WorkerError | None = None
        self.parcel: Parcel | None = None
        self.rider_of = ""
        self.ended: list[BlockMediator] | None = None
        self.late: tuple[str, int] | None = None
        self.wide = wide
        self.visit: Visit | None = None
        self.answers_only = False
        self.to_the_end = False
        self.before: dict[str, Any] = {}
        self.home = home
        self.spans = self.elsewhere = False
        self.refusal = ""
        self.cut: dict[int, str] = {}
        self.names: frozenset[str] | None = None

    def start(self, interleaver: Any = None) -> None:
        with aside_of(interleaver):
            super().start(interleaver)

    def _run(self) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        super()._run()

    def switch(self, *args: Any) -> Any:
        if GIVEN_UP and not self.to_the_end and given_up(self.rider_of):
            raise ExitedBlock(BlockStopped("its request was given up"))
        worker = self.worker
        worker.parent = getcurrent()
        try:
            pending = worker.switch(*args)
        except (Exception, GreenletExit) as error:
            # As nnsight does: only the block's own frames, before the model's are added.
            if not hasattr(error, "__intervention_tb__"):
                error.__intervention_tb__ = error.__traceback__  # type: ignore[union-attr]
            raise
        except BaseException as error:
            # SystemExit and its like would go through the forward and end the engine for everybody.
            raise ExitedBlock(error) from None
        finally:
            if self.ended is not None and not self.alive:
                self.ended.append(self)
        provider = None if pending is None else pending.provider
        if provider is not None and provider not in self.requested and len(self.requested) < _REMEMBERED:
            self.requested[provider] = self._line()
        return pending

    def handle(self, provider: str, value: Any) -> Any:
        pending = self.pending
        if pending is None or pending.provider != provider:
            return value
        if self.answers_only and is_module_location(provider):
            self.pending = self.worker.throw(UnreadPrompt(f"{provider} was asked for {UNREAD}"))
            return value
        batcher = self.interleaver.batcher
        if not isinstance(batcher, LabBatcher):
            return super().handle(provider, value)
        visit, self.visit = self.visit or Visit(), None
        # A module called from inside a block serves its own locations while this one is open.
        outer, batcher.visit = batcher.visit, visit
        with aside_of(self.interleaver):
            try:
                return super().handle(provider, value)
            finally:
                batcher.visit.write_back(leaves=True)
                batcher.visit = outer

    def values(self) -> dict[str, Any]:
        """What it saved, by name, as of when that was last noted; nothing else that it holds."""
        names, scope = self.nnsight_saved | self.presaved, self.lcls
        # The block's own order of binding, which is the order a reader expects.
        saved = {name: plain(scope[name]) for name in scope if name in names}
        for name, value in self.before.items():
            saved[name] = [*value, *saved.get(name, [])]
        return saved

    def note_late(self) -> None:
        """Note what it waits for in vain: a location that it had asked for before may be it, too."""
        provider = None if self.pending is None else self.pending.provider
        if provider is not None:
            self.late = (provider, self._line())

    def _line(self) -> int:
        frame = self.worker.gr_frame if self.worker is not None else None
        line = 0
        while frame is not None:
            if frame.f_code.co_filename == self.filename:
                line = frame.f_lineno
            frame = frame.f_back
        return line
