"""Memory of large replies: used again once nothing looks into it, and given back after a while."""

from __future__ import annotations

import gc

import pytest
import torch

from nnsight_lab.engine import buffers
from nnsight_lab.engine.buffers import Buffers

MB = 2**20


def test_memory_comes_back_with_the_last_that_looks_into_it_and_is_used_again():
    pool = Buffers()
    view = pool.take(4 * MB)
    tensor = torch.frombuffer(view, dtype=torch.float32)[7:20]
    address = view[:].obj.__array_interface__["data"][0]
    tensor.fill_(3.0)
    del view
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take(4 * MB)
    assert other.obj.__array_interface__["data"][0] != address
    assert tensor.tolist() == [3.0] * 13
    del tensor
    assert pool.idle_bytes == 4 * MB
    again = pool.take(3 * MB)
    assert len(again) == 3 * MB
    assert again.obj.__array_interface__["data"][0] == address
    assert pool.idle_bytes == 0


@pytest.mark.parametrize("nbytes", [1 * MB, 5 * MB])
def test_what_is_too_small_or_far_too_large_is_not_used(nbytes):
    pool = Buffers()
    pool.take(4 * MB).release()
    assert pool.idle_bytes == 4 * MB
    kept = pool.take(nbytes)
    assert pool.idle_bytes == 4 * MB
    assert len(kept) == nbytes


def test_what_waits_is_bounded_in_bytes_and_time_and_gone_with_the_engine(monkeypatch):
    monkeypatch.setattr(buffers, "IDLE_BYTES", 6 * MB)
    pool = Buffers()
    first, second = pool.take(4 * MB), pool.take(4 * MB)
    del first, second
    assert pool.idle_bytes == 4 * MB
    pool.tidy()
    assert pool.idle_bytes == 4 * MB
    pool.tidy(idle_s=0.0)
    assert pool.idle_bytes == 0
    last = pool.take(4 * MB)
    pool.close()
    del last
    assert pool.idle_bytes == 0
