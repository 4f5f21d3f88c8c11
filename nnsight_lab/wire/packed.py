"""Values whose tensors stayed in shared memory: the tree travels, and where each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nnsight_lab.wire.extent import ALIGN, Extent, Packed, aligned
from nnsight_lab.wire.flatten import Handle, flatten
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.limits import extent as extent_of
from nnsight_lab.wire.tensors import DTYPES, NAMES
from nnsight_lab.wire.unflatten import unflatten

#: A run of so many tensors or more, each of so few bytes or less, is moved as one.
_RUN = 4
_SMALL = 4096
#: Dtypes that torch stacks on every device.
_STACKED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    }
)


@dataclass(frozen=True)
class Layout:
    """A value about to be packed: its tree, its tensors, and where each will go."""

    tree: str
    sources: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, value: object, *, name: str) -> Layout:
        """Take ``value`` apart; nothing is copied.

        Raises:
            CannotTravel: As the codec would, naming the place.
        """
        sources: list[torch.Tensor] = []
        offsets: list[int] = []
        end = 0

        def put(tensor: torch.Tensor) -> Handle:
            nonlocal end
            sources.append(tensor)
            offsets.append(end)
            end += aligned(tensor.numel() * tensor.element_size())
            return len(sources) - 1

        node = flatten(value, put, name=name)
        return cls(json.dumps(node, separators=(",", ":")), tuple(sources), tuple(offsets), end)

    def copy_into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the tensors to their places in ``memory``, bytes ``[byte]``, uint8."""
        for first, last in _alike(self.sources):
            if last - first > 1:
                _copy_together(self.sources[first:last], memory[self.offsets[first] :], non_blocking)
                continue
            source, offset = self.sources[first], self.offsets[first]
            count = source.numel() * source.element_size()
            if count:
                target = memory[offset : offset + count].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=non_blocking)

    def packed(self, extent: Extent) -> Packed:
        """The message that says where it all lies."""
        specs = [
            (offset, NAMES[source.dtype], tuple(source.shape))
            for source, offset in zip(self.sources, self.offsets, strict=True)
        ]
        return Packed(self.tree, extent, json.dumps(specs, separators=(",", ":")))


def _alike(sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Where runs of small tensors of one kind begin and end, and every other tensor by itself."""
    first = 0
    while first < len(sources):
        last = first + 1
        one = sources[first]
        if 0 < one.nbytes <= _SMALL and one.dtype in _STACKED:
            kind = (one.dtype, one.device, one.shape)
            while (
                last < len(sources)
                and (sources[last].dtype, sources[last].device, sources[last].shape) == kind
            ):
                last += 1
        if last - first < _RUN:
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

    return unflatten(node, get)


def _views(memory: torch.Tensor, specs: list[Any]) -> list[torch.Tensor]:
    """A tensor for each description; a run of small ones of one kind is one view, taken apart."""
    views: list[torch.Tensor] = []
    typed: dict[str, torch.Tensor] = {}
    while len(views) < len(specs):
        first = len(views)
        one = _view(memory, specs[first], typed)
        apart = aligned(one.nbytes)
        last = first + 1
        if 0 < one.nbytes <= _SMALL:
            offset, *kind = specs[first]
            while last < len(specs) and specs[last] == [offset + (last - first) * apart, *kind]:
                last += 1
        if last - first < _RUN:
            views.append(one)
            continue
        _view(memory, specs[last - 1], typed)  # the last lies in memory, so all do
        count = last - first
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
