"""Values whose tensors stayed in shared memory: the tree travels, and where each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nnsight_lab.wire.extent import ALIGN, Extent, Packed, aligned
from nnsight_lab.wire.flatten import Handle, flatten
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.limits import extent as extent_of
from nnsight_lab.wire.runs import RUN, SMALL, STACKED
from nnsight_lab.wire.tensors import DTYPES, NAMES
from nnsight_lab.wire.unflatten import unflatten


@dataclass(frozen=True)
class Layout:
    """A value about to be packed.

    Attributes:
        tree: Its tree.
        sources: Its tensors.
        offsets: Where each will go.
        nbytes: What they take.
        runs: Of lists of small tensors of one kind: their first's index, and the next after their last.
    """

    tree: str
    sources: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    nbytes: int
    runs: Mapping[int, int]

    @classmethod
    def of(cls, value: object, *, name: str) -> Layout:
        """Take ``value`` apart; nothing is copied.

        Raises:
            CannotTravel: As the codec would, naming the place.
        """
        sources: list[torch.Tensor] = []
        offsets: list[int] = []
        runs: dict[int, int] = {}
        end = 0

        def put(tensor: torch.Tensor) -> Handle:
            nonlocal end
            sources.append(tensor)
            offsets.append(end)
            end += aligned(tensor.numel() * tensor.element_size())
            return len(sources) - 1

        def put_run(tensors: Sequence[torch.Tensor]) -> int:
            nonlocal end
            first, apart = len(sources), aligned(tensors[0].nbytes)
            runs[first] = first + len(tensors)
            sources.extend(tensors)
            offsets.extend(range(end, end + len(tensors) * apart, apart))
            end += len(tensors) * apart
            return first

        node = flatten(value, put, name=name, put_run=put_run)
        return cls(json.dumps(node, separators=(",", ":")), tuple(sources), tuple(offsets), end, runs)

    def copy_into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the tensors to their places in ``memory``, bytes ``[byte]``, uint8."""
        for first, last in self._stretches():
            if last - first > 1:
                _copy_together(self.sources[first:last], memory[self.offsets[first] :], non_blocking)
                continue
            source, offset = self.sources[first], self.offsets[first]
            count = source.numel() * source.element_size()
            if count:
                target = memory[offset : offset + count].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=non_blocking)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """What is copied at once: runs, those that nobody noted too, and every other tensor by itself."""
        at = 0
        for first, last in [*self.runs.items(), (len(self.sources), 0)]:
            yield from ((at + a, at + b) for a, b in _alike(self.sources[at:first]))
            if last:
                yield first, last
            at = last

    def packed(self, extent: Extent) -> Packed:
        """The message that says where it all lies."""
        specs: list[Any] = []
        at = 0
        while at < len(self.sources):
            source, last = self.sources[at], self.runs.get(at)
            spec = (self.offsets[at], NAMES[source.dtype], tuple(source.shape))
            specs.append(spec if last is None else (*spec, last - at))
            at = at + 1 if last is None else last
        return Packed(self.tree, extent, json.dumps(specs, separators=(",", ":")))


