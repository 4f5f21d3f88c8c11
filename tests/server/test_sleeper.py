"""When an idle engine is put to sleep, and that whoever comes waits until it is awake.

Which memory that frees is vLLM's, and a GPU's: here it is an engine that only says what it was asked.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nnsight_lab.server.sleeper import Sleeper


class SleepsSlowly:
    """An engine client that takes a while to fall asleep and to wake."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.said: list[str] = []
        self.may_go_on = asyncio.Event()

    async def sleep(self, level: int) -> None:
        self.said.append(f"sleep {level}")
        await self.may_go_on.wait()
        self.said.append("asleep")

    async def wake_up(self) -> None:
        self.said.append("awake")


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("nnsight_lab.server.sleeper.time.monotonic", lambda: clock.now)
    return clock


def test_it_sleeps_once_idle_for_long_enough_and_a_request_wakes_it(now):
    async def scenario():
        llm = SleepsSlowly()
        llm.may_go_on.set()
        sleeper = Sleeper(llm, 60.0)
        now.now = 59.0
        await sleeper.look()
        llm.output_processor.request_states["a"] = object()
        now.now = 200.0
        await sleeper.look()  # not while a request is there
        llm.output_processor.request_states.clear()
        now.now = 259.0
        await sleeper.look()
        assert (llm.said, sleeper.asleep) == ([], False)
        now.now = 260.0
        await sleeper.look()
        await sleeper.look()
        assert (llm.said, sleeper.asleep) == (["sleep 1", "asleep"], True)
        await asyncio.gather(sleeper.awake(), sleeper.awake())
        assert (llm.said[2:], sleeper.asleep) == (["awake"], False)
        await sleeper.look()
        assert len(llm.said) == 3

    asyncio.run(scenario())


def test_a_request_that_comes_while_it_falls_asleep_is_not_lost(now):
    async def scenario():
        llm = SleepsSlowly()
        sleeper = Sleeper(llm, 60.0)
        now.now = 60.0
        falling = asyncio.ensure_future(sleeper.look())
        await asyncio.sleep(0)
        asking = asyncio.ensure_future(sleeper.awake())
        await asyncio.sleep(0)
        assert not asking.done()
        llm.may_go_on.set()
        await asyncio.gather(falling, asking)
        assert llm.said == ["sleep 1", "asleep", "awake"]

    asyncio.run(scenario())
