"""A block of numbers as one number, and what may not be lost on the way.

A screen has a million pixels and a saved tensor has billions of values, so what is drawn of it from afar is
one number per block. Two facts shape this file. A NaN among a million must still be seen: each block says
which special values it holds, and its number is that of its finite ones. And nothing here may depend on how
the values were cut into chunks, else a picture would change with the way to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch

How: TypeAlias = Literal["mean", "max", "min", "absmax"]

#: What a block's number may be; ``absmax`` is the value of the largest magnitude, with its sign.
HOWS: Final[tuple[How, ...]] = ("mean", "max", "min", "absmax")

#: The bits of a block's flags.
NAN: Final = 1
POSINF: Final = 2
NEGINF: Final = 4

_WIDE: Final = frozenset(
    {torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64, torch.complex64, torch.complex128}
)


class Blocks(NamedTuple):
    """Blocks of a matrix; all on the CPU.

    Attributes:
        values: ``[row, column]``, float32 or float64, of the finite values of each; NaN where it has none.
        flags: ``[row, column]``, uint8: which special values are in each.
        counts: ``[row, column]``, int64: how many finite values each has; None where all of them are.
        nan: How many values are not a number.
        posinf: How many are infinite.
        neginf: How many are minus infinity.
        least: The least finite value; infinite where there is none.
        most: The greatest; minus infinity where there is none.
    """

    values: torch.Tensor
    flags: torch.Tensor
    counts: torch.Tensor | None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    least: float = math.inf
    most: float = -math.inf


def numbers(raw: torch.Tensor) -> torch.Tensor:
    """Values as float32, or as float64 where that would lose some of their range; magnitudes of complex ones.

    A complex number of which either part is NaN is NaN, as in a summary.
    """
    raw = raw.detach()
    if raw.dtype.is_complex:
        parts = torch.view_as_real(raw.resolve_conj().resolve_neg()).to(torch.float64)
        real, imaginary = parts[..., 0], parts[..., 1]
        either = torch.isnan(real) | torch.isnan(imaginary)
        return torch.hypot(real, imaginary).masked_fill_(either, math.nan)
    return raw.resolve_neg().to(torch.float64 if raw.dtype in _WIDE else torch.float32)


def reduce_blocks(values: torch.Tensor, rows: int, columns: int, how: How) -> Blocks:
    """One number per block of ``rows`` x ``columns``, those at the far edges smaller.

    Args:
        values: ``[row, column]``, float32 or float64, not empty.
        rows: Of a block.
        columns: Of a block.
        how: Which number.
    """
    found = [
        [_even(part, high, wide, how) for part, wide in _halves(half, 1, columns)]
        for half, high in _halves(values, 0, rows)
    ]
    flat = [piece for row in found for piece in row]
    if len(flat) == 1:
        return flat[0].blocks
    counts = None
    if any(piece.blocks.counts is not None for piece in flat):
        counts = _joined([[piece.counts() for piece in row] for row in found])
    return Blocks(
        _joined([[piece.blocks.values for piece in row] for row in found]),
        _joined([[piece.blocks.flags for piece in row] for row in found]),
        counts,
        sum(piece.blocks.nan for piece in flat),
        sum(piece.blocks.posinf for piece in flat),
        sum(piece.blocks.neginf for piece in flat),
        min(piece.blocks.least for piece in flat),
        max(piece.blocks.most for piece in flat),
    )


def reduce_again(
    values: torch.Tensor, flags: torch.Tensor, counts: torch.Tensor, rows: int, columns: int, how: How
) -> Blocks:
    """Blocks of blocks: what `reduce_blocks` says of the values they came from.

    Args:
        values: ``[row, column]`` of the blocks, as in `Blocks`.
        flags: As in `Blocks`.
        counts: As in `Blocks`, and never None.
        rows: Of a block, in blocks.
        columns: Of a block, in blocks.
        how: Which number, the one that ``values`` are.
    """
    held = _fold(_fold(counts, 0, rows, torch.sum), 1, columns, torch.sum)
    if how == "mean":
        sums = (
            values.to(torch.float64).mul(counts).nan_to_num_(0.0)
        )  # a block without finite values is 0 x NaN
        folded = _fold(_fold(sums, 0, rows, torch.sum), 1, columns, torch.sum) / held
    else:
        folded = _extreme(values, counts == 0, rows, columns, how)
    bits = [_fold(_fold((flags & bit), 0, rows, torch.amax), 1, columns, torch.amax) for bit in _BITS]
    folded = folded.masked_fill(held == 0, math.nan)
    return Blocks(folded, bits[0] | bits[1] | bits[2], held)


_BITS: Final = (NAN, POSINF, NEGINF)


class _Piece(NamedTuple):
    """Blocks of one size."""

    blocks: Blocks
    size: int

    def counts(self) -> torch.Tensor:
        if self.blocks.counts is not None:
            return self.blocks.counts
        return torch.full(self.blocks.values.shape, self.size, dtype=torch.int64)


def _halves(values: torch.Tensor, dim: int, size: int) -> list[tuple[torch.Tensor, int]]:
    """The part that blocks of ``size`` fill, and the rest, each with the size of its blocks."""
    length = values.shape[dim]
    rest = length % size
    if rest == length:
        return [(values, length)]
    found = [(values.narrow(dim, 0, length - rest), size)]
    if rest:
        found.append((values.narrow(dim, length - rest, rest), rest))
    return found


def _joined(pieces: Iterable[Iterable[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([torch.cat(list(row), 1) for row in pieces], 0)


def _even(values: torch.Tensor, rows: int, columns: int, how: How) -> _Piece:
    """Blocks of exactly that size. Rows are folded first: that runs along memory."""
    size = rows * columns
    if how == "mean":
        folded = values if rows == 1 else _split(values, 0, rows).sum(1)
        folded = folded if columns == 1 else _split(folded, 1, columns).sum(2)
        # One value that is not finite, or a sum that float32 does not hold, shows in the sum.
        if bool(torch.isfinite(folded).all()):
            least, most = torch.aminmax(values)
            return _clean(folded / size if size > 1 else folded.clone(), float(least), float(most), size)
    elif bool(torch.isfinite(values.sum())):
        least, most = torch.aminmax(values)
        folded = _extreme(values, None, rows, columns, how)
        return _clean(folded, float(least), float(most), size)
    return _Piece(_special(values, rows, columns, how), size)


def _clean(folded: torch.Tensor, least: float, most: float, size: int) -> _Piece:
    flags = torch.zeros(folded.shape, dtype=torch.uint8)
    return _Piece(Blocks(folded.cpu(), flags, None, least=least, most=most), size)


def _special(values: torch.Tensor, rows: int, columns: int, how: How) -> Blocks:
    """As `_even`, the long way: some value may not be finite."""
    finite = torch.isfinite(values)
    masks = (torch.isnan(values), values == math.inf, values == -math.inf)
    sums = [
        _fold(_fold(mask.to(torch.int64), 0, rows, torch.sum), 1, columns, torch.sum)
        for mask in (*masks, finite)
    ]
    counts = sums[3]
    if how == "mean":
        wide = values.to(torch.float64).masked_fill(~finite, 0.0)
        folded = _fold(_fold(wide, 0, rows, torch.sum), 1, columns, torch.sum) / counts
        folded = folded.to(values.dtype)
    else:
        folded = _extreme(values, ~finite, rows, columns, how)
    folded = folded.masked_fill(counts == 0, math.nan)
    flags = torch.zeros(folded.shape, dtype=torch.uint8)
    for bit, held in zip(_BITS, sums, strict=False):
        flags |= (held > 0).to(torch.uint8).cpu() * bit
    some = values[finite]
    least, most = torch.aminmax(some) if some.numel() else (math.inf, -math.inf)
    nan, posinf, neginf, _ = (int(held.sum()) for held in sums)
    return Blocks(folded.cpu(), flags, counts.cpu(), nan, posinf, neginf, float(least), float(most))


def _extreme(
    values: torch.Tensor, without: torch.Tensor | None, rows: int, columns: int, how: How
) -> torch.Tensor:
    def most(found: torch.Tensor) -> torch.Tensor:
        found = found if without is None else found.masked_fill(without, -math.inf)
        return _fold(_fold(found, 0, rows, torch.amax), 1, columns, torch.amax)

    def least(found: torch.Tensor) -> torch.Tensor:
        found = found if without is None else found.masked_fill(without, math.inf)
        return _fold(_fold(found, 0, rows, torch.amin), 1, columns, torch.amin)

    if how == "max":
        return most(values)
    if how == "min":
        return least(values)
    high, low = most(values), least(values)
    return torch.where(high >= -low, high, low)


def _split(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A dimension as blocks of that size."""
    shape = values.shape
    return values.reshape(*shape[:dim], -1, size, *shape[dim + 1 :])


def _fold(values: torch.Tensor, dim: int, size: int, fold: Any) -> torch.Tensor:
    """Fold along one dimension, its last block smaller where it must be."""
    if size == 1:
        return values
    length = values.shape[dim]
    whole = length - length % size
    parts = []
    if whole:
        parts.append(fold(_split(values.narrow(dim, 0, whole), dim, size), dim + 1))
    if whole < length:
        parts.append(fold(values.narrow(dim, whole, length - whole), dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
