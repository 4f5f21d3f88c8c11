"""What makes two engines the same."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from nnsight_lab.engine.config import EngineConfig, check_options
from nnsight_lab.errors import CellUsageError


def config(model="m", mode="sync", **options):
    return EngineConfig.of(model, mode, options)


def test_configurations_are_equal_by_value_whatever_the_order():
    assert config(dtype="float32", seed=1) == config(seed=1, dtype="float32")
    assert hash(config(seed=1)) == hash(config(seed=1))
    assert config(seed=1).differences(config(seed=1)) == []


def test_a_difference_is_named_with_both_values():
    mine = config("m", "sync", dtype="float32", seed=1)
    theirs = config("other", "async", dtype="bfloat16", max_model_len=8)
    assert mine.differences(theirs) == [
        "model: 'm' -> 'other'",
        "mode: 'sync' -> 'async'",
        "dtype: 'float32' -> 'bfloat16'",
        "max_model_len: 'default' -> 8",
        "seed: 1 -> 'default'",
    ]


def test_mode_auto_is_async_where_a_loop_runs():
    async def within():
        return config(mode="auto").mode

    assert config(mode="auto").mode == "sync"
    assert asyncio.run(within()) == "async"


def test_an_unknown_mode_is_refused():
    with pytest.raises(CellUsageError, match="mode='asinc' is not one of auto, sync, async"):
        config(mode="asinc")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtpye": "float32"}, r"'dtpye' is not a vLLM engine option\. Did you mean 'dtype'\?"),
        ({"worker_cls": "x"}, "worker_cls cannot be set: the engine sets its own worker"),
        ({"dispatch": True}, "dispatch cannot be set"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, said):
    with pytest.raises(CellUsageError, match=said):
        check_options(options)


def test_vllms_own_options_are_taken():
    check_options({"dtype": "float32", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"})


@pytest.mark.parametrize(
    ("options", "on_cpu", "added"),
    [
        ({"max_model_len": 1024}, False, {"max_num_batched_tokens": 8192}),
        ({"max_model_len": 8192}, False, {"max_num_batched_tokens": 8192}),
        ({"max_model_len": 8193}, False, {}),  # a prompt must fit in one step
        ({}, False, {}),
        ({"max_model_len": 1024}, True, {}),
        ({"max_model_len": 1024, "max_num_batched_tokens": 2048}, False, {}),
        ({"max_model_len": 1024, "enable_chunked_prefill": True}, False, {}),
    ],
)
def test_steps_on_a_gpu_are_those_of_the_async_engine_where_nobody_said_otherwise(options, on_cpu, added):
    from nnsight_lab.engine.model import step_size  # vLLM: seconds to import

    assert step_size(options, on_cpu=on_cpu) == added


def test_ray_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch):
    asked = {"distributed_executor_backend": "ray"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CellUsageError, match=r"pip install 'nnsight-lab\[ray\]'$"):
        check_options(asked)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_options(asked)
