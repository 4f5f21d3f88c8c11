"""What is known of a saved value without the value: labels, which hold no tensor.

Widgets, tables and files are made of labels; the numbers are asked for by label, when they are drawn. A
value that holds others (a list that a block appended to per step, a dict of layers) has a label for each
tensor in it, so that one step of one layer can be found and sliced. What lies between the tensors, a dict
of settings or a list of token ids, gets one label as a whole, however long it is.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.errors import CellUsageError, SavesError
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.record import Record
from nnsight_lab.wire.registry import register

Kind: TypeAlias = Literal["tensor", "array", "scalar", "text", "tree"]

#: A value whose parts refer to each other is a small text and an endless walk, so the walk is bounded.
MAX_LEAVES: Final = 1_000_000

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_SCALARS: Final = (bool, int, float, complex, np.generic)


class SaveKey(NamedTuple):
    """Where one saved tensor is: enough to ask a store for it."""

    request_id: str
    sequence: int
    block: str
    name: str
    path: str = ""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLabel:
    """One saved tensor, or one plain value, without its data.

    Attributes:
        request_id: The request it was saved for.
        engine: The engine that ran it.
        block: ``"trace"``, or the edit's name.
        edit_version: Which version of the edit; 0 for a trace.
        name: The name it was saved under.
        sequence: Which completion of the request.
        path: Where in the saved value: ``"[3]['x']"``; empty where it is the value itself.
        step: Its index in the value, where that is a list: the step, where a block appended once per step.
        kind: ``"tensor"``, ``"array"``, ``"scalar"``, ``"text"`` or ``"tree"`` (all else).
        shape: Of a tensor or array; empty for the others.
        dtype: ``"bfloat16"``; the type's name for a value that is no tensor.
        bytes: What its elements take; 0 for a value that is no tensor.
        module_path: The module it was read at, where that is known.
        prompt: The request's prompt as text.
        prompt_ids: Its token ids; empty where they are not known.
        sampling: The sampling settings, plain values.
        edits: The edits the request ran: name, version, source of each.
        block_source: The block's source.
        model: The model's id.
        model_revision: Its revision, where that is known.
        versions: Of the packages that made it.
        created: When, in seconds since 1970.
    """

    request_id: str = ""
    engine: str = ""
    block: str = TRACE_BLOCK
    edit_version: int = 0
    name: str = ""
    sequence: int = 0
    path: str = ""
    step: int | None = None
    kind: str = "tree"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    module_path: str = ""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = field(default=(), hash=False, repr=False)
    sampling: dict[str, Any] = field(default_factory=dict, hash=False)
    edits: tuple[tuple[str, int, str], ...] = ()
    block_source: str = ""
    model: str = ""
    model_revision: str = ""
    versions: dict[str, str] = field(default_factory=dict, hash=False)
    created: float = field(default_factory=time.time)

    @property
    def key(self) -> SaveKey:
        """Where it is."""
        return SaveKey(self.request_id, self.sequence, self.block, self.name, self.path)


def key_of(label: SaveLabel | SaveKey) -> SaveKey:
    """Where what a label or a key names is.

    Raises:
        CellUsageError: It is neither.
    """
    if isinstance(label, SaveLabel):
        return label.key
    # A key that went through a file or a message is a plain tuple.
    whole = isinstance(label, tuple) and len(label) in (4, 5) and isinstance(label[1], int)
    if whole and all(isinstance(part, str) for at, part in enumerate(label) if at != 1):
        return SaveKey(*label)
    name = label if isinstance(label, str) else "hidden"
    raise CellUsageError(
        f"{label!r:.80} is no label of a save. Take one from labels: engine.saves.labels(name={name!r})[0]"
    )


class Leaf(NamedTuple):
    """A tensor or a plain value, and where in a saved value it lies."""

    path: str
    step: int | None
    kind: Kind
    value: Any


def labels_of(value: object, **common: Any) -> list[SaveLabel]:
    """The labels of a saved value: one per tensor or array in it, one per largest part without any.

    Args:
        value: What was saved.
        **common: The fields of `SaveLabel` that do not depend on the value.

    Raises:
        SavesError: It has more than `MAX_LEAVES` of them, or contains itself.
    """
    return [label_of(leaf, common) for leaf in leaves_of(value)]


def label_of(leaf: Leaf, common: dict[str, Any]) -> SaveLabel:
    """The label of one leaf."""
    value = leaf.value
    shape: tuple[int, ...] = ()
    nbytes = 0
    if leaf.kind == "tensor":
        shape, dtype, nbytes = tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes
    elif leaf.kind == "array":
        shape, dtype, nbytes = value.shape, str(value.dtype), value.nbytes
    else:
        dtype = value._type_name if isinstance(value, Record) else type(value).__name__
    return SaveLabel(
        path=leaf.path, step=leaf.step, kind=leaf.kind, shape=shape, dtype=dtype, bytes=nbytes, **common
    )


def leaves_of(value: object) -> list[Leaf]:
    """The tensors of a value and the largest parts without tensors, in the value's order."""
    kind = _kind(value)
    if kind != "tree":
        return [Leaf("", None, kind, value)]
    found: list[Leaf] = []
    try:
        _Walk(found).visit(value, "", None, top=True)
    except RecursionError:
        raise SavesError("the value contains itself, or is nested too deeply to be labelled") from None
    return found


