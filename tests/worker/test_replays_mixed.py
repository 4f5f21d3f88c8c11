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
from typing import Any, NamedTuple

import pytest
import torch

from nnsight_lab.engine.call import Call
from nnsight_lab.wire.keys import STEPS
from tests.server.lora import tiny_lora
from tests.waiting import OneEngine, idle, in_background, until
from tests.worker import acting

TAPS, NOTHING, HOOKS = "replayed with taps", "replayed", "module by module"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Wanted(NamedTuple):
    """One request of a mix."""

    prompt: list[int]
    edits: tuple[str, ...]
    sampling: dict[str, Any]


@pytest.fixture(scope="module")
def engine(one_engine: OneEngine, llama_path: Path) -> Iterator[Any]:
    engine = acting.replaying(one_engine, llama_path)
    install(engine)
    yield engine
    engine.edits.clear()
    engine.saves.clear()
    idle(engine)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("tiny", 1, str(tiny_lora(tmp_path_factory.mktemp("lora") / "tiny")))


def install(engine: Any) -> None:
    """An edit of each kind; all are off until a request names them."""
    model = engine.model
    with engine.edit("tap") as (tracer, _):
        tap = [].save()
        for _ in tracer.all():
            tap.append(model.model.layers[2].output[0][-1])
    with engine.edit("tap_window") as (tracer, _):
        tap_window = [].save()
        for _ in tracer.iter[2:5]:
            tap_window.append(model.model.layers[3].input[-1])
    with engine.edit("module") as (tracer, _):
        module = [].save()
        for _ in tracer.all():
            module.append(model.model.layers[1].mlp.output[-1])
    with engine.edit("module_once") as (tracer, _):
        module_once = [].save()
        for _ in tracer.iter[3]:
            module_once.append(model.model.layers[2].self_attn.output[-1])
    with engine.edit("logits") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits[-1])
    with engine.edit("samples") as (tracer, _):
        samples = [].save()
        for _ in tracer.all():
            samples.append(model.samples[-1])
    with engine.edit("prompt_only") as (tracer, _):
        prompt_only = [].save()
        prompt_only.append(model.model.layers[1].output[0][-1])
    with engine.edit("steer") as (tracer, _):
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += 0.3
    with engine.edit("changes") as (tracer, _):
        changes = [].save()
        for _ in tracer.iter[:2]:
            changes.append(model.logits[-1])
        for _ in tracer.iter[2:4]:
            changes.append(model.model.norm.output[0][-1])
        for _ in tracer.iter[4:7]:
            changes.append(model.model.layers[0].output[0][-1])
            changes.append(model.logits[-1])
    with engine.edit("stops") as (tracer, _):
        stops = [].save()
        for _ in tracer.all():
            stops.append(model.model.layers[2].output[0][-1])
            if len(stops) == 3:
                tracer.stop()
    with engine.edit("fails") as (tracer, _):
        fails = [].save()
        for _ in tracer.all():
            fails.append(model.model.layers[0].output[0][-1])
            if len(fails) == 3:
                raise ValueError("the third time")
    engine.default_edits = []


NAMES = (
    "tap", "tap_window", "module", "module_once", "logits", "samples", "prompt_only", "steer", "changes",
    "stops", "fails",
)  # fmt: skip
#: Those that no step of generation need run module by module for.
QUIET = ("tap", "tap_window", "logits", "samples", "prompt_only", "steer", "stops", "fails")


def run(engine: Any, wanted: Sequence[Wanted]) -> list[Any]:
    """The outputs of requests that are submitted together."""
    call = Call(
        [engine.request(one.prompt, one.sampling, engine.edits.chosen(list(one.edits))) for one in wanted]
    )
    engine.submit(call)
    engine.wait(call)
    return list(engine.outputs(call))


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


def different(found: Any, wanted: Any, where: str = "") -> str:
    """Where two values differ, and by how much; "" where they do not."""
    if isinstance(wanted, torch.Tensor):
        if found.shape != wanted.shape:
            return f"{where}: {tuple(found.shape)} for {tuple(wanted.shape)}"
        off = float((found.float() - wanted.float()).abs().max()) if found.numel() else 0.0
        size = float(wanted.float().abs().max()) if found.numel() else 0.0
        return f"{where}: off by {off} of {size}" if off > 1e-3 * (1 + size) else ""
    if len(found) != len(wanted):
        return f"{where}: {len(found)} for {len(wanted)}"
    return next(
        (said for i in range(len(wanted)) if (said := different(found[i], wanted[i], f"{where}[{i}]"))), ""
    )


def compare(found: Sequence[Any], wanted: Sequence[Any], asked: Sequence[Wanted]) -> None:
    """Every request said, saved and failed as it did alone."""
    wrong = []
    for index, (one, other, request) in enumerate(zip(found, wanted, asked, strict=True)):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            at = f"request {index}, {request.edits}, {request.sampling}"
            if list(mine.token_ids) != list(theirs.token_ids):
                wrong.append(f"{at}: {mine.token_ids} for {theirs.token_ids}")
            assert mine.saves.blocks == theirs.saves.blocks, at
            for block in mine.saves.blocks:
                saved, alike = mine.saves.edit(block), theirs.saves.edit(block)
                assert list(saved) == list(alike), at
                for name in saved:
                    said = different(saved[name], alike[name], f"{at}: {name}")
                    wrong += [said] if said else []
        if (one.error is None) != (other.error is None):
            wrong.append(f"request {index}: {one.error} for {other.error}")
    assert not wrong, "\n".join(wrong)


def prompt_of(made: random.Random, longest: int) -> list[int]:
    return [made.randrange(2, 250) for _ in range(made.randint(1, longest))]


def mix(count: int, seed: int, names: Sequence[str], lora: Any) -> list[Wanted]:
    """That many requests with edits, lengths, answers and LoRAs drawn at random."""
    made = random.Random(seed)
    found = []
    for _ in range(count):
        sampling: dict[str, Any] = {**GREEDY, "max_tokens": made.randint(1, 12)}
        if made.random() < 0.25:
            sampling |= {"n": 2, "temperature": 1.0, "seed": made.randrange(1000)}
        if made.random() < 0.3:
            sampling["lora_request"] = lora
        edits = tuple(made.sample(names, made.choice((0, 1, 1, 2, 3))))
        found.append(Wanted(prompt_of(made, 40), edits, sampling))
    return found


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
    assert since(engine, before)[TAPS] == 5
    with_it, without = found[0].saves["tap"], found[1].saves["tap"]
    assert float((with_it[3] - without[3]).abs().max()) > 0.01, "the LoRA changed nothing"


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
