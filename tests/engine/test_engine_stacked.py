"""A block that runs once for many requests gives each what its own run gives it, on a real engine.

Whatever is asked is asked twice: with blocks run together, and with each run by itself.
"""

from __future__ import annotations

import threading

import pytest
import torch

from nnsight_lab.errors import EditError
from nnsight_lab.wire.codec import decode, encode
from tests import models
from tests.waiting import freed, idle, until

PROMPTS = [list(range(10 + i, 18 + 3 * i)) for i in range(9)]
STEPS = {"max_tokens": 7, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["sync", "async"])
def started(request, one_engine, llama_path):
    engine = one_engine.want(
        llama_path,
        request.param,
        worker="tests.worker.inplace.InPlaceCPUWorker",
        dtype="float32",
        max_model_len=models.CONTEXT,
        max_num_seqs=6,  # so that some of the requests begin when others have ended
    )
    install(engine)
    yield engine
    engine.edits.clear()
    idle(engine)


@pytest.fixture
def engine(started):
    yield started
    started.saves.clear()
    started.rpc("stack_blocks", True)
    freed(started)


def install(engine):
    model = engine.model
    with engine.edit("best") as (tracer, edit):
        best = list().save()  # noqa: C408
        for _ in tracer.all():
            best.append(engine.model.logits[0].max())
    weights = torch.linspace(-1, 1, 258)
    with engine.edit("several") as (tracer, edit):
        ids, scores, rows = [].save(), [].save(), [].save()
        for _ in tracer.all():
            row = model.logits[0]
            scores.append(row.log_softmax(-1).topk(4).indices)
            rows.append(row @ weights)
            ids.append(model.samples[0])
    with engine.edit("three") as (tracer, edit):
        ids = [].save()
        scores = [].save()
        for _ in tracer.iter[:]:
            row = model.logits[0]
            scores.append(torch.logsumexp(row, -1) + row @ weights)
            ids.append(model.samples[0])
    with engine.edit("first") as (tracer, edit):
        top = model.logits[0].topk(3).indices.save()  # noqa: F841
    with engine.edit("layer") as (tracer, edit):
        hidden = model.model.layers[1].output[0][-1].save()  # noqa: F841
    with engine.edit("bends") as (tracer, edit):
        for _ in tracer.all():
            model.logits[0, 5] += 3.0
    for edit in engine.edits:
        edit.switch_off()


def same(a, b):
    if isinstance(a, torch.Tensor):
        close = torch.allclose(a, b, rtol=1e-5, atol=1e-5) if a.is_floating_point() else torch.equal(a, b)
        return a.dtype == b.dtype and a.shape == b.shape and close
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


def agree(engine, work, *, runs=True):
    """What ``work`` gives, which must be the same both ways."""
    engine.rpc("stack_blocks", False)
    engine.rpc("stacked_runs")
    wanted = work()
    assert engine.rpc("stacked_runs") == [0]
    engine.rpc("stack_blocks", True)
    found = work()
    assert (engine.rpc("stacked_runs")[0] > 0) == runs
    assert same(found, wanted)
    return found


