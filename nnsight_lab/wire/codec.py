"""The one codec: a value as a JSON tree and its tensors' bytes, and back.

`encode` and `decode` are for bytes on a pipe, a socket or a disk; `flatten` and `unflatten` are the
same tree for whoever keeps tensors elsewhere, as in slabs of shared memory. The hard fact: a message
comes from a process that ran somebody's block, so decoding it must not be able to run code, and must
not allocate more than was sent, whatever the bytes claim. There is no pickle in it.

What travels: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range,
slice, tensors, torch.Size, torch.dtype, torch.device, numpy arrays and scalars of numbers, the classes
of `registry`; dataclasses, namedtuples and torch's return types arrive as `Record`. Members of int and
str enums, and subclasses of plain types that add no attributes, arrive as the plain type. Anything else
is refused with `CannotTravel`, before anything is sent.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from nnsight_lab.errors import CannotTravel
from nnsight_lab.wire import many as _many  # noqa: F401  # its class must be registered to be read
from nnsight_lab.wire import messages as _messages  # noqa: F401  # the same of these
from nnsight_lab.wire.flatten import Handle, flatten, size_of
from nnsight_lab.wire.leaves import Node
from nnsight_lab.wire.limits import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    VERSION,
    WireError,
    aligned,
    extent,
)
from nnsight_lab.wire.record import Record
from nnsight_lab.wire.registry import register
from nnsight_lab.wire.tensors import DTYPES, NAMES, Bytes, memory_of, tensor_over
from nnsight_lab.wire.unflatten import unflatten

__all__ = [
    "Handle",
    "Node",
    "Record",
    "WireError",
    "check_head",
    "decode",
    "encode",
    "encode_parts",
    "flatten",
    "head_of",
    "register",
    "size_of",
    "unflatten",
]

_PADDING: Final = bytes(63)
#: Of the parts of a message, those that come before its tensors and what is between them.
_HEAD_PARTS: Final = 4


def _not_json(constant: str) -> object:
    raise WireError(f"the message's header has {constant}, which is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_not_json)
_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


def encode(value: object, *, name: str = "value") -> bytes:
    """Write a value down.

    One copy of each tensor is made, straight into the result; a tensor on a device or with gaps in its
    memory is first brought together on the CPU. Arguments and errors are those of `encode_parts`.
    """
    return b"".join(encode_parts(value, name=name))


def encode_parts(value: object, *, name: str = "value") -> list[Any]:
    """The buffers that make up a message, for a file's or socket's ``writelines``: no tensor is copied.

    They look into the memory of the value's own tensors, so they must be written before those change.

    Args:
        value: What travels.
        name: What the value is called in an error's path, as in ``saves["probe"]["fn"]``.

    Raises:
        CannotTravel: Something in it has no form outside this process, or its tree is too large.
    """
    tensors: list[torch.Tensor] = []
    table: list[list[Any]] = []
    end = 0

    def put(tensor: torch.Tensor) -> int:
        nonlocal end
        start = aligned(end)
        end = start + tensor.nbytes
        table.append([start, NAMES[tensor.dtype], list(tensor.shape)])
        tensors.append(tensor)
        return len(tensors) - 1

    tree = flatten(value, put, name=name)
    header = _ENCODER.encode({"tensors": table, "value": tree}).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise CannotTravel(
            f"{name} holds {len(header):,} bytes of text and numbers besides its tensors, more than "
            f"{MAX_HEADER_BYTES:,}. Save its numbers as tensors instead: `torch.tensor(...)` of a list."
        )
    parts: list[Any] = [MAGIC, bytes([VERSION]), len(header).to_bytes(8, "little"), header]
    at = PREFIX_BYTES + len(header)
    data = aligned(at)
    for tensor, (start, _, _) in zip(tensors, table, strict=True):
        gap = data + start - at
        if gap:
            parts.append(_PADDING[:gap])
        if tensor.nbytes:
            # As bytes: a memoryview of complex numbers cannot be looked at as any other thing.
            parts.append(memory_of(tensor).reshape(-1).view(np.uint8))
        at = data + start + tensor.nbytes
    return parts


class Head(NamedTuple):
    """What of a message precedes its tensors' bytes.

    Attributes:
        contents: The bytes, up to the first tensor's.
        nbytes: The length of the whole message.
    """

    contents: bytes
    nbytes: int


def head_of(parts: list[Any]) -> Head:
    """The head of a message that `encode_parts` gave."""
    sizes = [memoryview(part).nbytes for part in parts]
    contents = b"".join(parts[:_HEAD_PARTS])
    return Head(contents, sum(sizes))


def check_head(head: bytes | bytearray | memoryview, nbytes: int) -> None:
    """Refuse a head that is none, or that of a message of another length.

    Raises:
        WireError: Says why. Nothing was allocated for its tensors.
    """
    _read_header(memoryview(head).cast("B"), total=nbytes)


def decode(data: bytes | bytearray | memoryview, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Any:
    """Read a value from bytes that anyone may have written.

    All tensors and arrays are writable. From writable memory (a bytearray, a shared mapping) they are views
    of it: no copy is made, a change shows in ``data``, and each keeps all of it alive. From read-only bytes,
    or where ``data`` starts at an address that is no multiple of 16, each gets memory of its own.

    Args:
        data: The message.
        max_header_bytes: Of its text, which becomes objects that are many times as large.

    Raises:
        WireError: It is not a message, or a damaged one; says why. Nothing larger than it was allocated.
    """
    view = memoryview(data).cast("B")
    tree, spans, start = _read_header(view, most=max_header_bytes)
    raw: Bytes = np.frombuffer(view[start:], np.uint8) if start < len(view) else np.empty(0, np.uint8)
    own = view.readonly or raw.__array_interface__["data"][0] % 16 != 0
    taken = bytearray(len(spans))

    def get(handle: Handle) -> torch.Tensor:
        if type(handle) is not int or not 0 <= handle < len(spans):
            raise WireError(f"the message has no tensor {handle!r:.40}")
        if taken[handle]:
            raise WireError(f"the message has tensor {handle} in two places")
        taken[handle] = 1
        span = spans[handle]
        chunk = raw[span.start : span.stop]
        return tensor_over(chunk.copy() if own else chunk, span.dtype, span.shape)

    return unflatten(tree, get)


class _Span(NamedTuple):
    """Where one tensor lies, in bytes from the start of the data."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: list[int]


