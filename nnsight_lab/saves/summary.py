"""The one set of statistics of a tensor: what widgets, tables and plots say about it.

Two facts shape it. A bfloat16 or float16 tensor summed in its own dtype is wrong in the first digits, and a
float64 copy of a saved residual stream is gigabytes: so float64 it is, a chunk at a time. And one NaN must
not hide the rest: the statistics are those of the finite values, and the others are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

#: Elements in float64 at a time: 256 KiB, which stays in a core's cache, and torch starts no threads for.
CHUNK: Final = 2**15
#: Beyond these a square leaves float64.
_TINY, _HUGE = 1e-140, 1e140
#: float4_e2m1fn_x2 holds two numbers in a byte, the lower four bits first.
_E2M1: Final = np.outer([1.0, -1.0], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).ravel()


class Summary(NamedTuple):
    """What a tensor's values are like. Complex ones count by magnitude, bools as 0 and 1.

    Attributes:
        min: The least finite value, exact (an int for ints); None where there is none.
        max: The greatest.
        mean: Of the finite values; None where there is none.
        std: Their deviation from it, divided by their number (not by one less).
        nan: How many are not a number; a complex one is where either part is.
        posinf: How many are infinite; a complex one is where either part is.
        neginf: How many are minus infinity.
        zeros: How many are zero, minus zero too.
        norm: The square root of the sum of the finite values' squares.
    """

    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    nan: int
    posinf: int
    neginf: int
    zeros: int
    norm: float


def summarize(values: torch.Tensor | npt.NDArray[Any], check: Callable[[], object] = lambda: None) -> Summary:
    """The statistics of a tensor or array of any shape, strides, device and dtype; empty and 0-d too.

    Takes a few MiB beside the tensor, whatever its size.

    Args:
        values: What is read.
        check: Called between pieces; what it raises ends the reading.
    """
    tensor = _as_tensor(values) if isinstance(values, np.ndarray) else values.detach()
    counted, moments = _Counts(), _Moments()
    for chunk in _chunks(tensor):
        check()
        moments.add(counted.add(chunk))
    counts = (counted.nan, counted.posinf, counted.neginf, counted.zeros)
    if moments.count == 0:
        return Summary(None, None, None, None, *counts, 0.0)
    power = 0
    largest = max(abs(float(counted.min)), abs(float(counted.max)))
    if largest != 0 and not _TINY < largest < _HUGE:
        power = -math.frexp(largest)[1]  # a power of two, so that scaling rounds nothing
        moments = _Moments(power)
        for chunk in _chunks(tensor):
            check()
            moments.add(_Counts().add(chunk))
    mean = math.ldexp(moments.mean, -power)
    std = _back(math.sqrt(moments.squared_deviations / moments.count), power)
    norm = _back(math.sqrt(moments.squares), power)
    # Rounding may put the mean of equal values a hair beyond them.
    mean = min(max(mean, float(counted.min)), float(counted.max))
    return Summary(counted.min, counted.max, mean, std, *counts, norm)


def _back(value: float, power: int) -> float:
    try:
        return math.ldexp(value, -power)
    except OverflowError:  # the norm of the largest floats there are is larger still
        return math.inf


class _Counts:
    """Extremes, and how many values are special."""

    def __init__(self) -> None:
        self.min: float | int = math.inf
        self.max: float | int = -math.inf
        self.nan = self.posinf = self.neginf = self.zeros = 0

    def add(self, chunk: torch.Tensor) -> npt.NDArray[np.float64]:
        """Count a chunk; its finite values ``[value]``."""
        values = float64(chunk)
        self.zeros += values.size - int(np.count_nonzero(values))
        if not (chunk.dtype.is_floating_point or chunk.dtype.is_complex):
            whole = chunk.numpy()  # float64 does not hold every int64
            self.min, self.max = min(self.min, int(whole.min())), max(self.max, int(whole.max()))
            return values
        least, most = float(values.min()), float(values.max())
        if not (math.isfinite(least) and math.isfinite(most)):
            self.nan += int(np.isnan(values).sum())
            self.posinf += int(np.isposinf(values).sum())
            self.neginf += int(np.isneginf(values).sum())
            finite: npt.NDArray[np.float64] = values[np.isfinite(values)]
            if finite.size == 0:
                return finite
            values = finite
            least, most = float(values.min()), float(values.max())
        self.min, self.max = min(self.min, least), max(self.max, most)
        return values


class _Moments:
    """Mean and squares, combined over chunks (Chan, Golub and LeVeque 1979); scaled by a power of two."""

    def __init__(self, power: int = 0) -> None:
        self._power = power
        self.count = 0
        self.mean = self.squared_deviations = self.squares = 0.0

    @np.errstate(over="ignore", invalid="ignore")  # such values are read again, scaled
    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Add finite values ``[value]``."""
        if values.size == 0:
            return
        if self._power:
            values = np.ldexp(values, self._power)
        mean = float(values.mean())
        deviations = values - mean
        count = self.count + values.size
        apart = mean - self.mean
        # Not `@`: on a busy machine BLAS's threads wait for each other longer than they work.
        self.squared_deviations += float(np.square(deviations, out=deviations).sum())
        self.squares += float(np.square(values, out=deviations).sum())
        self.squared_deviations += apart * apart * self.count * values.size / count
        self.mean += apart * values.size / count
        self.count = count


def _as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in native.strides) or not native.flags.writeable:
        native = native.copy()
    return torch.from_numpy(native)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of at most `CHUNK` elements on the CPU, in no particular order; none for an empty tensor."""
    if tensor.numel() == 0:
        return
    if tensor.numel() <= CHUNK:
        yield tensor.cpu()
    elif tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, len(flat), CHUNK):
            yield flat[start : start + CHUNK].cpu()
    else:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        for half in tensor.chunk(2, longest):
            yield from _chunks(half)


def float64(chunk: torch.Tensor) -> npt.NDArray[np.float64]:
    """The values ``[value]`` as float64, those of complex numbers as magnitudes: NaN before infinite."""
    if chunk.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        pairs = chunk.reshape(-1).view(torch.uint8).numpy()
        unpacked: npt.NDArray[np.float64] = _E2M1[np.concatenate([pairs & 15, pairs >> 4])]
        return unpacked
    if chunk.dtype.is_complex:
        parts = torch.view_as_real(chunk.reshape(-1).resolve_conj()).to(torch.float64).numpy()
        with np.errstate(over="ignore"):
            magnitudes: npt.NDArray[np.float64] = np.hypot(parts[:, 0], parts[:, 1])
        magnitudes[np.isnan(parts).any(1)] = np.nan
        return magnitudes
    values: npt.NDArray[np.float64] = chunk.reshape(-1).resolve_neg().to(torch.float64).numpy()
    return values
