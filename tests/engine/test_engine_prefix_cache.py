"""The prefix cache and prompts in pieces, beside blocks: every value is that of an engine without either."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import random

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine.call import Call
from nnsight_lab.errors import EditError, RequestRefused
from tests.engine.prefix_reference import seen
from tests.models import HIDDEN
from tests.waiting import GREEDY, freed, idle

torch.manual_seed(11)
VECTOR = torch.randn(HIDDEN) * 2
OTHER = torch.randn(HIDDEN) * 2
#: A token a byte; blocks of the cache have 32.
STORY = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
#: Sums in another order, over four layers of large weights.
CLOSE = {"rtol": 1e-3, "atol": 2e-3}
#: A step's tokens of prompts that may be cut.
PIECE = 64


@pytest.fixture(scope="module")
def started(one_engine, llama_path, nothing_left_behind):
    engine = one_engine.want(
        llama_path,
        "sync",
        worker="tests.worker.telling.TellingCPUWorker",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        block_size=32,
        scheduling_policy="priority",
        additional_config={"nnsight_lab_schedule": {"split_tokens": PIECE}},
    )
    yield engine
    idle(engine)


@pytest.fixture
def engine(started):
    steps_of(started)
    yield started
    started.edits.clear()
    idle(started)


@pytest.fixture
def edits(engine):
    """One of each kind; by name, what each does to the residual stream of layer 1."""
    model = engine.model
    with engine.edit("front"):
        model.model.layers[1].output[0][:] += VECTOR
    with engine.edit("rows"):
        rows = lab.residual(model.model.layers[2].output).save()
    with engine.edit("answers") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits)
    engine.edit("everywhere", steps=[lab.steps.add("model.layers.1", VECTOR)])
    engine.edit("otherwise", steps=[lab.steps.add("model.layers.1", OTHER)])
    engine.edit("last", steps=[lab.steps.add("model.layers.1", VECTOR, positions=-1)])
    engine.edit("generated", steps=[lab.steps.add("model.layers.1", OTHER, positions="generated")])
    return engine


def front(rows, prompt):
    rows[:prompt] += VECTOR
    return rows


def last(rows, prompt):
    rows[prompt - 1] += VECTOR
    return rows


def generated(rows, prompt):
    rows[prompt:] += OTHER
    return rows


CHANGES = {
    "front": front,
    "last": last,
    "generated": generated,
    "everywhere": lambda rows, _: rows + VECTOR,
    "otherwise": lambda rows, _: rows + OTHER,
}
#: What requests run, and whether their prompts may be cut.
KINDS = {
    (): True,
    ("answers",): True,
    ("everywhere",): True,
    ("otherwise",): True,
    ("answers", "everywhere"): False,
    ("front",): False,
    ("last",): False,
    ("generated",): False,
    ("rows",): False,
    ("everywhere", "rows"): False,
}


def asked(engine, prompt, names, **settings):
    return engine.request(prompt, {"logprobs": 0, **GREEDY, **settings}, engine.edits.chosen(list(names)))


def together(engine, requests):
    """The outputs of requests that are submitted at once."""
    call = Call(requests)
    engine.submit(call)
    engine.wait(call)
    outputs = engine.outputs(call)
    engine.raise_errors(call, outputs)
    return outputs


def steps_of(engine):
    """Of each request since this was last asked, the tokens of each of its steps."""
    found = {}
    for step in engine.rpc("steps_told")[0]:
        for name, tokens in step.items():
            found.setdefault(name.rpartition("-")[0], []).append(tokens)
    return found


def right(path, output, names):
    """The output is that of a forward pass over all of its tokens, and so is all that was saved."""
    prompt = len(output.prompt_token_ids)
    completion = output.outputs[0]
    ids = [*output.prompt_token_ids, *completion.token_ids]
    change = next((CHANGES[name] for name in names if name in CHANGES), None)
    expected = seen(path, ids[:-1], prompt, {} if change is None else {1: change})
    chances = torch.log_softmax(expected.logits[prompt - 1 :], -1)
    for number, token in enumerate(completion.token_ids):
        said = completion.logprobs[number][token].logprob
        assert said == pytest.approx(float(chances[number, token]), abs=5e-3), (names, number)
    if "rows" in names:
        assert output.saves["rows"].shape[0] == prompt
        torch.testing.assert_close(output.saves["rows"], expected.streams[2][:prompt], **CLOSE)
    if "answers" in names:
        assert len(output.saves["logits"]) == len(completion.token_ids)
        found = torch.cat(output.saves["logits"])
        torch.testing.assert_close(found, expected.logits[prompt - 1 :], **CLOSE)


def test_a_plain_prompt_is_served_from_the_cache_and_one_that_is_read_is_not(edits, llama_path):
    for names in KINDS:
        for _ in range(2):
            (plain,) = edits.generate(STORY, edits=[], logprobs=0, **GREEDY)
            (output,) = together(edits, [asked(edits, STORY, names)])
            right(llama_path, plain, ())
            right(llama_path, output, names)
        assert plain.num_cached_tokens >= len(STORY) // 32 * 32 - 32
        reads = not ({"front", "last", "generated", "rows"} & {*names})
        assert (output.num_cached_tokens > 0) == reads, names


@pytest.mark.parametrize("seed", range(3))
def test_every_request_of_a_mixed_crowd_is_as_if_it_were_alone(edits, llama_path, seed):
    chance, cached = random.Random(seed), 0
    for _ in range(8):
        crowd = []
        for _ in range(6):
            prompt = STORY[
                : chance.randrange(20, len(STORY))
            ] + f"{chance.choice('abc')} " * chance.randrange(20)
            names = chance.choice(list(KINDS))
            crowd.append((asked(edits, prompt, names), names))
        outputs = together(edits, [request for request, _ in crowd])
        pieces = steps_of(edits)
        for output, (request, names) in zip(outputs, crowd, strict=True):
            right(llama_path, output, names)
            cached += output.num_cached_tokens
            if not KINDS[names]:
                left = len(output.prompt_token_ids) - output.num_cached_tokens
                assert pieces[request.id] == [left, 1, 1], names
    assert cached > 1000