class _Header(NamedTuple):
    """All that comes before the data, and where the data starts."""

    tree: Node
    spans: list[_Span]
    data_start: int


def _read_header(view: memoryview, *, total: int | None = None, most: int = MAX_HEADER_BYTES) -> _Header:
    """Check everything but the tree's own forms.

    Args:
        view: The message, or its beginning.
        total: The length of the message, where this is its beginning.
        most: What its header may have.
    """
    if len(view) < PREFIX_BYTES:
        raise WireError(f"the message is cut off: {len(view)} bytes, and {PREFIX_BYTES} precede its header")
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise WireError(f"this is no message of nnsight_lab: it starts with {bytes(view[:8])!r}")
    if view[len(MAGIC)] != VERSION:
        raise WireError(
            f"the message has format {view[len(MAGIC)]}, this side reads {VERSION}: "
            "use one version of nnsight_lab on both"
        )
    length = int.from_bytes(view[len(MAGIC) + 1 : PREFIX_BYTES], "little")
    end = PREFIX_BYTES + length
    if length > most:
        raise WireError(f"the message claims a header of {length:,} bytes; {most:,} is the most")
    if end > len(view):
        raise WireError(f"the message is cut off: its header ends at byte {end:,}, and it has {len(view):,}")
    try:
        header = _DECODER.decode(str(view[PREFIX_BYTES:end], "utf-8"))
    except ValueError as error:  # not UTF-8, not JSON, or an int of thousands of digits
        raise WireError(f"the message's header cannot be read: {error!s:.200}") from None
    except RecursionError:
        raise WireError("the message is nested too deeply") from None
    if (
        type(header) is not dict
        or header.keys() != {"tensors", "value"}
        or type(header["tensors"]) is not list
    ):
        raise WireError("the message's header lacks its tensors or its value")
    spans: list[_Span] = []
    at = 0
    for entry in header["tensors"]:
        spans.append(_span(entry, at))
        at = spans[-1].stop
    start = aligned(end) if spans else end
    # Exactly: a byte too many means that the two sides disagree about what was sent.
    nbytes = len(view) if total is None else total
    if start + at != nbytes:
        raise WireError(f"the message should have {start + at:,} bytes, and has {nbytes:,}")
    return _Header(header["value"], spans, start)


def _span(entry: object, at: int) -> _Span:
    """Where one tensor lies, given that the one before it ended at ``at``."""
    if type(entry) is not list or len(entry) != 3:
        raise WireError(f"the message describes a tensor as {entry!r:.80}")
    start, name, shape = entry
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise WireError(f"the message has a tensor of dtype {name!r:.40}, which this torch does not know")
    sizes, nbytes = extent(shape, dtype.itemsize)
    if type(start) is not int or start != aligned(at):
        raise WireError(f"the message has a tensor at {start!r:.40} that belongs at {aligned(at)}")
    return _Span(start, start + nbytes, dtype, sizes)
