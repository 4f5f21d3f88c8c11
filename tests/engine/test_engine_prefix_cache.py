"""The prefix cache and prompts in pieces, beside blocks: every value is that of an engine without either."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import random

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine.call import Call
from nnsight_lab.errors import EditError
from nnsight_lab.wire.touch import Reach, Touch
from tests.engine.prefix_reference import seen
from tests.models import HIDDEN
from tests.waiting import GREEDY, idle

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
        num_gpu_blocks_override=128,
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


def right(path, output, names, index=0):
    """The output is that of a forward pass over all of its tokens, and so is all that was saved."""
    prompt = len(output.prompt_token_ids)
    completion = output.outputs[index]
    ids = [*output.prompt_token_ids, *completion.token_ids]
    change = next((CHANGES[name] for name in names if name in CHANGES), None)
    expected = seen(path, ids[:-1], prompt, {} if change is None else {1: change})
    chances = torch.log_softmax(expected.logits[prompt - 1 :], -1)
    for number, token in enumerate(completion.token_ids):
        said = completion.logprobs[number][token].logprob
        assert said == pytest.approx(float(chances[number, token]), abs=5e-3), (names, number)
    saves = completion.saves
    if "rows" in names:
        assert saves["rows"].shape[0] == prompt
        torch.testing.assert_close(saves["rows"], expected.streams[2][:prompt], **CLOSE)
    if "answers" in names:
        assert len(saves["logits"]) == len(completion.token_ids)
        found = torch.cat(list(saves["logits"]))
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


@pytest.mark.parametrize("names", [(), ("answers",), ("everywhere",), ("answers", "everywhere"), ("rows",)])
def test_a_long_prompt_runs_in_pieces_unless_blocks_read_it(edits, llama_path, names):
    prompt = f"{names} {STORY}"[:333]
    request = asked(edits, prompt, names)
    (output,) = together(edits, [request])
    right(llama_path, output, names)
    pieces = steps_of(edits)[request.id]
    if KINDS[names]:
        assert pieces == [64, 64, 64, 64, 64, 13, 1, 1]
    else:
        assert pieces == [333, 1, 1]


def test_traces_are_whole_between_plain_requests_and_those_of_logits_are_cached(engine, llama_path):
    model = engine.model
    for _ in range(2):
        (plain,) = engine.generate(STORY, logprobs=0, **GREEDY)
        with engine.trace(STORY, logprobs=0, **GREEDY) as tracer:
            rows = lab.residual(model.model.layers[2].output).save()
        right(llama_path, plain, ())
        expected = seen(llama_path, plain.prompt_token_ids, len(STORY))
        torch.testing.assert_close(rows, expected.streams[2], **CLOSE)
        assert tracer.output.num_cached_tokens == 0
        with engine.trace(STORY, **GREEDY) as tracer:
            first = model.logits.save()
        torch.testing.assert_close(first[0], expected.logits[-1], **CLOSE)
        assert tracer.output.num_cached_tokens > 300
        with engine.trace([STORY, STORY[:200]], **GREEDY) as tracer:
            chosen = model.logits.argmax(-1).save()
        assert [int(one) for one in chosen] == [output.outputs[0].token_ids[0] for output in tracer.outputs]
        assert all(output.num_cached_tokens > 100 for output in tracer.outputs)


def test_an_edit_under_the_same_name_is_another_and_a_cleared_one_leaves_nothing(edits, llama_path):
    prompt = "redefined " + STORY[:300]
    for vector, first in [(VECTOR, "everywhere"), (OTHER, "otherwise"), (VECTOR, "everywhere")]:
        edits.edit("again", steps=[lab.steps.add("model.layers.1", vector)])
        for _ in range(2):
            (output,) = edits.generate(prompt, edits=["again"], logprobs=0, **GREEDY)
            right(llama_path, output, (first,))
        assert output.num_cached_tokens > 250
        (plain,) = edits.generate(prompt, edits=[], logprobs=0, **GREEDY)
        right(llama_path, plain, ())
    edits.edits.clear("again")
    (plain,) = edits.generate(prompt, edits=[], logprobs=0, **GREEDY)
    right(llama_path, plain, ())


@pytest.mark.parametrize("names", [(), ("everywhere",), ("front",), ("rows",), ("answers",)])
def test_each_of_several_answers_is_right(edits, llama_path, names):
    prompt = "several " + STORY[:200]
    for _ in range(2):
        (output,) = together(edits, [asked(edits, prompt, names, n=3, temperature=1, seed=5)])
        for index in range(3):
            right(llama_path, output, names, index)


def test_a_seed_gives_the_same_answer_whether_the_prompt_runs_in_pieces_or_whole(edits):
    prompt, found = "seeded " + STORY[:250], []
    for names in [("rows",), (), (), ("answers",)]:
        request = asked(edits, prompt, names, temperature=1, seed=7, max_tokens=12)
        (output,) = together(edits, [request])
        found.append((output.outputs[0].token_ids, steps_of(edits)[request.id][0]))
    (whole, first), (pieces, second), (cached, _), (answers, _) = found
    assert (first, second) == (257, PIECE)
    assert whole == pieces == cached == answers
    assert len(set(whole)) > 1


def test_measuring_what_a_call_would_save_leaves_nothing_in_the_cache(edits, llama_path):
    model, prompt = edits.model, "measured " + STORY[:200]
    edits.estimate(prompt, edits=["front"], **GREEDY)
    with edits.trace([prompt], edits=[], estimate=True, **GREEDY):
        model.model.layers[1].output[0][:] = 0
        rows = model.model.layers[2].output[0].save()
    (plain,) = edits.generate(prompt, edits=[], logprobs=0, **GREEDY)
    right(llama_path, plain, ())


def test_a_salt_of_the_users_own_goes_on_keeping_apart(edits, llama_path):
    ids = edits.model.tokenizer("salted " + STORY[:200]).input_ids
    found = {}
    for names in [(), ("answers",), ("everywhere",), ("front",)]:
        for salt in ("one", "one", "two", "two", None, None):
            prompt = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
            (output,) = together(edits, [asked(edits, prompt, names)])
            right(llama_path, output, names)
            found.setdefault(names, []).append(output.num_cached_tokens > 0)
    once = [False, True] * 3
    assert found == {(): once, ("answers",): [True] * 6, ("everywhere",): once, ("front",): [False] * 6}


def test_a_block_that_was_read_wrong_is_an_error_and_not_fewer_rows(edits):
    edits.edits["rows"]._current.touch = Touch(Reach.ANSWERS)
    with pytest.raises(EditError, match=r"model\.layers\.2\.output was asked for by a block that names no"):
        edits.generate(STORY, edits=["rows"], **GREEDY)


def test_what_is_not_finite_stays_with_its_own_request(edits, llama_path):
    model = edits.model
    with edits.edit("ruin"):
        model.model.layers[0].output[0][:] = float("nan")
    edits.edit(
        "ruined", steps=[lab.steps.scale("model.layers.0", 3e38), lab.steps.scale("model.layers.1", 3e38)]
    )
    for turn in range(2):
        for name in ("ruin", "ruined"):
            for number in range(4):
                edits.generate(f"{turn} {number} {STORY}", edits=[name], **GREEDY)
        # More than the cache has room for: what the others had is given to these.
        prompts = [f"{letter} {turn} {STORY}"[: 300 + ord(letter)] for letter in "abcdefghijkl"]
        outputs = edits.generate(prompts, edits=[], logprobs=0, **GREEDY)
        for output in outputs:
            right(llama_path, output, ())


def test_a_request_that_is_put_off_for_want_of_memory_goes_on_right(edits, llama_path):
    names = [(), ("answers",), ("everywhere",), ("rows",), (), ("answers",), ("everywhere",), ("otherwise",)]
    requests = [
        asked(edits, f"{number} {STORY}"[:372], one, max_tokens=220) for number, one in enumerate(names)
    ]
    outputs = together(edits, requests)
    for output, one in zip(outputs, names, strict=True):
        right(llama_path, output, one)
    again = [name for name, pieces in steps_of(edits).items() if sum(pieces) > 372 + 219]
    assert again, "no request was put off"