def _kind(value: object) -> Kind:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array"
    if isinstance(value, str):
        return "text"
    return "scalar" if isinstance(value, _SCALARS) else "tree"


class _Walk:
    """One walk over one value, which remembers what holds no tensor."""

    def __init__(self, found: list[Leaf]) -> None:
        self._found = found
        self._plain: dict[int, bool] = {}
        self._visited = 0

    def visit(self, value: object, path: str, step: int | None, *, top: bool = False) -> None:
        self._visited += 1
        if self._visited > MAX_LEAVES:
            raise SavesError(f"the value has more than {MAX_LEAVES:,} parts: save a stacked tensor instead")
        kind = _kind(value)
        if kind != "tree" or self._is_plain(value):
            self._found.append(Leaf(path, step, kind, value))
            return
        listed = top and type(value) is list
        for number, (part, child) in enumerate(_children(value)):
            self.visit(child, path + part, number if listed else step)

    def _is_plain(self, value: object) -> bool:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return False
        known = self._plain.get(id(value))
        if known is None:
            # Token ids and scores come in long lists: no call per item for those.
            known = type(value) in (list, tuple) and set(map(type, value)) <= _ATOMS  # type: ignore[call-overload]
            known = known or all(self._is_plain(child) for _, child in _children(value))
            self._plain[id(value)] = known  # the value outlives the walk, so its id stays its own
        return known


def _children(value: object) -> Iterator[tuple[str, object]]:
    """What a value holds, each with its piece of a path; nothing for a value that holds none."""
    if isinstance(value, Record):
        return ((f".{name}", item) for name, item in value._values.items())
    if isinstance(value, dict):
        return ((f"[{key!r}]", item) for key, item in dict.items(value))
    kind: type[Any] = type(value)
    if isinstance(value, tuple):
        names = getattr(kind, "_fields", None)
        if names is None and hasattr(kind, "n_sequence_fields"):  # torch.return_types.topk and its like
            names = getattr(kind, "__match_args__", None)
        if isinstance(names, tuple):
            return ((f".{name}", item) for name, item in zip(names, value, strict=True))
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", item) for index, item in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return ((f"{{{index}}}", item) for index, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return ((f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(kind))
    return iter(())


def array_over(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An array over the memory of ``flat`` ``[byte]``, uint8."""
    array: npt.NDArray[Any] = flat.numpy().view(np.dtype(dtype)).reshape(shape)
    return array
