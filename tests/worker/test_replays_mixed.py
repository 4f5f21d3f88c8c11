"""Requests of every kind in one engine that replays: each gets what it gets alone where every module runs.

One engine has it all at once: a cache so small that requests are preempted, a LoRA, edits that wait for taps,
for any module, for logits, for nothing, that stop and that fail. Replays are acted out (see `test_replays`).
Values are compared within 1e-3 of their size: rows that are computed beside others, or again after a
preemption, differ in their last bits, and a row of another step or request differs in its first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.wire.keys import STEPS
from tests.server.lora import tiny_lora
from tests.waiting import OneEngine, idle, in_background, until
from tests.worker import acting
from tests.worker.mixes import GREEDY, NAMES, QUIET, Wanted, compare, different, install, mix, prompt_of, run

TAPS, NOTHING, HOOKS = "replayed with taps", "replayed", "module by module"


@pytest.fixture(scope="module")
def engine(one_engine: OneEngine, llama_path: Path) -> Iterator[Any]:
    engine = acting.replaying(one_engine, llama_path)
    install(engine)
    yield engine
    engine.default_edits = None
    engine.edits.clear()
    engine.saves.clear()
    idle(engine)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("tiny", 1, str(tiny_lora(tmp_path_factory.mktemp("lora") / "tiny")))


def alone(engine: Any, wanted: Sequence[Wanted]) -> list[Any]:
    """The outputs of each alone, where every module of every step runs."""
    engine.rpc("act_replays", False)
    try:
        return [run(engine, [one])[0] for one in wanted]
    finally:
        engine.rpc("act_replays", True)


def steps(engine: Any) -> dict[str, int]:
    (figures,) = engine.rpc(STEPS)
    return dict(figures["steps"])


def since(engine: Any, before: dict[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in steps(engine).items() if count}


@pytest.mark.parametrize(
    ("seed", "names", "most"),
    [(1, NAMES, HOOKS), (2, QUIET, TAPS), (3, QUIET, TAPS), (4, (*QUIET, "module_once"), None)],
)
def test_a_random_mix_of_requests_gets_what_each_gets_alone(
    engine: Any, lora: Any, seed: int, names: Sequence[str], most: str | None
) -> None:
    asked = mix(30, seed, names, lora)
    wanted = alone(engine, asked)
    before = steps(engine)
    found = run(engine, asked)
    ran = since(engine, before)
    compare(found, wanted, asked)
    assert {output.error is None for output in found} == {True, False}
    assert most is None or ran[most] >= 3


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_block_beside_requests_of_every_other_kind(engine: Any, name: str) -> None:
    made = random.Random(name)
    asked = [
        Wanted(prompt_of(made, 20), (name,) if index % 2 else (name, other), {**GREEDY, "max_tokens": 8})
        for index, other in enumerate(n for n in NAMES if n != name)
    ]
    compare(run(engine, asked), alone(engine, asked), asked)


def test_several_answers_each_count_their_own_steps(engine: Any) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 7}
    asked = [Wanted([5, 6, 7, 8], (name,), sampling) for name in ("tap_window", "changes", "module_once")]
    wanted = alone(engine, asked)
    found = run(engine, asked)
    compare(found, wanted, asked)
    assert len({tuple(one.token_ids) for one in found[0].outputs}) == 3


def test_requests_with_and_without_a_lora_share_replayed_steps(engine: Any, lora: Any) -> None:
    sampling = {**GREEDY, "max_tokens": 6}
    asked = [
        Wanted([9, 8, 7, 6], (edit,), {**sampling, **({"lora_request": lora} if with_lora else {})})
        for edit in ("tap", "logits")
        for with_lora in (True, False)
    ]
    wanted = alone(engine, asked)
    before = steps(engine)
    found = run(engine, asked)
    compare(found, wanted, asked)
    assert since(engine, before)[TAPS] >= 3  # which step a prompt runs in is the scheduler's
    with_it, without = found[0].saves["tap"], found[1].saves["tap"]
    assert float((with_it[3] - without[3]).abs().max()) > 0.01, "the LoRA changed nothing"


def test_blocks_that_ended_early_and_alike_come_home_each_with_its_own(engine: Any) -> None:
    """What ended last is copied first, so pieces of shared memory lie in no order of requests."""
    made = random.Random(6)
    wanted = [
        Wanted([made.randrange(2, 250) for _ in range(24)], ("prompt_rows",), {**GREEDY, "max_tokens": 4})
        for _ in range(9)
    ]
    layers = engine.model.model.layers
    with engine.edit("prompt_rows"):
        prompt_rows = layers[1].output[0].save()  # noqa: F841
    engine.default_edits = []
    compare(run(engine, wanted), alone(engine, wanted), wanted)


def test_preempted_requests_count_on_where_they_were(engine: Any) -> None:
    made = random.Random(3)
    # Each grows by several blocks of the cache, which has not enough for half of them.
    asked = [
        Wanted([made.randrange(2, 250) for _ in range(14)], (name,), {**GREEDY, "max_tokens": 60})
        for name in ("tap", "tap_window", "module_once", "logits", "changes", "steer", "module", "tap")
    ]
    wanted = alone(engine, asked)
    before = preemptions(engine)
    found = run(engine, asked)
    assert preemptions(engine) > before, "nothing was preempted: make the cache smaller"
    compare(found, wanted, asked)


def test_blocks_that_arrive_while_others_generate_count_from_their_own_start(engine: Any) -> None:
    first = [
        Wanted([30 + i] * 6, (name,), {**GREEDY, "max_tokens": 90}) for i, name in enumerate(("tap", ""))
    ]
    first[1] = first[1]._replace(edits=())
    later = [Wanted([60 + i] * 9, (name,), {**GREEDY, "max_tokens": 8}) for i, name in enumerate(NAMES)]
    wanted_first, wanted = alone(engine, first), alone(engine, later)
    before = steps(engine)
    running = in_background(lambda: run(engine, first))
    until(lambda: steps(engine).get(TAPS, 0) - before.get(TAPS, 0) >= 3, 30, "the first ones to replay")
    compare(run(engine, later), wanted, later)
    compare(running(), wanted_first, first)


def test_the_first_steps_of_an_engine_are_counted_though_they_could_replay(engine: Any) -> None:
    # A prompt of one token is no different from a step of generation, and nothing is known yet of how often
    # a forward reaches a module.
    sampling = {**GREEDY, "max_tokens": 6}
    asked = [Wanted([77], (name,), sampling) for name in ("module_once", "changes", "tap_window")]
    wanted = alone(engine, asked)
    for one, other in zip(asked, wanted, strict=True):
        engine.rpc("forget_visits")
        compare(run(engine, [one]), [other], [one])


def test_a_module_called_by_a_block_is_no_visit_of_the_model(engine: Any) -> None:
    model = engine.model
    with engine.edit("lens") as (tracer, edit):
        lens = [].save()
        for _ in tracer.all():
            hidden, residual = model.model.layers[1].output
            lens.append(model.lm_head(model.model.norm(hidden + residual))[-1])
    asked = [
        Wanted([11, 12, 13], names, {**GREEDY, "max_tokens": 7})
        for names in (("lens",), ("changes",), ("lens", "changes"), ("module_once", "lens"))
    ]
    wanted = [alone(engine, [one])[0] for one in asked]
    for one, other in zip(asked, wanted, strict=True):
        compare(run(engine, [one]), [other], [one])
    compare(run(engine, asked), wanted, asked)
    edit.clear()


def test_a_trace_that_stops_ends_its_request_in_a_replayed_step(engine: Any) -> None:
    model = engine.model

    def stopped() -> tuple[list[Any], int]:
        with engine.trace([5, 6, 7], max_tokens=20, temperature=0.0) as tracer:
            rows = [].save()
            for _ in tracer.all():
                rows.append(model.model.layers[2].output[0][-1])
                if len(rows) == 4:
                    tracer.stop()
        return rows, len(tracer.outputs[0].outputs[0].token_ids)

    engine.rpc("act_replays", False)
    wanted, length = stopped()
    engine.rpc("act_replays", True)
    before = steps(engine)
    found, again = stopped()
    assert (len(found), again) == (4, length)
    assert not different(found, wanted)
    assert since(engine, before)[TAPS] == 3


def test_a_block_that_fails_in_a_replayed_step_leaves_the_others_alone(engine: Any) -> None:
    asked = [Wanted([5, 6, 7 + i], (name,), {**GREEDY, "max_tokens": 7}) for i, name in enumerate(NAMES)]
    asked.append(Wanted([9, 9], ("fails", "tap"), {**GREEDY, "max_tokens": 7}))
    outputs = run(engine, asked)
    failed = [output for output in outputs if output.error is not None]
    assert ["the third time" in output.error for output in failed] == [True, True]
    assert len(failed[1].saves["tap"]) == 7
    compare(outputs, alone(engine, asked), asked)


def preemptions(engine: Any) -> int:
    """How often a request lost its place in the cache, over the engine's life."""
    return int(engine.rpc("resumed")[0])
