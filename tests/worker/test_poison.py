"""What is not finite in an ended request's cache is cleared when it gets a new owner, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nnsight_lab.worker.poison import Poison, handed_out


def caches(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(6, 2, 4, 8).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_block_is_cleared_in_every_layer_once_it_is_handed_on(dtype, value):
    layers, poison = caches(dtype), Poison()
    layers[-1][3, 1, 2, 5] = value
    assert poison.look(layers, [1, 3], "lab-a")
    poison.clear(layers, [0, 1, 2])
    assert not torch.isfinite(layers[-1][3].float()).all(), "whoever shares it sees what it is"
    poison.clear(layers, [2, 3])
    for layer in layers:
        assert layer.float().sum(dim=(1, 2, 3)).tolist() == [64, 64, 64, 0, 64, 64]
    layers[-1][3] = 1
    poison.clear(layers, [3])
    assert layers[-1][3].eq(1).all(), "it is cleared once"


def test_finite_blocks_and_the_blocks_of_others_are_left_alone():
    layers, poison = caches(torch.float32), Poison()
    layers[-1][0] = float("nan")
    assert not poison.look(layers, [1, 2], "lab-a")
    poison.clear(layers, range(6))
    assert layers[-1][1:].eq(1).all()
    assert not poison.look(layers, [], "lab-a")
    assert not poison.look([], [1], "lab-a")


def test_blocks_are_handed_out_to_be_written_and_not_where_they_are_served_from_the_cache():
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=([1, 2, 3], [11, 12]), num_computed_tokens=0),
            SimpleNamespace(block_ids=([4, 5, 6],), num_computed_tokens=64),
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b", "c"],
            resumed_req_ids={"c"},
            new_block_ids=[([7],), None, ([8, 9],)],
            num_computed_tokens=[64, 65, 32],
        ),
    )
    assert handed_out(scheduled, 32) == [1, 2, 3, 11, 12, 6, 7, 9]
