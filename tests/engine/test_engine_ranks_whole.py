"""Places that two tensor-parallel ranks share: read once and whole, edited on both, replayed, looked at."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import re

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import TraceError
from nnsight_lab.wire.keys import STEPS
from tests.models import HIDDEN
from tests.parity import hugging_face, hugging_face_attention, hugging_face_lens
from tests.waiting import CAT, GREEDY, TOWER, idle
from tests.worker import acting

#: Sums in another order, through four layers.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ONCE = {"max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def two_ranks(one_engine, llama_path):
    yield acting.two_ranks(one_engine, llama_path)
    one_engine.stop()


@pytest.fixture
def engine(two_ranks):
    idle(two_ranks)
    yield two_ranks
    two_ranks.edits.clear()
    idle(two_ranks)


@pytest.fixture(scope="module")
def weights(llama_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama_path, dtype=torch.float32).state_dict()


def test_columns_come_in_the_order_of_the_models_own_heads(engine, weights):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        qkv = model.model.layers[1].self_attn.qkv_proj
        given = qkv.input.save()
        found = qkv.output[0].save()
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    torch.testing.assert_close(found, given @ torch.cat([weights[name] for name in names]).T, **CLOSE)


def test_parameters_are_the_models_and_not_a_ranks(engine, weights):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        layer = model.model.layers[1]
        stream = layer.output
        qkv = layer.self_attn.qkv_proj.weight.save()
        gated = layer.mlp.gate_up_proj.weight.save()
        down = layer.mlp.down_proj.weight.save()
        norm = layer.input_layernorm.weight.save()
        table = model.model.embed_tokens.weight.save()
        head = model.lm_head.weight.save()
    of = {name: weights[f"model.layers.1.{name}.weight"] for name in ("mlp.down_proj", "input_layernorm")}
    assert torch.equal(down, of["mlp.down_proj"])
    assert torch.equal(norm, of["input_layernorm"])
    for found, names in (
        (qkv, [f"self_attn.{n}_proj" for n in "qkv"]),
        (gated, ["mlp.gate_proj", "mlp.up_proj"]),
    ):
        assert torch.equal(found, torch.cat([weights[f"model.layers.1.{name}.weight"] for name in names]))
    for found, name in ((table, "model.embed_tokens.weight"), (head, "lm_head.weight")):
        assert torch.equal(found[: len(weights[name])], weights[name])  # vLLM pads the vocabulary


def test_inside_a_module_a_value_is_whole_or_refused_with_what_to_read_instead(engine):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        mlp = model.model.layers[1].mlp
        inside = mlp.source.self_gate_up_proj_0.output[0].save()
    with engine.trace(TOWER, **ONCE):
        outside = model.model.layers[1].mlp.gate_up_proj.output[0].save()
    assert torch.equal(inside, outside)
    output, error = engine.generate(TOWER, edits=[], **ONCE), None
    try:
        with engine.trace(TOWER, **ONCE):
            hidden = model.model.layers[1].mlp.source.x_0.output.save()
    except TraceError as refused:
        error = str(refused)
    assert re.search(r"x_0\.output is not one value.* Whole are: .*gate_up_proj\.output", error)
    assert engine.generate(TOWER, edits=[], **ONCE)[0].outputs[0].token_ids == output[0].outputs[0].token_ids
    with engine.trace(TOWER, **ONCE):
        after = model.model.layers[1].mlp.gate_up_proj.output[0].save()
    assert torch.equal(after, outside)


def test_a_block_may_take_another_way_when_it_is_refused(engine):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        why = ""
        try:
            found = model.model.layers[1].mlp.source.x_0.output
        except RuntimeError as refused:
            why = str(refused)
        found = model.model.layers[1].mlp.down_proj.input.save()
        why = [why].save()
    assert found.shape == (len(TOWER), 256)
    assert "Whole are" in why[0]


def test_a_skip_is_given_whole_and_each_rank_takes_its_piece(engine):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        given = (model.model.layers[1].mlp.act_fn.output * 0.5).save()
        qkv = (model.model.layers[2].self_attn.qkv_proj.output[0] * 0.5).save()
    with engine.trace(TOWER, **ONCE):
        model.model.layers[1].mlp.act_fn.output = given
        assigned = model.logits.save()
    with engine.trace(TOWER, **ONCE):
        model.model.layers[1].mlp.act_fn.skip(given)
        skipped = model.logits.save()
    torch.testing.assert_close(skipped, assigned, **CLOSE)
    with engine.trace(TOWER, **ONCE):
        model.model.layers[2].self_attn.qkv_proj.output[0][:] *= 0.5
        halved = model.logits.save()
    with engine.trace(TOWER, **ONCE):
        model.model.layers[2].self_attn.source.self_qkv_proj_0.skip((qkv, None))
        inside = model.logits.save()
    torch.testing.assert_close(inside, halved, **CLOSE)
    assert (assigned - halved).abs().max() > 0.01


def test_a_skip_of_one_request_leaves_the_others_of_the_step_alone(engine):
    model = engine.model
    with engine.trace(TOWER, **ONCE):
        plain = model.logits.save()
        given = torch.zeros(len(CAT), 256).save()
    with engine.trace(CAT, **ONCE):
        model.model.layers[1].mlp.act_fn.output = given
        assigned = model.logits.save()
    with engine.trace(**ONCE) as tracer:
        with tracer.invoke(CAT):
            model.model.layers[1].mlp.act_fn.skip(given)
            one = model.logits.save()
        with tracer.invoke(TOWER):
            other = model.logits.save()
    torch.testing.assert_close(one, assigned, **CLOSE)
    torch.testing.assert_close(other, plain, **CLOSE)


def test_what_is_put_together_is_so_once_for_all_who_read_and_only_then(engine):
    model = engine.model
    for name in ("one", "two"):
        with engine.edit(name) as (tracer, _):
            for _ in tracer.all():
                seen = model.model.layers[1].mlp.act_fn.output.save()
                again = model.model.layers[1].mlp.act_fn.output.save()
    before = engine.rpc("gathered")
    engine.generate([TOWER, CAT], edits=[], **GREEDY)
    assert engine.rpc("gathered") == before
    steps = engine.rpc(STEPS)
    outputs = engine.generate([TOWER], edits=["one", "two"], **GREEDY)
    after = engine.rpc("gathered")
    assert after[0] - before[0] == after[1] - before[1] == GREEDY["max_tokens"]
    used = engine.rpc("used_bytes")
    assert used[0] > 0
    assert used[1] == 0, "each value is moved once, by one rank"
    del outputs


def test_a_cache_keeps_whole_values(engine):
    model = engine.model
    with engine.trace(TOWER, **ONCE) as tracer:
        kept = tracer.cache(modules=[model.model.layers[1].mlp.act_fn]).save()
    with engine.trace(TOWER, **ONCE):
        read = model.model.layers[1].mlp.act_fn.output.save()
    assert torch.equal(kept["model.model.layers.1.mlp.act_fn"].output, read)


@pytest.mark.parametrize("site", ["self_attn.attn", "mlp.act_fn", "self_attn.o_proj:input"])
def test_a_step_at_a_place_that_is_cut_does_what_a_block_does(engine, site):
    model = engine.model
    path, _, side = site.partition(":")
    at = f"model.layers.1.{path}"
    engine.edit("told", steps=[lab.steps.scale(at, 0.3, side=side or "output", positions="all")])
    with engine.edit("hand") as (tracer, _):
        module = model.model.layers[1]
        for part in path.split("."):
            module = getattr(module, part)
        for _ in tracer.all():
            rows = module.input if side else module.output
            rows[:] *= 0.3
    with engine.edit("probe") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits[-1])
    told, hand, none = (
        engine.generate(TOWER, edits=[*names, "probe"], **GREEDY)[0].saves["logits"]
        for names in (["told"], ["hand"], [])
    )
    for one, other in zip(told, hand, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert (told[0] - none[0]).abs().max() > 0.01


def test_the_lens_and_attention_see_all_heads_and_the_whole_vocabulary(engine, llama_path):
    lens = hugging_face_lens(llama_path, TOWER)
    found = engine.logit_lens(TOWER, top_k=5)
    torch.testing.assert_close(found.top_probabilities, lens.exp().topk(5, dim=-1).values, **CLOSE)
    assert torch.equal(found.final_ids, lens[-1].argmax(-1))
    patterns = engine.attention(TOWER).patterns
    torch.testing.assert_close(patterns, hugging_face_attention(llama_path, TOWER), **CLOSE)
    streams, _ = hugging_face(llama_path, TOWER)
    again = engine.logit_lens(residual=torch.stack(streams).reshape(len(streams), -1, HIDDEN), top_k=5)
    torch.testing.assert_close(again.top_probabilities, found.top_probabilities, **CLOSE)


def test_a_tap_at_a_place_that_is_cut_is_whole_in_a_replay_too(engine):
    model = engine.model
    with engine.edit("tap") as (tracer, _):
        seen = [].save()
        for _ in tracer.all():
            qkv = model.model.layers[1].self_attn.qkv_proj.output[0]
            qkv[:, :24] *= 0.5
            seen.append(qkv[-1])
            seen.append(model.model.layers[2].mlp.act_fn.output[-1])
            seen.append(model.model.layers[3].output[0][-1])

    def run():
        return engine.generate(TOWER, edits=["tap"], **{**GREEDY, "max_tokens": 6})[0].saves["seen"]

    wanted = run()
    before = engine.rpc(STEPS)[0]["steps"].get("replayed with taps", 0)
    engine.rpc("act_replays", True)
    try:
        found = run()
    finally:
        engine.rpc("act_replays", False)
    assert engine.rpc(STEPS)[0]["steps"]["replayed with taps"] - before >= 5
    assert len(found) == 18
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
