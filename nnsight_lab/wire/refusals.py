"""Why a value cannot leave the worker, and what to save instead.

The text is for a reader who has just saved the wrong thing: it names the type, the reason, and an
expression to type. Types are told apart by their class alone. An instance is never asked anything,
since an envoy or a lazy proxy answers every attribute, and nnsight mounts ``save`` on all objects.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import types
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import torch


class Stuck(Exception):
    """Raised where a value cannot travel; each container on the way out adds its part of the path.

    Attributes:
        why: The rest of the sentence that begins with the path.
        parts: The path, innermost first.
    """

    def __init__(self, why: str, *parts: str) -> None:
        super().__init__(why)
        self.why = why
        self.parts = list(parts)


_CODE: Final = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.CodeType,
    functools.partial,
    torch.jit.ScriptFunction,
)
_AS_TEXT: Final = (
    pathlib.PurePath,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    np.dtype,
)


def type_name(kind: type[object]) -> str:
    """``module.Class``, without the module where it says nothing."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def refuse(value: object) -> Stuck:
    """The refusal of a value that has no form outside the worker."""
    kind = type(value)
    return Stuck(f" is {_a(kind)}: {_reason(kind)}")


def refuse_key(value: object) -> Stuck:
    """The refusal of a dict's key or a set's member that is more than a plain value."""
    return Stuck(
        f" is {_a(type(value))}: keys, and members of sets, are text, numbers, bytes, or tuples of them. "
        "Save a list of pairs, or a list, instead."
    )


def refuse_extras(value: object, extras: Collection[str], base: type[object]) -> Stuck:
    """The refusal of a subclass of a plain type whose attributes would be left behind."""
    return Stuck(
        f" is {_a(type(value))} with attributes of its own ({', '.join(sorted(extras)[:4])}), which would be "
        f"lost. Save its data instead: `{base.__name__}(...)` of it, and the attributes beside it."
    )


def _a(kind: type[object]) -> str:
    name = type_name(kind)
    return f"an {name}" if name[:1] in "aeiouAEIOU" else f"a {name}"


def _reason(kind: type[object]) -> str:
    if issubclass(kind, _CODE):
        return "code does not travel. Save its data instead: what it returns."
    if issubclass(kind, (type, types.ModuleType, types.GenericAlias)):
        return "code does not travel. Save its data instead: its name, as a string."
    if any(base.__module__.split(".")[0] == "nnsight" for base in kind.__mro__):
        return "it stands for a module, not a value. Save its data instead: its `.output` or `.input`."
    if issubclass(kind, torch.nn.Module):
        return "a module is code and weights. Save its data instead: `.weight`, or `.state_dict()`."
    if issubclass(kind, enum.Enum):
        return "its class stays behind. Save its data instead: its `.value`, or its `.name`."
    if issubclass(kind, io.IOBase):
        return "an open file stays with its process. Save its data instead: what `.read()` gives."
    if issubclass(kind, BaseException):
        return "its class stays behind. Save its data instead: `str(error)`."
    if issubclass(kind, (types.CoroutineType, types.AsyncGeneratorType)):
        return "it has not run yet. Save its data instead: what it gives when awaited."
    if issubclass(kind, Iterator):
        return "it can be read once, here only. Save its data instead: `list(...)` of it."
    if issubclass(kind, (bytearray, memoryview)):
        return "it can change under the reader. Save its data instead: `bytes(...)` of it."
    if issubclass(kind, _AS_TEXT):
        return "only plain data travels. Save its data instead: `str(...)` of it."
    if issubclass(kind, np.ma.MaskedArray):
        return "its mask would be lost. Save its data instead: its `.data` and its `.mask`."
    if issubclass(kind, np.ndarray):
        return "a subclass would lose what it adds. Save its data instead: `numpy.asarray(...)` of it."
    if issubclass(kind, Mapping):
        return "only plain containers travel. Save its data instead: `dict(...)` of it."
    if issubclass(kind, Collection):
        return "only plain containers travel. Save its data instead: `list(...)` of it."
    return "only plain data travels. Save its data instead: a dict of its tensors and numbers."


def refuse_array(dtype: np.dtype[np.generic]) -> Stuck:
    """The refusal of a numpy array or scalar for its dtype."""
    if dtype.names is not None:
        cure = f"its fields one by one, as `array[{dtype.names[0]!r}]`"
    elif dtype.kind in "OUSTV":
        cure = "`array.tolist()`, or a torch tensor"
    elif dtype.kind in "Mm":
        cure = "`array.astype('int64')`, and its unit"
    else:
        cure = "`array.astype('float64')` (or 'complex128')"
    kind = "structured dtype" if dtype.names is not None else "dtype"
    return Stuck(f" is a numpy value of {kind} {dtype}: only numbers travel. Save its data instead: {cure}.")
