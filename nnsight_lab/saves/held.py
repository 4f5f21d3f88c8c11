"""The saves of one request as they are kept: trees without tensors, and the tensors beside them.

A value is taken apart once, by the codec, when it is put. So what the store keeps is its own list and its
own dict (the notebook may go on appending to its own), the same tensor under two names is kept once, and
moving a request to a file moves its tensors and nothing else: trees and labels stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt
import torch

from nnsight_lab.errors import SaveNotFound, SavesError
from nnsight_lab.saves.label import SaveKey, SaveLabel, array_over, label_of, leaves_of
from nnsight_lab.saves.request import Saves
from nnsight_lab.wire.codec import Handle, Node, flatten, unflatten
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.tensors import NAMES

Get: TypeAlias = Callable[[Handle], torch.Tensor]
#: What the blocks of one sequence saved: block, name, value.
Blocks: TypeAlias = Mapping[str, Mapping[str, Any]]


class Slot(NamedTuple):
    """Where one saved value is in its request."""

    sequence: int
    block: str
    name: str


class Spec(NamedTuple):
    """What the bytes of a kept tensor are.

    Attributes:
        dtype: A tensor's, as ``"bfloat16"``; a numpy array's, as ``"<f4"``, whose tensor is its bytes. Of
            several arrays over the same bytes, the first one's.
        shape: The tensor's or the array's.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_array(self) -> bool:
        """Whether it is numpy's."""
        return self.dtype[0] in "<>|"


class Tensors(Protocol):
    """Where the tensors of a request are: in memory, or in a file."""

    def reader(self) -> Get:
        """A function from a handle to its tensor, good for one value's reading."""
        ...


@dataclass(frozen=True)
class Memory:
    """Tensors in memory, by handle."""

    tensors: Mapping[int, torch.Tensor]

    def reader(self) -> Get:
        """The tensors themselves."""

        def get(handle: Handle) -> torch.Tensor:
            assert isinstance(handle, int)
            return self.tensors[handle]

        return get


@dataclass(frozen=True)
class HeldSave:
    """One saved value, taken apart.

    Attributes:
        tree: The codec's tree; a tensor is its handle.
        labels: Of its leaves.
        handles: Of each label the handle of its tensor; -1 where it has none.
        used: Every handle in the tree.
    """

    tree: Node
    labels: tuple[SaveLabel, ...]
    handles: tuple[int, ...]
    used: frozenset[int]


@dataclass(eq=False)
class Held:
    """The saves of one request.

    Attributes:
        request_id: The request.
        common: The label fields that all of its saves share.
        saves: Each saved value.
        specs: Of each handle, what its bytes are.
        sizes: Of each handle, how many.
        tensors: Where they are.
    """

    request_id: str
    common: dict[str, Any]
    saves: dict[Slot, HeldSave]
    specs: dict[int, Spec]
    sizes: dict[int, int]
    tensors: Tensors
    keys: dict[SaveKey, tuple[SaveLabel, int]] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """What all of its tensors take, each counted once."""
        return sum(self.sizes.values())

    def labels(self) -> Iterator[SaveLabel]:
        """The labels of all its saves, in the order in which they were put."""
        for save in self.saves.values():
            yield from save.labels

    def slot(self, name: str, block: str | None, sequence: int) -> Slot:
        """The save of that name.

        Raises:
            SaveNotFound: There is none.
            AmbiguousSave: Two blocks have one, and ``block`` was not said.
        """
        named: dict[str, dict[str, Slot]] = {}
        for slot in self.saves:
            if slot.sequence == sequence:
                named.setdefault(slot.block, {})[slot.name] = slot
        if not named:
            raise SaveNotFound(f"Request {self.request_id!r} has no saves of sequence {sequence}.")
        if block is None:
            found: Slot = Saves(named)[name]
            return found
        if name not in named.get(block, {}):
            raise SaveNotFound(f"Block {block!r} of request {self.request_id!r} saved nothing as {name!r}.")
        return named[block][name]

    def value(self, slot: Slot) -> Any:
        """The saved value, rebuilt."""
        return unflatten(self.saves[slot].tree, self.tensors.reader())

    def values(self, sequence: int) -> Saves:
        """All saved values of a sequence."""
        get = self.tensors.reader()
        blocks: dict[str, dict[str, Any]] = {}
        for slot, save in self.saves.items():
            if slot.sequence == sequence:
                blocks.setdefault(slot.block, {})[slot.name] = unflatten(save.tree, get)
        return Saves(blocks)

    def leaf(self, key: SaveKey) -> torch.Tensor | npt.NDArray[Any]:
        """One tensor or array; of a file, mapped and not read yet.

        Raises:
            SaveNotFound: There is nothing at that place.
            SavesError: What is there is no tensor.
        """
        if not self.keys:
            self.keys = {
                label.key: (label, handle)
                for save in self.saves.values()
                for label, handle in zip(save.labels, save.handles, strict=True)
            }
        if key not in self.keys:
            raise SaveNotFound(
                f"Request {key.request_id!r} has no tensor {key.name}{key.path} of {key.block!r}."
            )
        label, handle = self.keys[key]
        if handle < 0:
            raise SavesError(f"{key.name}{key.path} is no tensor but a {label.dtype}: read it with `get`.")
        tensor = self.tensors.reader()(handle)
        return array_over(tensor, label.dtype, label.shape) if label.kind == "array" else tensor

    def without(self, slots: Iterable[Slot]) -> Held:
        """The rest of it; tensors that only ``slots`` had are not in it."""
        gone = set(slots)
        saves = {slot: save for slot, save in self.saves.items() if slot not in gone}
        used = frozenset[int]().union(*(save.used for save in saves.values()))
        tensors = self.tensors
        if isinstance(tensors, Memory):
            tensors = Memory({handle: tensors.tensors[handle] for handle in used})
        specs = {handle: self.specs[handle] for handle in used}
        sizes = {handle: self.sizes[handle] for handle in used}
        return Held(self.request_id, self.common, saves, specs, sizes, tensors)


