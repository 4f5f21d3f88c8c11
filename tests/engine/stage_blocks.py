"""Blocks that an engine of one stage and a pipeline of two both run: what they give must be the same."""
# ruff: noqa: F841, C408, RET504  (what a block saves is bound in the frame; a literal cannot be saved)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import nnsight_lab as lab
from nnsight_lab import steps
from nnsight_lab.errors import LabError
from tests.waiting import CAT, FOX, GREEDY, TOWER

GOES_ON = {**GREEDY, "max_tokens": 5}
#: Of a model of four layers: on the first stage of two; the second's first; and its last.
EARLY, MIDDLE, LATE = 1, 2, 3

Block = Callable[[Any], Any]
BLOCKS: dict[str, Block] = {}


def block(run: Block) -> Block:
    BLOCKS[run.__name__] = run
    return run


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except LabError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


@block
def plain(engine: Any) -> Any:
    return [list(one.outputs[0].token_ids) for one in engine.generate([TOWER, CAT, FOX], **GOES_ON)]


@block
def a_layer_of_the_first_stage(engine: Any) -> Any:
    with engine.trace(TOWER, **GOES_ON):
        hidden = engine.model.model.layers[EARLY].output[0].save()
    return hidden


@block
def a_layer_of_the_second_stage(engine: Any) -> Any:
    with engine.trace(TOWER, **GOES_ON):
        hidden = engine.model.model.layers[LATE].mlp.output.save()
    return hidden


@block
def every_layer_the_final_norm_and_logits(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON):
        embedded = model.model.embed_tokens.output.save()
        streams = list().save()
        for layer in model.model.layers:
            streams.append(lab.residual(layer.output))
        normed = model.model.norm.output[0].save()
        logits = model.logits.save()
        samples = model.samples.save()
    return [embedded, *streams, normed, logits, samples]


@block
def the_inner_model_s_input_and_output(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON):
        first = model.model.input.save()
        last = model.model.output.save()
    return [first, last]


