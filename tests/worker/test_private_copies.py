"""What a block reads is its own, what it writes reaches the model: under kernels that write in place.

vLLM's CUDA kernels overwrite activations, its CPU kernels mostly do not; so the worker here has a norm
that does, and the first test shows that it makes nnsight's own views go wrong.
"""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import pytest
import torch

import nnsight_lab as lab
from tests import models
from tests.parity import hugging_face, residuals
from tests.waiting import LONG, TOWER, idle, interrupt, until, when_running

#: By name, as vLLM is told: the module is the worker's, and brings nnsight and vLLM with it.
IN_PLACE = "tests.worker.inplace.InPlaceCPUWorker"

ONE_STEP = {"max_tokens": 1, "temperature": 0}
#: In the order the model reaches them; ``:0`` is the first of a tuple.
LOCATIONS = (
    "input_layernorm",
    "self_attn.qkv_proj:0",
    "self_attn.o_proj:0",
    "self_attn",
    "post_attention_layernorm:0",
    "post_attention_layernorm:1",
    "mlp.gate_up_proj:0",
    "mlp.act_fn",
    "mlp.down_proj:0",
    "mlp",
    ":0",
    ":1",
)


@pytest.fixture(scope="module")
def started(one_engine, llama_path):
    engine = one_engine.want(
        llama_path, "sync", worker=IN_PLACE, dtype="float32", max_model_len=models.CONTEXT
    )
    yield engine
    idle(engine)


@pytest.fixture
def engine(started):
    yield started
    started.rpc("share_views", False)
    started.edits.clear()
    idle(started)


def at(layer, location):
    """The value at a location of a layer, in a block."""
    path, _, index = location.partition(":")
    for part in filter(None, path.split(".")):
        layer = getattr(layer, part)
    value = layer.output
    return value[int(index)] if index else (value[0] if isinstance(value, tuple) else value)


def read_everything(engine):
    """Every location of every layer, as it was read and as a clone taken at once, by name."""
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP):
        kept, cloned = {}.save(), {}.save()
        for index in range(models.LAYERS):
            for location in LOCATIONS:
                value = at(model.model.layers[index], location)
                kept[f"{index} {location}"] = value
                cloned[f"{index} {location}"] = value.clone()
        value = model.model.norm.output[0]
        kept["norm"], cloned["norm"] = value, value.clone()
        value = model.logits
        kept["logits"], cloned["logits"] = value, value.clone()
    return kept, cloned


def differing(kept, cloned):
    assert kept.keys() == cloned.keys()
    return {name for name in kept if not torch.equal(kept[name], cloned[name])}


def test_views_are_overwritten_where_a_block_shares_the_models_buffers(engine):
    before = engine.rpc("overwritten_count")[0]
    engine.rpc("share_views", True)
    wrong = differing(*read_everything(engine))
    assert engine.rpc("overwritten_count")[0] > before
    expected = {f"{layer} {part}" for layer in range(models.LAYERS) for part in (":0", ":1", "mlp")}
    assert expected <= wrong
    assert "1 self_attn.qkv_proj:0" in wrong  # rotary embedding writes in place on a CPU too


def test_everything_a_block_keeps_equals_its_clone(engine):
    kept, cloned = read_everything(engine)
    assert len(kept) == models.LAYERS * len(LOCATIONS) + 2
    assert differing(kept, cloned) == set()


def test_reading_with_a_clone_or_without_gives_the_same_as_sharing_with_a_clone(engine):
    engine.rpc("share_views", True)
    _, expected = read_everything(engine)
    engine.rpc("share_views", False)
    kept, _ = read_everything(engine)
    assert differing(kept, expected) == set()


def test_saves_of_outputs_slices_and_lists_over_layers_are_what_was_read(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP):
        first = model.model.layers[0].output[0].save()
        second = model.model.layers[0].output[1].save()
        first_clone = first.clone().save()
        second_clone = second.clone().save()
        last_token = model.model.layers[1].output[0][-1, :7].save()
        last_token_clone = last_token.clone().save()
        whole = model.model.layers[1].output.save()
        whole_clone = [part.clone() for part in whole].save()
        normed = model.model.layers[2].post_attention_layernorm.output.save()
        normed_clone = [part.clone() for part in normed].save()
    for kept, clone in ((first, first_clone), (second, second_clone), (last_token, last_token_clone)):
        assert torch.equal(kept, clone)
    for kept, clone in ((whole, whole_clone), (normed, normed_clone)):
        assert all(torch.equal(one, other) for one, other in zip(kept, clone, strict=True))
    with engine.trace(TOWER, **ONE_STEP):
        listed = [layer.output[0] for layer in model.model.layers].save()
    with engine.trace(TOWER, **ONE_STEP):
        cloned = [layer.output[0].clone() for layer in model.model.layers].save()
    assert len(listed) == models.LAYERS
    assert all(torch.equal(one, other) for one, other in zip(listed, cloned, strict=True))


