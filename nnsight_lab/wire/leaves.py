"""The forms of values that hold no others: numbers, text, dtypes; and what may be a key.

Exactness is the point: a float's NaN keeps its payload, minus zero its sign, a str its lone
surrogates. A member of an int or str enum, and a subclass of a plain type without attributes of its
own, travel as the plain value they are.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nnsight_lab.wire.limits import MAX_DEPTH
from nnsight_lab.wire.refusals import refuse_extras, refuse_key
from nnsight_lab.wire.tensors import check_array

Node: TypeAlias = bool | int | float | str | list["Node"] | dict[str, "Node"] | None

#: Larger ints travel as hex: Python refuses to read back long decimal ones.
INT_BOUND: Final = 2**64


def itself(value: Any) -> Node:
    """None and bools."""
    node: Node = value
    return node


def integer(value: int) -> Node:
    """An int of any size."""
    return value if -INT_BOUND < value < INT_BOUND else {"i": f"{value:x}"}


def floating(value: float) -> Node:
    """A float: its shortest repr is exact where it is finite."""
    return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}


def text(value: str) -> Node:
    """A str; lone surrogates have no UTF-8 and travel beside it."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"s": value.encode("utf-8", "surrogatepass").hex()}
    return value


def numpy_scalar(value: np.generic) -> Node:
    """A numpy scalar, as its bytes."""
    check_array(value)
    return {"n": [value.dtype.str, value.tobytes().hex()]}


def _complex(value: complex) -> Node:
    return {"c": [floating(value.real), floating(value.imag)]}


def _range(value: range) -> Node:
    return {"r": [integer(value.start), integer(value.stop), integer(value.step)]}


def _size(value: torch.Size) -> Node:
    return {"z": list(value)}


def _dtype(value: torch.dtype) -> Node:
    return {"y": str(value).removeprefix("torch.")}


def _device(value: torch.device) -> Node:
    return {"v": str(value)}


LEAVES: Final[dict[type[Any], Callable[[Any], Node]]] = {
    type(None): itself,
    bool: itself,
    int: integer,
    float: floating,
    str: text,
    complex: _complex,
    range: _range,
    torch.Size: _size,
    torch.dtype: _dtype,
    torch.device: _device,
}

_SCALAR_BASES: Final[tuple[tuple[type[Any], Callable[[Any], object]], ...]] = (
    (int, int.__int__),
    (float, float.__float__),
    (complex, lambda value: complex(value.real, value.imag)),
    (str, str.__str__),
    (bytes, lambda value: b"".join([value])),  # what `bytes.__bytes__` is from Python 3.11 on
)


def plainer(value: object) -> object:
    """The plain value that a subclass of int, float, complex, str or bytes is; any other as it is.

    Raises:
        Stuck: It has attributes of its own, which would be lost.
    """
    kind = type(value)
    if issubclass(kind, np.generic) and not issubclass(kind, (np.str_, np.bytes_)):
        return value
    for base, plain in _SCALAR_BASES:
        if issubclass(kind, base) and kind is not base and kind is not bool:
            if not issubclass(kind, enum.Enum):
                check_extras(value, base)
            return plain(value)
    return value


def check_extras(value: object, base: type[object]) -> None:
    """Refuse, with `Stuck`, a subclass of a plain type that carries attributes."""
    extras = getattr(value, "__dict__", None)
    if isinstance(extras, dict) and extras:
        raise refuse_extras(value, extras, base)


def key(value: object, depth: int) -> Node:
    """The form of a dict's key or a set's member: a hashable plain value, nothing in it numbered.

    Raises:
        Stuck: It is anything else.
    """
    value = plainer(value)
    kind = type(value)
    leaf = LEAVES.get(kind)
    if leaf is not None:
        return leaf(value)
    if isinstance(value, np.generic):
        return numpy_scalar(value)
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, (tuple, frozenset)) and kind in (tuple, frozenset) and depth <= MAX_DEPTH:
        return {"t" if kind is tuple else "E": [key(item, depth + 1) for item in value]}
    raise refuse_key(value)
