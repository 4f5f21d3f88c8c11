"""A request that loses its place in the cache and comes back keeps its part of a run for many."""

from __future__ import annotations

import pytest

from tests.waiting import idle
from tests.worker.acting import replaying

PROMPTS = [list(range(10 + i, 30 + i)) for i in range(7)]


@pytest.fixture
def engine(one_engine, llama_path):
    engine = replaying(one_engine, llama_path)
    yield engine
    engine.edits.clear()
    engine.saves.clear()
    idle(engine)


@pytest.mark.parametrize("acts", [False, True], ids=["module by module", "replayed"])
def test_its_values_are_those_of_its_own_tokens(engine, acts):
    model = engine.model
    with engine.edit("reads") as (tracer, edit):
        ids, best = [].save(), [].save()
        for _ in tracer.all():
            best.append(model.logits[0].argmax())
            ids.append(model.samples[0])
    edit.switch_off()
    with engine.edit("mixed") as (tracer, edit):
        seen = [].save()
        for _ in tracer.all():
            model.model.layers[2].output[0][-1]
            seen.append(model.samples[0])
    edit.switch_off()
    engine.rpc("act_replays", acts)
    before = engine.rpc("resumed")[0]
    engine.rpc("stacked_runs")
    outputs = engine.generate(PROMPTS, edits=["reads"], max_tokens=90, temperature=0.0, ignore_eos=True)
    assert engine.rpc("resumed")[0] > before, "nothing lost its place, so nothing was tested"
    assert engine.rpc("stacked_runs")[0] > 0
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 90
        assert [int(one) for one in output.saves["ids"]] == tokens
        assert [int(one) for one in output.saves["best"]] == tokens
    for output in engine.generate(PROMPTS, edits=["reads", "mixed"], max_tokens=9, temperature=0.0):
        tokens = list(output.outputs[0].token_ids)
        assert [int(one) for one in output.saves["seen"]] == tokens
        assert [int(one) for one in output.saves["ids"]] == tokens
