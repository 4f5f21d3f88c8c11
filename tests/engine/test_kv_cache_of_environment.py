"""`NNSIGHT_LAB_KV_CACHE`: a KV cache smaller than vLLM's own variable can say, for small containers."""

import pytest

from nnsight_lab.engine.starting import KV_CACHE_VARIABLE, kv_cache_of_environment
from nnsight_lab.errors import CellUsageError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv(KV_CACHE_VARIABLE, raising=False)


def test_it_is_in_bytes_where_nobody_said_another(monkeypatch):
    assert kv_cache_of_environment({}) == {}
    monkeypatch.setenv(KV_CACHE_VARIABLE, "64MiB")
    assert kv_cache_of_environment({"max_model_len": 8}) == {"kv_cache_memory_bytes": 64 * 2**20}


@pytest.mark.parametrize(
    "said", ["gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"]
)
def test_what_a_cell_says_wins(monkeypatch, said):
    monkeypatch.setenv(KV_CACHE_VARIABLE, "64MiB")
    assert kv_cache_of_environment({said: 1}) == {}


def test_vllms_own_variable_wins(monkeypatch):
    monkeypatch.setenv(KV_CACHE_VARIABLE, "64MiB")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert kv_cache_of_environment({}) == {}


def test_nonsense_is_refused_by_the_variables_name(monkeypatch):
    monkeypatch.setenv(KV_CACHE_VARIABLE, "small")
    with pytest.raises(CellUsageError, match=f"{KV_CACHE_VARIABLE}='small' is not a size"):
        kv_cache_of_environment({})
