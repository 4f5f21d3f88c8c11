"""A call that is interrupted, cancelled or fails leaves nothing behind, and the next one is its own."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import asyncio
import contextlib

import pytest

from nnsight_lab.errors import Interrupted, TraceError
from tests.waiting import CAT, GREEDY, LONG, TOWER, freed, in_background, interrupt, until, when_running


@pytest.fixture
def probed(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    return engine


def only_its_own(engine):
    """Nothing is left of any earlier call, in the workers or in what comes next."""
    model = engine.model
    freed(engine)
    (output,) = engine.generate(CAT, **GREEDY)
    assert output.prompt == CAT
    assert output.saves["rows"] == [4, 1, 1]
    with engine.trace(CAT, **GREEDY) as tracer:
        hidden = model.model.layers[1].output[0].save()
    assert hidden.shape == (4, 128), "not a list with what an earlier trace saved"
    assert len(tracer.outputs) == 1
    freed(engine)


def test_an_interrupted_generate_is_aborted(probed):
    pressed = when_running(probed, interrupt, requests=3)
    with pytest.raises(Interrupted, match="the engine is still loaded"):
        probed.generate([TOWER, CAT, TOWER], **LONG)
    pressed()
    only_its_own(probed)


def test_an_interrupt_during_a_live_view_aborts_the_call(probed):
    def watch(looks):
        if any(progress.tokens > 5 for progress in looks):
            interrupt()

    with pytest.raises(KeyboardInterrupt) as raised:
        probed.generate([TOWER, CAT], watch=watch, **LONG)
    assert isinstance(raised.value, Interrupted)
    only_its_own(probed)


def test_an_interrupted_trace_is_aborted_and_binds_nothing(probed):
    model = probed.model
    hidden = "untouched"
    pressed = when_running(probed, interrupt)
    with pytest.raises(Interrupted), probed.trace(TOWER, **LONG) as tracer:
        hidden = model.model.layers[0].output[0].save()
    pressed()
    assert hidden == "untouched"
    only_its_own(probed)


def test_an_interrupted_trace_of_several_prompts_takes_its_own_edit_along(probed):
    model = probed.model
    pressed = when_running(probed, interrupt, requests=2)
    with pytest.raises(Interrupted), probed.trace([TOWER, CAT], **LONG):
        hidden = model.model.layers[0].output[0].save()
    pressed()
    assert [edit.name for edit in probed.edits] == ["probe"]
    only_its_own(probed)


def test_an_interrupted_stream_is_aborted(probed):
    with pytest.raises(KeyboardInterrupt):
        for _ in probed.stream([TOWER, CAT], **LONG):
            interrupt()
    only_its_own(probed)


def test_an_interrupt_while_a_stream_waits_is_said_in_one_line(probed):
    pressed = when_running(probed, interrupt, requests=2)
    with pytest.raises(Interrupted, match="the engine is still loaded"):
        for _ in probed.stream([TOWER, CAT], **LONG):
            pass
    pressed()
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_cancelled_async_stream_is_said_in_one_line_and_is_a_cancellation(probed):
    async def read():
        async for _ in probed.stream([TOWER, CAT], **LONG):
            pass

    task = asyncio.create_task(read())
    while await asyncio.to_thread(probed.request_count) < 2:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value, Interrupted)
    assert str(raised.value) == "the requests of this cell were aborted; the engine is still loaded."
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_cancelled_generate_is_aborted(probed):
    task = asyncio.create_task(probed.agenerate([TOWER, CAT, TOWER], **LONG))
    while await asyncio.to_thread(probed.request_count) < 3:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_generate_that_is_cancelled_at_once_is_aborted(probed):
    task = asyncio.create_task(probed.agenerate([TOWER, CAT], **LONG))
    await asyncio.sleep(0)  # it is submitted, and no more
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_cancelled_trace_is_aborted(probed):
    model = probed.model

    async def traced():
        async with probed.trace(TOWER, **LONG):
            hidden = model.model.layers[0].output[0].save()

    task = asyncio.create_task(traced())
    while await asyncio.to_thread(probed.request_count) < 1:
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_generate_that_runs_out_of_time_is_aborted_and_asyncio_says_so(probed):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(probed.agenerate([TOWER] * 8, **LONG), timeout=0.3)
    only_its_own(probed)


@pytest.mark.asyncio
async def test_cancelling_one_call_leaves_the_others_running(probed):
    going = asyncio.create_task(probed.agenerate(TOWER, max_tokens=200, temperature=0, ignore_eos=True))
    given_up = asyncio.create_task(probed.agenerate(CAT, **LONG))
    while await asyncio.to_thread(probed.request_count) < 2:
        assert not going.done()
    given_up.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await given_up
    (output,) = await going
    assert output.saves["rows"] == [16] + [1] * 199
    only_its_own(probed)


def test_a_failed_trace_leaves_nothing_behind(probed):
    model = probed.model
    with pytest.raises(TraceError), probed.trace(TOWER, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
        raise ValueError("on purpose")
    only_its_own(probed)


def test_a_failed_trace_ends_its_request_early(probed):
    model = probed.model
    with pytest.raises(TraceError) as raised, probed.trace(TOWER, edits=[], **LONG):
        raise ValueError("at once")
    assert len(raised.value.outputs) == 1
    only_its_own(probed)


def test_a_call_that_is_abandoned_while_another_waits_frees_the_engine_for_it(probed):
    stream = iter(probed.stream([TOWER] * 4, **LONG))
    next(stream)
    until(lambda: probed.request_count() == 4, 10)
    stream.close()
    (output,) = probed.generate(CAT, **GREEDY)
    assert output.saves["rows"] == [4, 1, 1]
    only_its_own(probed)


def pressed_in(flag):
    """Press stop once the block has made the file."""
    return in_background(lambda: (until(flag.exists, 30, "the block did not begin"), interrupt()))


def test_a_block_that_never_ends_is_broken_off_and_its_neighbours_go_on(probed, tmp_path):
    model = probed.model
    flag = tmp_path / "begun"
    going = in_background(lambda: probed.generate(TOWER, max_tokens=200, temperature=0, ignore_eos=True))
    until(lambda: probed.request_count() == 1, 30)
    pressed = pressed_in(flag)
    with pytest.raises(Interrupted, match="the engine is still loaded"), probed.trace(CAT, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
        open(str(flag), "w").close()
        while True:
            pass
    pressed()
    (output,) = going()
    assert output.saves["rows"] == [16] + [1] * 199
    only_its_own(probed)


def test_a_block_that_catches_exceptions_is_broken_off_too(probed, tmp_path):
    model = probed.model
    flag = tmp_path / "begun"
    pressed = pressed_in(flag)
    with pytest.raises(Interrupted, match="the engine is still loaded"), probed.trace([CAT, TOWER], **GREEDY):
        open(str(flag), "w").close()
        while True:
            try:
                model.lm_head.weight.sum()
            except Exception:
                caught = True
    pressed()
    only_its_own(probed)


@pytest.mark.asyncio
async def test_a_block_that_never_ends_is_broken_off_when_its_task_is_cancelled(probed, tmp_path):
    flag = tmp_path / "begun"

    async def traced():
        async with probed.trace(CAT, **GREEDY):
            open(str(flag), "w").close()
            while True:
                pass

    task = asyncio.create_task(traced())
    await asyncio.to_thread(until, flag.exists, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert "the engine is still loaded" in str(raised.value)
    only_its_own(probed)
