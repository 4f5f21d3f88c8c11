from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import PlotRefused, SaveNotFound
from nnsight_lab.plots import blocks
from nnsight_lab.plots.blocks import block_shape, cells_of
from nnsight_lab.plots.values import matrix_of
from nnsight_lab.saves.store import SavesStore

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_the_numbers_it_holds(dtype: torch.dtype) -> None:
    numbers = [[0, 1, 1], [1, 0, 1]]
    matrix = matrix_of(torch.tensor(numbers, dtype=torch.float32).to(dtype))
    assert matrix.read().tolist() == numbers
    assert matrix.said() == f"{str(dtype).removeprefix('torch.')} [2, 3]"
    stacked = matrix_of([torch.tensor(row, dtype=torch.float32).to(dtype) for row in numbers])
    assert stacked.read().tolist() == numbers
    assert stacked.dtype == matrix.dtype


def test_bfloat16_values_are_exact_and_complex_ones_are_magnitudes() -> None:
    values = torch.randn(5, 7).to(torch.bfloat16)
    assert np.array_equal(matrix_of(values).read(), values.double().numpy())
    matrix = matrix_of(torch.tensor([3 + 4j, -1j]))
    assert matrix.read().tolist() == [[5.0, 1.0]]
    assert matrix.said() == "magnitude of complex64 [2]"


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]],
        np.arange(6).reshape(2, 3)[::-1][::-1], np.arange(6, dtype=">i4").reshape(2, 3),
        (torch.arange(3), np.arange(3, 6)), [torch.arange(3)[None], torch.arange(3, 6)[None]],
        torch.arange(6).reshape(1, 2, 1, 3), torch.arange(6).reshape(3, 2).T.contiguous().T.reshape(2, 3),
        torch.arange(6.0, requires_grad=True).reshape(2, 3), torch.arange(6).reshape(2, 3).to_sparse(),
        np.arange(6, dtype=np.longdouble).reshape(2, 3),
    ],
)  # fmt: skip
def test_tensors_arrays_and_lists_of_them_are_one_matrix(values: Any) -> None:
    assert matrix_of(values).read().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("value", [3, 3.0, True, np.float32(3), torch.tensor(3.0)])
def test_a_number_is_a_matrix_of_one(value: Any) -> None:
    assert matrix_of(value).read().shape == (1, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.empty(0, 3), r"empty, \[0, 3\]"),
        ([], "the list is empty"),
        (torch.zeros(2, 3, 4), r"3 dimensions, \[2, 3, 4\].*values\[0\]"),
        ([torch.zeros(2), torch.zeros(3)], r"different lengths, \[2\], \[3\].*ragged=\"pad\""),
        ([torch.zeros(2, 2), torch.zeros(3, 2)], r"different shapes, \[2, 2\], \[3, 2\]"),
        ("text", "str cannot be drawn"),
        ({"a": 1}, "dict cannot be drawn"),
        (np.array(["a"]), "numbers are needed"),
        (torch.empty(2, 2, device="meta"), "meta tensor"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(values: Any, said: str) -> None:
    with pytest.raises(PlotRefused, match=said) as refused:
        matrix_of(values)
    assert "\n" not in str(refused.value)


def test_ragged_rows_are_padded_with_gaps_where_that_is_asked_for() -> None:
    read = matrix_of([torch.ones(1, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)], ragged="pad")
    assert np.isnan(read.read()).tolist() == [[False, True, True], [False, False, False]]
    assert matrix_of([[1], [2, 3]], ragged="pad").read()[1].tolist() == [2, 3]


def test_lists_of_mixed_dtypes_are_promoted() -> None:
    assert (
        matrix_of([torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)]).dtype == "bfloat16"
    )
    mixed = [torch.ones(2).to(torch.float8_e5m2), torch.ones(2)]
    assert matrix_of(mixed).read().tolist() == [[1, 1], [1, 1]]


def test_saved_values_are_found_by_label() -> None:
    store = SavesStore(budget_bytes=10**6)
    steps = [torch.full((1, 4), float(step)).to(torch.bfloat16) for step in range(3)]
    store.put("r", [{"trace": {"hidden": torch.ones(2, 4), "steps": steps}}])
    (label,) = store.labels("r", name="hidden")
    matrix = matrix_of(label, store=store)
    assert (matrix.shape, matrix.name) == ((2, 4), "hidden")
    stacked = matrix_of(store.labels("r", name="steps"), store=store)
    assert stacked.read().tolist() == [[float(step)] * 4 for step in range(3)]
    assert stacked.name == "steps"
    with pytest.raises(PlotRefused, match="pass store= as well"):
        matrix_of(label)
    store.drop("r")
    with pytest.raises(SaveNotFound):
        matrix_of(label.key, store=store)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), limit=st.integers(1, 60),
    how=st.sampled_from(["mean", "max", "absmax"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_blocks_are_the_mean_or_most_of_their_finite_values(
    rows: int, columns: int, limit: int, how: str, seed: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, columns)).round(3)
    values[np.random.default_rng(seed + 1).random(values.shape) < 0.3] = np.nan
    values.flat[0] = np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MAX_CELLS", limit)
        patch.setattr("nnsight_lab.plots.values._CHUNK", 50)
        cells = cells_of(matrix_of(values), how)
    assert cells.values.size <= limit
    assert (cells.nan, cells.infinite) == (int(np.isnan(values).sum()), 1)
    if not cells.aggregated:
        assert np.array_equal(cells.values, values, equal_nan=True)
        return
    assert f"{cells.rows} × {cells.columns} values" in cells.note
    for (row, column), found in np.ndenumerate(cells.values):
        block = values[row * cells.rows : (row + 1) * cells.rows, column * cells.columns :][
            :, : cells.columns
        ]
        finite = block[np.isfinite(block)]
        if finite.size == 0:
            assert np.isnan(found)
        elif how == "mean":
            assert found == pytest.approx(finite.mean(), abs=1e-12)
        elif how == "max":
            assert found == finite.max()
        else:
            assert abs(found) == np.abs(finite).max()


def test_the_longer_side_is_put_together_first() -> None:
    assert block_shape(500, 500) == (1, 1)
    assert block_shape(32, 100_000) == (1, 32)
    assert block_shape(1, 20_000) == (1, 8)
    assert block_shape(3, 200_000, by_row=False) == (1, 64)
