"""What a call would save, said before it runs; and a call that would save too much, stopped."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import Interrupted, OverBudget, RequestRefused, UnknownEdit
from tests.waiting import CAT, FOX, GREEDY, TOWER, freed, in_background, interrupt, until

PROMPTS = [TOWER, CAT, FOX * 4, TOWER * 7]
#: Tokens of a call long enough to come near the small budget below by the upper bound.
MANY = [[index + 1] * 120 for index in range(8)]
#: A residual stream of the tiny Llama: 128 values of float32.
ROW = 512


def nbytes(value: Any) -> int:
    """Bytes of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


@pytest.fixture
def submitted(engine, monkeypatch):
    """The calls that reach the engine, as lists of requests."""
    return recorded(engine, monkeypatch)


def recorded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    submit = engine._driver.submit
    monkeypatch.setattr(
        engine._driver, "submit", lambda call: (calls.append(len(call.requests)), submit(call))
    )
    return calls


@pytest.fixture
def small(one_engine, mode, llama_path) -> Iterator[Any]:
    """An engine with one megabyte for saves."""
    engine = one_engine.want(
        llama_path, mode, dtype="float32", max_model_len=256, save_budget="1MB", spill_budget=0
    )
    yield engine
    engine.edits.clear()
    freed(engine)
    gc.collect()
    engine._driver.home.flush()


# -- asked for ------------------------------------------------------------------------------------


def test_the_formula_for_layers_is_what_saving_them_takes(engine):
    model = engine.model
    count = len(model.model.layers)
    found = engine.estimate(PROMPTS, max_tokens=1)
    with engine.trace(PROMPTS, max_tokens=1, temperature=0):
        streams = [lab.residual(layer.output) for layer in model.model.layers].save()
    assert found.saved_bytes == nbytes(streams) == found.prompt_tokens * count * ROW
    assert (found.requests, found.how, found.at_most) == (4, "layers", False)
    assert found.prompt_tokens == sum(map(len, PROMPTS))
    some = engine.estimate(PROMPTS, layers=[0, -1], positions="last")
    assert some.saved_bytes == 2 * 4 * ROW
    assert engine.estimate(PROMPTS, n=3, temperature=1).saved_bytes == 3 * found.saved_bytes
    assert found.seconds > 0
    assert found.fits
    assert str(found).startswith(f"4 prompts, {found.prompt_tokens} tokens: ")
    assert "fits in memory" in str(found)


def test_an_estimate_refuses_what_the_model_does_not_have(engine):
    with pytest.raises(RequestRefused, match="There is no layer 99"):
        engine.estimate(CAT, layers=[99])
    with pytest.raises(RequestRefused, match="positions='first'"):
        engine.estimate(CAT, positions="first")
    with pytest.raises(RequestRefused, match="layers='some'"):
        engine.estimate(CAT, layers="some")
    with pytest.raises(RequestRefused, match="There is no prompt"):
        engine.estimate()
    with pytest.raises(UnknownEdit):
        engine.estimate(CAT, edits=["none"])


def test_an_estimate_and_the_guard_refuse_a_prompt_longer_than_the_context(engine, submitted):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[0].output[0].save()
    long = [[1] * engine._context()]
    said = r"The prompt has 1,024 tokens, and the engine's context is 1,024"
    with pytest.raises(RequestRefused, match=said):
        engine.estimate(*long)
    with pytest.raises(RequestRefused, match=said):
        engine.estimate(*long, edits=["probe"])
    with pytest.raises(RequestRefused, match="Prompt 1 has 1,024 tokens"):
        engine.estimate([[1, 2], *long])
    assert submitted == []
    with pytest.raises(RequestRefused, match="longer than the maximum model length"):
        engine.generate(*long)  # what it would be told without an estimate
    assert engine.estimate([1] * (engine._context() - 1)).prompt_tokens == engine._context() - 1


def test_a_call_beside_others_or_right_after_an_interrupt_does_not_count_as_the_engines_pace(engine):
    noted = []
    pace = engine._driver.pace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "call", lambda *figures: noted.append(figures))
        engine.generate(CAT, **GREEDY)
        assert len(noted) == 1
        stream = iter(engine.stream(TOWER, max_tokens=900, ignore_eos=True))
        next(stream)
        engine.generate(CAT, **GREEDY)
        stream.close()
        until(lambda: not engine._under_way, 5, "the stream was not aborted")
        engine.generate(CAT, **GREEDY)
        assert len(noted) == 1
        engine.generate(CAT, **GREEDY)
        assert len(noted) == 2
    freed(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 20])
