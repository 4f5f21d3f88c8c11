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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nnsight.intervention.interleaver import Interleaver
from nnsight.intervention.source import NO_SKIP
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.util import apply


@dataclass
class Served:
    """Rows of the model's buffer, and the copy of them that a block was given.

    Attributes:
        version: The copy's version counter when it last agreed with the rows.
        turn: When that was, in writes of the visit.
    """

    rows: torch.Tensor
    copy: torch.Tensor
    version: int
    turn: int


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
        copy = _private(rows)
        self.given.append(Served(rows, copy, copy._version, self.turn))
        return copy

    def write_back(self) -> None:
        """Land the copies that were changed in the model's buffer.

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
                rows.copy_(copy)
            self.turn += 1
            self.written[rows.data_ptr()] = self.turn
            served.version, served.turn = copy._version, self.turn

    def forget(self) -> None:
        """What was given so far is replaced by an assignment: later changes of it mean nothing."""
        self.given.clear()
        self.written.clear()


def _private(rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return rows.clone(memory_format=torch.contiguous_format)


class LabBatcher(VLLMBatcher):
    """nnsight's row arithmetic, with private copies and partial skips."""

    def __init__(self, envoy: Any, kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(envoy, kwargs)
        self.clone_reads = False  # private copies make nnsight's own switch pointless
        self.visit: Visit | None = None
        #: Replacements of a skip that does not cover the whole step: ``(group, value)``.
        self.partial_skip: list[tuple[list[int], Any]] = []

    def narrow(self, value: Any, group: list[int] | None) -> Any:
        """The rows of ``group`` as a private copy, with what the block changed before."""
        if group is None:
            return value
        visit = self.visit
        if visit is not None:
            visit.write_back()

        def private(tensor: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self._narrow_tensor(tensor, group)
            if rows is tensor:
                return tensor  # no token axis: not a buffer of this step
            return _private(rows) if visit is None else visit.copy(rows)

        return apply(value, private, torch.Tensor)

    def widen(self, full: Any, group: list[int] | None, edited: Any) -> Any:
        """Splice an assigned value in, after what the block wrote in place before it."""
        if self.visit is not None:
            self.visit.write_back()
            self.visit.forget()
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
        if location not in self.parked and location not in self.observers:
            self.counts[location] = self.counts.get(location, 0) + 1
            return
        super().replay(location, live)

    def handle(self, provider: str, value: Any) -> Any:
        if self._recording is not None:
            self._recording.reached(provider, value)
            return value
        path, _, side = provider.rpartition(".")
        if self.hushed and side in ("input", "output", "skip") and not (self.stops and provider in self.taps):
            return value
        if side == "output" and self.spliced and path in self.spliced:
            for group, replacement in self.spliced.pop(path):
                value = self.batcher.widen(value, group, replacement)
        value = Interleaver.handle(self, provider, value)
        batcher = self.batcher
        if batcher is not None and batcher.partial_skip:
            self.spliced[path] = batcher.partial_skip
            batcher.partial_skip = []
        return value
