"""The road home on bad days: odd tensors, blocks that save too much or never end, and no room anywhere.

What comes home is right or refused by name; and whatever a block does, the engine and everyone else go on.
"""
# ruff: noqa: F841  (what a block saves is read where the trace binds it, or not at all)

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nnsight_lab as lab
from nnsight_lab.engine import homecoming
from nnsight_lab.errors import EngineDied, Interrupted, OverBudget, TraceError
from nnsight_lab.saves import slab
from tests.waiting import (
    CAT,
    GREEDY,
    LONG,
    TOWER,
    freed,
    idle,
    in_background,
    interrupt,
    pid_of,
    until,
    when_running,
)

ONE = {"max_tokens": 1, "temperature": 0}


def used(engine: Any) -> int:
    """Bytes of shared memory the pieces in use take, in all workers."""
    return sum(figures["used_bytes"] for figures in engine.rpc("lab_slabs"))


def goes_on(engine: Any) -> None:
    """The engine takes requests, and nothing of earlier ones is left in it."""
    engine.saves.clear()
    gc.collect()
    engine._driver.home.flush()
    until(lambda: used(engine) == 0, 3, "a piece of shared memory was left taken")
    model = engine.model
    with engine.trace(CAT, **ONE):
        rows = model.model.layers[0].output[0].repeat(100, 10).save()
    assert rows.shape == (400, 1280)
    freed(engine)


# -- what is saved ---------------------------------------------------------------------------------


def test_a_save_is_what_the_name_holds_when_the_block_ends(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE):
        out = model.model.layers[0].output[0].repeat(100, 2)
        expected = float(out.double().sum().save())
        zeroed = out.clone().save()
        zeroed.zero_()
        grown = torch.ones(3).save()
        grown.resize_(300, 200).fill_(2)
        other = torch.ones(3).save()
        other.set_(out)
        bigger = out.clone().save()
        bigger *= 2
    assert zeroed.shape == (1600, 256)
    assert zeroed.abs().sum() == 0
    assert grown.shape == (300, 200)
    assert grown.eq(2).all()
    assert other.shape == bigger.shape == (1600, 256)
    assert bigger.equal(other * 2)
    del zeroed, grown, other, bigger
    goes_on(engine)


@pytest.mark.parametrize("times", [1, 100])
def test_a_saved_value_that_is_deleted_in_the_block_does_not_mark_another_one(engine, times):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        source = model.model.layers[0].output[0]
        for _ in range(20):
            gone = source.repeat(times, 1)
            gone.save()
            del gone
            rows = [1, 2].save()
            del rows
        # Likely at the very places of those that are gone.
        fresh = [source.repeat(times, 1) * 3 for _ in range(20)]
        lists = [[3, 4] for _ in range(20)]
        first, second, third = fresh[:3]
        one, two, three = lists[:3]
        kept = source.repeat(times, 1).save()
    (output,) = engine.generate(TOWER, **ONE)
    engine.edits.clear()
    assert set(output.saves) == {"kept"}
    assert output.saves["kept"].shape == (16 * times, 128)
    del output
    goes_on(engine)


def test_a_loop_that_saves_under_one_name_brings_its_last_value_home(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE):
        for layer in model.model.layers:
            last = layer.output[0].repeat(50, 2).save()
        same = last[0].save()
    assert last[0].equal(same)
    del last, same
    goes_on(engine)


@pytest.mark.parametrize("rows", [2, 400])  # in the reply, and through shared memory
def test_views_of_every_kind_come_home_with_their_values(engine, rows):
    model = engine.model
    with engine.trace(CAT, **ONE):
        base = model.model.layers[0].output[0][0].float().repeat(rows, 1).save()
        transposed = base.T.save()
        strided = base[:, ::3].save()
        expanded = base[:1].expand(3 * rows, -1).save()
        overlapping = base.flatten().as_strided((rows, 90), (1, 1)).save()
        window = base[1:].save()
        conjugate = torch.complex(base, base).conj().save()
        negative = torch.complex(base, base).conj().imag.save()
        learned = base.clone().requires_grad_().save()
        computed = (learned * 2).save()
        empty = base[:0].save()
        number = base[0, 0].save()
    assert transposed.equal(base.T)
    assert strided.equal(base[:, ::3])
    assert expanded.equal(base[:1].expand(3 * rows, -1))
    assert overlapping.equal(base.flatten().as_strided((rows, 90), (1, 1)))
    assert window.equal(base[1:])
    assert conjugate.equal(torch.complex(base, -base))
    assert negative.equal(-base)
    assert learned.equal(base)
    assert not learned.requires_grad
    assert computed.equal(base * 2)
    assert empty.shape == (0, 128)
    assert number == base[0, 0]
    del base, transposed, strided, expanded, overlapping, window
    del conjugate, negative, learned, computed, empty, number
    goes_on(engine)


