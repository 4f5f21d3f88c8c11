"""Tiles: what is drawn of a matrix is what numpy says of it, from any distance and by any way."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import SaveNotFound, SavesError
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import tiles as module
from nnsight_lab.widgets.reduce import HOWS, NAN, NEGINF, POSINF, numbers, reduce_blocks
from nnsight_lab.widgets.sources import SavedSource, TensorSource, source_of
from nnsight_lab.widgets.spans import (
    CODE_NAN,
    CODE_NEGINF,
    CODE_NONE,
    CODE_POSINF,
    TOP,
    Span,
    encode,
    span_of,
)
from nnsight_lab.widgets.tiles import TILE, Level, Place, Stopped, Tiles, base_level

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]

#: Sums of up to a few thousand float32 values in another order than numpy's.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def naive(
    matrix: npt.NDArray[np.float64], rows: int, columns: int, how: str
) -> list[npt.NDArray[np.float64]]:
    """Numbers and flags of blocks ``[row, column]``, one block at a time."""
    down, across = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    found, flags = np.full((down, across), np.nan), np.zeros((down, across))
    for i in range(down):
        for j in range(across):
            block = matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            flags[i, j] = (
                NAN * np.isnan(block).any()
                + POSINF * np.isposinf(block).any()
                + NEGINF * np.isneginf(block).any()
            )
            finite = block[np.isfinite(block)]
            if finite.size:
                largest = finite[np.abs(finite).argmax()]
                low, high = finite.min(), finite.max()
                largest = high if high >= -low else low
                found[i, j] = {"mean": finite.mean(), "max": high, "min": low, "absmax": largest}[how]
    return [found, flags]


@st.composite
def matrices(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    matrix = random.standard_normal((rows, columns)).astype(np.float32)
    for special in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3)):
        matrix[random.random((rows, columns)) < draw(st.sampled_from([0.01, 0.3, 1.0]))] = special
    return matrix


@settings(deadline=None)
@given(matrix=matrices(), rows=st.integers(1, 80), columns=st.integers(1, 80), how=st.sampled_from(HOWS))
def test_blocks_are_what_numpy_says(
    matrix: npt.NDArray[np.float32], rows: int, columns: int, how: str
) -> None:
    found = reduce_blocks(torch.from_numpy(matrix), rows, columns, how)
    values, flags = naive(matrix.astype(np.float64), rows, columns, how)
    np.testing.assert_allclose(found.values.numpy(), values, **TOLERANCE)
    np.testing.assert_array_equal(found.flags.numpy(), flags)
    assert (found.nan, found.posinf, found.neginf) == (
        np.isnan(matrix).sum(),
        np.isposinf(matrix).sum(),
        np.isneginf(matrix).sum(),
    )
    finite = matrix[np.isfinite(matrix)]
    assert (found.least, found.most) == (
        (finite.min(), finite.max()) if finite.size else (math.inf, -math.inf)
    )
    if found.counts is not None:
        assert found.counts.sum() == finite.size


@settings(deadline=None, max_examples=60)
@given(
    matrix=matrices(),
    level=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    base=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    how=st.sampled_from(HOWS),
)
def test_a_tile_is_the_same_straight_from_the_tensor_and_over_a_base(
    matrix: npt.NDArray[np.float32], level: tuple[int, int], base: tuple[int, int], how: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", 8)
        patch.setattr(module, "_CHUNK_VALUES", 256)
        patch.setattr(module, "_QUIET_VALUES", 64)
        patch.setattr(module, "base_level", lambda *_: Level(*base))
        tiles = Tiles(TensorSource(torch.from_numpy(matrix)))
        values, flags = naive(matrix.astype(np.float64), 2 ** level[0], 2 ** level[1], how)
        for i in range(-(-values.shape[0] // 8)):
            for j in range(-(-values.shape[1] // 8)):
                found = tiles.tile((), how, Place(Level(*level), i, j))
                part = np.s_[8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
                np.testing.assert_allclose(found.values.numpy(), values[part], **TOLERANCE)
                np.testing.assert_array_equal(found.flags.numpy(), flags[part])
        special = tiles.count((), how)
        assert special == (*(int(f(matrix).sum()) for f in (np.isnan, np.isposinf, np.isneginf)), 1.0)


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS, *WHOLE, *COMPLEX], ids=str)
def test_every_dtype_has_its_numbers(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(300, 40, generator=random, dtype=torch.float64) * 20
    if dtype.is_complex:
        tensor = torch.complex(wide, wide.flip(0)).to(dtype)
        expected = tensor.to(torch.complex128).abs()
    else:
        tensor = (wide if dtype.is_floating_point else wide.abs()).to(dtype)
        expected = tensor.to(torch.float64)
    found = Tiles(TensorSource(tensor)).tile((), "mean", Place(Level(2, 1), 0, 0))
    values, _ = naive(expected.numpy(), 4, 2, "mean")
    np.testing.assert_allclose(found.values.double().numpy(), values, **TOLERANCE)


def test_a_mean_of_the_largest_floats_is_no_infinity() -> None:
    huge = torch.full((64, 64), 3e38)
    found = reduce_blocks(huge, 8, 8, "mean")
    assert found.flags.sum() == 0
    np.testing.assert_allclose(found.values.numpy(), 3e38, rtol=1e-6)
    wide = torch.full((4, 4), 1.7e308, dtype=torch.float64)
    assert math.isfinite(Tiles(TensorSource(wide)).span((), "mean", Level(0, 0), "auto", "robust").high)


def test_a_complex_number_with_a_nan_in_it_is_nan() -> None:
    parts = torch.tensor([[complex(math.nan, math.inf), complex(3, 4), complex(0, math.inf)]])
    assert torch.isnan(numbers(parts)).tolist() == [[True, False, False]]
    assert numbers(parts)[0, 1:].tolist() == [5.0, math.inf]
    assert numbers(parts.conj())[0, 1].item() == 5.0


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4, 5)])
def test_the_last_two_dimensions_are_the_matrix(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    tiles = Tiles(TensorSource(tensor))
    leads = tuple(size - 1 for size in shape[:-2])
    matrix = tensor[leads] if leads else tensor
    found = tiles.tile(leads, "mean", Place(Level(0, 0), 0, 0)).values
    assert found.tolist() == matrix.reshape((1, 1, *matrix.shape)[-2:]).tolist()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_saved_tensor_gives_the_tiles_of_the_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    tensor = torch.randn(shape, dtype=torch.float32).to(torch.bfloat16)
    store = SavesStore()
    store.put("r", [{"trace": {"h": [torch.ones(2), tensor]}}])
    (label,) = store.labels(step=1)
    saved, plain = Tiles(SavedSource(store, label)), Tiles(TensorSource(tensor))
    leads = tuple(data.draw(st.integers(0, size - 1)) for size in shape[:-2])
    place = Place(Level(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))), 0, 0)
    torch.testing.assert_close(
        saved.tile(leads, "mean", place).values, plain.tile(leads, "mean", place).values, rtol=0, atol=0
    )
    assert saved.source is not None
    assert (saved.source.shape, saved.source.dtype) == (tuple(shape), "bfloat16")


def test_what_the_store_dropped_is_not_there_any_more() -> None:
    store = SavesStore()
    store.put("r", [{"trace": {"h": torch.ones(4, 4), "n": 3}}])
    (label,) = store.labels(name="h")
    tiles = Tiles(SavedSource(store, label.key))
    assert tiles.rows == 4
    store.drop("r")
    with pytest.raises(SaveNotFound):
        tiles.tile((), "mean", Place(Level(0, 0), 0, 0))
    with pytest.raises(SaveNotFound):
        SavedSource(store, label.key)


def test_what_cannot_be_drawn_is_refused_with_what_to_do() -> None:
    store = SavesStore()
    store.put("r", [{"trace": {"n": 3}}])
    with pytest.raises(SavesError, match="no tensor"):
        source_of(store, store.labels()[0])
    with pytest.raises(SavesError, match="say which"):
        source_of(store)
    with pytest.raises(SavesError, match="densify"):
        source_of(torch.eye(3).to_sparse())
    with pytest.raises(SavesError, match="str"):
        source_of("text")
    assert source_of([[1, 2], [3, 4]]).dtype == "int64"
    assert source_of(np.arange(6.0, dtype=">f4")[::-1]).dtype == "float32"


def test_a_mapped_file_is_read_where_it_is_looked_at(tmp_path: Path) -> None:
    file = np.memmap(tmp_path / "m", dtype=np.float32, mode="w+", shape=(3000, 500))
    file[2100, 77] = 5.0
    file.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = source_of(np.memmap(tmp_path / "m", dtype=np.float32, mode="r", shape=(3000, 500)))
    read: list[int] = []
    original = source.read

    def counting(index: tuple[int | slice, ...]) -> torch.Tensor:
        found = original(index)
        read.append(found.numel())
        return found

    source.read = counting  # type: ignore[method-assign]
    tiles = Tiles(source)
    found = tiles.tile((), "max", Place(Level(0, 0), 2100 // TILE, 0))
    assert found.values[2100 % TILE, 77] == 5.0
    assert sum(read) == TILE * TILE
    tiles.tile((), "max", Place(Level(0, 0), 2100 // TILE, 0))
    assert sum(read) == TILE * TILE


def test_what_is_kept_stays_within_its_bound() -> None:
    assert base_level(100_000, 8192, 2**30) == (5, 1)
    assert base_level(1, 10**6, 2**30) == (0, 6)
    assert base_level(10**6, 8, 2**30) == (6, 0)
    assert base_level(1000, 1000, 2**30) == (4, 2)
    rows, columns = 10**6, 10**5
    down, across = base_level(rows, columns, 10**8)
    assert rows / 2**down * columns / 2**across * 13 <= 10**8
    tiles = Tiles(TensorSource(torch.zeros(4, 2000, 2000)), cache_bytes=2 * 2**20)
    for lead in range(4):
        for row in range(8):
            tiles.tile((lead,), "mean", Place(Level(0, 0), row, 0))
        tiles.tile((lead,), "mean", Place(Level(3, 3), 0, 0))
        assert tiles.cached_bytes <= 2.5 * 2**20
    tiles.release()
    assert tiles.cached_bytes == 0


def test_an_answer_nobody_waits_for_is_given_up() -> None:
    tiles = Tiles(TensorSource(torch.zeros(5000, 5000)))
    asked = []
    with pytest.raises(Stopped):
        tiles.tile((), "mean", Place(Level(5, 5), 0, 0), lambda: asked.append(1) or len(asked) > 2)
    assert len(asked) == 3
    with pytest.raises(IndexError):
        tiles.tile((), "mean", Place(Level(0, 0), 99, 0))


def test_codes_keep_special_values_apart_from_numbers() -> None:
    values = np.array([[-2.0, -1.0, 0.0, 1.0, 2.0, np.nan]], dtype=np.float32)
    none = np.zeros((1, 6), dtype=np.uint8)
    span = Span(-1.0, 1.0, "diverging")
    assert encode(values, none, span).tolist() == [[0, 0, round(TOP / 2), TOP, TOP, CODE_NONE]]
    flags = np.array([[NAN, POSINF, NEGINF, NAN | POSINF, 0, NAN]], dtype=np.uint8)
    assert encode(values, flags, span).tolist() == [
        [CODE_NAN, CODE_POSINF, CODE_NEGINF, CODE_NAN, TOP, CODE_NAN]
    ]
    log = encode(np.array([0.0, -1.0, 10.0, 100.0]), np.zeros(4, dtype=np.uint8), Span(1.0, 100.0, "log"))
    assert log.tolist() == [0, 0, round(TOP / 2), TOP]


@given(sample=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30))
def test_a_span_is_never_empty(sample: list[float]) -> None:
    for scale in ("sequential", "diverging", "log"):
        for robust in (True, False):
            span = span_of(np.array(sample, dtype=np.float64), scale, robust=robust)
            assert span.low < span.high
            assert scale != "log" or span.low > 0
            assert scale != "diverging" or span.low == -span.high


def test_one_outlier_does_not_take_the_colours() -> None:
    tensor = torch.randn(500, 500, generator=torch.Generator().manual_seed(0))
    tensor[3, 3] = 1e6
    tiles = Tiles(TensorSource(tensor))
    robust = tiles.span((), "mean", Level(0, 0), "auto", "robust")
    assert robust.scale == "diverging"
    assert 2 < robust.high < 4
    assert tiles.span((), "mean", Level(0, 0), "auto", "full").high == 1e6
    assert tiles.span((), "mean", Level(0, 0), "sequential", (-1, 2)) == (-1, 2, "sequential")
    assert tiles.span((), "mean", Level(3, 3), "auto", "robust").high < 1.5
