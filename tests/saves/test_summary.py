"""The one set of statistics: exact, for every dtype, and blind to no value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.saves import summary
from nnsight_lab.saves.summary import Summary, summarize
from nnsight_lab.wire.tensors import DTYPES
from tests.saves.folders import python
from tests.wire.codec_values import arrays, tensors

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
NEVER = Summary(None, None, None, None, 0, 0, 0, 0, 0.0)
#: Sums of a few values in float64, in any order.
CLOSE = {"rel_tol": 1e-12, "abs_tol": 1e-300}


def numbers(tensor: torch.Tensor) -> list[Any]:
    """The values as Python's own numbers, found in another way."""
    if tensor.dtype is torch.float4_e2m1fn_x2:
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        halves = [
            half for byte in tensor.reshape(-1).view(torch.uint8).tolist() for half in (byte & 15, byte >> 4)
        ]
        return [math.copysign(table[half & 7], -1 if half & 8 else 1) for half in halves]
    if tensor.dtype.is_complex:
        parts = torch.view_as_real(tensor.resolve_conj()).reshape(-1, 2).tolist()
        return [math.nan if math.isnan(re) or math.isnan(im) else math.hypot(re, im) for re, im in parts]
    found: list[Any] = (
        tensor.to(torch.float64).reshape(-1).tolist() if "float8" in str(tensor.dtype) else None
    )
    return tensor.reshape(-1).tolist() if found is None else found


def expected(values: list[Any]) -> Summary:
    finite = [value for value in values if math.isfinite(value)]
    counts = (
        sum(map(math.isnan, values)),
        values.count(math.inf),
        values.count(-math.inf),
        sum(value == 0 for value in values),
    )
    if not finite:
        return Summary(None, None, None, None, *counts, 0.0)
    floats = list(map(float, finite))
    scale = max(map(abs, floats)) or 1.0
    scaled = [value / scale for value in floats]
    mean = math.fsum(scaled) / len(scaled)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / len(scaled))
    norm = math.sqrt(math.fsum(value * value for value in scaled))
    return Summary(min(finite), max(finite), mean * scale, std * scale, *counts, norm * scale)


def assert_close(got: Summary, wanted: Summary) -> None:
    assert (got.min, got.max) == (wanted.min, wanted.max)
    assert got[4:8] == wanted[4:8]
    for one, two in ((got.mean, wanted.mean), (got.std, wanted.std), (got.norm, wanted.norm)):
        if two is None:
            assert one is None
            continue
        # A mean or deviation near zero is what is left of values as large as these.
        largest = max(abs(float(wanted.min or 0)), abs(float(wanted.max or 0)))
        assert one is not None
        assert one == two or abs(one - two) <= max(1e-12 * abs(two), 1e-14 * largest, 1e-320), (got, wanted)


@settings(deadline=None)
@given(tensors())
def test_any_tensor_of_any_bytes_has_the_statistics_of_its_numbers(tensor: torch.Tensor) -> None:
    assert_close(summarize(tensor), expected(numbers(tensor)))


@settings(deadline=None)
@given(arrays())
def test_arrays_of_either_byte_order_have_them_too(array: np.ndarray[Any, Any]) -> None:
    native = array.astype(array.dtype.newbyteorder("=")).copy()
    assert summarize(array) == summarize(torch.from_numpy(native))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_statistics_empty_0_d_and_by_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[name]
    monkeypatch.setattr(summary, "CHUNK", 7)
    assert summarize(torch.empty(0, 3, dtype=dtype)) == NEVER
    every_byte = torch.arange(256, dtype=torch.uint8)
    if dtype is torch.bool:
        every_byte = every_byte & 1
    tensor = every_byte.view(dtype)
    assert_close(summarize(tensor), expected(numbers(tensor)))
    assert_close(summarize(tensor[3]), expected(numbers(tensor[3:4])))


def test_float8_is_read_as_its_format_says() -> None:
    # E4M3: 448 is the largest, 2**-9 the smallest; two NaNs, two zeros, no infinity.
    got = summarize(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert (got.min, got.max, got.nan, got.zeros, got.posinf) == (-448.0, 448.0, 2, 2, 0)


def test_one_bad_value_hides_nothing_of_the_others() -> None:
    got = summarize(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 0.0, -0.0]))
    assert got == Summary(0.0, 3.0, 1.0, math.sqrt(1.5), 1, 1, 1, 2, math.sqrt(10))
    assert summarize(torch.full((5,), math.nan)) == NEVER._replace(nan=5)


def test_ints_beyond_a_float_keep_their_extremes() -> None:
    got = summarize(torch.tensor([2**63 - 1, -(2**63) + 1, 0]))
    assert (got.min, got.max) == (-(2**63) + 1, 2**63 - 1)
    assert type(got.min) is int
    assert summarize(torch.tensor([2**64 - 1], dtype=torch.uint64)).max == 2**64 - 1


def test_bools_count_as_zero_and_one() -> None:
    got = summarize(torch.tensor([True, False, True, True]))
    assert (got.min, got.max, got.mean, got.zeros) == (0, 1, 0.75, 1)


def test_complex_numbers_count_by_magnitude() -> None:
    got = summarize(torch.tensor([3 + 4j, 0j, complex(math.nan, math.inf), complex(-math.inf, 0)]))
    assert got == Summary(0.0, 5.0, 2.5, 2.5, 1, 1, 0, 1, 5.0)
    assert summarize(torch.tensor([3 + 4j]).conj()).max == 5.0


def test_values_whose_squares_leave_float64_are_measured_all_the_same() -> None:
    huge = summarize(torch.tensor([1e300, -1e300], dtype=torch.float64))
    assert (huge.mean, huge.std, huge.norm) == (0.0, 1e300, pytest.approx(math.sqrt(2) * 1e300, rel=1e-15))
    tiny = summarize(torch.tensor([5e-324, 5e-324], dtype=torch.float64))
    assert (tiny.mean, tiny.std) == (5e-324, 0.0)
    most = torch.finfo(torch.float64).max
    assert summarize(torch.full((100,), most, dtype=torch.float64)).mean == most


def test_a_small_deviation_around_a_large_mean_is_not_lost() -> None:
    values = torch.randn(300_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e9
    got = summarize(values)
    assert got.std is not None
    assert got.std == pytest.approx(float(values.std(unbiased=False)), rel=1e-9)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.int16]))
def test_strides_and_chunks_change_nothing(seed: int, dtype: torch.dtype) -> None:
    whole = (torch.randn(70, 90, 11, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    view = whole.permute(2, 0, 1)[::2, 3:, ::3]
    one, two = summarize(view), summarize(view.contiguous())
    assert one[:2] == two[:2]
    assert one[4:8] == two[4:8]
    assert one.mean == pytest.approx(two.mean, rel=1e-9, abs=1e-9)
    assert one.std == pytest.approx(two.std, rel=1e-12)
    spread = torch.tensor([1.0, 2.0]).expand(50_000, 2)
    assert summarize(spread)[:4] == (1.0, 2.0, 1.5, 0.5)


def test_half_a_gigabyte_is_summarized_without_a_copy() -> None:
    grown = python(
        "import resource, torch\n"
        "from nnsight_lab.saves.summary import summarize\n"
        "summarize(torch.ones(3, dtype=torch.bfloat16))\n"
        "flat = torch.ones(16_384, 16_384, dtype=torch.bfloat16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert summarize(flat).mean == summarize(flat.T).mean == 1\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    assert int(grown) < 50 * 1024  # KiB; a float64 copy would be 2 GiB
