"""Steps smaller than a prompt, as an option asks for: blocks that read it are refused before it is sent."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import pytest

from nnsight_lab.errors import EditError, RequestRefused, TraceError
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
    with engine.edit("probe"):
        hidden = model.model.layers[1].output[0].save()
    return engine


def test_a_long_prompt_that_is_read_is_refused_before_it_is_sent_and_others_are_not(probed):
    model = probed.model
    said = r"has 221 tokens, and blocks read it.*steps take 64: start it with max_num_batched_tokens=221"
    ids = model.tokenizer(LONG_PROMPT).input_ids
    for prompt in (LONG_PROMPT, ids, {"prompt": LONG_PROMPT}, {"prompt_token_ids": ids}):
        with pytest.raises(RequestRefused, match=said):
            probed.generate([CAT, prompt] if isinstance(prompt, str) else prompt, **GREEDY)
    with pytest.raises(RequestRefused, match=said), probed.trace(LONG_PROMPT, edits=[], **GREEDY):
        hidden = model.model.layers[1].output[0].save()
    (plain,) = probed.generate(LONG_PROMPT, edits=[], **GREEDY)
    with probed.trace(LONG_PROMPT, edits=[], **GREEDY):
        first = model.logits.argmax().save()
    assert int(first) == plain.outputs[0].token_ids[0]


def test_one_that_is_split_all_the_same_is_an_error_and_not_fewer_rows(probed, monkeypatch):
    # As where the kernel cannot count: a text for a server, whose tokenizer it does not have.
    monkeypatch.setattr(type(probed), "_fits", lambda *_: None)
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
    probed.edits.clear()
    model = probed.model
    with pytest.raises(TraceError, match="split across steps"), probed.trace(LONG_PROMPT, **GREEDY):
        hidden = model.model.layers[1].output[0].save()
    freed(probed)


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
