"""Options that keep tokens from a block: prefix caching is warned about, a split prompt is an error."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import inspect

import pytest

from nnsight_lab.errors import EditError, TraceError
from tests.waiting import CAT, GREEDY, freed, idle

LONG_PROMPT = "once upon a time " * 13
#: One block of 32 tokens in the cache and a bit, and short enough for one step.
CACHED = "It was a bright cold day in April, and the clocks were"


@pytest.fixture(scope="module")
def started(one_engine, llama_path, nothing_left_behind):
    engine = one_engine.want(
        llama_path,
        "sync",
        dtype="float32",
        max_model_len=512,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=32,
    )
    yield engine
    idle(engine)


@pytest.fixture
def engine(started):
    yield started
    started.edits.clear()
    idle(started)


@pytest.fixture
def probed(engine):
    model = engine.model
    with pytest.warns(UserWarning, match="Prefix caching is on"), engine.edit("probe"):
        hidden = model.model.layers[1].output[0].save()
    return engine


def test_an_edit_under_prefix_caching_is_warned_about_at_its_own_line(engine):
    model = engine.model
    said = "Prefix caching is on: what edit 'probe' writes"
    line = inspect.currentframe().f_lineno + 1
    with pytest.warns(UserWarning, match=said) as caught, engine.edit("probe"):
        hidden = model.model.layers[1].output[0].save()
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.asyncio
async def test_an_awaited_edit_under_prefix_caching_is_warned_about_at_its_own_line(engine):
    model = engine.model
    with pytest.warns(UserWarning, match="Prefix caching is on") as caught:
        async with engine.edit("probe"):
            hidden = model.model.layers[1].output[0].save()
    (warning,) = caught
    assert warning.filename == __file__


def test_a_prompt_that_is_split_over_steps_is_an_error_for_an_edit_and_not_fewer_rows(probed):
    assert len(LONG_PROMPT) > 200
    with pytest.raises(EditError, match=r"221-token prompt was split.*\(6\d tokens") as raised:
        probed.generate([CAT, LONG_PROMPT], **GREEDY)
    assert (raised.value.failed, raised.value.total) == (1, 2)
    whole, split = raised.value.outputs
    assert whole.error is None
    assert whole.saves["hidden"].shape == (4, 128)
    assert "hidden" not in split.saves
    assert len(split.outputs[0].token_ids) == 3
    assert next(iter(probed.edits)).errors == 1
    freed(probed)


def test_a_prompt_that_is_split_over_steps_is_an_error_for_a_trace(engine):
    model = engine.model
    with pytest.raises(TraceError, match="split across steps"), engine.trace(LONG_PROMPT, **GREEDY):
        hidden = model.model.layers[1].output[0].save()
    freed(engine)


def test_a_prompt_in_the_cache_is_whole_for_a_block_all_the_same(probed):
    model = probed.model
    for _ in range(2):
        (plain,) = probed.generate(CACHED, edits=[], **GREEDY)
    assert plain.num_cached_tokens >= 32, "the prompt was to be in the cache"
    rows = len(plain.prompt_token_ids)
    for _ in range(2):
        (output,) = probed.generate(CACHED, **GREEDY)
        assert output.saves["hidden"].shape[0] == rows
    with probed.trace(CACHED, edits=[], **GREEDY):
        hidden = model.model.layers[1].output[0].save()
    assert hidden.shape[0] == rows
