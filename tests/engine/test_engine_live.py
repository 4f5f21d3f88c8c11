"""Runs that are watched while they run: what their views get, how often, and what watching leaves behind."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch

from nnsight_lab.errors import EditError, Interrupted, RequestRefused, TraceError
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import STATIC
from nnsight_lab.wire.keys import PEEK
from tests.waiting import CAT, LONG, TOWER, freed, until
from tests.widgets.comms import Page, mock_comms

pytestmark = pytest.mark.skipif(
    not (STATIC / "token_strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)

SHORT = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def comms():
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def live(engine):
    """Starts runs, and closes them."""
    made = []

    def start(*prompts, **options):
        made.append(engine.live(*prompts, **options))
        return made[-1]

    yield start
    for run in made:
        run.close()
    freed(engine)


@pytest.fixture
def norms(engine):
    """An edit that appends a vector and a number at every step."""
    model = engine.model
    with engine.edit("norms") as (tracer, edit):
        vectors = [].save()
        numbers = [].save()
        for _ in tracer.all():
            hidden = model.model.layers[0].output[0]
            vectors.append(hidden[-1])
            numbers.append(hidden[-1].norm().item())
    return engine


@pytest.fixture
def peeked(engine, monkeypatch):
    """Counts how often the workers are asked for what runs."""
    asked = []
    driver = engine._driver
    target = driver._llm if engine.mode == "async" else driver._engine
    original = target.collective_rpc

    def counting(method, *arguments, **more):
        if method == PEEK:
            asked.append(time.monotonic())
        return original(method, *arguments, **more)

    monkeypatch.setattr(target, "collective_rpc", counting)
    return asked


def sent(widget):
    """The messages of a widget that are no answers."""
    found = [message["data"] for message in widget.comm.sent if message["type"] == "comm_msg"]
    return [data for data in found if kinds.ANSWER not in data.get("content", {})]


def test_a_run_shows_its_prompt_and_its_tokens_with_their_log_probabilities(live):
    run = live(CAT, **SHORT)
    output = run.wait()
    completion = output.outputs[0]
    assert run.strip.token_ids == (*output.prompt_token_ids, *completion.token_ids)
    steps = zip(completion.logprobs, completion.token_ids, strict=True)
    expected = [step[token].logprob for step, token in steps]
    prompt = len(output.prompt_token_ids)
    np.testing.assert_allclose(run.strip.scores[0, prompt:], expected)
    assert np.isnan(run.strip.scores[0, :prompt]).all()
    assert run.strip.prompt_count == prompt
    assert run.strip.state["words"].startswith("40 tokens in ")
    assert run.strip.state["ended"] == "done"


def test_tokens_come_while_it_runs_and_no_oftener_than_twenty_times_a_second(live):
    began = time.monotonic()
    run = live(TOWER, **{**LONG, "max_tokens": 400})
    seen = []
    while not run.over:
        seen.append(len(run.strip))
        time.sleep(0.01)
    took = time.monotonic() - began
    assert len(set(seen)) > 5, "it did not grow"
    assert seen == sorted(seen)
    messages = sent(run.strip)
    # The first, the last, and the state that is saved with the notebook come on top.
    assert len(messages) <= 20 * took + 3
    grew = [data["content"] for data in messages if data.get("content", {}).get(kinds.KIND) == kinds.GREW]
    assert sum(len(content["tokens"]) for content in grew) <= len(run.strip) * 1.1 + 20


def test_what_an_edit_appends_is_seen_before_it_is_home_and_is_the_same(norms, live):
    run = live(TOWER, **{**LONG, "max_tokens": 400})
    early = until(lambda: run.heatmaps.get("vectors") and not run.over and run.heatmaps["vectors"], 20)
    rows = early.source.shape[0]
    assert 0 < rows < 400
    output = run.wait()
    vectors = torch.stack(output.saves["vectors"])
    assert run.heatmaps["vectors"].source.shape == (400, vectors.shape[1])
    torch.testing.assert_close(run.heatmaps["vectors"].source.read((slice(None), slice(None))), vectors)
    assert run.heatmaps["numbers"].source.shape == (400,)
    # Its first row is the prompt's last token.
    assert run.heatmaps["vectors"].places == [len(output.prompt_token_ids) - 1, None]
    assert run.heatmaps["vectors"].sequence == run.strip.sequence != ""
    for heatmap in run.heatmaps.values():
        assert all(len(b) <= 2**20 for message in heatmap.comm.sent for b in message["buffers"])


def test_a_saved_list_is_a_score_of_its_own_row(norms, live):
    run = live(CAT, score=["logprob", "numbers"], **SHORT)
    output = run.wait()
    assert run.strip.rows == ("log probability", "numbers")
    first = len(output.prompt_token_ids) - 1
    np.testing.assert_allclose(run.strip.scores[1, first : first + 40], output.saves["numbers"])
    assert math.isnan(run.strip.scores[1, first + 40])
    assert "numbers" not in run.heatmaps
    assert "vectors" in run.heatmaps


def test_a_trace_is_watched_while_its_cell_waits(engine):
    model = engine.model
    with engine.trace(TOWER, live=True, **{**LONG, "max_tokens": 300}) as tracer:
        streams = [].save()
        for _ in tracer.all():
            streams.append(model.model.layers[0].output[0])
    view = tracer.live
    try:
        assert len(streams) == 300
        assert view.over
        # The first step saw the whole prompt, so there is a row for each position.
        whole = torch.cat(list(streams))
        assert view.heatmaps["streams"].source.shape == whole.shape
        assert view.heatmaps["streams"].places == [0, None]
        grew = [data for data in sent(view.heatmaps["streams"]) if data["method"] == "custom"]
        assert len(grew) > 3, "it did not grow"
        shapes = [data["content"]["traits"]["shape"][0] for data in grew]
        assert shapes == sorted(shapes)
    finally:
        view.close()
    freed(engine)


def test_workers_are_asked_only_where_somebody_watches_and_something_may_be_saved(engine, peeked, live):
    model = engine.model
    with engine.trace(TOWER, **{**LONG, "max_tokens": 60}) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    list(engine.stream(TOWER, **SHORT))
    live(TOWER, **SHORT).wait()
    assert peeked == []
    with engine.trace(TOWER, live=True, **{**LONG, "max_tokens": 300}) as tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    tracer.live.close()
    assert len(peeked) > 2
    apart = [later - earlier for earlier, later in itertools.pairwise(peeked)]
    assert min(apart) >= 0.045
    assert len(rows) == 300


def test_the_stop_button_aborts_the_request_and_keeps_what_came(engine, live):
    run = live(TOWER, **LONG)
    until(lambda: len(run.strip) > len(TOWER) + 3, 20)
    Page(run.strip).one(kinds.STOP)
    until(lambda: run.over, 5)
    freed(engine)
    assert "Stopped after" in run.strip.state["words"]
    assert run.strip.state["ended"] == "stopped"
    assert len(TOWER) + 3 < len(run.strip) < 900
    assert run.wait() is run.output  # what there is of it
    assert not run.output.finished


def test_the_stop_button_of_a_trace_ends_its_cell_in_one_line(engine):
    model = engine.model
    pressed = []

    def press():
        view = until(lambda: tracer.live, 20)
        until(lambda: len(view.strip) > len(TOWER) + 3, 20)
        Page(view.strip).one(kinds.STOP)
        pressed.append(True)

    tracer = engine.trace(TOWER, live=True, **LONG)
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(Interrupted, match="stopped in its view"), tracer:
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    presser.join()
    assert pressed
    assert tracer.live.strip.state["ended"] == "stopped"
    tracer.live.close()
    freed(engine)


@pytest.mark.asyncio
async def test_a_cancelled_cell_leaves_the_strip_readable_and_says_so(engine, live):
    run = live(TOWER, **LONG)
    task = asyncio.create_task(_awaited(run))
    while len(run.strip) < len(TOWER) + 3:
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    freed(engine)
    assert run.strip.state["words"].startswith("Interrupted after ")
    assert run.strip.kept["tokens"]
    assert "Interrupted after" in run._html()
    assert "lab-strip" in run._html()


async def _awaited(run):
    return await run


@pytest.mark.asyncio
async def test_a_run_gives_its_outputs_as_they_grow(live):
    lengths = [len(output.outputs[0].token_ids) async for output in live(CAT, **LONG)]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 900
    assert len(lengths) > 3
    assert len(list(live(CAT, **SHORT))[-1].outputs[0].token_ids) == 40
    output = await live(CAT, **SHORT)
    assert output.finished


def test_a_failing_edit_is_shown_in_the_view_and_raised(engine, live):
    model = engine.model
    with engine.edit("bad") as (tracer, edit):
        model.model.layers[0].output.nothing
    run = live(CAT, **SHORT)
    until(lambda: run.over, 20)
    assert run.strip.state["ended"] == "failed"
    assert "nothing" in run.strip.state["words"]
    with pytest.raises(EditError, match="nothing"):
        run.wait()


def test_a_failing_trace_is_shown_in_the_view_and_raised(engine):
    model = engine.model
    tracer = engine.trace(CAT, live=True, **SHORT)
    with pytest.raises(TraceError, match="nothing"), tracer:
        model.model.layers[0].output.nothing
    assert tracer.live.strip.state["ended"] == "failed"
    tracer.live.close()
    freed(engine)


@pytest.mark.parametrize(
    ("prompts", "options", "why"),
    [
        ((), {}, "one answer to one prompt"),
        ((["a", "b"],), {}, "one answer to one prompt"),
        (("a",), {"n": 2}, "one answer to one prompt"),
        (("a",), {"score": 3}, "3 is no score"),
        (("a",), {"score": []}, "is no score"),
        (("a",), {"max_tokns": 3}, "Did you mean 'max_tokens'"),
        (("a",), {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_line_before_it_runs(engine, prompts, options, why):
    with pytest.raises(RequestRefused, match=why) as refused:
        engine.live(*prompts, **options)
    assert "\n" not in str(refused.value)
    if prompts:
        options = {name: value for name, value in options.items() if name != "score"}
        score = 3 if "score" in why else True
        with pytest.raises(RequestRefused):
            engine.trace(*prompts, live=score, **options)


def test_a_saved_list_that_cannot_be_drawn_is_left_to_the_end(engine, live):
    model = engine.model
    with engine.edit("odd") as (tracer, edit):
        texts = [].save()
        widths = [].save()
        step = 0
        for _ in tracer.all():
            hidden = model.model.layers[0].output[0]
            step = step + 1
            texts.append("text")
            widths.append(hidden[-1, :step])
    run = live(CAT, **SHORT)
    output = run.wait()
    assert len(output.saves["texts"]) == len(output.saves["widths"]) == 40
    # Vectors of growing lengths are taken for numbers of several positions; texts are no picture.
    assert "texts" not in run.heatmaps