def _sparse(x):
    return x.to_sparse()


def _compressed(x):
    return x.to_sparse_csr()


def _quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def _meta(x):
    return x.to("meta")


def _nested(x):
    return torch.nested.nested_tensor([x, x[:1]])


def _freed(x):
    x.untyped_storage().resize_(0)
    return x


def _shortened(x):
    x.untyped_storage().resize_(x.nbytes // 2)
    return x


def _freed_view(x):
    view = x[1:]
    x.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("rows", [2, 400])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_sparse, r"layout torch\.sparse_coo.*to_dense"),
        (_compressed, r"layout torch\.sparse_csr.*to_dense"),
        (_quantized, "quantized.*dequantize"),
        (_meta, "meta device"),
        (_nested, "nested.*unbind"),
        (_freed, r"memory was freed.*\.clone\(\)"),
        (_shortened, r"memory was freed or made smaller.*\.clone\(\)"),
        (_freed_view, r"memory was freed.*\.clone\(\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_plain_bytes_is_refused_by_name(engine, make, said, rows):
    model = engine.model
    with pytest.raises(TraceError, match=f"(odd|x).*{said}"), engine.trace(CAT, **ONE):
        x = model.model.layers[0].output[0][0].float().repeat(rows, 1).clone()
        odd = make(x).save()
    goes_on(engine)


def test_a_view_larger_than_any_memory_is_over_budget_and_not_an_attempt(engine):
    model = engine.model
    refused = pytest.raises(OverBudget, match=r"saved 4 TB.*: endless \(4 TB\)")
    with refused, engine.trace(CAT, **ONE):
        endless = model.model.layers[0].output[0].float()[0, 0].expand(10**9, 10**3).save()
    goes_on(engine)


# -- how much is saved -----------------------------------------------------------------------------


def test_the_weights_of_the_model_come_home_as_they_are(engine):
    stored = load_file(next(Path(engine.config.model).glob("*.safetensors")))
    gate_up = torch.cat([stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])

    def read() -> None:
        model = engine.model
        with engine.trace(CAT, **ONE):
            up = model.model.layers[0].mlp.gate_up_proj.weight.save()
            words = model.model.embed_tokens.weight.save()
        assert torch.equal(up, gate_up)
        assert torch.equal(words[:258], stored["model.embed_tokens.weight"])
        assert not up.requires_grad
        up.zero_()  # the reader's own copy, not the model's

    read()
    read()
    goes_on(engine)


def test_the_whole_kv_cache_comes_home_or_is_over_budget_by_name(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE):
        done = model.logits.shape[0].save()
        caches = [layer.self_attn.attn._module.kv_cache for layer in model.model.layers]
        whole = caches.save()
        total = sum(int(cache.view(torch.int32).long().sum()) for cache in caches).save()
        size = sum(cache.nbytes for cache in caches).save()
    assert size > 500 * 10**6
    assert sum(cache.nbytes for cache in whole) == size
    assert sum(int(cache.view(torch.int32).long().sum()) for cache in whole) == total
    del whole, caches  # one list under two names
    refused = pytest.raises(OverBudget, match=r"this request's save_budget is 1 MB: whole \(")
    with refused, engine.trace(TOWER, save_budget="1MB", **ONE):
        done = model.logits.shape[0].save()
        whole = [layer.self_attn.attn._module.kv_cache for layer in model.model.layers].save()
    goes_on(engine)


# -- blocks that do not end ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["all", "iter", "edit"])
def test_a_block_that_saves_on_every_step_for_ever_ends_with_the_interrupt(engine, how):
    model = engine.model
    pressed = when_running(engine, interrupt)
    if how == "edit":
        with engine.edit("endless") as (tracer, edit):
            rows = [].save()
            for _ in tracer.all():
                rows.append(model.model.layers[0].output[0].repeat(50, 10))
        with pytest.raises(Interrupted, match="the engine is still loaded"):
            engine.generate(TOWER, **LONG)
        engine.edits.clear()
    else:
        stopped = pytest.raises(Interrupted, match="the engine is still loaded")
        with stopped, engine.trace(TOWER, **LONG) as tracer:
            rows = [].save()
            for _ in tracer.all() if how == "all" else tracer.iter[:]:
                rows.append(model.model.layers[0].output[0].repeat(50, 10))
    pressed()
    goes_on(engine)
    idle(engine)


def test_a_request_aborted_while_another_comes_home_costs_the_other_nothing(engine):
    model = engine.model
    with engine.edit("much") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].repeat(200, 4))
    stream = iter(engine.stream(TOWER, **LONG))
    next(stream)
    (output,) = engine.generate(CAT, **GREEDY)
    stream.close()
    assert [row.shape[0] for row in output.saves["rows"]] == [800, 200, 200]
    (again,) = engine.generate(CAT, **GREEDY)
    for mine, other in zip(output.saves["rows"], again.saves["rows"], strict=True):
        assert mine.equal(other)
    engine.edits.clear()
    del output, again, mine, other
    goes_on(engine)