def test_saves_of_an_edit_over_steps_are_what_was_read(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        kept, cloned = [].save(), [].save()
        for _ in tracer.all():
            for layer in model.model.layers:
                value = layer.output[0]
                kept.append(value)
                cloned.append(value.clone())
    outputs = engine.generate([TOWER, "cats", "dogs"], max_tokens=4, temperature=0, ignore_eos=True)
    for output in outputs:
        assert len(output.saves["kept"]) == 4 * models.LAYERS
        pairs = zip(output.saves["kept"], output.saves["cloned"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_cache_holds_what_was_read(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP) as tracer:
        cache = tracer.cache().save()
        logits = model.logits.save()
    _, cloned = read_everything(engine)
    wrong = set()
    for index in range(models.LAYERS):
        for location in LOCATIONS:
            path, _, part = location.partition(":")
            value = cache[".".join(filter(None, [f"model.model.layers.{index}", path]))].output
            value = value[int(part)] if part else (value[0] if isinstance(value, tuple) else value)
            if not torch.equal(value, cloned[f"{index} {location}"]):
                wrong.add(f"{index} {location}")
    assert wrong == set()
    assert torch.equal(cache["model.model.norm"].output[0], cloned["norm"])


EDITED = ("self_attn.qkv_proj:0", "self_attn.o_proj:0", "post_attention_layernorm:0", "mlp", ":0", ":1")


@pytest.mark.parametrize("location", EDITED)
def test_an_edit_in_place_moves_the_logits_as_an_assignment_does(engine, location):
    model = engine.model
    path, _, part = location.partition(":")
    part = int(part) if part else None
    with engine.trace(TOWER, **ONE_STEP):
        plain = model.logits.save()
    with engine.trace(TOWER, **ONE_STEP):
        at(model.model.layers[1], location)[:] *= 0.5
        in_place = model.logits.save()
    with engine.trace(TOWER, **ONE_STEP):
        module = model.model.layers[1]
        for name in filter(None, path.split(".")):
            module = getattr(module, name)
        if part is None:
            module.output = module.output * 0.5
        else:
            parts = [value.clone() if isinstance(value, torch.Tensor) else value for value in module.output]
            parts[part] = parts[part] * 0.5
            module.output = tuple(parts)
        assigned = model.logits.save()
    assert (in_place - plain).abs().max() > 0.01
    assert torch.equal(in_place, assigned)


def test_an_edit_in_place_keeps_what_was_read_before_it_and_after_it(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP):
        before = model.model.layers[1].mlp.output.clone().save()
        model.model.layers[1].mlp.output[:] = 7
        after = model.model.layers[1].mlp.output.save()
        later = model.model.layers[2].mlp.output.save()
    assert (after == 7).all()
    assert not (before == 7).any()
    assert not torch.equal(later, after)


def test_an_edit_in_place_of_one_request_leaves_its_neighbours_alone(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP):
        alone = model.logits.save()
    with engine.trace(**ONE_STEP) as tracer:
        with tracer.invoke("cats"):
            model.model.layers[1].output[0][:] = 3
        with tracer.invoke(TOWER):
            beside = model.logits.save()
    # The step has other shapes than a lone request's: float32 rounding, no more.
    torch.testing.assert_close(beside, alone, rtol=1e-3, atol=1e-4)


def test_the_residual_stream_is_hugging_faces_under_kernels_that_write_in_place(engine, llama_path):
    expected, _ = hugging_face(llama_path, TOWER)
    for stream, wanted in zip(residuals(engine, engine.model.model.layers, TOWER), expected, strict=True):
        torch.testing.assert_close(stream, wanted, rtol=1e-4, atol=1e-4)


def test_the_packages_residual_reads_a_pair_whole(engine):
    model = engine.model
    with engine.trace(TOWER, **ONE_STEP):
        hidden, residual = model.model.layers[2].output
        by_hand = (hidden + residual).save()
        stream = lab.residual(model.model.layers[2].output).save()
    assert torch.equal(by_hand, stream)


def test_what_is_copied_late_is_what_was_saved_and_its_memory_comes_back(engine):
    model = engine.model
    engine.rpc("share_views", False)
    before = engine.rpc("waited_for")[0]
    with engine.edit("probe") as (tracer, edit):
        kept = model.model.layers[0].output[0].save()
        sums = kept.sum().item().save()
    outputs = engine.generate([TOWER, "cats", "dogs"] * 4, max_tokens=2, temperature=0, ignore_eos=True)
    assert engine.rpc("waited_for")[0] > before
    for output in outputs:
        assert output.saves["kept"].sum().item() == output.saves["sums"]
    del outputs, output
    engine.saves.clear()
    until(lambda: engine.rpc("used_bytes") == [0], 3, "shared memory was not given back")


def test_an_aborted_request_gives_back_what_it_had_packed_only_when_that_is_copied(engine):
    model = engine.model
    engine.rpc("share_views", False)
    with engine.edit("probe") as (tracer, edit):
        kept = model.model.layers[0].output[0].save()
    stopped = when_running(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([TOWER, "cats"], **LONG)
    stopped()
    engine.saves.clear()
    until(lambda: engine.rpc("used_bytes") == [0], 3, "shared memory was not given back")
