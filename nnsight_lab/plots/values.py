"""What a plot is given, as a matrix whose rows can be read as float64.

The hard fact: a saved value may be gigabytes in a dtype that numpy does not have, and a float64 copy of it
eight times that. So it stays what it is, and a few rows at a time are read. Refused, in one line: nothing
(an empty tensor), more dimensions than can be drawn, and lists whose items have different shapes where
nothing was said about padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.errors import PlotRefused
from nnsight_lab.plots.known import NOTHING, Known, known_of, labels_of, store_of
from nnsight_lab.saves.label import SaveKey, SaveLabel
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.summary import float64

#: Values read as float64 at a time: 32 MiB.
_CHUNK: Final = 2**22
_SHAPES_SHOWN: Final = 4


@dataclass(frozen=True)
class Matrix:
    """Values ``[row, column]`` of any dtype, and what is known of them.

    Attributes:
        tensor: ``[row, column]`` on the CPU, as it was given.
        shape: Of what was given, before it was made a matrix.
        dtype: As it is said in a figure.
        name: The saved value's name, where it came from a store.
        known: What its label says of its two sides.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: str
    name: str = ""
    known: Known = NOTHING

    @property
    def rows(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def columns(self) -> int:
        return int(self.tensor.shape[1])

    @property
    def exact_in_float32(self) -> bool:
        """Whether a float32 holds each of the values exactly."""
        dtype = self.tensor.dtype
        return not dtype.is_complex and (
            dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float32)
            or (dtype.is_floating_point and dtype.itemsize <= 2)
        )

    @property
    def whole_numbers(self) -> bool:
        return not self.tensor.dtype.is_floating_point and not self.tensor.dtype.is_complex

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float64]:
        """Rows as float64 ``[row, column]``, complex values as their magnitude."""
        part = self.tensor[start:stop]
        return float64(part).reshape(part.shape)

    def chunks(self, multiple: int = 1) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """All rows, some at a time (a multiple of ``multiple``): the first one's number, and the values."""
        rows = max(_CHUNK // max(self.columns, 1) // multiple, 1) * multiple
        for start in range(0, self.rows, rows):
            yield start, self.read(start, start + rows)

    def said(self) -> str:
        """What it is, in words: ``bfloat16 [30, 576]``."""
        magnitude = "magnitude of " if self.tensor.dtype.is_complex else ""
        return f"{magnitude}{self.dtype} {list(self.shape)}"


def matrix_of(values: Any, *, store: SavesStore | None = None, ragged: str = "refuse") -> Matrix:
    """A matrix of what a plot was given.

    Args:
        values: A tensor or array of at most two dimensions, ``[column]`` or ``[row, column]`` (dimensions
            of one are dropped where there are more), a number, a list of any of those, or labels of a store.
        store: Where labels are looked up; that of their engine where it is None.
        ragged: Of a list of rows whose lengths differ: ``"refuse"``, or ``"pad"`` them with gaps at the end.

    Raises:
        PlotRefused: It cannot be drawn as a matrix.
        SaveNotFound: The store has no such value.
    """
    if ragged not in ("refuse", "pad"):
        raise PlotRefused(f'ragged={ragged!r} is not known: write "refuse" or "pad".')
    tensor, name = _tensor(values, store, ragged)
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.numel() == 0:
        raise PlotRefused(f"there is nothing to draw: the values are empty, {list(shape)}")
    if tensor.dim() > 2:
        kept = [size for size in shape if size != 1]
        if len(kept) > 2:
            raise PlotRefused(
                f"values of {tensor.dim()} dimensions, {list(shape)}, cannot be drawn as a matrix: choose "
                "one index of a dimension (values[0]) or reduce it (values.mean(0), values.norm(dim=-1))"
            )
        tensor = tensor.squeeze()
    flat = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    labels = labels_of(values)
    known = known_of(labels, int(flat.shape[0]), int(flat.shape[1]))
    names = {f"{label.name}{label.path}" for label in labels}
    return Matrix(flat, shape, dtype, name or (names.pop() if len(names) == 1 else ""), known)


def _tensor(values: Any, store: SavesStore | None, ragged: str) -> tuple[torch.Tensor, str]:
    if isinstance(values, (SaveLabel, SaveKey)):
        label = values
        found = store if store is not None else store_of(label)
        if found is None:
            raise PlotRefused(
                f"no engine keeps request {label.request_id!r}, which {label.name!r} is of: pass store= as "
                "well, the store that has it"
            )
        # A copy of its own: a figure must not hold a request's memory.
        return found.slice(label, ...), f"{label.name}{label.path}"
    if isinstance(values, torch.Tensor):
        return _readable(values.detach()), ""
    if isinstance(values, (np.ndarray, np.generic)):
        return _from_numpy(np.asarray(values)), ""
    if isinstance(values, (bool, int, float, complex)):
        return _from_numpy(np.asarray(values)), ""
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return _stacked(values, store, ragged)
    raise PlotRefused(f"{type(values).__name__} cannot be drawn{_instead(values)}")


def _instead(values: Any) -> str:
    """What to draw of a thing that has more than one matrix."""
    if hasattr(values, "top_probabilities"):
        return " as it is: lab.plot.logit_lens(lens) draws it, or choose a part, as lens.entropy"
    if hasattr(values, "patterns"):
        return " as it is: choose a layer's head, attention.pattern(layer, head)"
    if isinstance(values, Mapping):
        return ": choose one of its values" + (f", as [{next(iter(values))!r}]" if len(values) else "")
    return ": give a tensor, an array, a list of those, or the label of a saved value"


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_meta:
        raise PlotRefused("a meta tensor has a shape and no values, so there is nothing to draw")
    tensor = tensor.cpu()
    if tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        raise PlotRefused("float4 values lie two in a byte: unpack them first")
    return tensor


def _from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind in "OUSVMm":
        raise PlotRefused(f"an array of dtype {array.dtype} cannot be drawn: numbers are needed")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype.itemsize > 8 and native.dtype.kind == "f":
        native = native.astype(np.float64)  # torch has no long double
    if native.dtype.itemsize > 16:
        native = native.astype(np.complex128)
    if any(stride < 0 for stride in native.strides) or not native.flags.writeable:
        native = native.copy()
    return torch.from_numpy(native)


def _stacked(values: Sequence[Any], store: SavesStore | None, ragged: str) -> tuple[torch.Tensor, str]:
    if not values:
        raise PlotRefused("there is nothing to draw: the list is empty")
    if all(isinstance(value, (bool, int, float, complex)) for value in values):
        return _from_numpy(np.asarray(values)), ""
    found = [_tensor(value, store, ragged) for value in values]
    # A row that came with a batch dimension of one (a step's [1, hidden]) is that row.
    parts = [part.squeeze(0) if part.dim() == 2 and part.shape[0] == 1 else part for part, _ in found]
    names = {name.partition("[")[0] for _, name in found}
    name = names.pop() if len(names) == 1 else ""
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        common = parts[0].dtype
        for dtype in dtypes:
            common = _common(common, dtype)
        parts = [part.to(common) for part in parts]
    if len({tuple(part.shape) for part in parts}) == 1:
        return _stack(parts), name
    shapes = [str(list(part.shape)) for part in parts]
    shown = ", ".join(shapes[:_SHAPES_SHOWN]) + (", …" if len(shapes) > _SHAPES_SHOWN else "")
    if any(part.dim() != 1 for part in parts):
        raise PlotRefused(
            f"the {len(parts)} items have different shapes, {shown}: draw one item, or cut them to one shape"
        )
    if ragged == "refuse":
        raise PlotRefused(
            f'the {len(parts)} rows have different lengths, {shown}: pass ragged="pad" to leave gaps at '
            "their ends, or cut them to one length"
        )
    width = max(len(part) for part in parts)
    wide = torch.complex128 if parts[0].dtype.is_complex else torch.float64
    narrow = torch.float32 if parts[0].dtype.is_floating_point and parts[0].dtype.itemsize <= 4 else wide
    padded = torch.full((len(parts), width), torch.nan, dtype=narrow)
    for number, part in enumerate(parts):
        padded[number, : len(part)] = part
    return padded, name


def _common(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    try:
        return torch.promote_types(one, other)
    except RuntimeError:  # torch does not promote its float8 dtypes
        return torch.float64 if torch.float64 in (one, other) else torch.float32


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.stack(list(parts))
    except (RuntimeError, NotImplementedError):  # a dtype that torch only stores
        dtype = parts[0].dtype
        return torch.stack([part.contiguous().view(torch.uint8) for part in parts]).view(dtype)
