"""Two pipeline stages on a CPU: a block written against the whole model gives the values of one stage."""
# ruff: noqa: F841, C408, SIM117  (what a block saves is bound in the frame; a literal cannot be saved)

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab import steps
from nnsight_lab.engine import processes
from nnsight_lab.errors import BlockError, EngineDied
from nnsight_lab.wire.keys import STEPS
from tests.engine.stage_blocks import BLOCKS, EARLY, GOES_ON, LATE
from tests.waiting import (
    CAT,
    FOX,
    GREEDY,
    LONG,
    TOWER,
    freed,
    idle,
    in_background,
    interrupt,
    owned,
    pid_of,
    until,
    when_running,
)
from tests.worker import acting, mixes

#: Requests of every kind at once; and long ones, of which the small cache cannot hold all.
MIXED = mixes.mix(60, 11)
LONG_ONES = [one._replace(sampling={**mixes.GREEDY, "max_tokens": 60}) for one in mixes.mix(12, 12)]


def _engine(one_engine, llama_path, **options):
    return one_engine.want(
        llama_path,
        "sync",
        worker=acting.WORKER,
        dtype="float32",
        max_model_len=acting.CONTEXT,
        block_size=32,
        num_gpu_blocks_override=10,
        additional_config={"nnsight_taps": acting.taps()},
        **options,
    )


def _mixed(engine) -> list[list[Any]]:
    mixes.install(engine)
    found = [mixes.run(engine, MIXED), mixes.run(engine, LONG_ONES)]
    engine.edits.clear()
    return found


@pytest.fixture(scope="module")
def of_one_stage(one_engine, llama_path) -> dict[str, Any]:
    engine = _engine(one_engine, llama_path)
    return {"mixed": _mixed(engine)} | {name: run(engine) for name, run in BLOCKS.items()}


@pytest.fixture(scope="module")
def two_stages(one_engine, llama_path, of_one_stage):
    yield _engine(one_engine, llama_path, pipeline_parallel_size=2)
    one_engine.stop()


@pytest.fixture
def engine(two_stages):
    idle(two_stages)
    yield two_stages
    two_stages.edits.clear()
    idle(two_stages)


def _same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        # The same kernels on the same rows; sums over other threads may differ in their last bits.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            _same(mine, theirs)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_the_values_of_one_stage(engine, of_one_stage, name):
    _same(BLOCKS[name](engine), of_one_stage[name])


@pytest.mark.parametrize("name", BLOCKS)
def test_it_does_where_steps_are_replayed(engine, of_one_stage, name):
    engine.rpc("act_replays", True)
    try:
        _same(BLOCKS[name](engine), of_one_stage[name])
    finally:
        engine.rpc("act_replays", False)


@pytest.mark.parametrize("acts", [False, True])
def test_mixed_requests_are_those_of_one_stage_also_where_they_are_preempted(engine, of_one_stage, acts):
    before = engine.rpc("resumed")
    engine.rpc("act_replays", acts)
    try:
        found = _mixed(engine)
    finally:
        engine.rpc("act_replays", False)
    assert engine.rpc("resumed")[0] > before[0], "nothing was preempted: make the cache smaller"
    for mine, theirs, asked in zip(found, of_one_stage["mixed"], (MIXED, LONG_ONES), strict=True):
        mixes.compare(mine, theirs, asked)


def test_what_lives_on_one_stage_runs_there_and_what_spans_comes_home_once(engine):
    layers = engine.model.model.layers
    wide = torch.zeros(100_000)
    engine.saves.clear()
    until(lambda: engine.rpc("used_bytes") == [0, 0], 3, "shared memory was not given back")

    def moved(run):
        outputs = run()
        found = engine.rpc("used_bytes")
        del outputs
        engine.edits.clear()
        engine.saves.clear()
        until(lambda: engine.rpc("used_bytes") == [0, 0], 3, "shared memory was not given back")
        return found

    def early():
        with engine.edit("probe"):
            hidden = (layers[EARLY].output[0].sum() + wide).save()
        return engine.generate([TOWER, CAT], **GREEDY)

    def late():
        with engine.edit("probe"):
            hidden = (layers[LATE].output[0].sum() + wide).save()
        return engine.generate([TOWER, CAT], **GREEDY)

    def both():
        with engine.edit("probe"):
            first = layers[0].output[0].sum() + wide
            hidden = (layers[LATE].output[0].sum() + first).save()
        return engine.generate([TOWER, CAT], **GREEDY)

    def of_data():
        engine.edit("probe", steps=[steps.read("model.layers.0", "hidden", positions="prompt")])
        return engine.generate([TOWER * 4] * 40, **GREEDY)

    first, second = moved(early)
    assert (first > 0, second) == (True, 0)
    first, second = moved(late)
    assert (first, second > 0) == (0, True)
    first, second = moved(both)
    assert (first, second > 0) == (0, True)
    first, second = moved(of_data)
    assert (first > 0, second) == (True, 0)


def test_a_block_may_not_draw_numbers_where_each_stage_would_have_its_own(engine):
    layers = engine.model.model.layers
    with pytest.raises(BlockError, match=r"'randn' would give each of them other numbers: draw them before"):
        with engine.trace(TOWER, **GREEDY):
            first = layers[0].output[0]
            layers[LATE].output[0][:] += torch.randn(first.shape)
    with engine.trace(TOWER, **GREEDY):
        layers[LATE].output[0][:] += torch.randn(len(TOWER), 1)  # one stage has it all
        logits = model_logits = engine.model.logits.save()
    assert logits.shape[-1] == 258


