"""Reading the forms of `leaves` back, each checked to be what its name says.

A form is read without looking anything up outside the tables of this room, and costs no more than its
text: a large int is hex because reading a decimal one takes the square of its length.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from nnsight_lab.wire.leaves import Node
from nnsight_lab.wire.limits import MAX_DEPTH, WireError
from nnsight_lab.wire.tensors import ALL_DTYPES, NUMPY_DTYPES

#: The types that are themselves in the tree.
ATOMS: Final = frozenset({type(None), bool, int, float, str})
_DEVICE: Final = re.compile(r"[a-z]{2,20}(:[0-9]{1,3})?")
_HEX_INT: Final = re.compile("-?[0-9a-f]+")


def member(node: Node) -> tuple[str, Node]:
    if type(node) is not dict or len(node) != 1:
        raise WireError(f"the message has {node!r:.40} where a value belongs")
    return next(iter(node.items()))


def items(body: Node, length: int | None = None) -> list[Node]:
    if type(body) is not list or (length is not None and len(body) != length):
        raise WireError(f"the message has {body!r:.40} where a list of {length or 'values'} belongs")
    return body


def key(node: Node, depth: int) -> object:
    """A dict's key or a set's member: nothing with references, so that hashing it is one short walk."""
    if type(node) in ATOMS:
        return node
    if depth > MAX_DEPTH + 1:
        raise WireError(f"the message is nested more than {MAX_DEPTH} deep")
    tag, body = member(node)
    leaf = LEAVES.get(tag)
    if leaf is not None:
        return leaf(body)
    if tag == "b":
        return hexadecimal(body)
    if tag in ("t", "E"):
        parts = [key(item, depth + 1) for item in items(body)]
        return tuple(parts) if tag == "t" else frozenset(parts)
    raise WireError(f"the message has the form {tag!r:.40} as a key, or in a set")


def hexadecimal(body: Node) -> bytes:
    if type(body) is not str:
        raise WireError(f"the message has {body!r:.40} where hex belongs")
    try:
        return bytes.fromhex(body)
    except ValueError:
        raise WireError(f"the message has {body!r:.40} where hex belongs") from None


def _integer(node: Node) -> int:
    if type(node) is int:
        return node
    if type(node) is dict and len(node) == 1 and "i" in node:
        return _large_int(node["i"])
    raise WireError(f"the message has {node!r:.40} where an int belongs")


def _large_int(body: Node) -> int:
    if type(body) is not str or _HEX_INT.fullmatch(body) is None:
        raise WireError(f"the message has {body!r:.40} where hex belongs")
    return int(body, 16)


def _float(node: Node) -> float:
    if type(node) is dict and len(node) == 1 and "f" in node:
        return _any_float(node["f"])
    if type(node) is not float:
        raise WireError(f"the message has {node!r:.40} where a float belongs")
    return node


def _any_float(body: Node) -> float:
    raw = hexadecimal(body)
    if len(raw) != 8:
        raise WireError("a float has 8 bytes")
    value: float = struct.unpack(">d", raw)[0]
    return value


def _text(body: Node) -> str:
    try:
        return hexadecimal(body).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise WireError("the message has text that is not UTF-8") from None


def _complex(body: Node) -> complex:
    real, imag = items(body, 2)
    return complex(_float(real), _float(imag))


def _range(body: Node) -> range:
    start, stop, step = map(_integer, items(body, 3))
    if step == 0:
        raise WireError("the message has a range that stands still")
    return range(start, stop, step)


def _size(body: Node) -> torch.Size:
    sizes = items(body)
    if not all(type(size) is int and -(2**63) <= size < 2**63 for size in sizes):
        raise WireError(f"the message has {body!r:.40} where a torch.Size belongs")
    return torch.Size(list(map(_integer, sizes)))


def _dtype(body: Node) -> torch.dtype:
    dtype = ALL_DTYPES.get(body) if type(body) is str else None
    if dtype is None:
        raise WireError(f"this torch has no dtype {body!r:.40}")
    return dtype


def _device(body: Node) -> torch.device:
    if type(body) is not str or _DEVICE.fullmatch(body) is None:
        raise WireError(f"{body!r:.40} is no device")
    try:
        return torch.device(body)
    except RuntimeError:
        raise WireError(f"this torch has no device {body!r:.40}") from None


def numpy_dtype(body: Node) -> np.dtype[Any]:
    dtype = NUMPY_DTYPES.get(body) if type(body) is str else None
    if dtype is None:
        raise WireError(f"{body!r:.40} is no dtype of numpy that travels")
    return dtype


def _numpy_scalar(body: Node) -> object:
    name, raw = items(body, 2)
    dtype = numpy_dtype(name)
    data = hexadecimal(raw)
    if len(data) != dtype.itemsize:
        raise WireError(f"a numpy scalar of {dtype} has {dtype.itemsize} bytes, not {len(data)}")
    return np.frombuffer(data, dtype)[0]


LEAVES: Final[dict[str, Callable[[Node], object]]] = {
    "i": _large_int,
    "f": _any_float,
    "s": _text,
    "c": _complex,
    "r": _range,
    "z": _size,
    "y": _dtype,
    "v": _device,
    "n": _numpy_scalar,
}