# -- no room ---------------------------------------------------------------------------------------


def by_disk(engine: Any) -> list[str]:
    """The files of slabs on disk that this process has mapped, deleted ones too."""
    with open("/proc/self/maps") as maps:
        return sorted(set(re.findall(rf"/\S*spill/nnsight_lab\.{engine.id}\S+", maps.read())))


def large(engine: Any, megabytes: int) -> None:
    """Save a row so often, and see that it is that row everywhere."""
    model = engine.model
    times = megabytes * 10**6 // 512
    with engine.trace(CAT, **ONE):
        row = model.model.layers[0].output[0][:1].save()
        many = row.repeat(times, 1).save()
    assert many.shape[0] == times
    assert many.eq(row).all()
    engine.saves.clear()


@pytest.fixture
def roomless(one_engine, llama_path, tmp_path) -> Iterator[Any]:
    """Starts engines whose memory folder and budgets are as told; none of them stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

        def start(mode: str, memory: Path = Path("/dev/shm"), **options: Any) -> Any:
            patch.setattr(homecoming, "_MEMORY", memory)
            return one_engine.want(llama_path, mode, dtype="float32", max_model_len=256, **options)

        yield start
        one_engine.stop()
        assert not list(tmp_path.glob("**/nnsight_lab.*"))


def test_with_no_budget_at_all_small_saves_come_and_large_ones_are_refused_plainly(roomless):
    engine = roomless("sync", save_budget=0, spill_budget=0)
    model = engine.model
    for _ in range(3):
        with engine.trace(CAT, **ONE):
            small = model.model.layers[0].output[0].save()
        assert small.shape == (4, 128)
        refused = pytest.raises(
            OverBudget, match=r"saved 1(\.\d+)? MB, what the engine has left is 0 B: .*raise save_budget"
        )
        with refused:
            large(engine, 1)
    outputs = engine.generate([CAT, TOWER], **GREEDY)
    assert all(output.finished for output in outputs)
    freed(engine)


@pytest.mark.parametrize("why", ["no budget", "no folder"])
def test_without_shared_memory_large_saves_go_by_disk_and_the_disk_is_given_back(roomless, why, tmp_path):
    if why == "no budget":
        engine = roomless("async", save_budget=0)
    else:
        engine = roomless("sync", memory=tmp_path / "not-there")
    for _ in range(3):
        large(engine, 100)
        gc.collect()
    until(lambda: sum(f["total_bytes"] for f in engine.rpc("lab_slabs")) == 0, 5)
    until(lambda: by_disk(engine) == [], 5, "the kernel holds files that the worker gave up")
    model = engine.model
    with engine.trace(CAT, **ONE):
        many = model.model.layers[0].output[0].repeat(1000, 1).save()
    assert len(by_disk(engine)) == 1
    assert many.shape == (4000, 128)


@pytest.fixture
def tmpfs(tmp_path) -> Iterator[Any]:
    """Mounts file systems of a size, where that is allowed."""
    mounted = []

    def mount(name: str, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"file systems may not be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    if shutil.which("mount") is None:
        pytest.skip("there is no program to mount with")
    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_in_a_container_with_64_mib_of_shared_memory_large_saves_go_by_disk(tmpfs, roomless):
    memory = tmpfs("shm", "64M")
    spill = tmpfs("cache/nnsight_lab/spill", "400M")
    engine = roomless("sync", memory=memory, save_budget="1GB", spill_budget="1GB")
    model = engine.model
    for _ in range(2):
        with engine.trace(CAT, **ONE):
            held = model.model.layers[0].output[0].repeat(20_000, 1).save()  # 41 MB: in memory
        assert shutil.disk_usage(memory).used > 40 * 10**6
        assert shutil.disk_usage(memory).free > 15 * 2**20  # not to the last byte: others live there
        large(engine, 30)  # by disk
        large(engine, 150)
        refused = pytest.raises(OverBudget, match=r"saved 500(\.\d+)? MB, what the engine has left is \d+")
        with refused:
            large(engine, 500)
        assert held.shape == (80_000, 128)
        del held
        engine.saves.clear()
        gc.collect()
    assert engine.generate(TOWER, **GREEDY)[0].finished
    freed(engine)


# -- the worker's end ------------------------------------------------------------------------------


def test_a_worker_killed_in_the_middle_of_a_copy_ends_the_call_and_nothing_that_came_before(engine):
    model = engine.model
    with engine.trace(CAT, **ONE):
        row = model.model.layers[0].output[0][:1].save()
        before = row.repeat(20_000, 1).save()

    def slabs() -> list[Path]:
        return list(Path("/dev/shm").glob(f"nnsight_lab.{engine.id}.*"))

    def kill() -> float:
        deadline = time.monotonic() + 60
        while not slabs():  # made, and not mapped by this process yet: for some milliseconds
            assert time.monotonic() < deadline, "no slab was made"
            time.sleep(0.001)
        os.kill(pid_of(engine, "Worker"), signal.SIGKILL)
        return time.monotonic()

    def save_on_and_on() -> None:
        kept = []
        for _ in range(10):  # all are looked at, so each makes one more slab
            with engine.trace(CAT, **ONE):
                after = model.model.layers[0].output[0].repeat(150_000, 1).save()
            kept.append(after)

    assert slabs() == []
    killed = in_background(kill)
    with pytest.raises(EngineDied):
        save_on_and_on()
    assert time.monotonic() - killed() < 3
    assert before.eq(row).all()
    left = slabs()  # made by the worker, and nobody mapped it
    lab.restart()
    assert [path for path in left if path.exists()] == []
    assert before.eq(row).all()
    large(engine, 50)
    del before, row


# -- giving back -----------------------------------------------------------------------------------


def test_shared_memory_that_nobody_needs_returns_to_the_system_and_calls_in_a_row_reuse_it(
    one_engine, llama_path, monkeypatch
):
    idle_s, keep_bytes = 1.0, slab.MIN_SLAB  # as the worker below has them
    monkeypatch.setattr(slab, "IDLE_S", idle_s)
    monkeypatch.setattr(slab, "KEEP_BYTES", keep_bytes)
    worker = "tests.worker.impatient.ImpatientCPUWorker"
    engine = one_engine.want(llama_path, "sync", worker=worker, dtype="float32", max_model_len=256)

    def figures() -> Any:
        return engine.rpc("lab_slabs")[0]

    def mapped() -> int:
        """What this process has mapped of the engine's slabs."""
        with open("/proc/self/maps") as maps:
            found = re.findall(rf"^(\w+)-(\w+) .*nnsight_lab\.{engine.id}\.", maps.read(), re.MULTILINE)
        return sum(int(last, 16) - int(first, 16) for first, last in found)

    free = shutil.disk_usage("/dev/shm").free
    for _ in range(4):  # one after the other, with what the first made
        large(engine, 400)
        gc.collect()
        engine._driver.home.flush()
    made = figures()["made"]
    assert made <= 2
    assert figures()["made_s"] > 0
    assert mapped() >= 400 * 10**6
    until(lambda: figures()["total_bytes"] <= keep_bytes, 10, "the worker kept what nobody needs")
    until(lambda: mapped() <= keep_bytes, 5, "the kernel kept what nobody needs")
    until(lambda: shutil.disk_usage("/dev/shm").free > free - 2 * keep_bytes, 5)
    large(engine, 400)
    one_engine.stop()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_block_wrote_that_is_not_finite_harms_no_later_request(engine, value):
    model = engine.model
    prompts = [TOWER, CAT, TOWER * 3, CAT * 5]

    def answers():
        return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, **GREEDY)]

    expected = answers()
    for _ in range(2):
        with engine.trace([TOWER * 12] * 6, max_tokens=4, ignore_eos=True):
            model.model.layers[0].output[0][:] = value
        assert answers() == expected
