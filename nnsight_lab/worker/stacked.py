"""One run of a block for many requests at once, on their rows stacked.

A block that is known to be a function of its rows (see `nnsight_lab.blocks.stackable`) is run by
`torch.vmap`'s own machinery: a batch dimension over the requests that no line of the block sees, so
``logits[0].max()`` is one kernel for all of them. Nothing is carried from one step to the next but the values
that were appended, which stay stacked, ``[request, ...]`` for each step, until they go home. So a request may
sit steps out, come back and end whenever it does: its values are those of the steps that it was in.

What is not certain is not kept: the first values of a block are held against those of the block run for one
request, and whatever fails, then or later, is run again request by request, from the beginning of the step.
Then the block's own error is raised in each, at its line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from nnsight_lab.blocks.stackable import Stackable
from nnsight_lab.worker.greenlets import BlockMediator

_functorch: Any = torch._C._functorch
#: What one kernel for many rows may add in another order than one for each: by dtype, as torch compares.
_CLOSE: Final = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class Unfit(Exception):
    """A block that cannot be run for many at once."""


class Seat:
    """One request's part of a run: what stands among its blocks in place of a mediator of its own.

    Attributes:
        template: The block (see `nnsight_lab.worker.requests.Template`).
        rider_of: The id of the request.
        run: What runs it; None until its request's first step.
        parcel: What it saved, packed to leave; None until then.
    """

    __slots__ = ("parcel", "rider_of", "run", "template")

    #: As mediators have them; a block that is run for many has no error of its own, and no cache.
    worker = None
    caches = ()
    exception = None
    lab_error = None
    pending = None
    alive = False

    def __init__(self, template: Any, rider_of: str) -> None:
        self.template = template
        self.rider_of = rider_of
        self.run: StackedRun | None = None
        self.parcel: Any = None

    def single(self) -> BlockMediator:
        """A run of the request's own from now on, which keeps what was saved before."""
        mediator: BlockMediator = self.template.mediator()
        mediator.before = self.values()
        return mediator

    def values(self) -> dict[str, Any]:
        """What was saved so far, by name."""
        return {} if self.run is None else self.run.values_of(self)


class _Stretch:
    """Steps in which the same requests took part.

    Attributes:
        places: Which row of a value is whose.
        values: By output, its value at each step: ``[request, ...]``.
    """

    def __init__(self, seats: Sequence[Seat], outputs: int) -> None:
        self.places = {id(seat): at for at, seat in enumerate(seats)}
        #: How many of those have not left.
        self.living = len(seats)
        self.values: list[list[torch.Tensor]] = [[] for _ in range(outputs)]


