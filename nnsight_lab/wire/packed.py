"""Values whose tensors stayed in shared memory: the tree travels, and where each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nnsight_lab.wire.extent import ALIGN, Extent, Packed
from nnsight_lab.wire.flatten import Handle, flatten
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.limits import extent as extent_of
from nnsight_lab.wire.tensors import DTYPES, NAMES
from nnsight_lab.wire.unflatten import unflatten


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
            end += (tensor.numel() * tensor.element_size() + ALIGN - 1) // ALIGN * ALIGN
            return len(sources) - 1

        node = flatten(value, put, name=name)
        return cls(json.dumps(node, separators=(",", ":")), tuple(sources), tuple(offsets), end)

    def copy_into(self, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy the tensors to their places in ``memory``, bytes ``[byte]``, uint8."""
        for source, offset in zip(self.sources, self.offsets, strict=True):
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
    typed: dict[str, torch.Tensor] = {}
    views = [_view(memory, spec, typed) for spec in specs]

    def get(handle: Handle) -> torch.Tensor:
        if type(handle) is not int or not 0 <= handle < len(views):
            raise WireError(f"there is no tensor {handle!r} in the message")
        return views[handle]

    return unflatten(node, get)


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
