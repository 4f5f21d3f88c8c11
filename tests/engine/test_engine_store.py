"""The engine's store: every request's saves by label, in files, and their memory back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import nnsight_lab as lab
from nnsight_lab.errors import FileRefused, SaveNotFound, TraceError
from tests.waiting import CAT, FOX, GREEDY, TOWER, until


@pytest.fixture(autouse=True)
def empty_store(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    engine.saves.clear()
    budget = engine.saves.budget_bytes
    yield
    engine.saves.clear()
    engine.saves.budget_bytes = budget


def used(engine: Any) -> int:
    """Bytes of shared memory the pieces in use take."""
    return sum(engine.rpc("lab_used_bytes"))


def settled(store: Any) -> None:
    until(lambda: not store._shelf.janitor.busy, 20, "the store did not come to rest")


def test_a_traces_saves_are_kept_with_all_that_is_known_of_them(engine, llama_path):
    model = engine.model
    with engine.trace(TOWER, max_tokens=2, temperature=0, stop=["zzz"]) as tracer:
        row = model.model.layers[0].output[0].save()
        steps = [].save()
        for _ in tracer.iter[:2]:
            steps.append(model.model.layers[1].mlp.output)
    request_id = tracer.output.request_id
    assert engine.saves.ids() == [request_id]
    first, *listed = engine.saves.labels(request_id)
    assert engine.saves.get(request_id, "row").equal(row)
    assert (first.name, first.block, first.shape, first.dtype) == ("row", "trace", (16, 128), "float32")
    assert first.module_path == "model.layers[0].output[0]"
    assert [(label.path, label.step, label.module_path) for label in listed] == [
        ("[0]", 0, "model.layers[1].mlp.output"),
        ("[1]", 1, "model.layers[1].mlp.output"),
    ]
    assert first.bytes == 16 * 128 * 4
    assert first.prompt == TOWER
    assert first.sampling == {"max_tokens": 2, "temperature": 0, "stop": ["zzz"]}
    assert first.edits == ()
    assert first.block_source.splitlines()[0] == "row = model.model.layers[0].output[0].save()"
    assert (first.engine, first.model, first.model_revision) == ("main", str(llama_path), "")
    assert set(first.versions) == {"nnsight_lab", "nnsight", "vllm", "torch"}
    assert time.time() - 60 < first.created <= time.time()
    assert engine.saves.slice(first, (slice(None), 5)).equal(row[:, 5])
    assert engine.saves.summary(first).max == float(row.max())
    assert len(steps) == 2


def test_what_edits_saved_is_kept_also_when_the_caller_drops_the_outputs(engine):
    model = engine.model
    with engine.edit("probe") as (_, probe):
        rows = model.model.layers[0].output[0].save()
    engine.generate([[65, 66, 67], CAT], n=2, seed=1, max_tokens=1)
    newest, oldest = engine.saves
    assert {label.sequence for label in oldest.labels} == {0, 1}
    assert oldest.labels[0].prompt != ""  # from its token ids
    assert newest.labels[0].prompt == CAT
    label = newest.labels[0]
    assert label.edits == (("probe", 1, probe.source),)
    assert (label.block, label.edit_version, label.block_source) == ("probe", 1, probe.source)
    assert label.module_path == "model.layers[0].output[0]"
    with engine.edit("probe") as (_, probe):
        rows = model.model.layers[1].output[0].save()  # noqa: F841
    output = engine.generate(CAT, **GREEDY)[0]
    assert engine.saves.labels(output.request_id)[0].edit_version == 2
    assert engine.saves.labels(newest.request_id)[0].edit_version == 1


def test_streams_awaited_calls_and_several_prompts_enter_too(engine):
    model = engine.model
    with engine.edit("probe"):
        rows = model.model.layers[0].output[0].save()  # noqa: F841
    streamed = [output for output in engine.stream(TOWER, CAT, **GREEDY) if output.finished]
    (awaited,) = asyncio.run(engine.agenerate(FOX, **GREEDY))
    for output in (*streamed, awaited):
        assert engine.saves.get(output.request_id, "rows").equal(output.saves["rows"])
    engine.edits.clear()
    with engine.trace([TOWER, CAT], max_tokens=1) as tracer:
        last = model.model.layers[1].output[0][-1].save()
    for output, row in zip(tracer.outputs, last, strict=True):
        assert engine.saves.get(output.request_id, "last").equal(row)
    label = engine.saves.labels(name="last")[0]
    assert label.edits == ()
    assert label.block_source == "last = model.model.layers[1].output[0][-1].save()"
    assert label.module_path == "model.layers[1].output[0][-1]"


def test_requests_that_saved_nothing_do_not_enter(engine):
    engine.generate([TOWER, CAT], **GREEDY)
    with pytest.raises(TraceError), engine.trace(CAT, max_tokens=1):
        never = engine.model.model.layers[99].output.save()  # noqa: F841
    assert len(engine.saves) == 0


@pytest.mark.parametrize("wide", [1, 300], ids=["in the reply", "in shared memory"])
def test_a_list_the_notebook_appends_to_is_not_the_stores(engine, wide):
    model = engine.model
    with engine.trace(CAT, max_tokens=1) as tracer:
        rows = [].save()
        for layer in model.model.layers:
            rows.append(layer.output[0].repeat(1, wide))
        note = {"a": [1]}.save()
    rows.append("mine")
    note["a"].append(2)
    request_id = tracer.output.request_id
    kept = engine.saves.get(request_id, "rows")
    assert len(kept) == len(rows) - 1
    assert engine.saves.get(request_id, "note") == {"a": [1]}
    # The tensors are over the same memory.
    assert [mine.data_ptr() for mine in kept] == [theirs.data_ptr() for theirs in rows[:-1]]
    assert engine.saves.labels(name="rows")[0].module_path == "model.layers[*].output[0]"


def test_memory_goes_back_within_a_second_of_the_last_name_and_the_store(engine):
    model = engine.model
    before = used(engine)

    def save_much() -> Any:  # a frame of its own: before Python 3.13 one remembers its names until it ends
        with engine.trace(CAT, max_tokens=1):
            much = model.model.layers[0].output[0].repeat(50, 1000).save()
        return much  # noqa: RET504  (bound by the trace)

    much = save_much()
    assert used(engine) > before
    label = engine.saves.labels()[0]
    whole = engine.saves.get(label.request_id, "much")
    taken = engine.saves.slice(label, 0)
    assert whole.equal(much)
    del much, whole
    gc.collect()
    engine._driver.home.flush()
    assert used(engine) > before  # the store has it still
    engine.saves.drop(label.request_id)
    until(lambda: used(engine) <= before, 1, "the memory was not given back")
    assert taken.shape == (128_000,)
    with pytest.raises(SaveNotFound):
        engine.saves.get(label.request_id, "much")


def test_past_the_budget_the_oldest_go_to_files_and_their_memory_back(engine):
    model = engine.model
    before = used(engine)
    engine.saves.budget_bytes = 45_000_000
    expected = []
    for prompt in (TOWER, CAT, FOX):
        with engine.trace(prompt, max_tokens=1):
            much = model.model.layers[0].output[0][:4].repeat(10, 1000).save()  # 20 MB
        expected.append(much[::10].clone())
        settled(engine.saves)
    del much
    gc.collect()
    store = engine.saves
    assert [request.on_disk for request in store] == [False, False, True]
    assert store.bytes_on_disk > 20_000_000
    until(lambda: used(engine) - before < 50_000_000, 1, "the spilled one's memory was not given back")
    for request, rows in zip(store, reversed(expected), strict=True):
        assert store.slice(request.labels[0], slice(None, None, 10)).equal(rows)


def test_saves_faster_than_files_take_them_leave_memory_for_the_next_call(engine, monkeypatch):
    model = engine.model
    store = engine.saves
    store.budget_bytes = 30_000_000
    written = threading.Event()
    monkeypatch.setattr(store._shelf, "tidy", written.wait)  # a disk that does not get done
    store._shelf.dropped.clear()
    for _ in range(6):
        with engine.trace(CAT, max_tokens=1):
            much = model.model.layers[0].output[0].repeat(10, 1000).save()  # noqa: F841  20 MB
    written.set()
    assert store.bytes_in_memory <= 45_000_000
    assert 0 < len(store) < 6
    assert "saved faster than files take them" in repr(store)
    store._shelf.dropped.clear()


def test_what_was_written_opens_anywhere_and_is_read_with_its_labels(engine, tmp_path):
    model = engine.model
    with engine.trace(TOWER, max_tokens=1) as tracer:
        row = model.model.layers[1].output[0].save()
        half = row.to(torch.float16).save()
    with engine.trace(CAT, max_tokens=1):
        other = model.model.layers[1].output[0].save()  # noqa: F841
    request_id = tracer.output.request_id
    path = engine.saves.write(tmp_path / "deep" / "one", request_id)
    assert path == tmp_path / "deep" / "one.safetensors"
    plain = load_file(path)
    assert np.array_equal(plain["row"], row.numpy())
    assert plain["half"].dtype == np.float16
    file = lab.read(path)
    assert file.requests == (request_id,)
    assert file["row"].equal(row)
    assert file.labels[0] == engine.saves.labels(request_id)[0]
    everything = lab.read(engine.saves.write(tmp_path / "all"))
    assert set(everything.requests) == set(engine.saves.ids())
    only = lab.read(engine.saves.write(tmp_path / "half", engine.saves.labels(request_id, name="half")))
    assert [label.name for label in only.labels] == ["half"]
    engine.saves.clear()
    engine.saves.adopt(everything)
    assert engine.saves.get(request_id, "half").equal(half)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileRefused, match="bytes"):
        lab.read(path)


def test_the_store_outlives_a_restart(engine, llama_path):
    model = engine.model
    with engine.trace(CAT, max_tokens=1) as tracer:
        much = model.model.layers[0].output[0].repeat(50, 1000).save()
    store, request_id = engine.saves, tracer.output.request_id
    assert lab.saves() is store
    assert lab.saves("main") is store
    engine.restart()
    assert engine.saves is store
    assert store.get(request_id, "much").equal(much)
    with engine.trace(CAT, max_tokens=1) as tracer:
        small = engine.model.model.layers[0].output[0].save()
    assert store.get(tracer.output.request_id, "small").equal(small)
    assert len(store) == 2


def test_entering_takes_well_under_five_milliseconds_a_call(engine, monkeypatch):
    model = engine.model
    with engine.edit("many"):
        values = [model.model.layers[0].output[0].repeat(1, 40) for _ in range(32)].save()  # noqa: F841
    taken = []
    enter = type(engine)._enter

    def timed(self: Any, call: Any) -> None:
        began = time.perf_counter()
        enter(self, call)
        taken.append(time.perf_counter() - began)

    monkeypatch.setattr(type(engine), "_enter", timed)
    for _ in range(3):
        engine.generate([CAT] * 64, max_tokens=1)
    assert len(engine.saves.labels(name="values")) == 3 * 64 * 32
    assert min(taken) < 0.005
