"""A trace's block is sent once and read once: the engine knows it by its content."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import gc
import inspect
from types import SimpleNamespace

import pytest
import torch

from nnsight_lab.engine.known_blocks import KnownBlocks, content_id
from nnsight_lab.errors import Interrupted, TraceError
from nnsight_lab.wire.keys import CLEAR, REGISTER, TRACE_KEY
from tests.waiting import CAT, GREEDY, LONG, TOWER, freed, interrupt, when_running


class User:
    """Something that names a block."""


class Sent:
    """What of blocks goes through the driver to its engine."""

    def __init__(self, engine, monkeypatch):
        driver = engine._driver
        self.payloads, self.cleared = [], []
        rpc, submit = driver.rpc, driver.submit

        def watched_rpc(method, *args):
            if method == REGISTER:
                self.payloads.append(len(args[1]))
            elif method == CLEAR:
                self.cleared += args[0]
            return rpc(method, *args)

        def watched_submit(call):
            extras = [request.params.extra_args or {} for request in call.requests]
            self.payloads += [len(extra[TRACE_KEY]) for extra in extras if TRACE_KEY in extra]
            return submit(call)

        monkeypatch.setattr(driver, "rpc", watched_rpc)
        monkeypatch.setattr(driver, "submit", watched_submit)

    def since(self):
        """How many blocks were sent since this was last asked."""
        found, self.payloads = len(self.payloads), []
        return found


@pytest.fixture
def sent(engine, monkeypatch):
    monkeypatch.setattr(engine, "_blocks", KnownBlocks())
    return Sent(engine, monkeypatch)


def over(engine, prompts, factor=2):
    model = engine.model
    with engine.trace(prompts, **GREEDY) as tracer:
        scaled = (model.model.layers[1].output[0][-1] * factor).save()
    return scaled  # noqa: RET504  (bound when the block ends)


def test_the_first_call_over_many_prompts_sends_the_block_once_and_the_next_not_at_all(engine, sent):
    prompts = [TOWER, CAT, TOWER]
    first = over(engine, prompts)
    assert sent.since() == 1
    second = over(engine, prompts)
    assert sent.since() == 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    freed(engine)


def test_a_trace_of_one_prompt_brings_its_block_along_once(engine, sent):
    first, second = over(engine, CAT), over(engine, CAT)
    assert sent.since() == 1
    assert torch.equal(first, second)
    # And a call over several prompts finds it there, as one prompt does what several brought.
    assert len(over(engine, [CAT, TOWER])) == 2
    assert sent.since() == 0
    over(engine, [CAT, TOWER], factor=3)
    over(engine, CAT, factor=3)
    assert sent.since() == 1
    freed(engine)


def test_another_captured_value_is_another_block(engine, sent):
    two, three = over(engine, CAT, factor=2), over(engine, CAT, factor=3)
    assert sent.since() == 2
    torch.testing.assert_close(two / 2, three / 3)
    vector = torch.ones(128)
    over(engine, [CAT], factor=vector)
    vector[0] = 2
    (changed,) = over(engine, [CAT], factor=vector)
    assert sent.since() == 2
    torch.testing.assert_close(changed[0], two[0])


def test_what_a_run_changes_of_its_captured_values_no_other_run_sees(engine, sent):
    model = engine.model
    seen, total, named = [0], torch.zeros(1), {"calls": []}

    def note(value):
        named["calls"].append(value)
        return len(named["calls"])

    for prompts in ([TOWER, CAT, CAT], [TOWER, CAT, CAT], [TOWER]):
        with engine.trace(prompts, **GREEDY):
            rows = model.model.layers[0].output[0].shape[0]
            seen.append(rows)
            total += rows
            calls = note(rows).save()
            found = list(seen).save()
            summed = total.clone().save()
        lengths = [len(prompt) for prompt in prompts]
        assert found == [[0, length] for length in lengths]
        assert [one.item() for one in summed] == lengths
        assert calls == [1] * len(prompts)
    for _ in range(2):
        with engine.trace(CAT, **GREEDY):
            seen.append(model.model.layers[0].output[0].shape[0])
            found = list(seen).save()
        assert found == [0, 4]
    assert (seen, total.item(), named) == ([0], 0, {"calls": []})
    assert sent.since() == 2


def test_several_sequences_of_one_kept_block_have_their_own_values(engine, sent):
    model = engine.model
    seen = []
    for _ in range(2):
        with engine.trace(CAT, n=2, max_tokens=2, temperature=1.0, seed=3, ignore_eos=True):
            seen.append(model.model.layers[0].output[0].shape[0])
            found = list(seen).save()
        assert found == [[4], [4]]
    assert sent.since() == 1


def test_a_block_that_was_not_seen_to_arrive_is_sent_again(engine, sent):
    model = engine.model
    for _ in range(2):
        pressed = when_running(engine, interrupt)
        with pytest.raises(Interrupted), engine.trace(TOWER, **LONG):
            hidden = model.model.layers[0].output[0].save()
        pressed()
        assert sent.since() == 1
    freed(engine)


def test_an_error_of_a_kept_block_is_on_its_own_line_every_time(engine, sent):
    model = engine.model
    for prompts in (CAT, CAT, [CAT, TOWER], [CAT, TOWER]):
        with pytest.raises(TraceError) as raised, engine.trace(prompts, **GREEDY):
            hidden = model.model.layers[0].output[0].save()
            wrong = hidden @ torch.ones(3)
        line = inspect.currentframe().f_lineno - 1
        assert raised.traceback[-1].lineno + 1 == line
    assert sent.since() == 1
    freed(engine)


def test_the_oldest_blocks_make_room_and_are_sent_again_when_they_are_wanted(engine, sent, monkeypatch):
    monkeypatch.setattr(engine, "_blocks", KnownBlocks(most=2))
    for factor in (1, 2, 3, 4):
        over(engine, [CAT], factor)
    gc.collect()
    over(engine, CAT, 4)
    assert sent.since() == 4
    assert len(engine._blocks) == 2
    assert len(sent.cleared) == 2
    expected = over(engine, CAT, 4)
    assert sent.since() == 0
    torch.testing.assert_close(over(engine, CAT, 1) * 4, expected)
    assert sent.since() == 1
    freed(engine)


def test_what_an_engine_has_is_bounded_in_bytes_and_what_is_named_stays() -> None:
    known = KnownBlocks(most=10, most_bytes=100)
    user = User()
    assert not known.use("first", 60, user)
    known.arrived("first")
    other = User()
    assert not known.use("second", 60, other)
    assert known.gone() == []
    del other
    gc.collect()
    assert known.gone() == ["second"]
    assert known.use("first", 60, user)
    known.lost("first")
    assert not known.use("first", 60, user)


def test_content_is_the_whole_of_what_is_sent() -> None:
    assert content_id(b"a") == content_id(b"a") != content_id(b"b")


def test_an_engine_of_replicas_keeps_no_blocks(engine, monkeypatch):
    assert engine._keeps_blocks()
    monkeypatch.setattr(engine, "config", SimpleNamespace(options=(("data_parallel_size", 2),)))
    assert not engine._keeps_blocks()
