"""What blocks see on an engine that replays: the same as on one that runs every module, step by step.

There is no CUDA here, so replays are acted out: in a step that would be replayed the modules run, but only
taps may serve a block. Everything else is the product's own: which steps replay, the counting of what they
passed in silence, the errors. `tests/gpu/check.py` shows the same on real graphs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine.call import Call
from nnsight_lab.wire.keys import STEPS
from tests.waiting import OneEngine, idle, in_background, until
from tests.worker import acting

PROMPT = list(range(10, 30))
OTHER = list(range(40, 52))
STEP = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(one_engine: OneEngine, llama_path: Path) -> Iterator[Any]:
    engine = acting.replaying(one_engine, llama_path)
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


def test_a_call_says_why_its_steps_did_not_replay(engine: Any) -> None:
    model = engine.model
    engine.rpc("act_replays", True)
    with engine.trace(PROMPT, **STEP) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[2].mlp.output[-1])
    assert (tracer.steps.module_by_module, tracer.steps.slowed, tracer.steps.total) == (6, 5, 6)
    assert str(tracer.steps) == (
        "5 of 6 steps ran module by module: `model.layers.2.mlp.output` is not a tap; an engine started with "
        'taps=["model.layers.*.output", "model.layers.2.mlp.output"] would replay them'
    )
    assert engine.status().last_call == str(tracer.steps)
    with engine.trace(PROMPT, **STEP) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[2].output[0][-1])
    assert str(tracer.steps) == "5 of 6 steps replayed, 5 of them stopping at taps"
    assert tracer.steps == tracer.outputs[0].steps
    assert engine.status().last_call == ""
    assert engine.generate(PROMPT, **STEP)[0].steps is None


def test_a_status_says_how_steps_ran_and_whose_block_was_in_the_way(engine: Any) -> None:
    model = engine.model
    engine.rpc("act_replays", True)
    with engine.edit("probe") as (tracer, edit):
        found = [].save()
        for _ in tracer.all():
            found.append(model.model.layers[3].mlp.output[-1])
    engine.generate(PROMPT, **{**STEP, "max_tokens": 70})
    before = engine.steps()
    engine.generate(PROMPT, edits=[], **STEP)  # no block, so nothing was told along with it
    status = engine.status()
    figures = engine.steps()
    assert figures.total == sum(steps(engine).values())
    assert figures.replayed == before.replayed + 5
    assert status.steps == (
        f"{figures.total:,}: {figures.replayed:,} replayed, {figures.tapped:,} replayed with taps, "
        f"{figures.eager:,} module by module"
    )
    assert "69 model.layers.3.mlp.output asked by edit probe" in status.module_by_module
    assert dict(status.rows())["steps"] == f"{status.steps} ({status.module_by_module})"
    edit.clear()


def test_a_status_does_not_wait_for_a_block_that_computes(engine: Any) -> None:
    engine.rpc("act_replays", True)
    engine.status()

    def stuck() -> None:
        with engine.trace(PROMPT, **STEP):
            time.sleep(3)
            engine.model.logits.save()

    waiting = in_background(stuck)
    until(lambda: engine.state()[0] == "busy", 30, "the request to begin")
    began = time.monotonic()
    assert engine.status().steps.endswith("module by module")
    for _ in range(20):
        engine.shown_steps()
    assert time.monotonic() - began < 2.5
    waiting()


def test_others_blocks_that_slow_a_request_are_told_without_a_name(engine: Any) -> None:
    model = engine.model
    engine.rpc("act_replays", True)
    with engine.edit("quick") as (tracer, _):
        quick = [].save()
        for _ in tracer.all():
            quick.append(model.logits[-1])
    with engine.edit("slow") as (tracer, _):
        slow = [].save()
        for _ in tracer.all():
            slow.append(model.model.layers[3].mlp.output[-1])
    call = Call([engine.request(PROMPT, STEP, engine.edits.chosen([name])) for name in ("quick", "slow")])
    engine.submit(call)
    engine.wait(call)
    quicker, slower = engine.outputs(call)
    # Which step a prompt runs in is the scheduler's.
    (why, asker, count), *_ = quicker.steps.reasons
    assert (why, asker) == ("model.layers.3.mlp.output", "")
    assert count >= 4
    (why, asker, count), *_ = slower.steps.reasons
    assert (why, asker) == ("model.layers.3.mlp.output", "slow")
    assert count >= 5
    assert "(another request asked for it)" in str(quicker.steps)
    engine.edits.clear()
