"""A matrix seen from any distance, in tiles, without a copy of it.

A level ``(a, b)`` shows one number per block of ``2**a`` rows by ``2**b`` columns; a tile is 256 x 256 of
those. Near levels are read straight from the tensor. Far ones come from a *base*, one number per 64 or more
values, which is read once, chunk by chunk and only where it is looked at, and kept within a bound of bytes:
a tensor of 10 GB is never copied, and zooming out costs its reading once. Colours need a range before the
whole was read, so a range is that of a fixed sample of blocks, the same at every look.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_lab.widgets.jobs import Stopped
from nnsight_lab.widgets.reduce import Blocks, How, numbers, reduce_again, reduce_blocks
from nnsight_lab.widgets.sources import Source
from nnsight_lab.widgets.spans import Span, encode, scale_of, span_of

#: Blocks along a side of a tile.
TILE: Final = 256
CACHE_BYTES: Final = 256 * 2**20
#: What is read at once: 16 MiB in float32.
_CHUNK_VALUES: Final = 4 * 2**20
#: Up to this torch starts no threads, which would wait for work by spinning, and take a browser's core.
_QUIET_VALUES: Final = 2**15
#: What a question about one block may read, and a sample.
_BLOCK_VALUES: Final = 4 * 2**20
_SAMPLE_VALUES: Final = 2**20
#: Singles are a cache miss each: 256 x 256 of them take some 10 ms of a tensor that no cache holds.
_SAMPLE_SIDE: Final = 256
_SAMPLE_STRIPS: Final = 32
_SAMPLE_RUNS: Final = 4
#: Bytes that a block of a base takes: its number, its flags, its count.
_BASE_BYTES: Final = (4 + 1, 8)
_BASE_HALVINGS: Final = 6
#: About how many pixels a picture has, down and across.
_LOOK: Final = (420, 1000)

Leads = tuple[int, ...]


class Level(NamedTuple):
    """How far away: a block is ``2**rows`` by ``2**columns`` values."""

    rows: int
    columns: int


class Place(NamedTuple):
    """A tile: which level, and which there."""

    level: Level
    row: int
    column: int


class Special(NamedTuple):
    """How many values are not finite, in as much as was looked at.

    Attributes:
        nan: Not a number.
        posinf: Infinite.
        neginf: Minus infinity.
        seen: The share of the slice that was looked at, 1 where these are the whole numbers.
    """

    nan: int
    posinf: int
    neginf: int
    seen: float


class Tiles:
    """Tiles of the last two dimensions of a source; one of 1-D is a matrix of one row.

    Every method may be called from any thread.

    Args:
        source: Where the numbers are.
        cache_bytes: What may be kept of what was computed.
    """

    def __init__(self, source: Source, cache_bytes: int = CACHE_BYTES) -> None:
        self.source: Source | None = source
        shape = source.shape
        self.leads = shape[:-2]
        self.rows, self.columns = (1, 1, *shape)[-2:]
        self.is_bool = source.dtype == "bool"
        self._cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._bases: OrderedDict[tuple[Leads, How], _Base] = OrderedDict()
        self._tiles: OrderedDict[tuple[Leads, How, Place], Blocks] = OrderedDict()
        self._tile_bytes = 0
        self._samples: OrderedDict[tuple[Leads, How, Level], npt.NDArray[np.float64]] = OrderedDict()
        self._last_singles: tuple[Leads, torch.Tensor] | None = None

    # -- tiles ---------------------------------------------------------------------------------

    def tile(
        self, leads: Leads, how: How, place: Place, stopped: Callable[[], bool] = lambda: False
    ) -> Blocks:
        """The blocks of a tile ``[row, column]``, fewer than 256 x 256 at the far edges.

        Args:
            leads: Index of the slice in the leading dimensions.
            how: Which number of a block.
            place: Which tile.
            stopped: Asked between chunks whether to go on.

        Raises:
            Stopped: It said so.
            IndexError: There is no such tile.
        """
        key = (leads, how, place)
        with self._lock:
            if key in self._tiles:
                self._tiles.move_to_end(key)
                return self._tiles[key]
        level, rows, columns = place.level, 2**place.level.rows, 2**place.level.columns
        first_row, first_column = place.row * TILE * rows, place.column * TILE * columns
        if not (0 <= first_row < self.rows and 0 <= first_column < self.columns):
            raise IndexError(f"no tile {place}")
        last_row = min(first_row + TILE * rows, self.rows)
        last_column = min(first_column + TILE * columns, self.columns)
        base = self._base(leads, how)
        window = (first_row, last_row, first_column, last_column)
        if level.rows >= base.level.rows and level.columns >= base.level.columns:
            found = base.blocks(window, level, self, stopped)
        else:
            found = self._direct(leads, how, window, level, stopped)
        with self._lock:
            if self.source is not None:
                self._tiles[key] = found
                self._tile_bytes += _nbytes(found)
                while self._tile_bytes > self._cache_bytes // 4 and len(self._tiles) > 1:
                    self._tile_bytes -= _nbytes(self._tiles.popitem(last=False)[1])
        return found

    def is_quick(self, leads: Leads, how: How, places: list[Place]) -> bool:
        """Whether these tiles need little reading."""
        values = 0
        with self._lock:
            for place in places:
                if (leads, how, place) not in self._tiles:
                    values += (TILE << place.level.rows) * (TILE << place.level.columns)
            base = self._bases.get((leads, how))
        return min(values, self.rows * self.columns) <= 2 * _CHUNK_VALUES or (
            base is not None and base.seen == 1.0 and all(base.serves(place.level) for place in places)
        )

    def codes(self, blocks: Blocks, span: Span) -> npt.NDArray[np.uint8]:
        """A tile as one byte per block."""
        return encode(blocks.values.numpy(), blocks.flags.numpy(), span)

    def preview(self, leads: Leads, span: Span) -> npt.NDArray[np.uint8]:
        """The codes of some single values ``[row, column]``, at even distances over the slice."""
        return self.codes(reduce_blocks(self._singles(leads), 1, 1, "mean"), span)

    # -- colours -------------------------------------------------------------------------------

    def span(self, leads: Leads, how: How, level: Level, scale: str, clip: str | tuple[float, float]) -> Span:
        """What the colours span at a level.

        Args:
            leads: As for `tile`.
            how: As for `tile`.
            level: The range ``"robust"`` is that of the blocks there.
            scale: One of `nnsight_lab.widgets.spans.SCALES`.
            clip: ``"robust"``, ``"full"`` (of single values, wherever one looks from), or the two ends.
        """
        singles = self._sample(leads, "mean", Level(0, 0))
        if scale == "auto":
            scale = scale_of(singles)
        if not isinstance(clip, str):
            return Span(float(clip[0]), float(clip[1]), scale)
        if self.is_bool:
            return Span(0.0, 1.0, "sequential")
        if clip == "full":
            base = self._base(leads, "mean")
            base.fill((0, self.rows, 0, self.columns), self, lambda: False)
            ends = [base.least, base.most] if base.least <= base.most else []
            if scale == "log":  # the least magnitude is not among the ends
                ends = [*ends, *np.abs(singles[singles != 0])]
            return span_of(np.array(ends, dtype=np.float64), scale, robust=False)
        sample = singles if level == (0, 0) else self._sample(leads, how, level)
        return span_of(sample, scale, robust=True)

    def special(self, leads: Leads) -> Special:
        """What is known of special values so far."""
        with self._lock:
            bases = [base for (at, _), base in self._bases.items() if at == leads]
        base = max(bases, key=lambda found: found.seen, default=None)
        if base is None:
            return Special(0, 0, 0, 0.0)
        return Special(base.nan, base.posinf, base.neginf, base.seen)

    def count(self, leads: Leads, how: How, stopped: Callable[[], bool] = lambda: False) -> Special:
        """The same, when all was looked at."""
        self._base(leads, how).fill((0, self.rows, 0, self.columns), self, stopped)
        return self.special(leads)

    # -- single values and blocks --------------------------------------------------------------

    def values(self, leads: Leads, rows: slice, columns: slice) -> torch.Tensor:
        """Exact values ``[row, column]`` in the source's dtype, on the CPU."""
        return self._read(leads, rows, columns).cpu()

    def block(self, leads: Leads, level: Level, row: int, column: int) -> Blocks | None:
        """What is in one block, exactly; None where it is too large to be read at once."""
        high, wide = 2**level.rows, 2**level.columns
        last_row, last_column = min((row + 1) * high, self.rows), min((column + 1) * wide, self.columns)
        if (last_row - row * high) * (last_column - column * wide) > _BLOCK_VALUES:
            return None
        raw = self._read(leads, slice(row * high, last_row), slice(column * wide, last_column))
        return reduce_blocks(numbers(raw).to(torch.float64), high, wide, "mean")

    def release(self) -> None:
        """Let go of the source and of all that was computed."""
        with self._lock:
            self.source = None
            self.forget()

    def forget(self) -> None:
        """Let go of what was computed."""
        with self._lock:
            self._bases.clear()
            self._tiles.clear()
            self._samples.clear()
            self._last_singles = None
            self._tile_bytes = 0

    @property
    def cached_bytes(self) -> int:
        """What is kept of what was computed."""
        with self._lock:
            return self._tile_bytes + sum(base.nbytes for base in self._bases.values())

    # -- inside --------------------------------------------------------------------------------

    def _read(self, leads: Leads, rows: slice, columns: slice) -> torch.Tensor:
        source = self.source
        if source is None:
            raise Stopped
        index: tuple[int | slice, ...] = (*leads, rows, columns)
        if len(source.shape) >= 2:
            return source.read(index)
        if len(source.shape) == 1:
            return source.read((columns,)).unsqueeze(0)
        return source.read(()).reshape(1, 1)

    def _direct(
        self,
        leads: Leads,
        how: How,
        window: tuple[int, int, int, int],
        level: Level,
        stopped: Callable[[], bool],
    ) -> Blocks:
        """Blocks read from the source, a few rows of blocks at a time."""
        first_row, last_row, first_column, last_column = window
        high, wide = 2**level.rows, 2**level.columns
        few = (last_row - first_row) * (last_column - first_column) <= _CHUNK_VALUES
        step = (
            max(1, (_QUIET_VALUES if few else _CHUNK_VALUES) // (high * (last_column - first_column))) * high
        )
        parts = []
        for row in range(first_row, last_row, step):
            if stopped():
                raise Stopped
            raw = self._read(leads, slice(row, min(row + step, last_row)), slice(first_column, last_column))
            parts.append(reduce_blocks(numbers(raw), high, wide, how))
        if len(parts) == 1:
            return parts[0]
        values, flags = torch.cat([part.values for part in parts]), torch.cat([part.flags for part in parts])
        return Blocks(values, flags, None)

    def _base(self, leads: Leads, how: How) -> _Base:
        with self._lock:
            base = self._bases.get((leads, how))
            if base is None:
                level = base_level(self.rows, self.columns, self._cache_bytes // 2)
                wide = self.source is not None and self.source.dtype in _DOUBLE
                base = self._bases[leads, how] = _Base(leads, how, level, self.rows, self.columns, wide)
                while len(self._bases) > 1 and self.cached_bytes > self._cache_bytes:
                    self._bases.popitem(last=False)
            self._bases.move_to_end((leads, how))
            return base

    def _singles(self, leads: Leads) -> torch.Tensor:
        """Some single numbers ``[row, column]``, at even distances: always the same ones."""
        with self._lock:
            if self._last_singles is not None and self._last_singles[0] == leads:
                return self._last_singles[1]
        across = _SAMPLE_SIDE if self.rows > 1 else _SAMPLE_SIDE**2
        rows = slice(0, self.rows, max(1, -(-self.rows // _SAMPLE_SIDE)))
        columns = slice(0, self.columns, max(1, -(-self.columns // across)))
        found = numbers(self._read(leads, rows, columns)).cpu()
        with self._lock:
            self._last_singles = (leads, found)
        return found

    def _sample(self, leads: Leads, how: How, level: Level) -> npt.NDArray[np.float64]:
        """The finite numbers of some blocks at even distances: always the same ones."""
        key = (leads, how, level)
        with self._lock:
            if key in self._samples:
                return self._samples[key]
        if level == (0, 0):
            found = self._singles(leads).to(torch.float64).numpy().ravel()
        else:
            found = np.concatenate(list(self._sampled_blocks(leads, how, level)))
        found = np.asarray(found[np.isfinite(found)], dtype=np.float64)
        with self._lock:
            self._samples[key] = found
            while len(self._samples) > 64:
                self._samples.popitem(last=False)
        return found

    def _sampled_blocks(self, leads: Leads, how: How, level: Level) -> Iterator[npt.NDArray[np.float64]]:
        """Blocks of some rows of blocks, in runs that lie together in memory."""
        high, wide = 2**level.rows, 2**level.columns
        down, across = -(-self.rows // high), -(-self.columns // wide)
        strips, runs = min(down, _SAMPLE_STRIPS), 1
        # A block of a million values is known well enough by some of its rows.
        every = max(1, high * wide * strips // _SAMPLE_VALUES)
        run = max(1, _SAMPLE_VALUES * every // (strips * high * wide))
        if run < across:
            runs = min(_SAMPLE_RUNS, run)
            run //= runs
        for row in _spread(down, strips):
            rows = slice(row * high, min((row + 1) * high, self.rows), every)
            for column in _spread(max(1, across - run + 1), runs):
                columns = slice(column * wide, min((column + run) * wide, self.columns))
                raw = self._read(leads, rows, columns)
                yield reduce_blocks(numbers(raw), raw.shape[0], wide, how).values.double().numpy().ravel()


def _spread(size: int, count: int) -> list[int]:
    """``count`` places at even distances, the first and the last among them."""
    return [0] if count == 1 else [place * (size - 1) // (count - 1) for place in range(count)]


_DOUBLE: Final = frozenset(
    {"float64", "int32", "int64", "uint32", "uint64", "complex32", "complex64", "complex128"}
)


def base_level(rows: int, columns: int, bound_bytes: int) -> Level:
    """The level of a base: 64 values a block or more, and the whole within a bound.

    A picture is wider than high and a tensor is often higher than wide, so its first look is at blocks that
    are. The base has blocks of that form, so that it serves also the looks after some zooming, until little
    is in sight.
    """
    higher = math.log2(max(1, rows / _LOOK[0])) - math.log2(max(1, columns / _LOOK[1]))
    down = min(max(round((_BASE_HALVINGS + higher) / 2), 0), _BASE_HALVINGS)
    across = _BASE_HALVINGS - down
    while (rows / 2**down) * (columns / 2**across) * sum(_BASE_BYTES) > bound_bytes:
        down, across = (down + 1, across) if rows >> down > columns >> across else (down, across + 1)
    return Level(down, across)


class _Base:
    """One number per block of a slice, read where it is looked at."""

    def __init__(self, leads: Leads, how: How, level: Level, rows: int, columns: int, wide: bool) -> None:
        self.level = level
        self.least, self.most = math.inf, -math.inf
        self.nan = self.posinf = self.neginf = 0
        self._leads, self._how = leads, how
        self._lock = threading.Lock()
        down, across = -(-rows // 2**level.rows), -(-columns // 2**level.columns)
        self._values = torch.empty(down, across, dtype=torch.float64 if wide else torch.float32)
        self._flags = torch.empty(down, across, dtype=torch.uint8)
        self._counts: torch.Tensor | None = None
        side = math.isqrt(_CHUNK_VALUES)
        self._step = (max(1, side >> level.rows), max(1, side >> level.columns))
        self._done = np.zeros((-(-down // self._step[0]), -(-across // self._step[1])), dtype=bool)
        self._rows, self._columns = rows, columns

    @property
    def nbytes(self) -> int:
        """What it takes."""
        counts = 0 if self._counts is None else self._counts.nbytes
        return self._values.nbytes + self._flags.nbytes + counts

    @property
    def seen(self) -> float:
        """The share of it that was read."""
        return float(self._done.mean()) if self._done.size else 1.0

    def serves(self, level: Level) -> bool:
        """Whether tiles of that level are made from it."""
        return level.rows >= self.level.rows and level.columns >= self.level.columns

    def blocks(
        self, window: tuple[int, int, int, int], level: Level, tiles: Tiles, stopped: Callable[[], bool]
    ) -> Blocks:
        """The blocks of a window of values, at a level it serves."""
        self.fill(window, tiles, stopped)
        down, across = 2**self.level.rows, 2**self.level.columns
        rows = slice(window[0] // down, -(-window[1] // down))
        columns = slice(window[2] // across, -(-window[3] // across))
        with self._lock:
            values, flags = self._values[rows, columns], self._flags[rows, columns]
            counts = self._sizes(rows, columns) if self._counts is None else self._counts[rows, columns]
            high, wide = 2 ** (level.rows - self.level.rows), 2 ** (level.columns - self.level.columns)
            if high == wide == 1:
                return Blocks(values.clone(), flags.clone(), counts.clone())
            return reduce_again(values, flags, counts, high, wide, self._how)

    def fill(self, window: tuple[int, int, int, int], tiles: Tiles, stopped: Callable[[], bool]) -> None:
        """Read what is missing of a window of values."""
        high, wide = self._step[0] << self.level.rows, self._step[1] << self.level.columns
        for row in range(window[0] // high, -(-window[1] // high)):
            for column in range(window[2] // wide, -(-window[3] // wide)):
                if stopped():
                    raise Stopped
                with self._lock:
                    if not self._done[row, column]:
                        self._read(row, column, high, wide, tiles)

    def _read(self, row: int, column: int, high: int, wide: int, tiles: Tiles) -> None:
        raw = tiles._read(
            self._leads,
            slice(row * high, min((row + 1) * high, self._rows)),
            slice(column * wide, min((column + 1) * wide, self._columns)),
        )
        found = reduce_blocks(numbers(raw), 2**self.level.rows, 2**self.level.columns, self._how)
        rows = slice(row * self._step[0], row * self._step[0] + found.values.shape[0])
        columns = slice(column * self._step[1], column * self._step[1] + found.values.shape[1])
        self._values[rows, columns] = found.values
        self._flags[rows, columns] = found.flags
        if found.counts is not None and self._counts is None:
            everything = (slice(0, self._values.shape[0]), slice(0, self._values.shape[1]))
            self._counts = self._sizes(*everything).contiguous()
        if found.counts is not None and self._counts is not None:
            self._counts[rows, columns] = found.counts
        self.nan += found.nan
        self.posinf += found.posinf
        self.neginf += found.neginf
        self.least, self.most = min(self.least, found.least), max(self.most, found.most)
        self._done[row, column] = True

    def _sizes(self, rows: slice, columns: slice) -> torch.Tensor:
        """How many values each block has, those at the far edges fewer."""
        return _lengths(rows, 2**self.level.rows, self._rows)[:, None] * _lengths(
            columns, 2**self.level.columns, self._columns
        )


def _lengths(part: slice, size: int, whole: int) -> torch.Tensor:
    firsts = torch.arange(part.start, part.stop, dtype=torch.int64) * size
    return (whole - firsts).clamp(max=size)


def _nbytes(blocks: Blocks) -> int:
    counts = 0 if blocks.counts is None else blocks.counts.nbytes
    return blocks.values.nbytes + blocks.flags.nbytes + counts
