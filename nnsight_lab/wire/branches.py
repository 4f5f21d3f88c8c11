"""The forms of values that hold others: containers, tensors, and everything with named fields.

Which type travels how is looked up by exact type first, since that is one dict access; subclasses are
told apart after that. Subclasses are read with their base's own methods: a dict that answers ``items``
in its own way still travels as the dict it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.wire.leaves import INT_BOUND, Node, check_extras
from nnsight_lab.wire.limits import INLINE_BYTES
from nnsight_lab.wire.record import Record
from nnsight_lab.wire.refusals import Stuck, refuse
from nnsight_lab.wire.registry import field_names, later_fields, registered_name
from nnsight_lab.wire.tensors import bytes_of_array, check_array, plain, settled

if TYPE_CHECKING:  # it looks its forms up here
    from nnsight_lab.wire.flatten import Flattener

Build: TypeAlias = Callable[["Flattener", Any, int], Node]


def _subscript(name: str) -> str:
    return f"[{json.dumps(name, ensure_ascii=False)}]"


def _attribute(name: str) -> str:
    return f".{name}"


def _list(walk: Flattener, value: list[Any], depth: int) -> Node:
    if len(value) > 8:
        # Token ids, scores and words come in long lists of one type: no call per item for those.
        kinds = set(map(type, value))
        if (
            (kinds == {int} and min(value) > -INT_BOUND and max(value) < INT_BOUND)
            or (kinds == {float} and all(map(math.isfinite, value)))
            or (kinds == {str} and all(map(str.isascii, value)))
        ):
            return list(value)
    return walk.items(list.__iter__(value), depth)


def _list_or_run(walk: Flattener, value: list[Any], depth: int) -> Node:
    return walk.run(value) or _list(walk, value, depth)


def _tuple(walk: Flattener, value: tuple[Any, ...], depth: int) -> Node:
    return {"t": _list(walk, list(tuple.__iter__(value)), depth)}


def _dict(walk: Flattener, value: dict[Any, Any], depth: int) -> Node:
    if all(type(name) is str and name.isascii() for name in dict.keys(value)):
        return {"d": walk.named(value, depth, _subscript)}
    return {"m": walk.pairs(value, depth)}


def _set(walk: Flattener, value: set[Any], depth: int) -> Node:
    return {"e": walk.members(set.__iter__(value), depth)}


def _frozenset(walk: Flattener, value: frozenset[Any], depth: int) -> Node:
    return {"E": walk.members(frozenset.__iter__(value), depth)}


def _slice(walk: Flattener, value: slice, depth: int) -> Node:
    return {"S": walk.items((value.start, value.stop, value.step), depth)}


def _bytes(walk: Flattener, value: bytes, depth: int) -> Node:
    if len(value) <= INLINE_BYTES:
        return {"b": value.hex()}
    # A bytearray, because torch warns of memory that it may not write.
    return {"B": walk.store(len(value), lambda: torch.frombuffer(bytearray(value), dtype=torch.uint8))}


def _tensor(walk: Flattener, value: torch.Tensor, depth: int) -> Node:
    tensor = plain(value)
    return {"T": walk.store(tensor.nbytes, lambda: settled(tensor))}


def _array(walk: Flattener, value: npt.NDArray[Any], depth: int) -> Node:
    check_array(value)
    array = np.asarray(value)
    return {
        "N": [walk.store(array.nbytes, lambda: bytes_of_array(array)), array.dtype.str, list(array.shape)]
    }


def _record(walk: Flattener, value: Record, depth: int) -> Node:
    return _as_record(walk, value._type_name, value._is_tuple, value._values, depth)


def _registered(walk: Flattener, value: Any, depth: int) -> Node:
    kind = type(value)
    fields = _fields(value, field_names(kind))
    for name in later_fields(kind):
        if fields[name] is None:
            del fields[name]
    return {"C": [kind.__name__, walk.named(fields, depth, _attribute)]}


def _dataclass(walk: Flattener, value: Any, depth: int) -> Node:
    fields = _fields(value, [field.name for field in dataclasses.fields(value)])
    if isinstance(value, dict):  # a model output of transformers, which can hold more than its fields
        fields.update((name, item) for name, item in dict.items(value) if type(name) is str)
    return _as_record(walk, type(value).__name__, False, fields, depth)


def _namedtuple(walk: Flattener, value: Any, depth: int) -> Node:
    return _as_record(
        walk, type(value).__name__, True, dict(zip(type(value)._fields, value, strict=True)), depth
    )


def _structseq(walk: Flattener, value: Any, depth: int) -> Node:
    fields = dict(zip(type(value).__match_args__, value, strict=True))
    return _as_record(walk, type(value).__name__, True, fields, depth)


def _as_record(walk: Flattener, name: str, is_tuple: bool, fields: Mapping[str, Any], depth: int) -> Node:
    return {"R": [name, is_tuple, walk.named(fields, depth, _attribute)]}


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in names:
        try:
            fields[name] = getattr(value, name)
        except AttributeError:  # each field may be the one that was never set
            raise Stuck(f".{name} was declared and never set. Set it before it is saved.") from None
    return fields


_PLAIN_BUILDS: Final[dict[type[Any], Build]] = {
    list: _list_or_run,
    tuple: _tuple,
    dict: _dict,
    set: _set,
    frozenset: _frozenset,
}
BUILDS: Final[dict[type[Any], Build]] = {
    **_PLAIN_BUILDS,
    slice: _slice,
    bytes: _bytes,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    np.ndarray: _array,
    np.memmap: _array,
    Record: _record,
}


def build_for(value: object) -> Build:
    """How a value whose exact type is not in the table travels."""
    kind = type(value)
    known = BUILDS.get(kind)  # what `plainer` made of it
    if known is not None:
        return known
    if registered_name(kind) is not None:
        BUILDS[kind] = _registered  # there to stay, as its registration is
        return _registered
    if issubclass(kind, torch.Tensor):
        return _tensor
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if issubclass(kind, tuple):
        if isinstance(getattr(kind, "_fields", None), tuple):
            return _namedtuple
        if hasattr(kind, "n_sequence_fields"):  # torch.return_types.topk and its like
            return _structseq
    for base, build in _PLAIN_BUILDS.items():
        if issubclass(kind, base):
            check_extras(value, base)
            return build
    raise refuse(value)