def hold(
    request_id: str,
    sequences: Sequence[Blocks] | Mapping[int, Blocks],
    common: Mapping[str, Any],
    module_paths: Mapping[tuple[str, str], str],
) -> Held:
    """Take the saves of a request apart. No tensor is copied, unless it is on a device.

    Raises:
        CannotTravel: A value has no form outside this process.
    """
    tensors: dict[int, torch.Tensor] = {}
    known: dict[tuple[Any, ...], int] = {}

    def put(tensor: torch.Tensor) -> int:
        tensor = tensor.cpu()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        handle = known.setdefault(identity, len(tensors))
        tensors.setdefault(handle, tensor)
        return handle

    memory = Memory(tensors)
    saves: dict[Slot, HeldSave] = {}
    held = Held(request_id, dict(common), saves, {}, {}, memory)
    numbered = sequences.items() if isinstance(sequences, Mapping) else enumerate(sequences)
    for sequence, blocks in numbered:
        for block, values in blocks.items():
            for name, value in values.items():
                tree = flatten(value, put, name=name)
                fields = save_fields(held.common, block)
                fields["module_path"] = module_paths.get((block, name), "")
                slot = Slot(sequence, block, name)
                saves[slot] = held_save(held, slot, tree, fields)
    return held


def save_fields(common: Mapping[str, Any], block: str) -> dict[str, Any]:
    """The label fields of one block's saves that its request's common fields say."""
    if block == TRACE_BLOCK:
        return {"edit_version": 0, "block_source": common.get("block_source", "")}
    for name, version, source in common.get("edits", ()):
        if name == block:
            return {"edit_version": version, "block_source": source}
    return {"edit_version": 0, "block_source": ""}


def held_save(held: Held, slot: Slot, tree: Node, fields: Mapping[str, Any]) -> HeldSave:
    """Label a value that was taken apart, and enter its tensors in ``held``.

    Raises:
        WireError: The tree is malformed.
        SavesError: It has too many leaves.
    """
    get = held.tensors.reader()
    tensors: dict[int, int] = {}  # handles by the identity of the tensor object
    bytes_at: dict[tuple[int, int], int] = {}  # of flat bytes by where they are: an array is built over them
    used: set[int] = set()

    def remember(handle: Handle) -> torch.Tensor:
        tensor = get(handle)
        assert isinstance(handle, int)
        used.add(handle)
        tensors[id(tensor)] = handle
        if tensor.dtype is torch.uint8 and tensor.dim() == 1:
            bytes_at.setdefault(_place(tensor.data_ptr(), tensor.nbytes), handle)
        if handle not in held.sizes:
            held.sizes[handle] = tensor.nbytes
            held.specs[handle] = Spec(NAMES[tensor.dtype], tuple(tensor.shape))
        return tensor

    value = unflatten(tree, remember)
    common = held.common | dict(fields) | slot._asdict() | {"request_id": held.request_id}
    labels: list[SaveLabel] = []
    handles: list[int] = []
    for leaf in leaves_of(value):
        label = label_of(leaf, common)
        labels.append(label)
        if leaf.kind not in ("tensor", "array"):
            handles.append(-1)
            continue
        if leaf.kind == "tensor":
            handles.append(tensors[id(leaf.value)])
            continue
        handle = bytes_at[_place(leaf.value.__array_interface__["data"][0], leaf.value.nbytes)]
        handles.append(handle)
        if not held.specs[handle].is_array:
            held.specs[handle] = Spec(leaf.value.dtype.str, label.shape)
    return HeldSave(tree, tuple(labels), tuple(handles), frozenset(used))


def _place(address: int, nbytes: int) -> tuple[int, int]:
    return (address if nbytes else 0, nbytes)
