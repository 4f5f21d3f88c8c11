"""Whose request goes next, and what each user had: no engine is needed."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsight_lab.engine.remote_driver import pieces
from nnsight_lab.server.turns import Turns
from nnsight_lab.server.usage import Usage


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(scenario):
    """Run a coroutine."""
    return asyncio.run(scenario())


async def settle():
    """Let everything go on that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def asking(turns, user, count, places=1):
    """Requests of a user, each a task."""
    return [asyncio.ensure_future(turns.take(user, f"{user}-{i}", places)) for i in range(count)]


def done(tasks):
    """How many have their turn."""
    return sum(task.done() for task in tasks)


async def cancelled(tasks):
    """End what waits."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (2, 1), (4, 3), (8, 7), (64, 56), (256, 224)])
def test_one_user_has_most_places_and_never_the_last_one(places, alone):
    async def scenario():
        turns = Turns(places, Usage())
        flood = asking(turns, "alice", places + 5)
        await settle()
        assert done(flood) == alone
        assert turns.waiting("alice") == places + 5 - alone
        if places > 1:
            (bob,) = asking(turns, "bob", 1)
            await settle()
            assert bob.done()
        await cancelled(flood)

    run(scenario)


def test_of_those_who_wait_who_had_least_goes_first():
    async def scenario():
        usage = Usage()
        turns = Turns(1, usage)
        first = await turns.take("alice", "a", 1)
        alice, bob, carol = (asking(turns, user, 2) for user in ("alice", "bob", "carol"))
        usage.spent("alice", 10, 1000)
        usage.spent("carol", 5, 5)
        await settle()
        turns.give(first)
        order = []
        for _ in range(6):
            await settle()
            ready = next(t for tasks in (alice, bob, carol) for t in tasks if t.done() and not t.cancelled())
            turn = ready.result()
            order.append(turn.user)
            for tasks in (alice, bob, carol):
                if ready in tasks:
                    tasks.remove(ready)
            usage.spent(turn.user, 0, 8)
            turns.give(turn)
        assert order == ["bob", "bob", "carol", "carol", "alice", "alice"]

    run(scenario)


def test_a_request_that_is_cancelled_gives_its_place_back():
    async def scenario():
        turns = Turns(2, Usage())
        held = await turns.take("alice", "a", 1)
        waiting, granted = asking(turns, "alice", 2)
        await settle()
        turns.give(held)  # the next one is let in, and cancelled before it knows
        waiting.cancel()
        granted.cancel()
        await asyncio.gather(waiting, granted, return_exceptions=True)
        assert (turns.taken("alice"), turns.waiting("alice"), turns.running) == (0, 0, {})
        for number in range(3):
            turns.give(await asyncio.wait_for(turns.take("alice", str(number), 1), 1))

    run(scenario)


def test_what_asks_for_more_places_than_there_are_runs_all_the_same():
    async def scenario():
        turns = Turns(4, Usage())
        large = await asyncio.wait_for(turns.take("alice", "a", 50), 1)
        assert large.places == 3
        assert (await asyncio.wait_for(turns.take("bob", "b", 1), 1)).places == 1

    run(scenario)


def test_a_limit_of_places_holds_however_many_are_free():
    async def scenario():
        turns = Turns(256, Usage(), most=5)
        flood = asking(turns, "alice", 9)
        await settle()
        assert done(flood) == 5
        await cancelled(flood)

    run(scenario)


@given(
    st.integers(2, 12),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.booleans())),
    st.data(),
)
def test_places_never_run_out_of_number_and_everybody_is_served(places, asked, data):
    async def scenario():
        turns = Turns(places, Usage())
        tasks = deque()
        for number, (user, wants, leave) in enumerate(asked):
            task = asyncio.ensure_future(turns.take(user, str(number), wants))
            await settle()
            if leave:
                task.cancel()
                done_before = await asyncio.gather(task, return_exceptions=True)
                if not isinstance(done_before[0], BaseException):
                    turns.give(done_before[0])
            else:
                tasks.append(task)
            assert sum(turn.places for turn in turns.running.values()) <= places
        while tasks:
            ready = [task for task in tasks if task.done()]
            assert ready, "everybody waits and nobody runs"
            one = data.draw(st.sampled_from(ready))
            tasks.remove(one)
            turns.give(one.result())
            await settle()
            assert sum(turn.places for turn in turns.running.values()) <= places
        assert turns.running == {}
        assert turns.waiters() == []

    run(scenario)


def test_what_a_user_had_counts_less_with_time():
    clock = Clock()
    usage = Usage(clock=clock)
    usage.spent("alice", 100, 300)
    assert usage.recent("alice") == 400
    clock.now += 60
    assert usage.recent("alice") == pytest.approx(200)
    assert usage.recent("bob") == 0


def test_tokens_per_minute_are_made_up_for_in_the_time_that_is_said():
    clock = Clock()
    usage = Usage(600, clock)
    assert usage.wait_s("alice") == 0
    usage.spent("alice", 100, 700)  # what a request takes is known when it took it
    wait_s = usage.wait_s("alice")
    assert wait_s == pytest.approx(20.1)
    assert usage.wait_s("bob") == 0
    clock.now += wait_s + 0.01
    assert usage.wait_s("alice") == 0
    clock.now += 3600
    usage.spent("alice", 0, 599)
    assert usage.wait_s("alice") == 0


@given(st.lists(st.integers(1, 9)), st.integers(0, 12))
def test_the_pieces_of_a_call_are_the_call(weights, most):
    found = pieces(weights, most)
    assert found[0][0] == 0
    assert found[-1][1] == len(weights)
    assert all(one[1] == two[0] for one, two in itertools.pairwise(found))
    for start, stop in found:
        assert not most or sum(weights[start:stop]) <= most or stop - start == 1
