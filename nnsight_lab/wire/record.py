"""A user's object after it travelled: its names and values, without its class.

A dataclass, a namedtuple, one of torch's return types or a model output of transformers is rebuilt as
a `Record`, since rebuilding the class itself would import and run the user's code in the reader. The
class has almost no names of its own: a field called ``values`` (`torch.topk`), ``keys`` (a cache) or
``fields`` must win over anything this class could offer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch


class Record:
    """Named values, read by attribute, by name, and (was it a tuple) by position.

    ``record.x``, ``record["x"]``, ``"x" in record``, ``dict(record)`` and ``len(record)`` work on all of
    them; a former tuple can also be unpacked, indexed and sliced. Read-only, picklable, not hashable.
    Equal to another record of the same type name, names and values, tensors compared by value and
    dtype.

    Attributes:
        fields: The names and values as a read-only mapping (unless a field has that very name).
    """

    __slots__ = ("_is_tuple", "_type_name", "_values")
    __hash__ = None  # type: ignore[assignment]  # it may hold lists and tensors
    _type_name: str
    _values: dict[str, Any]
    _is_tuple: bool

    def __init__(self, type_name: str, values: Mapping[str, Any], is_tuple: bool = False) -> None:
        object.__setattr__(self, "_type_name", type_name)
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_is_tuple", is_tuple)

    def __getattribute__(self, name: str) -> Any:
        # Names with an underscore stay Python's own, so that no field can pose as `__class__`.
        if not name.startswith("_"):
            values = object.__getattribute__(self, "_values")
            if name in values:
                return values[name]
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name not in Record.__slots__ and name in self._values:
            return self._values[name]
        known = ", ".join(self._values)
        raise AttributeError(f"this {self._type_name} has no field {name!r}; it has {known or 'none'}")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The names and values, in order."""
        return MappingProxyType(self._values)

    def keys(self) -> Any:
        """The names, in order: what makes ``dict(record)`` and ``**record`` work."""
        return self._values.keys()

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return self._values[key]
        if self._is_tuple:
            return tuple(self._values.values())[key]
        raise KeyError(f"this {self._type_name} is read by name, not by {key!r}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values()) if self._is_tuple else iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __dir__(self) -> list[str]:
        return [*self._values, "fields", "keys"]

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"this {self._type_name} is a record of what was saved: it is read-only")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this {self._type_name} is a record of what was saved: it is read-only")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Record):
            return NotImplemented
        mine, theirs = self._values, other._values
        return (
            self._type_name == other._type_name
            and self._is_tuple == other._is_tuple
            and list(mine) == list(theirs)
            and all(map(_same, mine.values(), theirs.values()))
        )

    def __repr__(self) -> str:
        return f"{self._type_name}({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[type[Record], tuple[str, dict[str, Any], bool]]:
        return Record, (self._type_name, self._values, self._is_tuple)


def _same(one: object, two: object) -> bool:
    """Equality that tensors and arrays cannot turn into a tensor of answers."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and one.device == two.device and torch.equal(one, two)
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(value, two[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)
