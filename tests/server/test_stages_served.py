"""A served pipeline of two stages, jailed: the same cells, from another process."""
# ruff: noqa: F841, C408  (what a block saves is bound in the frame; a literal cannot be saved)

from __future__ import annotations

import openai
import pytest
import torch

from nnsight_lab import steps
from nnsight_lab.engine.remote import RemoteEngine
from nnsight_lab.errors import TraceError
from tests.server.conftest import TOKENS, end, start
from tests.server.test_openai import saved
from tests.server.test_served import TOWER
from tests.waiting import until

pytestmark = pytest.mark.engine
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, one_engine):
    one_engine.stop()
    found = start(tmp_path_factory.mktemp("pipeline"), "--pipeline-parallel-size=2", "--dtype=float32")
    yield found
    end(found)


@pytest.fixture(scope="module")
def engine(pipeline):
    attached = RemoteEngine("pipeline", pipeline.url, TOKENS["alice"])
    attached.start()
    yield attached
    attached.stop()


def test_a_trace_reads_and_writes_both_stages(engine):
    layers = engine.model.model.layers
    assert len(layers) == 30
    with engine.trace(TOWER, **GREEDY) as tracer:
        early = list().save()
        late = list().save()
        for _ in tracer.all():
            first = layers[2].output[0]
            early.append(first)
            layers[25].output[0][:] += first
            late.append(layers[25].output[0])
            layers[25].output[0][:] -= first
    with engine.trace(TOWER, **GREEDY) as tracer:
        plain = list().save()
        for _ in tracer.all():
            plain.append(layers[25].output[0])
    assert len(early) == len(late) == GREEDY["max_tokens"]
    for first, written, like in zip(early, late, plain, strict=True):
        torch.testing.assert_close(written, like + first, rtol=1e-4, atol=1e-3)


def test_an_edit_is_served_to_an_openai_client_and_its_saves_come_home(engine, pipeline):
    layers = engine.model.model.layers
    with engine.edit("both") as (tracer, _):
        norms = list().save()
        for _ in tracer.all():
            first = layers[0].output[0][-1].norm()
            norms.append(first + layers[29].output[0][-1].norm())
    engine.edit("data", steps=[steps.read("model.layers.3", "third", positions="last")])
    client = openai.OpenAI(base_url=f"{pipeline.url}/v1", api_key=TOKENS["alice"])
    asked = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=TOWER,
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": {"nnsight_edits": ["both", "data"]}},
    )
    assert asked.usage is not None
    assert asked.usage.completion_tokens == 4
    status, saves = saved(pipeline, asked.id)
    assert status == 200
    assert {name: tuple(value.shape) for name, value in saves.items()} == {
        **{f"both/norms/{step}": () for step in range(4)},
        "data/third": (1, 576),
    }
    engine.edits.clear()


def test_the_logit_lens_is_read_on_the_stage_that_has_the_head(engine):
    found = engine.logit_lens(TOWER, top_k=2)
    assert found.top_ids.shape[0] == 30
    assert torch.equal(found.top_ids[-1, :, 0], found.final_ids)


def test_both_stages_are_jailed_and_a_refused_act_is_its_request_s_error(engine, pipeline):
    layers = engine.model.model.layers
    assert any(state.startswith("yes") for state in pipeline.figures()["jail_layers"].values())
    with pytest.raises(TraceError, match="PermissionError"), engine.trace(TOWER, **GREEDY):
        early = layers[0].output[0].mean()
        late = layers[29].output[0].mean()
        import socket

        socket.create_connection(("127.0.0.1", 80), timeout=1)
    with engine.trace(TOWER, **GREEDY):
        both = (layers[0].output[0].mean(), layers[29].output[0].mean()).save()
    assert len(both) == 2
    until(lambda: engine.request_count() == 0, 5, "a request was left in the workers")
