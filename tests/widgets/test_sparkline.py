"""A tensor in a few points: what numpy says of small ones, and a bounded number of values of large ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nnsight_lab.widgets.sources import TensorSource
from nnsight_lab.widgets.sparkline import POINTS, sparkline


class Counting(TensorSource):
    """Counts what is read."""

    read_values = 0

    def read(self, index: tuple[int | slice, ...]) -> torch.Tensor:
        found = super().read(index)
        self.read_values += found.numel()
        return found


def points(tensor: torch.Tensor) -> str:
    return sparkline(TensorSource(tensor)).points


def test_a_row_is_drawn_by_its_values_and_a_matrix_by_the_length_of_its_rows() -> None:
    assert points(torch.tensor([0.0, 1.0, 2.0, 3.0])) == "05af"
    assert points(torch.tensor([[3.0, 3.0, -2.0]])) == "ff0"
    assert points(torch.tensor([[1.0, -1.0], [0.0, 0.0], [2.0, -2.0]])) == "80f"
    assert points(torch.arange(1000.0)) == points(torch.arange(32.0))
    assert sparkline(TensorSource(torch.ones(3, 4, 5))) == ("8" * 12, "root mean square of 12 rows")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor(3.0), ""),
        (torch.zeros(0, 4), ""),
        (torch.zeros(4, 0), ""),
        (torch.zeros(1), ""),
        (torch.full((2, 3), math.nan), ".."),
        (torch.tensor([1.0, math.nan, math.inf, 2.0]), "0..f"),
        (torch.tensor([-3e38, 3e38]), "0f"),
        (torch.tensor([True, False]), "f0"),
        (torch.tensor([3 + 4j, 0j]), "f0"),
        (torch.tensor([1, 2**62]), "0f"),
        (torch.tensor([[1.0, 2.0]] * 100).to(torch.bfloat16), "8" * POINTS),
    ],
)
def test_odd_tensors_have_their_points(tensor: torch.Tensor, text: str) -> None:
    assert points(tensor) == text


@pytest.mark.parametrize("shape", [(50_000, 50_000), (10**9,), (1, 10**9), (30, 40, 2000, 1000), (10**9, 1)])
def test_a_fixed_number_of_values_is_read_of_a_tensor_of_gigabytes(shape: tuple[int, ...]) -> None:
    source = Counting(torch.ones((1,) * len(shape)).expand(shape))
    assert sparkline(source).points == "8" * POINTS
    assert 0 < source.read_values <= 2 * POINTS * 1024


def test_the_sample_of_a_large_matrix_is_close_to_the_whole() -> None:
    torch.manual_seed(0)
    heights = torch.linspace(1, 2, POINTS)
    large = torch.randn(POINTS, 100_000) * heights[:, None]
    found = [int(digit, 16) for digit in points(large)]
    expected = np.round(np.linspace(0, 15, POINTS))
    assert np.abs(np.array(found) - expected).max() <= 2