class StackedRun:
    """A run of a block for the requests that began it in one step.

    Args:
        block: What is run.
        seats: Whose it is.
    """

    def __init__(self, block: Stackable, seats: Iterable[Seat]) -> None:
        self.block = block
        self.seats = {id(seat): seat for seat in seats}
        for seat in self.seats.values():
            seat.run = self
        self.stretches: list[_Stretch] = []
        #: Who takes part in this step, by row; and whether that is as it was in the last one.
        self._present: list[Seat] = []
        self._rows: list[int] = []
        self._index: torch.Tensor | None = None
        self._waits = 0
        self._given: list[torch.Tensor] = []

    # -- steps ---------------------------------------------------------------------------------------

    def seat(self, present: list[Seat], rows: list[int], aside: AbstractContextManager[None]) -> None:
        """Say who takes part from this step on, by row, and in which rows; blocks compute ``aside``."""
        self._waits, self._given = 0, []
        if rows != self._rows:
            self._rows, self._index = rows, None
        # Seats are equal only where they are one.
        if not self.stretches or present != self._present:
            with aside:
                self._thin()
            self.stretches.append(_Stretch(present, len(self.block.outputs)))
        self._present = present

    def ready(self) -> None:
        """A step begins with the same requests in the same rows."""
        self._waits, self._given = 0, []

    @property
    def present(self) -> list[tuple[Seat, int]]:
        """Who takes part in this step, and the row."""
        return list(zip(self._present, self._rows, strict=True))

    @property
    def over(self) -> bool:
        """Whether nothing is left to run."""
        return not self.seats or (
            not self.block.loops and bool(self.stretches and self.stretches[0].values[0])
        )

    def waits_for(self, read: str) -> bool:
        """Whether it takes that value of this step."""
        reads = self.block.reads
        return self._waits < len(reads) and reads[self._waits] == read and not self.over

    def take(self, value: Any, total: int) -> None:
        """Take the rows of those who take part; a copy, for the model goes on with its own.

        Raises:
            Unfit: It has no row for each request.
        """
        if type(value) is not torch.Tensor or not value.ndim or value.shape[0] != total:
            raise Unfit
        rows = self._rows
        if rows[-1] - rows[0] + 1 == len(rows):
            own = value.narrow(0, rows[0], len(rows)).clone(memory_format=torch.contiguous_format)
        else:
            if self._index is None:
                self._index = torch.tensor(rows, device=value.device)
            own = value.index_select(0, self._index)
        self._given.append(own.unsqueeze(1))
        self._waits += 1

    @property
    def given(self) -> list[tuple[str, torch.Tensor]]:
        """What it was given in this step: ``[request, 1, ...]``."""
        return list(zip(self.block.reads, self._given, strict=False))

    def go(self) -> None:
        """Run the block, if all that it reads is there.

        Raises:
            Exception: It cannot be run so; nothing of this step was kept.
        """
        block, given = self.block, self._given
        if len(given) < len(block.reads):
            return
        if not block.proven:
            _prove(block, given)
        values = _of_all(block, given)
        stretch = self.stretches[-1]
        if stretch.values[0] and any(
            value.shape != kept[-1].shape or value.dtype is not kept[-1].dtype
            for value, kept in zip(values, stretch.values, strict=True)
        ):
            stretch = _Stretch(self._present, len(values))
            self.stretches.append(stretch)
        for value, kept in zip(values, stretch.values, strict=True):
            kept.append(value)

    # -- what was saved ------------------------------------------------------------------------------

    @property
    def kept(self) -> list[torch.Tensor]:
        """All that it holds for its requests."""
        return [value for stretch in self.stretches for values in stretch.values for value in values]

    def steps_of(self, seat: Seat) -> tuple[int, ...]:
        """In which of its stretches of steps a request took part."""
        return tuple(at for at, stretch in enumerate(self.stretches) if id(seat) in stretch.places)

    def values_of(self, seat: Seat) -> dict[str, Any]:
        """What one request's run has saved so far, as the block itself would have it."""
        found: dict[str, Any] = {name: [] for name, listed in self.block.names.items() if listed}
        for stretch in self.stretches:
            at = stretch.places.get(id(seat))
            if at is None:
                continue
            for step in zip(*stretch.values, strict=True):
                for name, value in zip(self.block.outputs, step, strict=True):
                    if self.block.names[name]:
                        found[name].append(value[at])
                    else:
                        found[name] = value[at]
        return {name: found[name] for name in self.block.names if name in found}

    def stacked(self, seats: Sequence[Seat]) -> dict[str, torch.Tensor] | None:
        """What several requests saved, ``[request, step, ...]``, or ``[request, ...]`` for what is no list.

        Returns:
            By name; None where their values are not of one kind, or there are none.
        """
        block = self.block
        if len(set(block.outputs)) != len(block.outputs):
            return None  # two values a step in one list
        found: dict[str, list[torch.Tensor]] = {name: [] for name in block.outputs}
        for stretch in self.stretches:
            places = [stretch.places.get(id(seat)) for seat in seats]
            taken = [at for at in places if at is not None]
            if not taken or not stretch.values[0]:
                continue
            if len(taken) < len(places):
                return None  # they were not in the same steps
            for name, kept in zip(block.outputs, stretch.values, strict=True):
                steps = torch.stack(kept, 1) if len(kept) > 1 else kept[0].unsqueeze(1)
                if len(taken) < steps.shape[0] or taken != list(range(len(taken))):
                    steps = steps.index_select(0, torch.tensor(taken, device=steps.device))
                found[name].append(steps)
        stacked: dict[str, torch.Tensor] = {}
        for name, listed in block.names.items():
            parts = found.get(name)
            if not parts or len({(part.dtype, part.shape[2:]) for part in parts}) > 1:
                return None
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            stacked[name] = whole if listed else whole[:, 0]
        return stacked

    def leave(self, seat: Seat) -> None:
        """Forget a request."""
        if self.seats.pop(id(seat), None) is not None:
            for stretch in self.stretches:
                stretch.living -= id(seat) in stretch.places

    def _thin(self) -> None:
        """Forget what only those had who left, where they were most."""
        kept: list[_Stretch] = []
        for stretch in self.stretches:
            if not stretch.living:
                continue
            if stretch.living * 2 <= len(stretch.places):
                stretch = _thinned(stretch, [s for mark, s in self.seats.items() if mark in stretch.places])
            kept.append(stretch)
        self.stretches = kept


def _thinned(stretch: _Stretch, living: Sequence[Seat]) -> _Stretch:
    """The same steps with the values of those who are left."""
    thinner = _Stretch(living, len(stretch.values))
    rows = [stretch.places[id(seat)] for seat in living]
    for kept, values in zip(thinner.values, stretch.values, strict=True):
        if values:
            index = torch.tensor(rows, device=values[0].device)
            kept.extend(value.index_select(0, index) for value in values)
    return thinner


def _of_all(block: Stackable, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The block's outputs for many requests: ``[request, ...]``."""
    count = given[0].shape[0]
    level = _functorch._vmap_increment_nesting(count, "error")
    try:
        found = block.body(*(_functorch._add_batch_dim(one, 0, level) for one in given))
        values = []
        for value in found:
            if type(value) is not torch.Tensor:
                raise Unfit
            value = _functorch._remove_batch_dim(value, level, count, 0)
            # A piece of what was read would keep all of that; one value for many is not each one's own.
            if not value.is_contiguous() or value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone(memory_format=torch.contiguous_format)
            values.append(value)
        return values
    finally:
        _functorch._vmap_decrement_nesting()


def _prove(block: Stackable, given: Sequence[torch.Tensor]) -> None:
    """Hold the block's first values for many against what it gives for one.

    Raises:
        Unfit: They differ.
    """
    loops = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)  # where a rule is missing it would be a loop, and slow
    try:
        found = torch.vmap(block.body, randomness="error")(
            *given
        )  # the public way, which readies what it needs
        values = _of_all(block, given)
        for at in {0, given[0].shape[0] - 1}:
            for one, other, value in zip(block.body(*(g[at] for g in given)), found, values, strict=True):
                same = (
                    value[at].shape == one.shape and value.dtype is one.dtype and value.device == one.device
                )
                if not same or not _close(one, value[at]) or not _close(one, other[at]):
                    raise Unfit
    except Exception:
        block.unfit = True
        raise
    finally:
        _functorch._set_vmap_fallback_enabled(loops)
    block.proven = True


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    rtol = _CLOSE.get(one.dtype)
    if rtol is None:
        return torch.equal(one, two)
    return torch.allclose(one, two, rtol=rtol, atol=rtol, equal_nan=True)
