"""Something that gives slices: a tensor, an array, or one saved value of a store.

A view never copies more of a tensor than the piece it reads. What comes from a store is asked for by label
each time, so a view neither keeps a request in memory nor outlives it: when the store lets go, the next
question is answered with `SaveNotFound`. ipywidgets keeps every widget that was ever made, those of a cell
that was run again too; so a tensor is held only while somebody looks, else gigabytes would stay for ever.
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.errors import SavesError
from nnsight_lab.saves.label import SaveKey, SaveLabel, key_of
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets.reduce import numbers

#: Two numbers in one byte: no index of such a tensor is the index of a number.
_PACKED: Final = "float4_e2m1fn_x2"


class Source(Protocol):
    """What a view reads from.

    Attributes:
        shape: Of the whole.
        dtype: By name, as in ``"bfloat16"``.
        nbytes: What its elements take.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def read(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """The values at an index with an entry for each dimension."""

    def loosen(self) -> None:
        """Nobody looks: hold it no longer than others do."""

    def hold(self) -> None:
        """Somebody looks."""


class TensorSource:
    """A tensor; nothing of it is copied.

    Args:
        tensor: Strided, on any device.
        owner: What the user holds, where that is not the tensor: an array that it was made over, or None
            where nobody else holds it.

    Raises:
        SavesError: It is sparse, quantized or packed.
    """

    def __init__(self, tensor: torch.Tensor, owner: Any = ...) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise SavesError(
                f"only a dense tensor can be drawn, and this is {tensor.layout}: densify it first"
            )
        self._held: torch.Tensor | None = tensor.detach()
        owner = tensor if owner is ... else owner
        self._owner = None if owner is None else weakref.ref(owner)
        self.shape = tuple(tensor.shape)
        self.dtype = _drawable(str(tensor.dtype).removeprefix("torch."))
        self.nbytes = tensor.nbytes

    def read(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """As `Source.read`; a view of the tensor."""
        tensor = self._held if self._held is not None else self._again()
        if tensor is None:
            raise SavesError(
                "the tensor is gone: nothing else held it while this view was closed. "
                "Run the cell that made it again."
            )
        return tensor[index]

    def loosen(self) -> None:
        """As `Source.loosen`."""
        if self._owner is not None:
            self._held = None

    def hold(self) -> None:
        """As `Source.hold`."""
        if self._held is None:
            self._held = self._again()

    def _again(self) -> torch.Tensor | None:
        owner = None if self._owner is None else self._owner()
        if owner is None:
            return None
        return owner.detach() if isinstance(owner, torch.Tensor) else _over(owner)


class SavedSource:
    """A tensor or array in a store, by label.

    Args:
        store: Where it is.
        label: Which it is.

    Raises:
        SaveNotFound: It is not there.
        SavesError: It is no tensor.
    """

    def __init__(self, store: SavesStore, label: SaveLabel | SaveKey) -> None:
        self._store = store
        self._key = key_of(label)
        if not isinstance(label, SaveLabel):
            found = store.labels(self._key.request_id, block=self._key.block, name=self._key.name)
            label = next((one for one in found if one.key == self._key), SaveLabel(request_id=self._key[0]))
        if label.kind not in ("tensor", "array"):
            store.slice(self._key, ...)  # says why it cannot be
        self.prompt_ids = label.prompt_ids
        self.shape = label.shape
        self.dtype = _drawable(label.dtype)
        self.nbytes = label.bytes

    def read(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """As `Source.read`; a copy of that piece alone."""
        return self._store.slice(self._key, index)

    def loosen(self) -> None:
        """As `Source.loosen`; only the store holds it anyway."""

    def hold(self) -> None:
        """As `Source.hold`."""


class DifferenceSource:
    """One saved tensor minus another of its shape, computed where it is read.

    Args:
        one: What is compared.
        other: What is taken from it.

    Raises:
        SavesError: Their shapes differ.
    """

    def __init__(self, one: Source, other: Source) -> None:
        if one.shape != other.shape:
            raise SavesError(
                f"shapes must match to be compared, and these are {list(one.shape)} and {list(other.shape)}"
            )
        self._pair = (one, other)
        self.shape = one.shape
        self.dtype = "float64"
        self.nbytes = math.prod(self.shape) * 8

    def read(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        """As `Source.read`; of complex numbers the magnitude of their difference."""
        one, other = (source.read(index).cpu() for source in self._pair)
        if one.dtype.is_complex or other.dtype.is_complex:
            return numbers(one.to(torch.complex128) - other.to(torch.complex128))
        return numbers(one).double() - numbers(other).double()

    def loosen(self) -> None:
        """As `Source.loosen`."""
        for source in self._pair:
            source.loosen()

    def hold(self) -> None:
        """As `Source.hold`."""
        for source in self._pair:
            source.hold()


def source_of(values: Any, label: SaveLabel | SaveKey | None = None) -> Source:
    """The source for what a user has: a tensor, an array, numbers in lists, or a store and a label.

    Raises:
        SavesError: It is none of these.
    """
    if isinstance(values, DifferenceSource):
        return values
    if isinstance(values, SavesStore):
        if label is None:
            raise SavesError("a store holds many values: say which, as in Heatmap(store, store.labels()[0])")
        return SavedSource(values, label)
    if label is not None:
        raise SavesError("a label goes with a store: Heatmap(store, label)")
    if isinstance(values, torch.Tensor):
        return TensorSource(values)
    try:
        array = np.asarray(values)
        native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        if any(stride < 0 for stride in native.strides):
            native = native.copy()  # torch knows no negative strides
        return TensorSource(_over(native), native if native is values else None)
    except (TypeError, ValueError) as error:
        kind = type(values).__name__
        raise SavesError(f"a tensor, an array or (store, label) can be drawn, and this is {kind}") from error


def _over(array: npt.NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        # A memory-mapped file is read-only; nothing here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)
        return torch.from_numpy(array)


def _drawable(dtype: str) -> str:
    if dtype == _PACKED:
        raise SavesError(f"{dtype} packs two numbers in a byte: draw tensor.view(torch.uint8), or unpack it")
    return dtype