def test_a_block_that_ended_on_one_stage_may_read_there_and_not_write(engine):
    model, layers = engine.model, engine.model.model.layers
    with engine.trace(TOWER, **GREEDY):
        weight = model.lm_head.weight.sum()
        early = layers[0].output[0].save()
        late = (layers[LATE].output[0] * weight).save()
    assert early.shape == late.shape
    with pytest.raises(BlockError, match=r"layers\.0\.output was written, which is on pipeline stage 1"):
        with engine.trace(TOWER, **GREEDY):
            weight = model.lm_head.weight.sum()
            layers[0].output[0][:] += weight
            late = layers[LATE].output[0].save()
    with pytest.raises(
        BlockError, match=r"'weight' of model\.model\.layers\.0\.mlp\.down_proj is on pipeline"
    ):
        with engine.trace(TOWER, **GREEDY):
            late = layers[LATE].output[0].save()
            weight = layers[0].mlp.down_proj.weight.sum().save()


def test_stages_replay_the_same_steps_where_blocks_live_on_both(engine):
    layers = engine.model.model.layers
    with engine.edit("both") as (tracer, _):
        rows = list().save()
        for _ in tracer.all():
            change = layers[0].output[0] * 0.5
            layers[LATE].output[0][:] += change
            rows.append(layers[LATE].output[0][-1])
    engine.generate([TOWER, CAT], **GOES_ON)
    engine.rpc("act_replays", True)
    before = engine.rpc(STEPS)
    try:
        engine.generate([TOWER, CAT], **{**GOES_ON, "max_tokens": 9})
    finally:
        engine.rpc("act_replays", False)
    for one, other in zip(engine.rpc(STEPS), before, strict=True):
        ran = {kind: count - other["steps"].get(kind, 0) for kind, count in one["steps"].items()}
        assert ran["replayed with taps"] >= 8
        assert ran["module by module"] <= 2


def test_an_interrupt_leaves_both_stages_free(engine):
    layers = engine.model.model.layers
    with engine.edit("both") as (tracer, edit):
        rows = list().save()
        for _ in tracer.all():
            first = layers[0].output[0][-1]
            rows.append(first + layers[LATE].output[0][-1])
    sampling = {**LONG, "max_tokens": 100}
    for _ in range(3):
        watched = when_running(engine, interrupt, 3)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(50):
                engine.generate([TOWER, CAT, FOX], **sampling)
        watched()
        freed(engine)
    (output,) = engine.generate(CAT, **GREEDY)
    assert len(output.saves["rows"]) == 3
    edit.clear()


def test_a_block_is_installed_and_cleared_while_others_run(engine):
    layers = engine.model.model.layers

    def install(scale):
        with engine.edit("both") as (tracer, _):
            rows = list().save()
            for _ in tracer.all():
                change = layers[0].output[0][-1:] * scale
                layers[LATE].output[0][-1:] += change
                rows.append(layers[LATE].output[0][-1])

    install(0.5)
    wanted = engine.generate([TOWER] * 6, **{**GOES_ON, "max_tokens": 30})
    running = in_background(lambda: engine.generate([TOWER] * 6, **{**GOES_ON, "max_tokens": 30}))
    until(lambda: engine.request_count() == 6, 10)
    install(2.0)
    engine.edits.clear()
    for mine, theirs in zip(running(), wanted, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        for one, other in zip(mine.saves["rows"], theirs.saves["rows"], strict=True):
            torch.testing.assert_close(one, other)


def test_a_live_list_is_seen_of_whichever_stage_has_it(engine):
    layers = engine.model.model.layers
    with engine.edit("first") as (tracer, _):
        early = list().save()
        for _ in tracer.all():
            early.append(layers[0].output[0][-1].mean())
    with engine.edit("both") as (tracer, _):
        norms = list().save()
        for _ in tracer.all():
            first = layers[0].output[0][-1].mean()
            norms.append(first + layers[LATE].output[0][-1].mean())
    (output,) = engine.generate(TOWER, **GOES_ON)
    assert len(output.saves["early"]) == len(output.saves["norms"]) == 5


@pytest.mark.parametrize("victim", ["Worker_PP0", "Worker_PP1"])
def test_a_killed_stage_ends_every_wait_with_one_line_and_leaves_no_process(two_stages, victim):
    engine = two_stages
    layers = engine.model.model.layers
    with engine.edit("both") as (tracer, edit):
        rows = list().save()
        for _ in tracer.all():
            first = layers[0].output[0][-1]
            rows.append(first + layers[LATE].output[0][-1])

    def run():
        with pytest.raises(EngineDied) as raised:
            for _ in range(50):
                engine.generate([TOWER, CAT], **{**LONG, "max_tokens": 100})
        return time.monotonic(), str(raised.value)

    waiting = in_background(run)
    until(lambda: engine.request_count() == 2, 10)
    left = processes.engine_processes(engine.id)
    os.kill(pid_of(engine, victim), signal.SIGKILL)
    killed = time.monotonic()
    noticed, said = waiting()
    assert noticed - killed < 20  # vLLM gives the other stage four seconds to end by itself, twice
    assert len(said.splitlines()) == 1
    lab.restart()
    assert not {process.pid for process in left} & {process.pid for process in owned()}
    (output,) = engine.generate(CAT, **GREEDY)
    assert len(output.saves["rows"]) == 3
    engine.edits.clear()