@block
def the_second_stage_is_written_from_what_the_first_gave(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        seen = list().save()
        for _ in tracer.all():
            hidden = model.model.layers[0].output[0]
            model.model.layers[MIDDLE].output[0][:] += hidden * 0.5
            seen.append(model.model.layers[LATE].output[0])
            seen.append(model.logits)
    return seen


@block
def both_stages_are_written_in_place_and_by_assignment(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        seen = list().save()
        for _ in tracer.all():
            first = model.model.layers[0].output[0]
            first[:] *= 0.9
            hidden, stream = model.model.layers[EARLY].output
            model.model.layers[EARLY].output = (hidden + first, stream)
            hidden, stream = model.model.layers[LATE].output
            model.model.layers[LATE].output = (hidden * 1.1, stream)
            seen.append(model.logits.clone())
            model.logits[:] = -model.logits
    return seen


@block
def the_first_stage_is_written_from_what_the_last_gave_a_step_before(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        seen = list().save()
        change = torch.zeros(1, 1)
        for _ in tracer.all():
            model.model.layers[0].output[0][-1:] += change
            change = model.model.layers[LATE].output[0][-1:].clone()
            change = change + model.logits[0, 5] + model.samples[0, 0]
            seen.append(change)
    return seen


@block
def a_token_is_forced(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        early = list().save()
        for _ in tracer.all():
            early.append(model.model.layers[0].output[0][-1])
            model.samples = torch.full_like(model.samples, 42)
    return early


@block
def windows_of_steps(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        seen = list().save()
        for _ in tracer.iter[1:3]:
            seen.append(model.model.layers[0].output[0])
            seen.append(model.model.layers[LATE].output[0])
        for _ in tracer.iter[3:5]:
            seen.append(model.model.layers[MIDDLE].output[0])
    return seen


@block
def a_logit_lens_written_out(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        read = list().save()
        for layer in model.model.layers:
            stream = lab.residual(layer.output)
            read.append(model.logits_processor(model.lm_head, model.model.norm(stream)))
    return read


@block
def a_lens_at_every_token(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON) as tracer:
        read = list().save()
        for _ in tracer.all():
            stream = lab.residual(model.model.layers[0].output)
            read.append(model.logits_processor(model.lm_head, model.model.norm(stream)))
            read.append(model.model.layers[LATE].output[0])
    return read


@block
def the_logit_lens(engine: Any) -> Any:
    found = engine.logit_lens(TOWER, top_k=3)
    return [found.top_ids, found.top_probabilities, found.entropy, found.final_ranks]


@block
def modules_are_skipped_on_both_stages(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON):
        value = model.model.layers[EARLY].post_attention_layernorm.output[0]
        model.model.layers[EARLY].mlp.skip(torch.zeros_like(value))
        value = model.model.layers[LATE].post_attention_layernorm.output[0]
        model.model.layers[LATE].mlp.skip(torch.zeros_like(value))
        logits = model.logits.save()
    return logits


@block
def inside_a_forward(engine: Any) -> Any:
    model = engine.model
    with engine.trace(TOWER, **GOES_ON):
        first = model.model.layers[0].self_attn.source.self_rotary_emb_0.output[0].save()
        last = model.model.layers[LATE].self_attn.source.self_rotary_emb_0.output[0].save()
    return [first, last]


@block
def a_cache_of_both_stages(engine: Any) -> Any:
    layers = engine.model.model.layers
    with engine.trace(TOWER, **GOES_ON) as tracer:
        cache = tracer.cache(modules=[layers[0], layers[LATE]]).save()
        late = layers[LATE].output[0].save()
    return [cache[path].output[0] for path in sorted(cache)] + [late]


@block
def edits_of_each_stage_and_of_both(engine: Any) -> Any:
    layers = engine.model.model.layers
    with engine.edit("first"):
        early = layers[0].output[0].save()
    with engine.edit("second"):
        late = layers[LATE].output[0].save()
    with engine.edit("both") as (tracer, _):
        rows = list().save()
        for _ in tracer.all():
            rows.append([layer.output[0][-1] for layer in layers])
    outputs = engine.generate([TOWER, CAT, FOX], **GOES_ON)
    alone = engine.generate([TOWER, CAT], edits=["first", "second"], **GOES_ON)
    engine.edits.clear()
    return [
        [output.saves[name] for output in outputs for name in ("early", "late", "rows")],
        [output.saves[name] for output in alone for name in ("early", "late")],
    ]


@block
def an_edit_that_spans_stages_changes_later_requests_and_a_trace_sees_it(engine: Any) -> Any:
    layers = engine.model.model.layers
    with engine.edit("spans") as (tracer, _):
        for _ in tracer.all():
            change = layers[0].output[0].mean() + 0.1
            layers[MIDDLE].output[0][:] += change
    with engine.trace([TOWER, CAT], **GOES_ON):
        hidden = layers[MIDDLE].output[0].save()
        late = layers[LATE].output[0].save()
    texts = [list(one.outputs[0].token_ids) for one in engine.generate([TOWER, FOX], **GOES_ON)]
    engine.edits.clear()
    return [hidden, late, texts]


@block
def an_edit_told_as_data(engine: Any) -> Any:
    push = torch.arange(128.0) / 64
    told = [steps.add("model.layers.0", push, scale=0.5), steps.read(f"model.layers.{LATE}", "seen")]
    engine.edit("told", steps=told)
    found = [one.saves["seen"] for one in engine.generate([TOWER, CAT], **GOES_ON)]
    engine.edits.clear()
    return found


@block
def several_answers(engine: Any) -> Any:
    layers = engine.model.model.layers
    with engine.edit("rows") as (tracer, _):
        rows = list().save()
        for _ in tracer.all():
            rows.append(layers[0].output[0][-1] + layers[LATE].output[0][-1])
    found = engine.generate([TOWER, CAT], **{**GOES_ON, "n": 2, "temperature": 1.0, "seed": 3})
    engine.edits.clear()
    return [one.saves["rows"] for output in found for one in output.outputs]


@block
def a_stop_on_the_first_stage(engine: Any) -> Any:
    layers = engine.model.model.layers
    with engine.trace(TOWER, **{**GOES_ON, "ignore_eos": False}) as tracer:
        early = list().save()
        for step in tracer.all():
            early.append(layers[0].output[0][-1])
            if step == 2:
                tracer.stop()
        late = layers[LATE].output[0].save()
    return [early, len(early)]


@block
def errors(engine: Any) -> Any:
    layers = engine.model.model.layers

    def own_code() -> None:
        with engine.trace(TOWER, **GREEDY):
            early = layers[0].output[0].save()
            raise ValueError("mine")

    def does_not_fit_early() -> None:
        with engine.trace(TOWER, **GREEDY):
            layers[0].output = (torch.zeros(3, 5), layers[0].output[1])
            late = layers[LATE].output[0].save()

    def does_not_fit_late() -> None:
        with engine.trace(TOWER, **GREEDY):
            early = layers[0].output[0].save()
            layers[LATE].output = (torch.zeros(3, 5), early)

    def wrong_order() -> None:
        with engine.trace(TOWER, **GREEDY):
            late = layers[LATE].output[0].save()
            early = layers[0].output[0].save()

    def in_an_edit() -> None:
        with engine.edit("bad"):
            early = layers[0].output[0][:, 999].save()
        try:
            engine.generate(TOWER, **GREEDY)
        finally:
            engine.edits.clear()

    return [
        refusal(one) for one in (own_code, does_not_fit_early, does_not_fit_late, wrong_order, in_an_edit)
    ]
