"""The road home: large saves through shared memory, small ones in the reply, too large ones refused."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

import nnsight_lab as lab
from nnsight_lab.errors import OverBudget
from tests.waiting import CAT, GREEDY, LONG, TOWER, freed, interrupt, until, when_running

MB = 10**6


def slabs_mapped() -> list[str]:
    """The shared-memory files of engines that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sorted(set(re.findall(r"/dev/shm/nnsight_lab\.\S+", maps.read())))


def used(engine: Any) -> int:
    """Bytes of shared memory the pieces in use take."""
    return sum(engine.rpc("lab_used_bytes"))


@pytest.fixture
def small_budget(one_engine, mode, llama_path, tmp_path_factory) -> Iterator[Any]:
    """An engine with 70 MB of shared memory, and 100 MB on disk past that."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
        engine = one_engine.want(
            llama_path, mode, dtype="float32", save_budget="70MB", spill_budget="100MB", max_model_len=256
        )
        yield engine
        gc.collect()
        engine._driver.home.flush()


def test_large_saves_come_through_shared_memory_exactly(engine):
    import torch

    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        row = model.model.layers[0].output[0].save()
        wide = (row.repeat(1, 400)).save()
        kinds = {
            "half": wide.to(torch.bfloat16),
            "bits": wide > 0,
            "rows": [row, row[0], wide[:, ::3]],
            "same": row,
        }.save()
        note = "text".save()
    assert slabs_mapped()
    assert wide.equal(row.repeat(1, 400))
    assert kinds["half"].equal(wide.to(torch.bfloat16))
    assert kinds["half"].dtype is torch.bfloat16
    assert kinds["bits"].equal(wide > 0)
    assert kinds["rows"][2].equal(wide[:, ::3])
    assert kinds["same"] is kinds["rows"][0]
    assert note == "text"


def test_memory_is_used_again_once_the_tensors_are_gone(engine):
    model = engine.model

    def save_much() -> Any:
        with engine.trace(CAT, **GREEDY):
            much = model.model.layers[0].output[0].repeat(50, 1000).save()
        return much  # noqa: RET504  (bound by the trace)

    first = save_much()
    kept = first[0].clone()
    held = used(engine)
    assert held >= first.numel() * 4
    del first
    engine.saves.clear()
    gc.collect()
    until(lambda: used(engine) < held, 3, "the piece was not given back")
    before = slabs_mapped()
    for _ in range(5):
        assert save_much()[0].equal(kept)
        engine.saves.clear()
        gc.collect()
    assert len(slabs_mapped()) <= len(before) + 1


def test_a_tensor_outlives_its_request_and_keeps_its_values(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        kept = model.model.layers[0].output[0].repeat(1, 400).save()
    copy = kept.clone()
    for _ in range(3):
        with engine.trace(CAT, **GREEDY):
            other = model.model.layers[0].output[0].repeat(1, 1600).save()  # noqa: F841
    assert kept.equal(copy)


def test_an_aborted_request_leaves_no_memory_taken(engine):
    model = engine.model
    gc.collect()
    engine._driver.home.flush()
    before = used(engine)
    pressed = when_running(engine, interrupt)
    with pytest.raises(lab.errors.Interrupted), engine.trace(TOWER, **LONG) as tracer:
        grown = [].save()
        for _ in tracer.all():
            grown.append(model.model.layers[0].output[0].repeat(1, 100))
    pressed()
    freed(engine)
    until(lambda: used(engine) <= before, 3, "shared memory was left taken")


def test_past_the_memory_budget_saves_go_by_disk_and_past_that_the_request_is_refused(small_budget):
    engine, model = small_budget, small_budget.model
    with engine.trace(CAT, max_tokens=1):
        row = model.model.layers[0].output[0][:1].repeat(1000, 1).save()
    width = row.shape[1] * 4 * 1000
    times = 60 * MB // width
    with engine.trace(CAT, max_tokens=1):
        first = model.model.layers[0].output[0][:1].repeat(1000 * times, 1).save()
    with engine.trace(CAT, max_tokens=1):
        second = model.model.layers[0].output[0][:1].repeat(1000 * times, 1).save()  # by disk
    assert second.equal(first)
    refused = pytest.raises(OverBudget, match=r"third \(1\d\d\.\d\d MB\).*save_budget")
    with refused, engine.trace(CAT, max_tokens=1):
        third = model.model.layers[0].output[0][:1].repeat(3000 * times, 1).save()  # noqa: F841
    # The engine and everyone else go on.
    assert engine.generate(TOWER, **GREEDY)[0].finished
    assert engine.request_count() == 0


def test_a_request_has_a_budget_of_its_own(engine):
    model = engine.model
    refused = pytest.raises(OverBudget, match=r"this request's save_budget is 1 kB: x")
    with refused, engine.trace(CAT, save_budget=1000, **GREEDY):
        x = model.model.layers[0].output[0].repeat(10, 1).save()
    with engine.trace(CAT, save_budget="1GB", **GREEDY):
        x = model.model.layers[0].output[0].repeat(10, 1).save()
    assert x.ndim == 2
    with pytest.raises(lab.errors.CellUsageError, match="is not a size"):
        engine.generate(CAT, save_budget="much")


def test_a_stopped_engine_leaves_no_shared_memory_behind(one_engine, mode, llama_path):
    engine = one_engine.want(llama_path, mode, dtype="float32", max_model_len=128)
    model = engine.model
    with engine.trace(CAT, max_tokens=1):
        kept = model.model.layers[0].output[0].repeat(100, 10).save()
    copy = kept.clone()
    one_engine.stop()
    assert kept.equal(copy)
    engine.saves.clear()
    del kept

    def held() -> list[str]:
        gc.collect()
        return [name for name in slabs_mapped() if engine.id in name]

    # The store's thread may be looking at what is dropped.
    until(lambda: not held(), 5, "a stopped engine's memory is still mapped")
    assert not [name for name in os.listdir("/dev/shm") if engine.id in name]
