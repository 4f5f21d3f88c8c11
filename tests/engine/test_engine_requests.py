"""Prompts and sampling settings: taken in every form, refused before anything is submitted."""

from __future__ import annotations

import asyncio

import pytest

from nnsight_lab.errors import RequestRefused
from tests.waiting import CAT, GREEDY, TOWER, freed


def test_a_prompt_may_be_text_or_token_ids_or_a_dictionary(engine):
    import torch

    ids = engine.tokenizer.encode(TOWER)
    text = engine.generate(TOWER, **GREEDY)[0].outputs[0].token_ids
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": TOWER}, [TOWER], [ids], torch.tensor(ids)):
        (output,) = engine.generate(prompt, **GREEDY)
        assert output.outputs[0].token_ids == text
    several = engine.generate(TOWER, CAT, **GREEDY)
    assert [output.prompt for output in several] == [TOWER, CAT]


def test_max_new_tokens_is_taken_for_max_tokens(engine):
    (output,) = engine.generate(CAT, max_new_tokens=2, temperature=0, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_token": 3}, r"'max_token' is not a sampling setting\. Did you mean 'max_tokens'\?"),
        ({"zzz": 3}, "'zzz' is not a sampling setting"),
        ({"temperature": -1}, r"temperature.*-1.*\(given: temperature=-1\)"),
        ({"top_p": 7}, "top_p"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": "three"}, "three"),
    ],
)
def test_a_sampling_setting_that_vllm_does_not_take_is_refused(engine, settings, said):
    for call in (engine.generate, engine.trace, engine.stream):
        with pytest.raises(RequestRefused, match=said):
            call(CAT, **settings)
    with pytest.raises(RequestRefused, match=said):
        asyncio.run(engine.agenerate(CAT, **settings))
    assert engine._driver.unfinished() == 0


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ((), "There is no prompt"),
        (([],), "the list is empty"),
        (("",), "The prompt is empty"),
        ((["fine", ""],), "Prompt 1 is ''"),
        ((["fine", None],), "Prompt 1 is None"),
        ((7,), "not int"),
        ((None,), "not NoneType"),
    ],
)
def test_a_prompt_that_is_none_is_refused(engine, prompts, said):
    with pytest.raises(RequestRefused, match=said):
        engine.generate(*prompts, **GREEDY)
    with pytest.raises(RequestRefused, match=said):
        asyncio.run(engine.agenerate(*prompts, **GREEDY))
    if prompts:
        with pytest.raises(RequestRefused, match=said):
            engine.trace(*prompts, **GREEDY)


def test_a_prompt_that_is_too_long_is_refused_and_its_siblings_do_not_linger(engine):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[0].output[0].save()
    with pytest.raises(RequestRefused, match="1024"):
        engine.generate([CAT, "x" * 2000, TOWER], max_tokens=200, ignore_eos=True)
    with pytest.raises(RequestRefused, match="1024"):
        asyncio.run(engine.agenerate(["x" * 2000, CAT], max_tokens=200, ignore_eos=True))
    with pytest.raises(RequestRefused, match="1024"), engine.trace("x" * 2000, **GREEDY):
        hidden = model.model.layers[0].output[0].save()  # noqa: F841
    freed(engine)
    outputs = engine.generate(CAT, **GREEDY)
    assert [output.saves["hidden"].shape[0] for output in outputs] == [4]


def test_an_errors_setting_that_is_neither_is_refused(engine):
    with pytest.raises(RequestRefused, match='neither "raise" nor "keep"'):
        engine.generate(CAT, errors="ignore", **GREEDY)


def test_what_generate_gives_is_vllms_own_output(engine):
    from vllm import RequestOutput

    outputs = engine.generate([TOWER, CAT], logprobs=2, **GREEDY)
    assert all(isinstance(output, RequestOutput) and output.finished for output in outputs)
    assert all(output.error is None and dict(output.saves) == {} for output in outputs)
    assert len(outputs[0].outputs[0].logprobs) == 3


def test_a_live_view_sees_the_requests_grow(engine):
    seen = []
    engine.generate([TOWER, CAT], watch=seen.append, max_tokens=300, temperature=0, ignore_eos=True)
    assert [progress.tokens for progress in seen[-1]] == [300, 300]
    assert all(progress.finished for progress in seen[-1])
    assert any(0 < progress.tokens < 300 for look in seen for progress in look)
    assert [progress.prompt for progress in seen[-1]] == [TOWER, CAT]
