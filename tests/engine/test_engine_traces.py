"""Traces: a block that runs inside the forward passes of its own requests."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import asyncio
import importlib
import linecache
import sys

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import RequestRefused, TraceError
from tests.waiting import CAT, FOX, GREEDY, TOWER, freed

SCALE = 3.0


def scaled(value, by=SCALE):
    """A helper of this module: it travels by value, with the global it reads."""
    return value * by


def test_what_a_trace_saves_is_bound_in_the_frame(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY) as tracer:
        hidden = model.model.layers[1].output[0].save()
        logits = model.logits.save()
        result = tracer.result.save()
    assert hidden.shape == (16, 128)
    assert logits.shape == (1, 258)
    assert tracer.names == ("hidden", "logits", "result")
    assert result.outputs[0].text == tracer.output.outputs[0].text
    assert result.outputs[0].token_ids == tuple(tracer.output.outputs[0].token_ids)
    assert logits.argmax().item() == result.outputs[0].token_ids[0]


def test_the_package_level_trace_is_that_of_the_current_engine(engine):
    model = engine.model
    with lab.trace(TOWER, **GREEDY):
        hidden = lab.residual(model.model.layers[1].output).save()
    assert hidden.shape == (16, 128)
    with model.trace(TOWER, **GREEDY):
        again = lab.residual(model.model.layers[1].output).save()
    assert torch.equal(hidden, again)


@pytest.mark.asyncio
async def test_awaiting_a_tracer_twice_gives_the_outputs_twice(engine):
    model = engine.model
    async with engine.trace(TOWER, **GREEDY) as tracer:
        hidden = model.model.layers[1].output[0].save()
    first = await tracer
    second = await tracer
    assert first == second == tracer.outputs
    assert first[0].saves["hidden"] is hidden


def test_names_of_the_surrounding_code_are_read_by_value(engine):
    model = engine.model
    factor, rows = 2, [0, 3]

    def picked(value):
        return scaled(value, factor)[rows]

    with engine.trace(TOWER, **GREEDY):
        plain = model.model.layers[1].output[0].save()
        own = scaled(model.model.layers[1].output[0]).save()
        mine = picked(model.model.layers[1].output[0]).save()
    torch.testing.assert_close(own, plain * SCALE)
    torch.testing.assert_close(mine, plain[[0, 3]] * 2)


def test_a_list_of_prompts_is_one_edit_of_this_call_alone(engine):
    model = engine.model
    prompts = [TOWER, CAT, FOX]
    with engine.trace(prompts, **GREEDY) as tracer:
        hidden = model.model.layers[1].output[0].save()
        rows = hidden.shape[0].save()
    assert rows == [16, 4, 27]
    assert [value.shape[0] for value in hidden] == [16, 4, 27]
    assert [output.prompt for output in tracer.outputs] == prompts
    assert len(engine.edits) == 0
    (output,) = engine.generate(CAT, **GREEDY)
    assert dict(output.saves) == {}
    freed(engine)


def test_a_list_of_one_prompt_binds_a_list_of_one_value(engine):
    model = engine.model
    with engine.trace([TOWER], **GREEDY):
        hidden = model.model.layers[1].output[0].save()
    assert [value.shape[0] for value in hidden] == [16]


def test_edits_run_before_a_trace_of_several_prompts(engine):
    model = engine.model
    with engine.edit("zero"):
        model.model.layers[1].mlp.output = model.model.layers[1].mlp.output * 0
    with engine.trace([TOWER, CAT], **GREEDY):
        peak = model.model.layers[1].mlp.output.abs().max().save()
    assert [value.item() for value in peak] == [0, 0]
    with engine.trace([TOWER, CAT], edits=[], **GREEDY):
        peak = model.model.layers[1].mlp.output.abs().max().save()
    assert all(value.item() > 0 for value in peak)


def test_a_trace_of_several_sequences_binds_a_list(engine):
    model = engine.model
    with engine.trace(TOWER, n=3, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:4]:
            tokens.append(model.samples.item())
    assert tokens == [list(completion.token_ids) for completion in tracer.output.outputs]
    assert len(tokens) == 3


@pytest.mark.asyncio
async def test_several_invokes_in_one_trace_are_one_request_each(engine):
    model = engine.model
    async with engine.trace(**GREEDY) as tracer:
        with tracer.invoke(TOWER):
            low = model.model.layers[0].output[0].save()
        with tracer.invoke(CAT, max_tokens=1):
            high = model.model.layers[3].output[0].save()
    assert (low.shape[0], high.shape[0]) == (16, 4)
    assert [len(output.outputs[0].token_ids) for output in tracer.outputs] == [3, 1]
    with engine.trace(**GREEDY) as tracer:
        with tracer.invoke(TOWER):
            both = model.model.layers[0].output[0].save()
        with tracer.invoke(CAT):
            both = model.model.layers[0].output[0].save()
    assert [value.shape[0] for value in both] == [16, 4]
    freed(engine)


def test_a_list_saved_above_the_invokes_comes_back_as_one(engine):
    model = engine.model
    with engine.trace(**GREEDY) as tracer:
        rows = [].save()
        with tracer.invoke(TOWER):
            rows.append(model.model.layers[0].output[0].shape[0])
        with tracer.invoke(CAT):
            rows.append(model.model.layers[0].output[0].shape[0])
    assert rows == [16, 4]
    with engine.trace(**GREEDY) as tracer:
        slots = [None, None].save()
        named = {}.save()
        with tracer.invoke(TOWER):
            slots[0] = named["tower"] = model.model.layers[0].output[0].shape[0]
        with tracer.invoke(CAT):
            slots[1] = named["cat"] = model.model.layers[0].output[0].shape[0]
    assert slots == [16, 4]
    assert named == {"tower": 16, "cat": 4}


def test_stopping_a_trace_ends_its_request_early(engine):
    model = engine.model
    with engine.trace(TOWER, max_tokens=200, temperature=0) as tracer:
        hidden = model.model.layers[0].output[0].save()
        tracer.stop()
        never = model.model.layers[1].output[0].save()
    assert hidden.shape == (16, 128)
    assert tracer.names == ("hidden",)
    assert tracer.output.error is None
    assert len(tracer.output.outputs[0].token_ids) < 10
    freed(engine)


def test_a_cache_holds_every_module_asked_for(engine):
    model = engine.model
    layers = [model.model.layers[index] for index in range(4)]
    with engine.trace(TOWER, max_tokens=1, temperature=0) as tracer:
        cache = tracer.cache(modules=layers).save()
        last = model.model.layers[3].output[0].save()
    found = cache["model.model.layers.3"].output
    assert torch.equal(found[0], last)
    assert len(cache) == 4


def test_a_loop_over_steps_sees_those_steps_alone(engine):
    model = engine.model
    with engine.trace(TOWER, max_tokens=5, temperature=0, ignore_eos=True) as tracer:
        tokens, rows = [].save(), [].save()
        for _ in tracer.iter[1:3]:
            rows.append(model.model.layers[0].output[0].shape[0])
            tokens.append(model.samples.item())
    assert rows == [1, 1]
    assert tokens == list(tracer.output.outputs[0].token_ids[1:3])


def test_a_loop_that_outruns_its_request_keeps_what_it_saw(engine):
    model = engine.model
    with engine.trace(TOWER, max_tokens=3, temperature=0, ignore_eos=True) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:10]:
            rows.append(model.model.layers[0].output[0].shape[0])
    assert rows == [16, 1, 1]


def test_weights_can_be_read_in_a_block(engine):
    model = engine.model
    with engine.trace(CAT, **GREEDY):
        shape = tuple(model.model.layers[0].mlp.down_proj.weight.shape).save()
        inside = model.model.layers[0].mlp.down_proj.input.save()
        outside = model.model.layers[0].mlp.down_proj.output[0].save()
        weight = model.model.layers[0].mlp.down_proj.weight.detach().clone().save()
    assert shape == (128, 256)
    torch.testing.assert_close(inside @ weight.T, outside, rtol=1e-4, atol=1e-5)


def test_in_place_edits_and_assignments_move_the_model_alike(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        plain = model.logits.save()
    with engine.trace(TOWER, **GREEDY):
        model.model.layers[1].mlp.output[:] = 0
        in_place = model.logits.save()
    with engine.trace(TOWER, **GREEDY):
        model.model.layers[1].mlp.output = torch.zeros_like(model.model.layers[1].mlp.output)
        assigned = model.logits.save()
    assert torch.equal(in_place, assigned)
    assert (in_place - plain).abs().max() > 0.1


@pytest.mark.asyncio
async def test_a_skip_changes_its_own_request_and_no_neighbour(engine):
    model = engine.model

    async def logits(prompt, skipping):
        if skipping:
            async with engine.trace(prompt, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
                seen = [].save()
                for _ in tracer.iter[:4]:
                    given = model.model.layers[1].post_attention_layernorm.output[0]
                    model.model.layers[1].mlp.skip(torch.zeros_like(given))
                    seen.append(model.logits.clone())
        else:
            async with engine.trace(prompt, max_tokens=4, temperature=0, ignore_eos=True) as tracer:
                seen = [].save()
                for _ in tracer.iter[:4]:
                    seen.append(model.logits.clone())
        return torch.cat(seen)

    wanted = [(TOWER, True), (CAT, False), (FOX, False), (FOX, True)]
    alone = [await logits(*one) for one in wanted]
    together = await asyncio.gather(*(logits(*one) for one in wanted))
    for lone, shared in zip(alone, together, strict=True):
        # Rows computed in a batch round differently from lone rows in float32; a skip moves whole units.
        torch.testing.assert_close(shared, lone, rtol=1e-3, atol=1e-4)
    assert (alone[2] - alone[3]).abs().max() > 0.1
    assert engine.alive
    freed(engine)


def test_a_skip_in_one_request_of_a_call_leaves_the_others_as_they_are_alone(engine):
    model = engine.model
    with engine.trace(CAT, **GREEDY):
        alone = model.logits.save()
    with engine.trace(TOWER, **GREEDY):
        whole = model.logits.save()
    with engine.trace(**GREEDY) as tracer:
        with tracer.invoke(TOWER):
            model.model.layers[2].mlp.skip(
                torch.zeros_like(model.model.layers[2].post_attention_layernorm.output[0])
            )
            skipped = model.logits.save()
        with tracer.invoke(CAT):
            beside = model.logits.save()
    torch.testing.assert_close(beside, alone, rtol=1e-3, atol=1e-4)
    assert (skipped - whole).abs().max() > 0.1


def test_many_requests_at_once_keep_their_own_values(engine):
    model = engine.model
    prompts = ["x" * length for length in range(1, 33)]
    with engine.edit("probe"):
        rows = model.model.layers[2].output[0].shape[0].save()

    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(prompt, **GREEDY) for prompt in prompts))

    outputs = asyncio.run(all_of_them())
    assert [output.saves["rows"] for (output,) in outputs] == list(range(1, 33))
    freed(engine)


def test_a_trace_without_a_prompt_is_refused(engine):
    model = engine.model
    with pytest.raises(RequestRefused, match="no prompt"), engine.trace(**GREEDY):
        hidden = model.model.layers[0].output[0].save()
    with pytest.raises(RequestRefused, match="exactly one prompt"):  # noqa: SIM117  (one body each)
        with engine.trace(**GREEDY) as tracer:
            with tracer.invoke(TOWER, CAT):
                hidden = model.model.layers[0].output[0].save()
    # And the next trace is not disturbed by what those left.
    with engine.trace(CAT, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
    assert hidden.shape == (4, 128)


def test_a_wrongly_shaped_assignment_fails_its_own_request_alone(engine):
    model = engine.model
    with pytest.raises(TraceError), engine.trace(**GREEDY) as tracer:
        with tracer.invoke(TOWER):
            model.model.layers[1].mlp.output = torch.zeros(3, 5)
        with tracer.invoke(CAT):
            hidden = model.model.layers[0].output[0].save()
    assert tracer.outputs[1].saves["hidden"].shape == (4, 128)
    assert engine.alive


@pytest.mark.parametrize("kind", ["trace", "edit"])
def test_a_module_that_was_changed_and_reloaded_runs_its_new_block(engine, tmp_path, monkeypatch, kind):
    source = (
        "def run(engine):\n"
        "    if KIND == 'trace':\n"
        "        with engine.trace('cats', max_tokens=1):\n"
        "            value = (VALUE).save()\n"
        "        return value\n"
        "    with engine.edit('probe'):\n"
        "        value = (VALUE).save()\n"
        "    return engine.generate('cats', max_tokens=1)[0].saves['value']\n"
    )
    path = tmp_path / f"reloaded_{kind}_{engine.mode}.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else its age decides what is loaded

    def written(value):
        path.write_text(source.replace("KIND", repr(kind)).replace("VALUE", str(value)))

    written(111)
    module = importlib.import_module(path.stem)
    assert module.run(engine) == 111
    written(222)
    assert module.run(engine) == 111, "the module was not reloaded yet"
    importlib.reload(module)
    assert module.run(engine) == 222


def test_a_list_whose_items_alone_were_saved_is_named_at_the_blocks_line(engine):
    model = engine.model
    with (
        pytest.warns(UserWarning, match="'xs' was not kept: its items are saved, the list") as warned,
        engine.trace(TOWER, **GREEDY) as tracer,
    ):
        xs = [layer.output[0].save() for layer in model.model.layers]
    assert tracer.names == ()
    assert warned[0].filename == __file__
    assert "engine.trace(TOWER" in linecache.getline(__file__, warned[0].lineno + 2)
    with engine.trace(TOWER, **GREEDY):
        xs = [layer.output[0].save() for layer in model.model.layers]
        xs.save()
    assert [x.shape for x in xs] == [(16, 128)] * 4


def test_a_list_of_an_earlier_cell_comes_home_where_the_line_that_the_hint_gives_is_added(engine):
    model, xs = engine.model, []
    with pytest.warns(UserWarning, match="'xs' was not kept"), engine.trace(TOWER, **GREEDY):
        xs.append(model.logits.save())
    assert xs == []
    with engine.trace(TOWER, **GREEDY):
        xs.append(model.logits.save())
        xs.save()
    assert [x.shape for x in xs] == [(1, 258)]


def test_an_edit_says_so_when_it_is_installed(engine):
    model = engine.model
    with pytest.warns(UserWarning, match="'xs' was not kept"), engine.edit("probe"):
        xs = [layer.output[0].save() for layer in model.model.layers]
    with engine.edit("probe"):
        xs = [layer.output[0].save() for layer in model.model.layers].save()
