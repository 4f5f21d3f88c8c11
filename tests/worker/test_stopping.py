"""Only the block of a request that was given up is broken off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.wire.keys import LOG_ENV, STOP_SIGNAL, stop_file
from nnsight_lab.worker import stopping
from nnsight_lab.worker.greenlets import GIVEN_UP, BlockMediator, BlockStopped, ExitedBlock


def block(source: str, request_id: str) -> BlockMediator:
    made: Any = SimpleNamespace(glbls={}, lcls={"press": press}, presaved=set())
    mediator = BlockMediator(made, compile(source, "b", "exec"))
    mediator.rider_of = request_id
    return mediator


def press() -> None:
    stopping._stop(STOP_SIGNAL, None)


@pytest.fixture(autouse=True)
def named(tmp_path, monkeypatch):
    log = tmp_path / "engine.log"
    monkeypatch.setenv(LOG_ENV, str(log))
    stop_file(log).write_text("lab-aaaa\nlab-bbbb")
    yield stop_file(log)
    GIVEN_UP.clear()


@pytest.mark.parametrize("request_id", ["lab-bbbb", "lab-bbbb-0123abcd", "1_lab-bbbb-0123abcd"])
def test_the_block_of_a_request_that_was_given_up_is_broken_off(request_id):
    with pytest.raises(ExitedBlock) as raised:
        block("press()", request_id).start(None)
    assert isinstance(raised.value.original, BlockStopped)


def test_what_is_left_of_its_other_blocks_is_not_run():
    press()
    other = block("done = True", "2_lab-aaaa-0123abcd")
    with pytest.raises(ExitedBlock):
        other.start(None)
    assert "done" not in other.lcls
    block("done = True", "lab-cccc").start(None)


def test_the_block_of_another_request_goes_on():
    other = block("press(); done = True", "lab-cccc-0123abcd")
    other.start(None)
    assert other.lcls["done"]


def test_nothing_happens_where_no_block_runs_or_no_request_was_named(named):
    named.unlink()
    press()
    other = block("press(); done = True", "lab-bbbb")
    other.start(None)
    assert other.lcls["done"]
