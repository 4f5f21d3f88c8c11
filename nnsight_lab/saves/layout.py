"""How kept tensors lie in a safetensors file, and the check that a file lies just so.

Anyone's safetensors library opens these files. What the format, as old libraries know it, has no dtype for is
stored as what it is made of: complex numbers as pairs of reals, the rarer float8 and arrays of the other byte
order as bytes; the label file has the true dtype. Tensors of wide elements come first and the data starts at
a multiple of 64, so that every tensor can be used where it is mapped. A header was written by anyone: nothing
in it is believed before it has been held against the file's size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from nnsight_lab.errors import FileRefused
from nnsight_lab.saves.held import Spec
from nnsight_lab.wire.limits import ALIGNMENT, WireError, extent
from nnsight_lab.wire.tensors import DTYPES, NUMPY_DTYPES

#: What the safetensors library itself takes at most.
MAX_HEADER_BYTES: Final = 100_000_000
LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"

_SAME: Final = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_PAIRS: Final = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


class Form(NamedTuple):
    """A dtype and shape as safetensors says them."""

    dtype: str
    shape: list[int]


class Span(NamedTuple):
    """Where a tensor lies, in bytes from the file's start."""

    start: int
    stop: int


class Layout(NamedTuple):
    """A file about to be written.

    Attributes:
        header: Everything before the data, its length first.
        order: The tensors' names as they follow each other.
        nbytes: Of the whole file.
    """

    header: bytes
    order: list[str]
    nbytes: int


def item_bytes(spec: Spec) -> int:
    """The width of one element.

    Raises:
        WireError: The dtype is none that is kept.
    """
    if spec.dtype in DTYPES:
        return DTYPES[spec.dtype].itemsize
    if spec.dtype in NUMPY_DTYPES:
        return NUMPY_DTYPES[spec.dtype].itemsize
    raise WireError(f"it has a tensor of dtype {spec.dtype!r:.40}, which is none that is kept")


def form_of(spec: Spec) -> Form:
    """What a plain reader sees of a tensor."""
    width = item_bytes(spec)
    name = spec.dtype
    if spec.is_array:
        dtype = np.dtype(spec.dtype)
        name = dtype.name if dtype.isnative else ""
    shape = list(spec.shape)
    if name in _SAME:
        return Form(_SAME[name], shape)
    if name in _PAIRS:
        return Form(_PAIRS[name], [*shape, 2])
    return Form("U8", shape if width == 1 else [*shape, width])


def lay_out(specs: Mapping[str, Spec], mark: str, words: Mapping[str, str] | None = None) -> Layout:
    """Where each tensor goes.

    Args:
        specs: The tensors by the name that a plain reader sees.
        mark: Makes the header differ from that of every other file.
        words: What else the file says.
    """
    sizes = {name: extent(list(spec.shape), item_bytes(spec)).nbytes for name, spec in specs.items()}
    order = sorted(specs, key=lambda name: -item_bytes(specs[name]))
    header: dict[str, Any] = {_METADATA: {**(words or {}), "format": "pt", "nnsight_lab": mark}}
    at = 0
    for name in order:
        dtype, shape = form_of(specs[name])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return Layout(len(text).to_bytes(LENGTH_BYTES, "little") + text, order, LENGTH_BYTES + len(text) + at)


def header_length(prefix: bytes, file_bytes: int) -> int:
    """The header's length as a file's first bytes claim it, if that can be.

    Raises:
        FileRefused: It cannot.
    """
    if len(prefix) < LENGTH_BYTES:
        raise FileRefused(f"it is cut off: {file_bytes} bytes")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise FileRefused(f"it claims a header of {length:,} bytes, and has {file_bytes:,} in all")
    return length


def spans_of(text: bytes, file_bytes: int, specs: Mapping[str, Spec]) -> dict[str, Span]:
    """Where each tensor of a file lies.

    Args:
        text: The header, without its length.
        file_bytes: The file's size.
        specs: What the label file says is in it.

    Raises:
        FileRefused: The header is malformed, does not cover the file, or is not what the label file says.
    """
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"its header cannot be read: {error!s:.200}") from None
    if type(header) is not dict:
        raise FileRefused("its header is no object")
    header.pop(_METADATA, None)
    if header.keys() != specs.keys():
        unlike = next(iter(header.keys() ^ specs.keys()))
        raise FileRefused(f"it and its label file do not have the same tensors: {unlike!r:.80}")
    data = LENGTH_BYTES + len(text)
    spans = {name: _span(name, entry, specs[name], data) for name, entry in header.items()}
    at = data
    for span in sorted(spans.values()):
        if span.start != at:
            raise FileRefused(f"it has a tensor at byte {span.start:,} where one belongs at {at:,}")
        at = span.stop
    if at != file_bytes:
        raise FileRefused(f"its tensors end at byte {at:,}, and it has {file_bytes:,}")
    return spans


def _span(name: str, entry: object, spec: Spec, data: int) -> Span:
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FileRefused(f"it describes {name!r:.80} as {entry!r:.80}")
    width = item_bytes(spec)
    form = form_of(spec)
    if entry["dtype"] != form.dtype or entry["shape"] != form.shape:
        raise FileRefused(
            f"it has {name!r:.80} as {entry!r:.120}, its label file as {form.dtype} {form.shape}"
        )
    nbytes = extent(list(spec.shape), width).nbytes
    offsets = entry["data_offsets"]
    if type(offsets) is not list or len(offsets) != 2 or not all(type(at) is int for at in offsets):
        raise FileRefused(f"it has {name!r:.80} at {offsets!r:.80}")
    start, stop = offsets
    if start < 0 or stop - start != nbytes:
        raise FileRefused(f"it has {nbytes:,} bytes of {name!r:.80} in bytes {start:,} to {stop:,}")
    if nbytes and (data + start) % width:
        raise FileRefused(f"it has {name!r:.80} at a place where it cannot be mapped")
    return Span(data + start, data + stop)


def _once(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.80} is there twice")
        found[name] = value
    return found


def _no_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
