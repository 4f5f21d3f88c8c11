"""Sleep and wake: refused where vLLM would only pretend, and a request wakes what sleeps.

There is no GPU here. The refusal is real; for what follows from a sleep only that refusal is taken away, and
vLLM's engine is put to sleep for real: its scheduler stands still, though its CPU worker frees nothing.
"""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from nnsight_lab.errors import SleepRefused
from tests.waiting import CAT, GREEDY, LONG, TOWER, in_background, until


@pytest.fixture
def sleeper(engine, monkeypatch):
    """The engine, as if it could sleep; awake afterwards."""
    monkeypatch.setattr(engine, "no_sleep", lambda: "")
    yield engine
    engine.wake()


def test_an_engine_on_a_cpu_is_not_put_to_sleep_and_says_why(engine):
    for ask in (engine.sleep, lambda: asyncio.run(engine.sleep_async())):
        with pytest.raises(
            SleepRefused, match=r"runs on the CPU, .* GPU memory only: `%engine stop"
        ) as refused:
            ask()
        assert "\n" not in str(refused.value)
    assert engine.state() == ("ready", "")
    engine.wake()
    asyncio.run(engine.wake_async())
    assert engine.generate(TOWER, **GREEDY)


def test_a_request_wakes_an_engine_that_sleeps_and_its_answer_is_the_same(sleeper):
    model = sleeper.model
    awake = sleeper.generate([TOWER, CAT], **GREEDY)
    sleeper.sleep()
    sleeper.sleep()
    assert (sleeper.state()[0], sleeper.status().state, sleeper.alive) == ("asleep", "asleep", True)
    again = sleeper.generate([TOWER, CAT], **GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in awake]
    assert sleeper.state()[0] == "ready"
    asyncio.run(sleeper.sleep_async())
    with sleeper.edit("probe"):
        hidden = model.model.layers[1].output[0].save()
    assert sleeper.state()[0] == "asleep"
    with sleeper.trace(TOWER, **GREEDY):
        other = model.model.layers[0].output[0].save()
    assert other.shape == (16, 128)
    sleeper.sleep()
    asyncio.run(sleeper.wake_async())
    assert sleeper.state()[0] == "ready"


def test_several_requests_of_several_threads_wake_it_once(sleeper, monkeypatch):
    sleeper.sleep()
    woken, wake = [], sleeper._driver.wake
    monkeypatch.setattr(sleeper._driver, "wake", lambda: (woken.append(1), wake())[1])
    waiting = [in_background(lambda: sleeper.generate(CAT, **GREEDY)) for _ in range(4)]
    assert all(len(done()) == 1 for done in waiting)
    assert sleeper.state()[0] == "ready"
    assert len(woken) == 1


def test_who_finds_it_awake_on_the_way_to_wake_it_does_not_wake_it_again(sleeper, monkeypatch):
    monkeypatch.setattr(sleeper._driver, "wake", lambda: pytest.fail("it was awake"))
    assert sleeper._wake().result(1) is None


def test_a_busy_engine_is_not_put_to_sleep(sleeper):
    done = in_background(lambda: sleeper.generate(TOWER, **LONG))
    until(lambda: sleeper.flight().running == 1, 30, "a running request")
    with pytest.raises(SleepRefused, match="is busy"):
        sleeper.sleep()
    done()


def test_a_failure_to_sleep_or_to_wake_is_told_and_leaves_it_as_it_was(sleeper, monkeypatch):
    broken: Future[None] = Future()
    broken.set_exception(MemoryError("no room in the machine's memory"))
    with monkeypatch.context() as seam:
        seam.setattr(sleeper._driver, "sleep", lambda: broken)
        with pytest.raises(MemoryError):
            sleeper.sleep()
        assert sleeper.state()[0] == "ready"
    sleeper.sleep()
    with monkeypatch.context() as seam:
        seam.setattr(sleeper._driver, "wake", lambda: broken)
        for ask in (sleeper.wake, lambda: sleeper.generate(TOWER, **GREEDY)):
            with pytest.raises(MemoryError):
                ask()
        assert sleeper.state()[0] == "asleep"
    assert sleeper.generate(TOWER, **GREEDY)
