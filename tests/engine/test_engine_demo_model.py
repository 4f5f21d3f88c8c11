"""The demo model: a real language model, at its own precision, from the front door."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine.demo import demo_model
from tests.waiting import idle

PROMPT = "The Eiffel Tower is in the city of"


@pytest.fixture(scope="module")
def demo(one_engine, nothing_left_behind):
    demo_model()
    engine = one_engine.want("demo", "async", max_model_len=512)
    yield engine
    engine.edits.clear()
    idle(engine)


def test_the_demo_model_knows_where_the_tower_is(demo):
    (output,) = lab.generate(PROMPT, max_tokens=3, temperature=0)
    assert "Paris" in output.outputs[0].text
    assert demo.status().dtype == "bfloat16"


def test_a_logit_lens_in_a_block_ends_at_the_models_own_answer(demo):
    model = demo.model
    with lab.trace(PROMPT, max_tokens=1, temperature=0):
        guesses = [].save()
        for layer in model.model.layers:
            hidden = model.model.norm(lab.residual(layer.output)[-1:].clone())
            guesses.append(model.logits_processor(model.lm_head, hidden).argmax(-1).item())
        answer = model.logits.argmax(-1).item().save()
    assert len(guesses) == 30
    assert guesses[-1] == answer
    assert guesses[0] != answer
    assert "Paris" in demo.tokenizer.decode([answer])


def test_a_block_that_steers_every_step_moves_the_text_and_clearing_it_brings_it_back(demo):
    model = demo.model
    settings = {"max_tokens": 12, "temperature": 0}
    (before,) = lab.generate(PROMPT, **settings)
    with lab.edit("steer") as (tracer, edit):
        for _ in tracer.all():
            model.model.layers[10].output[0][:] += 3.0
    (steered,) = lab.generate(PROMPT, **settings)
    (chosen,) = lab.generate(PROMPT, edits=[], **settings)
    edit.clear()
    (after,) = lab.generate(PROMPT, **settings)
    assert steered.outputs[0].text != before.outputs[0].text
    assert before.outputs[0].text == chosen.outputs[0].text == after.outputs[0].text


def test_sixty_four_prompts_keep_their_own_saves(demo):
    model = demo.model
    prompts = [f"{'word ' * (1 + index % 7)}number {index}" for index in range(64)]
    with lab.edit("probe"):
        ids = model.model.embed_tokens.input.save()
        hidden = model.model.layers[15].output[0][-1].save()
    outputs = lab.generate(prompts, max_tokens=2, temperature=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.saves["ids"].tolist() == list(output.prompt_token_ids)
        assert output.saves["hidden"].shape == (576,)
        assert output.saves["hidden"].dtype == torch.bfloat16
    lab.edits().clear()
