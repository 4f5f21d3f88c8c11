"""Serve a block its own rows as a private copy, written back when the block yields.

vLLM's fused kernels overwrite activation buffers in place, so a *view* of one, which is what
nnsight serves, holds a later layer's data once the block has moved on: an unclone'd ``.save()``
was off by 3.5 on an H200, silently. nnsight's own cure (``NNSIGHT_VLLM_CLONE_READS``) loses every
in-place edit, silently too. Here a block reads a copy of its rows, edits it as it likes, and the
copy goes back into the model's buffer when the block parks elsewhere or ends, if it was changed:
what it keeps is its own, and what it wrote reaches the model.

`skip` of one request while others share the step is the second fault mended here: stock nnsight
raises inside the forward, which ends the engine for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import NO_SKIP
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.util import apply

from nnsight_lab.blocks.pure import READS

_HERE: Final = nullcontext()
#: Where blocks are served that run for many requests at once -> what is read there.
READ_AT: Final = {f"model.{read}": read for read in READS}
#: A piece that is kept keeps the whole copy: only what a step of generation has is copied together.
COMMON_BYTES = 4 << 20


@dataclass
class Served:
    """Rows of the model's buffer, and the copy of them that a block was given.

    Attributes:
        version: The copy's version counter when it last agreed with the rows.
        turn: When that was, in writes of the visit.
        common: What the copy is a piece of; None for one of its own.
    """

    rows: torch.Tensor
    copy: torch.Tensor
    version: int
    turn: int
    common: Common | None = None


class Common:
    """One copy of a tensor for all blocks that read it at one visit, each its own rows.

    A copy is a kernel, and a step of generation with a hundred blocks would launch hundreds for one row
    each, there and back. Only the first to read some rows is given a piece of this: what a block wrote is
    the next one's, if they share a request.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.copy = private(value)
        #: Where rows begin in memory -> they, or which they are, and their piece; changed and not landed yet.
        self._changed: dict[int, tuple[torch.Tensor | Sequence[int], torch.Tensor]] = {}
        self._whole = True

    def split(self, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """The copy in pieces, each with a version counter of its own."""
        with torch._C._InferenceMode(False):
            return self.copy.unsafe_split_with_sizes(sizes)

    def changed(self, rows: torch.Tensor, piece: torch.Tensor) -> None:
        """A block has changed its piece."""
        self._changed[rows.data_ptr()] = (rows, piece)

    def changed_first(self, group: Sequence[int], piece: torch.Tensor) -> None:
        """The same of rows of the first axis, looked up only when they must be; of a resized one nothing."""
        start, size = group
        value = self.value
        if piece.shape == (size, *value.shape[1:]):
            self._changed[value.data_ptr() + start * value.stride(0) * value.itemsize] = (group, piece)

    def land(self, rows: torch.Tensor) -> None:
        """Write these rows back now, if they were changed: somebody is about to read or replace them."""
        # From here on the copy may be older than what is done to these rows.
        self._whole = False
        found = self._changed.pop(rows.data_ptr(), None)
        if found is not None:
            rows.copy_(found[1])

    def land_all(self) -> None:
        """Write back what was changed: at once, where nothing was written beside it."""
        if self._whole and len(self._changed) > 1:
            self.value.copy_(self.copy)
        else:
            for where, piece in self._changed.values():
                rows = where if isinstance(where, torch.Tensor) else self.value.narrow(0, *where)
                rows.copy_(piece)
        self._changed.clear()


class Commons:
    """The common copies of one visit."""

    def __init__(self) -> None:
        self._by_value: dict[int, Common] = {}
        self._taken: set[tuple[int, int]] = set()

    def first(self, value: torch.Tensor, starts: Iterable[int]) -> Common:
        """The common copy of ``value``, of which the requests that begin there are given their rows."""
        self._taken.update((id(value), start) for start in starts)
        found = self._by_value[id(value)] = Common(value)
        return found

    def of(self, value: torch.Tensor, rows: torch.Tensor, group: list[int]) -> Common | None:
        """The common copy of ``value``; None where these rows were given before, or it holds too much."""
        common = self._by_value.get(id(value))
        taken = (id(value), group[0])
        if taken in self._taken or value.nbytes > COMMON_BYTES:
            if common is not None:
                common.land(rows)
            return None
        self._taken.add(taken)
        if common is None:
            common = self._by_value[id(value)] = Common(value)
        return common

    def land_all(self) -> None:
        """Write back what was changed."""
        for common in self._by_value.values():
            common.land_all()

    def copies(self) -> list[torch.Tensor]:
        """The copies."""
        return [common.copy for common in self._by_value.values()]


class Visit:
    """The copies one block was given at one location, until it yields.

    Every read gives a copy of its own, so that what was saved before an edit of the same location
    stays what it was. The copies are ordinary tensors, not inference tensors, for the version counter:
    only a copy that the block changed is written back.
    """

    def __init__(self) -> None:
        self.given: list[Served] = []
        self.turn = 0
        #: Where rows begin -> the turn in which they were last written.
        self.written: dict[int, int] = {}

    def copy(self, rows: torch.Tensor) -> torch.Tensor:
        """A private copy of ``rows``."""
        return self.give(rows, private(rows), None)

    def give(self, rows: torch.Tensor, copy: torch.Tensor, common: Common | None) -> torch.Tensor:
        """Note a copy of ``rows`` that a block is given."""
        self.given.append(Served(rows, copy, copy._version, self.turn, common))
        return copy

    def write_back(self, *, leaves: bool = False) -> None:
        """Land the copies that were changed in the model's buffer.

        Args:
            leaves: The block goes on elsewhere: what lies in a common copy may wait for the others.

        Raises:
            RuntimeError: When two reads of one value were both changed, the earlier one last: it does
                not have the later one's change, and would undo it.
        """
        for served in self.given:
            copy, rows = served.copy, served.rows
            if copy._version == served.version:
                continue
            if self.written.get(rows.data_ptr(), -1) > served.turn:
                raise RuntimeError(
                    "two reads of the same value were both edited, the earlier one last, which would undo "
                    "the other edit: read the value once and edit that"
                )
            # A block may resize or retype its own copy; the model's rows stay what they are.
            if copy.shape == rows.shape:
                if served.common is None:
                    rows.copy_(copy)
                else:
                    served.common.changed(rows, copy)
                    if not leaves:
                        served.common.land(rows)
            self.turn += 1
            self.written[rows.data_ptr()] = self.turn
            served.version, served.turn = copy._version, self.turn

    def forget(self) -> None:
        """What was given so far is replaced by an assignment: later changes of it mean nothing."""
        self.given.clear()
        self.written.clear()


def private(rows: torch.Tensor) -> torch.Tensor:
    """A copy of rows that counts what is written to it."""
    # torch.inference_mode(False) without its Python: this runs for every block at every step.
    with torch._C._InferenceMode(False):
        return rows.detach().clone(memory_format=torch.contiguous_format)


class LabBatcher(VLLMBatcher):
    """nnsight's row arithmetic, with private copies and partial skips."""

    def __init__(self, envoy: Any, kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(envoy, kwargs)
        self.clone_reads = False  # private copies make nnsight's own switch pointless
        self.visit: Visit | None = None
        #: Where several blocks read at this visit.
        self.commons: Commons | None = None
        #: Replacements of a skip that does not cover the whole step: ``(group, value)``.
        self.partial_skip: list[tuple[list[int], Any]] = []

    def narrow(self, value: Any, group: list[int] | None) -> Any:
        """The rows of ``group`` as a private copy, with what the block changed before."""
        if group is None:
            return value
        visit = self.visit
        if visit is not None:
            visit.write_back()

        def own(tensor: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self._narrow_tensor(tensor, group)
            if rows is tensor:
                return tensor  # no token axis: not a buffer of this step
            if visit is None:
                return private(rows)
            common = None if commons is None else commons.of(tensor, rows, group)
            if common is None:
                return visit.copy(rows)
            # Another tensor over the same memory, with a version counter of its own.
            return visit.give(rows, self._narrow_tensor(common.copy, group).data, common)

        commons = self.commons
        return apply(value, own, torch.Tensor)

    def widen(self, full: Any, group: list[int] | None, edited: Any) -> Any:
        """Splice an assigned value in, after what the block wrote in place before it."""
        if self.visit is not None:
            self.visit.write_back()
            self.visit.forget()
        if self.commons is not None:
            # The value is replaced by another: pieces of this one are no longer anybody's rows.
            self.commons.land_all()
            self.commons = None
        return super().widen(full, group, edited)

    def assemble_skip(self, running: Any) -> Any:
        """The combined skip, or "run the module" with the replacements kept for its output."""
        try:
            return super().assemble_skip(running)
        except ValueError:
            self.partial_skip = list(running.parts)
            return NO_SKIP


class LabInterleaver(VLLMInterleaver):
    """nnsight's handoff, with a skip of some rows spliced into the module's own output.

    nnsight's own serves taps only, on every step of an engine that has some; here a step that runs module
    by module serves every location, and one that replays serves taps (see `nnsight_lab.worker.steps`).

    Attributes:
        interleaving: Nnsight's: whether a step is under way.
        busy: Nnsight's: whether a module has anybody to hand over to.
        stops: Whether this step's graph stops at taps.
        hushed: Set where a replay is acted out without a graph: modules run, and only taps may serve.
        together: Serves all blocks of a visit that can be (see `nnsight_lab.worker.together`); None for none.
        aside: The stream of blocks (see `nnsight_lab.worker.aside`); None on a CPU.
        stacks: Blocks that run for many requests at once (see `nnsight_lab.worker.stacks`); None for none.
        stages: The pipeline's (see `nnsight_lab.worker.stages`); None where there is one stage.
        passed_over: Locations of this stage that another one serves.
    """

    interleaving: bool
    busy: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepare()

    def prepare(self) -> None:
        """Set what nnsight's own has not; the class may be given to one that was made before."""
        self.spliced: dict[str, list[tuple[list[int], Any]]] = {}
        self.stops = False
        self.hushed = False
        self.together: Any = None
        self.aside: Any = None
        self.stacks: Any = None
        self.stages: Any = None
        self.passed_over: frozenset[str] = frozenset()
        self._recording: Any = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record taps into the graph that is being captured."""
        from nnsight_lab.worker.graphs import Recording  # CUDA's alone

        before = self.interleaving, self.busy
        self.interleaving = self.busy = True
        self._recording = Recording(self.taps, self.replay)
        try:
            yield
        finally:
            self._recording = None
            self.interleaving, self.busy = before

    def replay(self, location: str, live: Any) -> None:
        """Serve a tap from a replayed graph."""
        if self._recording is not None or not self.interleaving:
            return
        watches = self.stages is not None and self.stages.watches
        if location not in self.parked and location not in self.observers and not watches:
            self.counts[location] = self.counts.get(location, 0) + 1
            return
        super().replay(location, live)

    def _serve(self, batcher: LabBatcher, provider: str, value: Any) -> Any:
        outer, commons = batcher.commons, Commons()
        cut = self.fragmented(provider)
        # What is put together is cut again within the visit, and by then everything must have landed.
        batcher.commons = None if cut else commons
        try:
            given, asks_more = value, True
            if self.together is not None and provider not in self.observers and not cut:
                asks_more = self.together.serve(self, provider, value, commons)
            if asks_more:
                value = Interleaver.handle(self, provider, value)
            else:  # nobody is left: the visit is counted, as nnsight does
                self.counts[provider] = self.counts.get(provider, 0) + 1
            commons.land_all()
            if self.together is not None:
                self.together.learn(provider, commons)
            if asks_more and self.aside is not None:
                self.aside.written()
                if value is not given or batcher.partial_skip:
                    self.aside.hand_over((value, [replacement for _, replacement in batcher.partial_skip]))
        finally:
            batcher.commons = outer
        return value

    def fragmented(self, provider: str) -> bool:
        """Whether this rank has a piece only of what is there."""
        fragments = self.fragments
        return fragments is not None and bool(fragments.enabled and fragments.fragmented(provider))

    def handle(self, provider: str, value: Any) -> Any:
        if self._recording is not None:
            self._recording.reached(provider, value)
            return value
        path, _, side = provider.rpartition(".")
        if self.hushed and side in ("input", "output", "skip") and not (self.stops and provider in self.taps):
            return value
        if provider in self.passed_over:
            return value
        cut = self.fragments is not None and self.fragments.enabled
        if side == "output" and self.spliced and path in self.spliced:
            value = self._spliced(provider, value, self.spliced.pop(path))
        batcher = self.batcher
        if provider in READ_AT and self.stacks is not None and self.stacks.wait_for(provider):
            with self.aside or _HERE:
                self.stacks.serve(self, provider, value)
        told = None
        if self.stages is not None and self.stages.listening:
            told = self.stages.note(self, provider, value)
        if cut:
            self.fragments.admit(self, provider, value)
        if provider in self.parked and batcher is not None:
            with self.aside or _HERE:
                value = self._serve(batcher, provider, value)
        else:
            value = Interleaver.handle(self, provider, value)
        if told is not None:
            self.stages.failed(told)
        if batcher is not None and batcher.partial_skip:
            self.spliced[path] = batcher.partial_skip
            batcher.partial_skip = []
        if cut and side == "skip" and value is not NO_SKIP and ".source." in path:
            value = self.fragments.skipped(provider, value)
        return value

    def _spliced(self, provider: str, value: Any, parts: list[tuple[list[int], Any]]) -> Any:
        """A module's own output with the rows of skips in it: in the whole, where a rank has a piece."""
        undo = None
        if self.fragmented(provider):
            value, undo = self.fragments.whole(provider, value)
        for group, replacement in parts:
            value = self.batcher.widen(value, group, replacement)
        return value if undo is None else undo(value)

    def whole(self, provider: str, value: Any) -> Any:
        """A value as blocks are given it, of which this rank may have a piece."""
        return self.fragments.whole(provider, value)[0] if self.fragmented(provider) else value
