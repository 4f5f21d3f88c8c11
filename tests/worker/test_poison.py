"""What is not finite in an ended request's cache is cleared, and nothing else."""

from __future__ import annotations

import pytest
import torch

from nnsight_lab.worker.poison import clear_poisoned


def caches(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(6, 2, 4, 8).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_blocks_of_a_poisoned_request_are_cleared_in_every_layer(dtype, value):
    layers = caches(dtype)
    layers[-1][3, 1, 2, 5] = value
    assert clear_poisoned(layers, [1, 3], "lab-a")
    for layer in layers:
        assert layer.float().sum(dim=(1, 2, 3)).tolist() == [64, 0, 64, 0, 64, 64]


def test_finite_blocks_and_the_blocks_of_others_are_left_alone():
    layers = caches(torch.float32)
    layers[-1][0] = float("nan")
    assert not clear_poisoned(layers, [1, 2], "lab-a")
    assert layers[-1][1:].eq(1).all()
    assert not clear_poisoned(layers, [], "lab-a")
    assert not clear_poisoned([], [1], "lab-a")
