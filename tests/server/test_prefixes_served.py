"""The prefix cache of a shared engine is each user's own, and each edit's, for kernels and OpenAI clients."""

from __future__ import annotations

import uuid

import openai
import pytest
import torch

import nnsight_lab as lab
from tests.server.conftest import TOKENS
from tests.server.test_served import GREEDY

pytestmark = pytest.mark.engine

VECTOR = 40 * torch.randn(576, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def prompt():
    """More than one block of the cache (128 tokens), and asked by nobody before."""
    return (
        f"{uuid.uuid4().hex} " + "The Eiffel Tower is in the city of Paris, and the river is the Seine. " * 12
    )


@pytest.fixture
def clients(server):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKENS["alice"], max_retries=0) as alice,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKENS["bob"], max_retries=0) as bob,
    ):
        yield {"alice": alice, "bob": bob}


def told(client, prompt, *names, **more):
    """An OpenAI client's answer, and how much of its prompt came from the cache."""
    body = {"vllm_xargs": {"nnsight_edits": list(names)}, **more}
    done = client.completions.create(model="demo", prompt=prompt, **GREEDY, extra_body=body)
    details = done.usage.prompt_tokens_details
    return done.choices[0].text, 0 if details is None else details.cached_tokens


def test_a_user_is_served_from_the_cache_what_they_asked_themselves_and_not_what_others_did(
    attach, clients, prompt
):
    alice, bob = attach("alice"), attach("bob")
    (first,) = alice.generate(prompt, edits=[], **GREEDY)
    (again,) = alice.generate(prompt, edits=[], **GREEDY)
    assert (first.num_cached_tokens, again.num_cached_tokens >= 128) == (0, True)
    text = first.outputs[0].text
    assert again.outputs[0].text == text
    found, cached = told(clients["alice"], prompt)
    assert (found, cached >= 128) == (text, True)
    assert told(clients["bob"], prompt) == (text, 0)
    (others,) = bob.generate(prompt, edits=[], **GREEDY)
    assert (others.outputs[0].text, others.num_cached_tokens >= 128) == (text, True)
    assert told(clients["alice"], prompt, cache_salt="mine") == (text, 0)
    found, cached = told(clients["alice"], prompt, cache_salt="mine")
    assert (found, cached >= 128) == (text, True)
    (salted,) = alice.generate({"prompt": prompt, "cache_salt": "mine"}, edits=[], **GREEDY)
    assert salted.num_cached_tokens >= 128


def test_what_an_edit_writes_is_served_to_nobody_else(attach, clients, prompt):
    engine, client = attach("alice"), clients["alice"]
    model = engine.model
    plain, _ = told(client, prompt)
    with engine.edit("code"):
        model.model.layers[4].output[0][:] += VECTOR
    with engine.edit("answers") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits)
    engine.edit("told", steps=[lab.steps.add("model.layers.4", VECTOR)])
    steered = told(client, prompt, "told")
    assert steered[0] != plain
    assert steered[1] == 0
    coded = told(client, prompt, "code")
    assert coded[0] != plain
    found, cached = told(client, prompt, "told")
    assert (found, cached >= 128) == (steered[0], True)
    assert told(client, prompt, "code") == coded == (coded[0], 0)
    for names in ((), ("answers",)):
        found, cached = told(client, prompt, *names)
        assert (found, cached >= 128) == (plain, True)
    with engine.trace(prompt, edits=[], **GREEDY) as tracer:
        rows = model.model.layers[1].output[0].save()
    assert rows.shape[0] == len(tracer.output.prompt_token_ids)
    assert tracer.output.num_cached_tokens == 0
    with engine.trace(prompt, edits=[], **GREEDY) as tracer:
        first = model.logits.argmax().save()
    assert tracer.output.num_cached_tokens >= 128
    assert int(first) == tracer.output.outputs[0].token_ids[0]
    assert tracer.output.outputs[0].text == plain