def test_a_block_is_measured_to_the_byte_and_not_run(engine, submitted, max_tokens):
    model = engine.model
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    streams = row = steps = nested = "untouched"
    with engine.trace(PROMPTS, estimate=True, **sampling) as tracer:
        streams = [].save()
        steps = [].save()
        for layer in model.model.layers:
            streams.append(lab.residual(layer.output))
        row = streams[-1][-1].save()
        nested = {"a": {"b": [streams[0] * 2, row]}, "text": "t"}.save()
        for _ in tracer.all():
            steps.append(model.model.norm.output[0])
    assert (streams, row, steps, nested) == ("untouched",) * 4
    assert tracer.outputs == []
    assert len(PROMPTS) not in submitted[1:], "the prompts themselves were run"
    freed(engine)
    found = tracer.estimate
    with engine.trace(PROMPTS, **sampling):
        streams = [].save()
        steps = [].save()
        for layer in model.model.layers:
            streams.append(lab.residual(layer.output))
        row = streams[-1][-1].save()
        nested = {"a": {"b": [streams[0] * 2, row]}, "text": "t"}.save()
        for _ in tracer.all():
            steps.append(model.model.norm.output[0])
    named = {name.name: name.nbytes for name in found.names}
    assert named == {
        "streams": nbytes(streams),
        "row": nbytes(row),
        "steps": nbytes(steps),
        "nested": nbytes(nested),
    }
    # The row lies in two places and travels once.
    assert found.saved_bytes == sum(named.values()) - nbytes(row)
    assert found.how == "probe"
    assert not found.at_most


def test_what_may_end_early_is_at_most(engine):
    model = engine.model
    with engine.trace(CAT, max_tokens=30, estimate=True) as tracer:
        steps = [].save()
        for _ in tracer.all():
            steps.append(model.model.norm.output[0])
    assert tracer.estimate.at_most
    assert "at most" in str(tracer.estimate)
    assert tracer.estimate.new_tokens == 30


def test_a_block_that_stops_growing_is_seen_to(engine):
    model = engine.model
    with engine.trace([TOWER * 20, CAT * 30], max_tokens=1, estimate=True) as tracer:
        first = model.model.layers[0].output[0][:20].save()
    assert tracer.estimate.saved_bytes == 2 * 20 * ROW


def test_sequences_are_counted_each(engine):
    model = engine.model
    sampling = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 2, "ignore_eos": True}
    with engine.trace([TOWER, CAT], estimate=True, **sampling) as tracer:
        hidden = model.model.layers[0].output[0].save()
    assert tracer.estimate.saved_bytes == 3 * 20 * ROW
    assert tracer.estimate.new_tokens == 12


def test_invokes_are_measured_together(engine):
    model = engine.model
    with engine.trace(max_tokens=1, estimate=True) as tracer:
        with tracer.invoke(TOWER):
            stream = model.model.layers[0].output[0].save()
        with tracer.invoke(FOX):
            row = model.model.layers[1].output[0][-1].save()
    assert {name.name: name.nbytes for name in tracer.estimate.names} == {"stream": 16 * ROW, "row": ROW}


def test_installed_edits_are_measured_and_count_no_run(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = lab.residual(model.model.layers[0].output).save()
    with engine.edit("last"):
        row = lab.residual(model.model.layers[1].output)[-1].save()
    found = engine.estimate(PROMPTS, edits=["probe", "last"], max_tokens=2, temperature=0)
    assert edit.hits == 0
    assert [str(name).partition(" ")[0] for name in found.names] == ["probe.hidden", "last.row"]
    outputs = engine.generate(PROMPTS, edits=["probe", "last"], max_tokens=2, temperature=0)
    assert edit.hits == len(PROMPTS)
    assert found.saved_bytes == sum(nbytes([o.saves["hidden"], o.saves["row"]]) for o in outputs)


def test_a_block_the_probe_cannot_run_is_not_known_and_says_why(engine):
    model = engine.model
    with engine.trace([TOWER * 20], max_tokens=1, estimate=True) as tracer:
        row = model.model.layers[0].output[0][300].save()
    assert tracer.estimate.saved_bytes is None
    assert tracer.estimate.fits is None
    assert "IndexError" in tracer.estimate.unknown
    assert "\n" not in str(tracer.estimate)
    freed(engine)


def test_an_estimate_is_awaited_without_holding_the_loop(engine):
    model = engine.model

    async def both() -> tuple[Any, Any, int]:
        ticks = 0

        async def ticker() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.002)
                ticks += 1

        ticking = asyncio.create_task(ticker())
        async with engine.trace([TOWER, CAT], max_tokens=40, ignore_eos=True, estimate=True) as tracer:
            hidden = model.model.layers[0].output[0].save()
        asked = await engine.aestimate([TOWER, CAT], layers=[0], max_tokens=40)
        ticking.cancel()
        return tracer.estimate, asked, ticks

    measured, asked, ticks = asyncio.run(both())
    assert measured.saved_bytes == asked.saved_bytes == 20 * ROW
    assert ticks > 2


# -- because it may be too much -------------------------------------------------------------------


