"""Values to send, and what it means that one arrived exactly as it left."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from nnsight_lab.wire.codec import Record
from nnsight_lab.wire.tensors import DTYPES, NUMPY_DTYPES


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, row-major, whatever the dtype and the strides."""
    if tensor.numel() == 0:
        return b""
    # Into memory of its own: a stride of 2 over one element counts as contiguous, and cannot be viewed.
    own = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return own.view(torch.uint8).numpy().tobytes()


def canonical(value: Any) -> str:
    """A text that is the same for sets of the same members, whatever their order."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(canonical, value)))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, value))})"
    return f"{type(value).__name__} {value!r}"


def assert_same(sent: Any, got: Any, pairs: dict[int, Any] | None = None) -> None:
    """Equal by type and by bytes, with the same objects shared and no others."""
    pairs = {} if pairs is None else pairs
    assert type(got) is type(sent) or (isinstance(sent, torch.nn.Parameter) and type(got) is torch.Tensor)
    if isinstance(sent, (list, dict, set, torch.Tensor, np.ndarray, Record)):
        if id(sent) in pairs:
            assert pairs[id(sent)] is got
            return
        assert all(got is not other for other in pairs.values())
        pairs[id(sent)] = got
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape, got.device.type) == (sent.dtype, sent.shape, "cpu")
        assert not got.requires_grad
        assert got.is_contiguous()
        assert bits(got) == bits(sent)
    elif isinstance(sent, (np.ndarray, np.generic)):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, float):
        assert struct.pack("d", got) == struct.pack("d", sent)
    elif isinstance(sent, complex):
        assert_same([sent.real, sent.imag], [got.real, got.imag])
    elif isinstance(sent, dict):
        assert len(got) == len(sent)
        for (sent_key, sent_item), (got_key, got_item) in zip(sent.items(), got.items(), strict=True):
            assert_same(sent_key, got_key, pairs)
            assert_same(sent_item, got_item, pairs)
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent)
        for one, two in zip(sent, got, strict=True):
            assert_same(one, two, pairs)
    elif isinstance(sent, (set, frozenset)):
        assert canonical(got) == canonical(sent)  # `==` fails where a NaN is within
    elif isinstance(sent, Record):
        assert sent._type_name == got._type_name
        assert_same(sent._values, got._values, pairs)
    else:
        assert got == sent


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any bytes (so every NaN), any small shape, as a view with gaps or repeats."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    wide = [2 * size for size in shape]
    count = int(np.prod(wide))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    view = flat.reshape(wide)
    form = draw(st.sampled_from(["whole", "strided", "transposed", "expanded", "slice"]))
    if form == "strided":
        return view[tuple(slice(None, None, 2) for _ in shape)]
    if form == "transposed":
        return view.permute(list(reversed(range(len(shape)))))
    if form == "expanded":
        return view.unsqueeze(0).expand(3, *wide)
    if form == "slice" and shape:
        return view[1:]
    return view


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """As `tensors`, for numpy: both byte orders, 0-d, empty, reversed."""
    dtype = draw(st.sampled_from(list(NUMPY_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array[::-1] if shape and draw(st.booleans()) else array


#: Every character, the lone surrogates too.
texts = st.text(st.characters(exclude_categories=()), max_size=6)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.complex_numbers()
    | st.binary(max_size=300)
)
keys = st.recursive(
    plain, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3
)
leaves = (
    plain
    | tensors()
    | arrays()
    | arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
    | st.sampled_from(
        [torch.bfloat16, torch.int64, torch.Size([2, 0]), torch.device("cuda:1"), range(5, 0, -2)]
    )
    | st.sampled_from([slice(None), slice(1, 10**30, -1), range(10**20)])
    | st.sets(keys, max_size=3)
    | st.frozensets(keys, max_size=3)
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=4)
    return (
        several
        | several.map(tuple)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | inner.map(lambda value: [value, {"again": value}, value])
        | several.map(lambda found: Record("Probe", {f"field{n}": value for n, value in enumerate(found)}))
    )


values = st.recursive(leaves, _containers, max_leaves=12)
