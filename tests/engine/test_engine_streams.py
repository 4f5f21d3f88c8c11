"""Streams: outputs as they grow, by ``for`` and by ``async for``."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from nnsight_lab.errors import EditError, RequestRefused
from tests.waiting import CAT, GREEDY, LONG, TOWER, freed


def grown(items):
    """The texts of each request in the order they came."""
    texts = {}
    for item in items:
        texts.setdefault(item.index, []).append(item.outputs[0].text)
    return texts


def checked(items, expected):
    assert sum(item.finished for item in items) == len(expected)
    for index, texts in grown(items).items():
        assert len(texts) > 1, "nothing came before the end"
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == expected[index].outputs[0].text
    for item in items:
        assert hasattr(item, "saves") == item.finished
        if item.finished:
            assert len(item.saves["rows"]) == 20


#: Printable text only: a byte that begins no character is shown until the next one completes it.
PLAIN = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "allowed_token_ids": list(range(34, 90))}


@pytest.fixture
def probed(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    return engine


def test_a_stream_gives_every_prompts_text_as_it_grows(probed):
    expected = probed.generate([TOWER, CAT], **PLAIN)
    checked(list(probed.stream([TOWER, CAT], **PLAIN)), expected)
    freed(probed)


@pytest.mark.asyncio
async def test_an_async_stream_gives_every_prompts_text_as_it_grows(probed):
    expected = await probed.agenerate([TOWER, CAT], **PLAIN)
    items = []
    async for item in probed.stream([TOWER, CAT], **PLAIN):
        items.append(item)  # noqa: PERF401  (the loop is what is tested)
    checked(items, expected)
    freed(probed)


def test_leaving_a_stream_early_aborts_its_requests(probed):
    stream = iter(probed.stream([TOWER, CAT], **LONG))
    for item in stream:
        assert not item.finished
        break
    stream.close()
    freed(probed)
    assert probed.generate(CAT, **GREEDY)[0].saves["rows"] == [4, 1, 1]


@pytest.mark.asyncio
async def test_leaving_an_async_stream_early_aborts_its_requests(probed):
    stream = aiter(probed.stream([TOWER, CAT], **LONG))
    async for item in stream:
        assert not item.finished
        break
    await stream.aclose()
    freed(probed)
    (output,) = await probed.agenerate(CAT, **GREEDY)
    assert output.saves["rows"] == [4, 1, 1]


def test_a_plain_break_aborts_too(probed):
    for item in probed.stream([TOWER, CAT], **LONG):
        assert not item.finished
        break
    freed(probed)


@pytest.mark.asyncio
async def test_a_plain_break_out_of_an_async_stream_aborts_too(probed):
    async for item in probed.stream([TOWER, CAT], **LONG):
        assert not item.finished
        break
    await asyncio.to_thread(freed, probed)


def test_a_failed_edit_is_raised_at_the_end_of_a_stream(engine):
    model = engine.model
    with engine.edit("bad"):
        model.model.layers[0].output
        raise ValueError("on purpose")
    items = []
    with pytest.raises(EditError, match="on purpose"):
        for item in engine.stream(TOWER, **GREEDY):
            items.append(item)  # noqa: PERF402
    assert items[-1].error == "ValueError: on purpose"


def test_a_stream_without_a_prompt_is_refused(engine):
    with pytest.raises(RequestRefused, match="no prompt"):
        engine.stream(**GREEDY)