def test_a_call_that_cannot_come_near_the_budget_is_not_measured(engine, submitted):
    model = engine.model
    with engine.trace(PROMPTS, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
    assert submitted == [len(PROMPTS)]


def test_a_request_over_its_own_budget_stops_the_call(engine, submitted):
    model = engine.model
    with (
        pytest.raises(OverBudget, match=r"1 of 2 requests .* save_budget \(the first 8\.19 kB of 5 kB\)"),
        engine.trace([TOWER, CAT], save_budget="5KB", **GREEDY),
    ):
        hidden = model.model.layers[0].output[0].save()
    assert 2 not in submitted[1:]
    with engine.trace([CAT, CAT], save_budget="5KB", **GREEDY):
        hidden = model.model.layers[0].output[0].save()
    assert len(hidden) == 2


def test_what_a_probe_saved_does_not_count_as_used(small):
    model = small.model
    with small.trace([[1] * 120], max_tokens=1, estimate=True) as tracer:
        wide = model.model.layers[0].output[0].repeat(1, 4).save()
    assert tracer.estimate.saved_bytes == 120 * 4 * ROW
    assert tracer.estimate.budget_bytes == 10**6


def test_a_cell_over_budget_is_stopped_before_it_runs(small, monkeypatch):
    engine, model = small, small.model
    calls = recorded(engine, monkeypatch)
    for _ in range(2):
        with (
            pytest.raises(OverBudget, match=r"8 requests would save 1\.97 MB.*1 MB left: wide \(1\.97 MB\)"),
            engine.trace(MANY, max_tokens=1),
        ):
            wide = model.model.layers[0].output[0].repeat(1, 4).save()
        freed(engine)
        assert len(engine.edits) == 0
    assert calls == [2], "two probes, once; and none of the requests"
    with engine.trace(MANY, max_tokens=1):
        row = model.model.layers[0].output[0][-1].save()
    assert [value.shape for value in row] == [(128,)] * 8
    outputs = engine.generate(MANY, max_tokens=1)
    assert all(output.finished for output in outputs)


def test_what_is_still_looked_at_is_not_left_for_others(small):
    engine, model = small, small.model
    with engine.trace(MANY, max_tokens=1):
        kept = model.model.layers[0].output[0].repeat(1, 2)[:100].save()
    refused = pytest.raises(OverBudget, match=r"the engine has \d+(\.\d+)? kB left")
    with refused, engine.trace(MANY, max_tokens=1):
        more = model.model.layers[0].output[0].repeat(1, 2)[:100].save()
    del kept
    with engine.trace(MANY, max_tokens=1):
        more = model.model.layers[0].output[0].repeat(1, 2)[:100].save()
    assert len(more) == 8


def test_without_the_check_the_worker_has_the_last_word(small, monkeypatch):
    engine, model = small, small.model
    calls = recorded(engine, monkeypatch)
    refused = pytest.raises(OverBudget, match=r"what the engine has left")
    with refused, engine.trace(MANY, max_tokens=1, save_check=False):
        wide = model.model.layers[0].output[0].repeat(1, 4).save()
    assert calls == [len(MANY)]
    del wide
    gc.collect()


def test_small_saves_ride_the_reply_and_count_against_no_budget(small):
    engine, model = small, small.model
    prompts = [[3] * 100] * 30
    with engine.trace(prompts, max_tokens=1):
        hidden = model.model.layers[0].output[0].save()
    assert nbytes(hidden) > 10**6


def test_a_block_the_probe_cannot_run_goes_on(small):
    engine, model = small, small.model
    with engine.trace(MANY, max_tokens=1):
        row = model.model.layers[0].output[0][100].save()
    assert len(row) == 8


def test_generating_with_edits_over_budget_is_stopped(small, monkeypatch):
    engine, model = small, small.model
    with engine.edit("wide") as (tracer, edit):
        wide = model.model.layers[0].output[0].repeat(1, 4).save()
    calls = recorded(engine, monkeypatch)
    with pytest.raises(OverBudget, match=r"wide\.wide"):
        engine.generate(MANY, max_tokens=1)

    async def generate() -> None:
        with pytest.raises(OverBudget, match=r"wide\.wide"):
            await engine.agenerate(MANY, max_tokens=1)

    async def trace() -> None:
        with pytest.raises(OverBudget, match=r"wide"):
            async with engine.trace(MANY, max_tokens=1):
                row = model.model.layers[1].output[0][-1].save()

    asyncio.run(generate())
    asyncio.run(trace())
    assert edit.hits == 0
    assert calls == [2, 2]
    assert len(engine.generate(MANY, edits=[], max_tokens=1)) == 8
    kept = engine.generate(MANY, max_tokens=1, save_check=False, errors="keep")
    assert edit.hits == 8
    assert sum(output.error is not None for output in kept) >= 4
    del kept
    gc.collect()


def test_a_probe_can_be_interrupted(small, monkeypatch):
    engine, model = small, small.model
    calls = recorded(engine, monkeypatch)

    def press() -> None:
        until(lambda: calls, 20, "the probe did not start")
        interrupt()

    pressed = in_background(press)
    with pytest.raises(Interrupted), engine.trace(MANY, max_tokens=1):
        time.sleep(0.5)
        hidden = model.model.layers[0].output[0].save()
    pressed()
    freed(engine)
    assert calls == [2]
    assert len(engine.generate(MANY, max_tokens=1)) == 8


def test_the_worker_sends_as_much_in_the_reply_as_the_estimate_takes_it_to():
    from nnsight_lab.engine import estimate
    from nnsight_lab.worker import courier

    assert estimate.INLINE_BYTES == courier.INLINE_BYTES
