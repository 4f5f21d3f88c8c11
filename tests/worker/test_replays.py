"""What blocks see on an engine that replays: the same as on one that runs every module, step by step.

There is no CUDA here, so replays are acted out: in a step that would be replayed the modules run, but only
taps may serve a block. Everything else is the product's own: which steps replay, the counting of what they
passed in silence, the errors. `tests/gpu/check.py` shows the same on real graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.blocks.taps import DECODER_LAYERS
from nnsight_lab.wire.keys import STEPS
from tests import models
from tests.waiting import OneEngine, idle

PROMPT = list(range(10, 30))
OTHER = list(range(40, 52))
STEP = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(one_engine: OneEngine, llama_path: Path) -> Iterator[Any]:
    engine = one_engine.want(
        llama_path,
        "sync",
        worker="tests.worker.acting.ActingCPUWorker",
        dtype="float32",
        max_model_len=models.CONTEXT,
        additional_config={"nnsight_taps": [DECODER_LAYERS]},
    )
    yield engine
    engine.edits.clear()
    engine.saves.clear()
    idle(engine)


def steps(engine: Any) -> dict[str, int]:
    """Steps by kind since the engine began."""
    (figures,) = engine.rpc(STEPS)
    return dict(figures["steps"])


def both(engine: Any, block: Any, prompts: Any = PROMPT) -> tuple[Any, Any, dict[str, int]]:
    """What a block saves where every module runs, what it saves where steps replay, and those steps."""
    engine.rpc("act_replays", False)
    wanted = block(engine, prompts, STEP)
    engine.rpc("act_replays", True)
    return (wanted, *seen(engine, block, prompts))


def seen(engine: Any, block: Any, prompts: Any = PROMPT, **sampling: Any) -> tuple[Any, dict[str, int]]:
    """What a block saved, and the steps that it took by kind."""
    before = steps(engine)
    found = block(engine, prompts, {**STEP, **sampling})
    after = steps(engine)
    return found, {
        kind: count - before.get(kind, 0) for kind, count in after.items() if count != before.get(kind)
    }


def layer_at_every_step(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[2].output[0][-1])
    return rows


def inputs_at_every_step(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[3].input[-1])
    return rows


def steering(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += 0.5
            rows.append(model.logits)
    return rows


def assigning(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            hidden, residual = model.model.layers[1].output
            model.model.layers[1].output = (hidden * 0, residual)
            rows.append(model.logits)
    return rows


def logits_at_every_step(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.logits)
    return rows


def any_module_at_every_step(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[2].mlp.output[-1])
    return rows


def a_later_window(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.iter[2:4]:
            rows.append(model.model.layers[0].output[0][-1])
            rows.append(model.model.layers[2].mlp.output[-1])
    return rows


def a_module_after_the_logits(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.iter[:2]:
            rows.append(model.logits)
        for _ in tracer.iter[2:4]:
            rows.append(model.model.norm.output[0][-1])
    return rows


def prompt_only(engine: Any, prompts: Any, sampling: Any) -> Any:
    model = engine.model
    with engine.trace(prompts, **sampling):
        rows = model.model.layers[2].mlp.output.save()
    return list(rows)


def captured_module(engine: Any, prompts: Any, sampling: Any) -> Any:
    target = engine.model.model.layers[1].self_attn
    with engine.trace(prompts, **sampling) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(target.output[-1])
    return rows


def cached(engine: Any, prompts: Any, sampling: Any) -> Any:
    with engine.trace(prompts, **sampling) as tracer:
        cache = tracer.cache(modules=[engine.model.model.layers[1].mlp]).save()
    return cache["model.model.layers.1.mlp"].output


TAPS, NOTHING, HOOKS = "replayed with taps", "replayed", "module by module"
CASES = [
    (layer_at_every_step, {HOOKS: 1, TAPS: 5}),
    (inputs_at_every_step, {HOOKS: 1, TAPS: 5}),
    (steering, {HOOKS: 1, TAPS: 5}),
    (assigning, {HOOKS: 1, TAPS: 5}),
    (logits_at_every_step, {HOOKS: 1, NOTHING: 5}),
    (any_module_at_every_step, {HOOKS: 6}),
    (a_later_window, {HOOKS: 3, NOTHING: 3}),
    (a_module_after_the_logits, {HOOKS: 3, NOTHING: 3}),
    (prompt_only, {HOOKS: 1, NOTHING: 5}),
    (captured_module, {HOOKS: 6}),
    (cached, {HOOKS: 6}),
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("block", "kinds"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_block_sees_what_it_sees_where_every_module_runs(engine: Any, block: Any, kinds: Any) -> None:
    wanted, found, ran = both(engine, block)
    assert len(found) > 1
    assert equal(found, wanted)
    assert ran == kinds


def test_without_blocks_every_step_of_generation_replays(engine: Any) -> None:
    _, _, ran = both(engine, lambda engine, prompts, sampling: engine.generate(prompts, **sampling))
    assert ran == {HOOKS: 1, NOTHING: 5}


def test_tenants_of_one_step_get_what_they_get_alone(engine: Any) -> None:
    def together(engine: Any, prompts: Any, sampling: Any) -> Any:
        model = engine.model
        with engine.trace(**sampling) as tracer:
            with tracer.invoke(PROMPT):
                first = [].save()
                for _ in tracer.all():
                    first.append(model.model.layers[2].output[0][-1])
            with tracer.invoke(OTHER):
                second = [].save()
                for _ in tracer.iter[3:5]:
                    second.append(model.model.layers[1].mlp.output[-1])
        return [first, second]

    wanted, found, ran = both(engine, together)
    assert equal(found, wanted)
    # Which step a prompt runs in is the scheduler's; the second block's window takes two steps.
    assert ran[TAPS] >= 1
    assert ran[HOOKS] < sum(ran.values())


def test_blocks_of_requests_of_different_lengths_count_from_their_own_start(engine: Any) -> None:
    model = engine.model
    with engine.edit("late") as (tracer, edit):
        rows = [].save()
        for _ in tracer.iter[1:3]:
            rows.append(model.model.layers[2].output[0][-1])
            rows.append(model.logits)
    edit.switch_off()

    def run(engine: Any, prompts: Any, sampling: Any) -> Any:
        before = engine.generate(prompts, edits=["late"], **sampling)
        after = engine.generate([OTHER, *prompts], edits=["late"], **sampling)
        return [output.saves["rows"] for output in [*before, *after]]

    wanted, found, ran = both(engine, run, [PROMPT, PROMPT[:5]])
    edit.clear()
    assert equal(found, wanted)
    assert all(len(rows) == 4 for rows in found)
    assert ran[TAPS] >= 4
    assert ran[NOTHING] >= 4


def test_a_module_named_at_run_time_is_an_error_and_not_a_later_value(engine: Any) -> None:
    model = engine.model
    by_name = operator.attrgetter("m" + "lp")

    def block(engine: Any, prompts: Any, sampling: Any) -> Any:
        with engine.trace(prompts, **sampling) as tracer:
            rows = [].save()
            for _ in tracer.all():
                rows.append(model.model.layers[1].output[0][-1])
                rows.append(by_name(model.model.layers[2]).output[-1])
        return rows

    engine.rpc("act_replays", True)
    with pytest.raises(lab.errors.TraceError, match="already replaying"):
        block(engine, PROMPT, STEP)
    assert engine.request_count() == 0
    found, _ = seen(engine, layer_at_every_step)
    assert len(found) == STEP["max_tokens"]
    engine.rpc("act_replays", False)
    assert len(block(engine, PROMPT, STEP)) == 2 * STEP["max_tokens"]
