"""The few classes that a message is allowed to build.

Everything else that has named fields arrives as a `Record`. A registered class is a frozen dataclass
of this package; its fields are checked against their annotations when it is rebuilt, because the
other side may be another version, or hostile.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar, Union, get_args, get_origin

from nnsight_lab.wire.limits import WireError

T = TypeVar("T")
#: Whether a value is what an annotation says.
Check = Callable[[object], bool]

#: Metadata of a field that older versions do not have, and would refuse: its default is None.
LATER: Final[Mapping[str, bool]] = types.MappingProxyType({"later": True})

_by_name: dict[str, type[Any]] = {}
_by_class: dict[type[Any], str] = {}
_names: dict[type[Any], tuple[str, ...]] = {}
_later: dict[type[Any], tuple[str, ...]] = {}
#: Of each: what tells whether a value fits each field, and the names of those that must be there.
_fields: dict[type[Any], tuple[dict[str, Check], frozenset[str]]] = {}


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
    _names[cls] = tuple(field.name for field in fields)
    _later[cls] = tuple(field.name for field in fields if field.metadata == LATER)
    return cls


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """The fields of a registered class, in their order."""
    return _names[cls]


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
        known = _fields[cls] = {field.name: check_of(every[field.name]) for field in fields}, needed
    checks, needed = known
    if values.keys() != checks.keys():
        missing, unknown = needed - values.keys(), values.keys() - checks.keys()
        if missing or unknown:
            seen = (
                f"lacks {sorted(missing)}" if missing else f"has the unknown fields {sorted(unknown)!r:.200}"
            )
            raise WireError(f"a {name} {seen}: the two sides are different versions of nnsight_lab")
    for field, value in values.items():
        if not checks[field](value):
            hint = typing.get_type_hints(cls)[field]
            raise WireError(f"{name}.{field} is a {type(value).__name__}, not {hint}")
    built: object = cls(**values)
    return built


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` is what an annotation of a registered class says.

    Knows classes, ``Any``, unions, ``tuple[X, ...]``, ``tuple[X, Y]``, ``list[X]`` and ``dict[K, V]``.
    """
    return check_of(hint)(value)


@functools.cache
def check_of(hint: Any) -> Check:
    """What `fits` does for one annotation, taken apart once: a call brings thousands of fields."""
    if hint is Any:
        return lambda value: True
    if hint is None:
        return lambda value: value is None
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return _is_one_of({hint})
    if origin in (Union, types.UnionType):
        if all(_is_class(arg) for arg in args):
            return _is_one_of(set(args))
        some = [check_of(arg) for arg in args]
        return lambda value: any(check(value) for check in some)
    if origin is dict:
        keys, items = _all_fit(args[0]), _all_fit(args[1])
        return lambda value: type(value) is dict and keys(value.keys()) and items(value.values())
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        each = [check_of(arg) for arg in args]
        return lambda value: (
            type(value) is tuple
            and len(value) == len(each)
            and all(check(item) for check, item in zip(each, value, strict=True))
        )
    if origin in (tuple, list):
        every = _all_fit(args[0])
        return lambda value: isinstance(value, (tuple, list)) and type(value) is origin and every(value)
    return lambda value: False


def _is_class(hint: Any) -> bool:
    return isinstance(hint, type) and get_origin(hint) is None and hint is not Any


def _is_one_of(classes: set[Any]) -> Check:
    # An int where a float is expected is fine; a bool where an int is expected is not.
    kinds = frozenset(classes | {int} if float in classes else classes)
    return lambda value: type(value) in kinds


def _all_fit(hint: Any) -> Callable[[Iterable[object]], bool]:
    check = check_of(hint)
    if not _is_class(hint):
        return lambda values: all(map(check, values))
    alone = {hint}  # a long tuple of token ids, without a call per id
    return lambda values: set(map(type, values)) <= alone or all(map(check, values))