def _alike(sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Where runs of small tensors of one kind begin and end, and every other tensor by itself."""
    first = 0
    while first < len(sources):
        last = first + 1
        one = sources[first]
        if 0 < one.nbytes <= SMALL and one.dtype in STACKED:
            kind = (one.dtype, one.device, one.shape)
            while (
                last < len(sources)
                and (sources[last].dtype, sources[last].device, sources[last].shape) == kind
            ):
                last += 1
        if last - first < RUN:
            yield from ((each, each + 1) for each in range(first, last))
        else:
            yield first, last
        first = last


def _copy_together(sources: Sequence[torch.Tensor], memory: torch.Tensor, non_blocking: bool) -> None:
    """Copy a run of tensors of one kind in one go: a value per token would be a copy of some bytes each."""
    one = sources[0]
    apart = aligned(one.nbytes)
    rows = torch.stack(tuple(sources)).view(len(sources), -1)
    if apart != one.nbytes:
        padded = rows.new_zeros((len(sources), apart // one.element_size()))
        padded[:, : rows.shape[1]] = rows
        rows = padded
    target = memory[: len(sources) * apart].view(one.dtype).view(rows.shape)
    target.copy_(rows, non_blocking=non_blocking)


def unpack(packed: Packed, open_extent: Callable[[Extent], torch.Tensor]) -> Any:
    """Rebuild a packed value; its tensors are views of the opened memory.

    Raises:
        WireError: When the message is malformed or points outside its piece.
    """
    try:
        node, specs = json.loads(packed.tree), json.loads(packed.tensors)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the message's tree is not JSON: {error}") from None
    if type(specs) is not list:
        raise WireError("the message's tensors are no list")
    memory = open_extent(packed.extent) if specs else torch.empty(0, dtype=torch.uint8)
    views = _views(memory, specs)

    def get(handle: Handle) -> torch.Tensor:
        if type(handle) is not int or not 0 <= handle < len(views):
            raise WireError(f"there is no tensor {handle!r} in the message")
        return views[handle]

    def get_run(first: int, count: int) -> list[torch.Tensor]:
        if not 0 <= first <= first + count <= len(views):
            raise WireError(f"there are no {count!r} tensors from {first!r} on in the message")
        return views[first : first + count]

    return unflatten(node, get, get_run)


def _views(memory: torch.Tensor, specs: list[Any]) -> list[torch.Tensor]:
    """A tensor for each description; a run of small ones of one kind is one view, taken apart."""
    views: list[torch.Tensor] = []
    typed: dict[str, torch.Tensor] = {}
    at = 0
    while at < len(specs):
        spec = specs[at]
        count = 1
        if type(spec) is list and len(spec) == 4:
            *spec, count = spec
            if type(count) is not int or count < 1:
                raise WireError(f"the message has a run of {count!r} tensors")
        one = _view(memory, spec, typed)
        at += 1
        offset, name, shape = spec
        apart = aligned(one.nbytes)
        if count == 1 and 0 < one.nbytes <= SMALL:
            while at < len(specs) and specs[at] == [offset + count * apart, name, shape]:
                at, count = at + 1, count + 1
        if count == 1:
            views.append(one)
            continue
        if not one.nbytes:
            raise WireError("the message has a run of tensors of nothing")
        _view(memory, [offset + (count - 1) * apart, name, shape], typed)  # the last lies there, so all do
        run = memory[offset : offset + (count - 1) * apart + one.nbytes]
        every = run.as_strided((count, one.nbytes), (apart, 1), run.storage_offset()).view(one.dtype)
        views += every.view(count, *one.shape).unbind(0)
    return views


def _view(memory: torch.Tensor, spec: object, typed: dict[str, torch.Tensor]) -> torch.Tensor:
    """One tensor over ``memory``; ``typed`` has the whole of it in each dtype that was met before.

    A slice of the memory in its dtype would be three calls of torch for each of hundreds; this is one.
    """
    if type(spec) is not list or len(spec) != 3:
        raise WireError(f"the message describes a tensor as {spec!r:.80}")
    offset, name, shape = spec
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None or type(offset) is not int or offset < 0 or offset % ALIGN:
        raise WireError(f"a tensor of dtype {name!r} and shape {shape!r} at {offset!r} cannot be")
    sizes, count = extent_of(shape, dtype.itemsize)
    if offset + count > memory.numel():
        raise WireError(f"a tensor of {count} bytes at {offset} does not lie in {memory.numel()} bytes")
    if count == 0:
        return torch.empty(sizes, dtype=dtype)
    whole = typed.get(name)
    if whole is None:
        # The widest dtype divides ALIGN, and what is past its last multiple holds no tensor's end.
        whole = typed[name] = memory[: memory.numel() // ALIGN * ALIGN].view(dtype)
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return whole.as_strided(sizes, strides[::-1], offset // dtype.itemsize)
