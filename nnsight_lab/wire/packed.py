"""Values whose tensors stayed in shared memory: the tree travels, and where each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from nnsight_lab.wire.extent import ALIGN, Extent, Packed, aligned
from nnsight_lab.wire.flatten import Handle, flatten
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.limits import extent as extent_of
from nnsight_lab.wire.runs import RUN, SMALL, STACKED
from nnsight_lab.wire.tensors import DTYPES, NAMES
from nnsight_lab.wire.unflatten import unflatten

#: `json.dumps` makes one for each of hundreds of messages.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False)


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
            first, apart = len(sources), tensors[0].nbytes
            runs[first] = first + len(tensors)
            sources.extend(tensors)
            offsets.extend(range(end, end + len(tensors) * apart, apart))
            end += aligned(len(tensors) * apart)
            return first

        node = flatten(value, put, name=name, put_run=put_run)
        return cls(_ENCODER.encode(node), tuple(sources), tuple(offsets), end, runs)

    def copy_into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the tensors to their places in ``memory``, bytes ``[byte]``, uint8."""
        for first, last in self._stretches():
            if last - first > 1:
                apart = self.offsets[first + 1] - self.offsets[first]
                _copy_together(self.sources[first:last], memory[self.offsets[first] :], apart, non_blocking)
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
            specs.append(spec if last is None else (*spec, last - at, source.nbytes))
            at = at + 1 if last is None else last
        return Packed(self.tree, extent, _ENCODER.encode(specs))


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


def _copy_together(
    sources: Sequence[torch.Tensor], memory: torch.Tensor, apart: int, non_blocking: bool
) -> None:
    """Copy a run of tensors of one kind in one go: a value per token would be a copy of some bytes each."""
    one = sources[0]
    rows = torch.stack(tuple(sources)).view(len(sources), -1)
    if apart != one.nbytes:
        padded = rows.new_zeros((len(sources), apart // one.element_size()))
        padded[:, : rows.shape[1]] = rows
        rows = padded
    target = memory[: len(sources) * apart].view(one.dtype).view(rows.shape)
    target.copy_(rows, non_blocking=non_blocking)


class Stack(NamedTuple):
    """What many requests saved, alike in all but the numbers, about to be packed.

    Attributes:
        tree: Of each.
        tensors: Of each, as in `Packed`.
        parts: Where in a request's piece some bytes go, and they: ``[request, byte]``, uint8.
        requests: How many.
        nbytes: Of one request's piece.
    """

    tree: str
    tensors: str
    parts: tuple[tuple[int, torch.Tensor], ...]
    requests: int
    nbytes: int

    @classmethod
    def of(cls, values: Mapping[str, torch.Tensor], listed: Mapping[str, bool]) -> Stack:
        """Lay it out.

        Args:
            values: By name ``[request, ...]``, or ``[request, item, ...]`` for what is a list of tensors.
            listed: Which of them are lists.
        """
        tree: dict[str, Any] = {}
        specs: list[Any] = []
        parts: list[tuple[int, torch.Tensor]] = []
        end = handle = count = 0
        for name, value in values.items():
            count = value.shape[0]
            kind, shape = NAMES[value.dtype], list(value.shape[1:])
            if listed[name]:
                items, shape = shape[0], shape[1:]
                each = value[0, 0].nbytes
                tree[name] = {"L": [handle, items]}
                specs.append([end, kind, shape, items, each])
                handle, nbytes = handle + items, items * each
            else:
                tree[name] = {"T": handle}
                specs.append([end, kind, shape])
                handle, nbytes = handle + 1, value[0].nbytes
            if nbytes:
                parts.append((end, value.contiguous().view(count, -1).view(torch.uint8)))
            end += aligned(nbytes)
        return cls(_ENCODER.encode({"d": tree}), _ENCODER.encode(specs), tuple(parts), count, end)

    def copy_into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """Copy it into ``memory``, bytes ``[byte]``, uint8, one request's piece after the other.

        Returns:
            What was copied from: it has to live until that is over.
        """
        device = self.parts[0][1].device if self.parts else memory.device
        rows = (
            memory if device == memory.device else torch.zeros(memory.shape, dtype=torch.uint8, device=device)
        )
        for start, part in self.parts:
            rows.view(self.requests, -1)[:, start : start + part.shape[1]] = part
        if rows is not memory:
            memory.copy_(rows, non_blocking=non_blocking)
        return rows


def unpack(packed: Packed, open_extent: Callable[[Extent], torch.Tensor]) -> Any:
    """Rebuild a packed value; its tensors are views of the opened memory.

    Raises:
        WireError: When the message is malformed or points outside its piece.
    """
    form = Form.read(packed.tree, packed.tensors)
    return form.over(open_extent(packed.extent) if form.specs else torch.empty(0, dtype=torch.uint8))


class Form(NamedTuple):
    """How packed values lie, read once for all that lie so.

    Attributes:
        node: Their tree.
        specs: Of each tensor, or run of tensors, where it is and what.
    """

    node: Any
    specs: list[Any]

    @classmethod
    def read(cls, tree: str, tensors: str) -> Form:
        """Read it off a message.

        Raises:
            WireError: The message is malformed.
        """
        try:
            node, specs = json.loads(tree), json.loads(tensors)
        except (ValueError, RecursionError) as error:
            raise WireError(f"the message's tree is not JSON: {error}") from None
        if type(specs) is not list:
            raise WireError("the message's tensors are no list")
        return cls(node, specs)

    def over(self, memory: torch.Tensor) -> Any:
        """The value that lies in ``memory``, bytes ``[byte]``, uint8; its tensors are views of that.

        Raises:
            WireError: The message is malformed or points outside the memory.
        """
        return _rebuilt(self.node, _views(memory, self.specs))


def _rebuilt(node: Any, views: list[torch.Tensor]) -> Any:

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
        apart: Any = None
        if type(spec) is list and len(spec) in (4, 5):
            # Without a distance, as it was written before there was one: each begins where any tensor may.
            spec, count, apart = spec[:3], spec[3], spec[4] if len(spec) == 5 else None
            if type(count) is not int or count < 1:
                raise WireError(f"the message has a run of {count!r} tensors")
        one = _view(memory, spec, typed)
        at += 1
        offset, name, shape = spec
        if apart is None:
            apart = aligned(one.nbytes)
        elif type(apart) is not int or apart < one.nbytes or apart % one.itemsize:
            raise WireError(f"the message has a run of tensors {apart!r} bytes apart")
        if count == 1 and 0 < one.nbytes <= SMALL:
            while at < len(specs) and specs[at] == [offset + count * apart, name, shape]:
                at, count = at + 1, count + 1
        if count == 1:
            views.append(one)
            continue
        if not one.nbytes:
            raise WireError("the message has a run of tensors of nothing")
        last = offset + (count - 1) * apart + one.nbytes
        if last > memory.numel():
            raise WireError(f"a run of tensors that ends at {last} does not lie in {memory.numel()} bytes")
        strides = (apart // one.itemsize, *one.stride())
        views += one.as_strided((count, *one.shape), strides, one.storage_offset()).unbind(0)
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
    return whole.as_strided(sizes, strides[::-1], whole.storage_offset() + offset // dtype.itemsize)
