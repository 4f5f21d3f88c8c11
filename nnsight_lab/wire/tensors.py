"""Tensors and arrays as plain bytes: which dtypes travel, and how a view becomes its own elements.

The hard fact here: numpy, through which torch's memory is reached without a copy, knows neither
bfloat16 nor any float8, so those are looked at as integers of the same width. Only a view's own
elements travel, row-major: a slice of a large buffer does not bring the buffer, an expanded view
arrives as large as it looks, and a channels-last layout is not kept.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.wire.limits import MAX_DIMS
from nnsight_lab.wire.refusals import Stuck, refuse, refuse_array

Bytes = npt.NDArray[np.uint8]

_TENSOR_DTYPES: Final = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
_NUMPY_CODES: Final = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")

#: The dtypes whose tensors travel, by name. Quantized and sub-byte dtypes do not.
DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in _TENSOR_DTYPES if hasattr(torch, name)
}
NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}

#: Every dtype there is, for a dtype that is itself the value.
ALL_DTYPES: Final[dict[str, torch.dtype]] = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}

_AS_INTEGERS: Final[dict[torch.dtype, torch.dtype]] = {
    dtype: {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for name, dtype in DTYPES.items()
    if name in ("bfloat16", "complex32") or name.startswith(("float8", "float4"))
}

_PAIRS_OF_NUMBERS: Final = frozenset(dtype for name, dtype in DTYPES.items() if name.startswith("float4"))

NUMPY_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    dtype.str: dtype for order in "<>" for code in _NUMPY_CODES for dtype in [np.dtype(order + code)]
}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient or subclass; on its device, still a view.

    Raises:
        Stuck: It has no plain bytes (sparse, quantized, meta, a wrapper of another tensor).
    """
    kind = type(tensor)
    if kind is not torch.Tensor:
        # A wrapper (DTensor, FakeTensor, torchao) is known by its dispatch: its own memory is not its values.
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise refuse(tensor)
        tensor = tensor.detach().as_subclass(torch.Tensor)
    elif tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise Stuck(f" is a tensor of layout {tensor.layout}: dense ones travel. Save `.to_dense()` instead.")
    if tensor.is_nested:
        raise Stuck(" is a nested tensor: dense ones travel. Save `.unbind()` instead, a tuple of tensors.")
    if tensor.is_quantized:
        raise Stuck(" is a quantized tensor: plain numbers travel. Save `.dequantize()` instead.")
    if tensor.dtype not in NAMES:
        raise Stuck(f" is a tensor of {tensor.dtype}, which has no plain bytes. Save it in another dtype.")
    if tensor.is_meta:
        raise Stuck(" is a tensor on the meta device: it has a shape and no data. Save its `.shape` instead.")
    if not has_its_memory(tensor):
        raise Stuck(
            " is a tensor whose memory was freed or made smaller. Save a `.clone()` made before that."
        )
    if tensor.dim() > MAX_DIMS:
        raise Stuck(f" has {tensor.dim()} dimensions, and {MAX_DIMS} is the most. Save `.flatten()` instead.")
    return tensor


def has_its_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage still reaches as far as the tensor does; reading past it ends the process."""
    if tensor.numel() == 0:
        return True
    if tensor.is_contiguous():  # nearly all are; their last element is their numel-th
        reach = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        return bool(reach <= tensor.untyped_storage().nbytes())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(needed <= tensor.untyped_storage().nbytes())


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it can be copied: a pending conjugation or negation, which no memory has, done."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype in _PAIRS_OF_NUMBERS and not tensor.is_contiguous():
        # torch copies no float4 by its elements, but bytes.
        tensor = tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor


def memory_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a plain tensor as a row-major array, without a copy where it is one already.

    Returns:
        An array of the same shape, whose dtype has the same width but need not be the same.
    """
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    integers = _AS_INTEGERS.get(tensor.dtype)
    if integers is not None:
        tensor = tensor.view(integers)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def check_array(array: np.ndarray[Any, Any] | np.generic) -> None:
    """Refuse, with `Stuck`, an array or scalar that is not of plain numbers."""
    if array.dtype.str not in NUMPY_DTYPES or array.dtype.names is not None:
        raise refuse_array(array.dtype)


def bytes_of_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """The elements of a checked array as a flat tensor ``[byte]``, uint8; copied where it has to be."""
    if not array.flags.c_contiguous or not array.flags.writeable:  # torch warns of memory it may not write
        array = array.copy(order="C")
    if array.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def tensor_over(chunk: Bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A tensor over the memory of ``chunk`` ``[byte]``, which must be as long as the shape says."""
    if chunk.size == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(chunk, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)