def saved(outputs):
    return [
        {name: dict(one.saves.edit(name)) for name in one.saves.blocks}
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize(
    "edits", [["best"], ["several"], ["three"], ["first"], ["best", "three"], ["first", "best"]], ids="+".join
)
def test_every_request_gets_what_its_own_run_gives(engine, edits):
    found = agree(engine, lambda: saved(engine.generate(PROMPTS, edits=edits, **STEPS)))
    assert len(found) == len(PROMPTS)
    assert all(one.keys() == set(edits) for one in found)
    for one in found:
        for name in one.keys() - {"first"}:
            assert all(len(values) == STEPS["max_tokens"] for values in one[name].values())


def test_requests_of_many_lengths_each_have_their_own_tokens(engine):
    ends = {**STEPS, "max_tokens": 12, "stop_token_ids": list(range(0, 258, 6))}

    def work():
        outputs = engine.generate(PROMPTS * 2, edits=["best", "three"], **ends)
        for output in outputs:
            length = len(output.outputs[0].token_ids)
            assert {len(output.saves[name]) for name in ("best", "ids", "scores")} == {length}
            assert [int(one) for one in output.saves["ids"]] == list(output.outputs[0].token_ids)
        assert len({len(output.outputs[0].token_ids) for output in outputs}) > 2
        return saved(outputs)

    agree(engine, work)


def test_the_numbers_are_those_of_the_step_and_the_request(engine):
    outputs = engine.generate(PROMPTS, edits=["three"], logprobs=1, **STEPS)
    for output in outputs:
        ids = [int(one) for one in output.saves["ids"]]
        assert ids == list(output.outputs[0].token_ids)


def test_several_answers_of_a_prompt_have_each_their_own(engine):
    settings = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    outputs = engine.generate(PROMPTS[:3], edits=["three"], **settings)
    for output in outputs:
        assert len(output.outputs) == 3
        for one in output.outputs:
            assert [int(token) for token in one.saves["ids"]] == list(one.token_ids)
    agree(engine, lambda: saved(engine.generate(PROMPTS[:3], edits=["three", "best"], **settings)))


def test_a_trace_over_prompts_is_run_together(engine):
    def work():
        with engine.trace(PROMPTS, edits=[], **STEPS) as tracer:
            best = list().save()  # noqa: C408
            for _ in tracer.all():
                best.append(engine.model.logits[0].max())
        with engine.trace(PROMPTS, edits=["best"], **STEPS):
            last = engine.model.logits[0].topk(2).values.save()
        return [best, last]

    found = agree(engine, work)
    assert [len(one) for one in found[0]] == [STEPS["max_tokens"]] * len(PROMPTS)


def test_a_request_with_a_block_that_writes_sees_what_it_wrote(engine):
    def work():
        return saved(engine.generate(PROMPTS, edits=["bends", "best"], **STEPS))

    agree(engine, work, runs=False)
    plain = saved(engine.generate(PROMPTS, edits=["best"], **STEPS))
    assert not same([one["best"] for one in work()], [one["best"] for one in plain])


def test_blocks_at_modules_run_beside_it(engine):
    found = agree(engine, lambda: saved(engine.generate(PROMPTS, edits=["layer"], **STEPS)), runs=False)
    assert all(one["layer"]["hidden"].shape == (models.HIDDEN,) for one in found)


def test_an_error_in_the_block_is_raised_at_its_line_with_how_many_it_failed(engine):
    with engine.edit("beyond") as (tracer, edit):
        best = list().save()  # noqa: C408
        for _ in tracer.all():
            best.append(engine.model.logits[0, 5000])
    edit.switch_off()
    with pytest.raises(EditError, match="9 of 9 requests failed") as caught:
        engine.generate(PROMPTS, edits=["beyond"], **STEPS)
    assert "out of bounds" in str(caught.value)
    assert "engine.model.logits[0, 5000]" in str(caught.value)
    edit.clear()


def test_an_edit_that_is_cleared_runs_on_where_it_runs(engine):
    with engine.edit("cleared") as (tracer, edit):
        seen = list().save()  # noqa: C408
        for _ in tracer.all():
            seen.append(engine.model.samples[0, 0])
    edit.switch_off()
    found = []
    long = {**STEPS, "max_tokens": 200}

    def run():
        found.extend(engine.generate(PROMPTS[:4], edits=["cleared"], **long))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: engine.rpc("nnsight_request_count") == [4], 30)
    edit.clear()
    thread.join(60)
    assert [len(one.saves["seen"]) for one in found] == [200] * 4


def test_a_look_at_a_running_request_brings_its_own_rows(engine):
    outputs = []
    long = {**STEPS, "max_tokens": 250}
    thread = threading.Thread(
        target=lambda: outputs.extend(engine.generate(PROMPTS[:5], edits=["three"], **long))
    )
    thread.start()
    until(lambda: engine.rpc("nnsight_request_count") == [5], 30)
    names = list(engine._driver.processor().request_states)
    looks = {}
    for name in names:
        asked = encode({"request_id": name, "have": {}, "names": ["ids"], "most_bytes": 2**20})
        looks[name] = decode(engine.rpc("lab_peek", asked)[0])["three"]["ids"]["items"]
    thread.join(60)
    assert engine.rpc("stacked_runs")[0] > 0
    whole = [[int(one) for one in output.saves["ids"]] for output in outputs]
    for seen in looks.values():
        assert seen
        ids = [int(one) for one in seen]
        assert any(one[: len(ids)] == ids for one in whole)


def test_aborted_requests_leave_nothing_and_the_others_go_on(engine):
    outputs = []
    call = {"edits": ["three"], **STEPS, "max_tokens": 150}
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS[:3], **call)))
    thread.start()
    until(lambda: engine.rpc("nnsight_request_count") == [3], 30)
    run = engine.live(PROMPTS[4], **{**call, "max_tokens": 800})
    until(lambda: len(run.strip) > len(PROMPTS[4]) + 2, 30)
    run.close()
    thread.join(60)
    assert [len(one.saves["ids"]) for one in outputs] == [150] * 3
