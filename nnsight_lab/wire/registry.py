"""The few classes that a message is allowed to build.

Everything else that has named fields arrives as a `Record`. A registered class is a frozen dataclass
of this package; its fields are checked against their annotations when it is rebuilt, because the
other side may be another version, or hostile.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, TypeVar, Union, get_args, get_origin

from nnsight_lab.wire.limits import WireError

T = TypeVar("T")

#: Metadata of a field that older versions do not have, and would refuse: its default is None.
LATER: Final[Mapping[str, bool]] = types.MappingProxyType({"later": True})

_by_name: dict[str, type[Any]] = {}
_by_class: dict[type[Any], str] = {}
_later: dict[type[Any], tuple[str, ...]] = {}
#: Of each: its fields' annotations, and the names of those that must be there.
_fields: dict[type[Any], tuple[dict[str, Any], frozenset[str]]] = {}


def register(cls: type[T]) -> type[T]:
    """Let a message build ``cls``, under its bare name. A class decorator, above ``@dataclass``.

    Raises:
        TypeError: It is not a frozen dataclass, or another class has that name.
    """
    params = getattr(cls, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise TypeError(f"{cls.__name__} is no frozen dataclass: only those can be registered")
    known = _by_name.get(cls.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"a class named {cls.__name__} is registered already, by {known.__module__}")
    _by_name[cls.__name__] = cls
    _by_class[cls] = cls.__name__
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    _later[cls] = tuple(field.name for field in fields if field.metadata == LATER)
    return cls


def later_fields(cls: type[Any]) -> tuple[str, ...]:
    """The fields of a registered class that are left out of a message where they are None."""
    return _later[cls]


def registered_name(cls: type[Any]) -> str | None:
    """The name ``cls`` travels under, or None where it travels as a `Record`."""
    return _by_class.get(cls)


def rebuild(name: str, values: Mapping[str, object]) -> object:
    """Build the registered class of that name.

    Fields that are missing take their defaults; fields that are unknown are refused.

    Raises:
        WireError: No such class, a field that it does not have or lacks, or one of another type.
    """
    cls = _by_name.get(name)
    if cls is None:
        raise WireError(f"the message holds a {name!r:.80}, which this version does not know")
    known = _fields.get(cls)
    if known is None:
        # Looked up once: a call brings hundreds of a few classes, between two steps of the model.
        fields = [field for field in dataclasses.fields(cls) if field.init]
        every = typing.get_type_hints(cls)
        needed = frozenset(field.name for field in fields if not _has_default(field))
        known = _fields[cls] = {field.name: every[field.name] for field in fields}, needed
    hints, needed = known
    missing, unknown = needed - values.keys(), values.keys() - hints.keys()
    if missing or unknown:
        seen = f"lacks {sorted(missing)}" if missing else f"has the unknown fields {sorted(unknown)!r:.200}"
        raise WireError(f"a {name} {seen}: the two sides are different versions of nnsight_lab")
    for field, value in values.items():
        if not fits(value, hints[field]):
            raise WireError(f"{name}.{field} is a {type(value).__name__}, not {hints[field]}")
    built: object = cls(**values)
    return built


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` is what an annotation of a registered class says.

    Knows classes, ``Any``, unions, ``tuple[X, ...]``, ``tuple[X, Y]``, ``list[X]`` and ``dict[K, V]``.
    """
    if hint is Any:
        return True
    if hint is None:
        return value is None
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is None:
        # An int where a float is expected is fine; a bool where an int is expected is not.
        return type(value) is hint or (hint is float and type(value) is int)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if type(value) is not origin:
        return False
    if isinstance(value, dict):
        return _all_fit(value.keys(), args[0]) and _all_fit(value.values(), args[1])
    if isinstance(value, tuple) and not (len(args) == 2 and args[1] is Ellipsis):
        return len(value) == len(args) and all(map(fits, value, args))
    return isinstance(value, (tuple, list)) and _all_fit(value, args[0])


def _all_fit(values: typing.Iterable[object], hint: Any) -> bool:
    if isinstance(hint, type) and get_origin(hint) is None and set(map(type, values)) <= {hint}:
        return True  # a long tuple of token ids, without a call per id
    return all(fits(value, hint) for value in values)
