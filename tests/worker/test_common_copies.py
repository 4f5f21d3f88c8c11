"""Many blocks at one location of one step share a copy: each still gets its own rows, and writes its own.

A copy for each block is what they had before, and is here what the common one is compared with.
"""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.waiting import idle

PROMPTS = [list(range(10 + i, 22 + 2 * i)) for i in range(6)]
STEPS = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(one_engine, llama_path):
    engine = one_engine.want(
        llama_path,
        "sync",
        worker="tests.worker.inplace.InPlaceCPUWorker",
        dtype="float32",
        max_model_len=models.CONTEXT,
    )
    yield engine
    idle(engine)


@pytest.fixture
def engine(started):
    yield started
    started.edits.clear()
    started.saves.clear()
    started.rpc("share_copies", True)
    idle(started)


def run(engine, *names, prompts=PROMPTS):
    outputs = engine.generate(prompts, edits=list(names), **STEPS)
    return [dict(output.saves) for output in outputs]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def install(engine):
    """Edits of every kind of reading and writing, at one layer."""
    layer = engine.model.model.layers[1]
    model = engine.model
    with engine.edit("reads") as (tracer, edit):
        seen = [].save()
        for _ in tracer.all():
            seen.append(layer.output[0][-1])
    with engine.edit("writes") as (tracer, edit):
        logits = [].save()
        for _ in tracer.all():
            layer.output[0][:] += 0.5
            logits.append(model.logits)
    with engine.edit("writes_both") as (tracer, edit):
        both = [].save()
        for _ in tracer.all():
            hidden, residual = layer.output
            hidden *= 1.5
            residual[-1] += 0.25
            both.append(model.logits)
    with engine.edit("reads_twice") as (tracer, edit):
        before, after = [].save(), [].save()
        for _ in tracer.all():
            value = layer.output[0]
            before.append(value)
            layer.output[0][:] += 1.0
            after.append(layer.output[0])
    with engine.edit("assigns") as (tracer, edit):
        for _ in tracer.all():
            hidden, residual = layer.output
            layer.output = (hidden * 0.5, residual)
    with engine.edit("logits") as (tracer, edit):
        best = [].save()
        for _ in tracer.all():
            model.logits[:, 3] += 2.0
            best.append(model.logits.argmax())
    for edit in engine.edits:
        edit.switch_off()


COMBINATIONS = [
    ("reads",),
    ("writes",),
    ("writes_both",),
    ("reads_twice",),
    ("assigns", "reads"),
    ("logits",),
    ("writes", "reads"),
    ("reads", "writes", "reads_twice"),
    ("writes", "assigns", "writes_both"),
    ("writes_both", "logits", "reads"),
]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_a_common_copy_is_as_good_as_copies_of_ones_own(engine, names):
    install(engine)
    engine.rpc("share_copies", False)
    wanted = run(engine, *names)
    engine.rpc("share_copies", True)
    found = run(engine, *names)
    assert all(found)
    assert equal(found, wanted)
    assert engine.rpc("common_copies")[0] > 0, "nothing was shared, so nothing was tested"


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_of_what_is_large_each_has_a_copy_of_its_own_as_good_as_nnsight_s(engine, names):
    install(engine)
    engine.rpc("share_copies", False)
    wanted = run(engine, *names)
    engine.rpc("share_copies", True)
    engine.rpc("large_copies")
    found = run(engine, *names)
    assert all(found)
    assert equal(found, wanted)


def test_a_large_copy_is_shared_where_it_is_looked_at_and_not_where_its_pieces_are_kept(engine):
    install(engine)
    engine.rpc("share_copies", False)
    wanted = run(engine, "logits")
    engine.rpc("share_copies", True)
    assert engine.rpc("large_copies") == [[]]
    before = engine.rpc("common_copies")[0]
    assert equal(run(engine, "logits"), wanted)  # changes them, and keeps the place of the largest only
    assert engine.rpc("common_copies")[0] > before
    assert engine.rpc("large_copies") == [[]]
    engine.rpc("share_copies", False)
    wanted = run(engine, "writes", "reads")
    engine.rpc("share_copies", True)
    engine.rpc("large_copies")
    assert equal(run(engine, "writes", "reads"), wanted)  # "writes" keeps its logits
    assert engine.rpc("large_copies") == [["model.logits"]]
    between = engine.rpc("common_copies")[0]
    assert equal(run(engine, "writes", "reads"), wanted)
    assert engine.rpc("common_copies")[0] == between


def test_alone_and_together_are_the_same(engine):
    install(engine)
    together = run(engine, "writes", "reads")
    for prompt, saves in zip(PROMPTS, together, strict=True):
        (alone,) = run(engine, "writes", "reads", prompts=[prompt])
        assert [a.shape for a in alone["seen"]] == [s.shape for s in saves["seen"]]
        # Other rows in a step change the order of sums: float32, over 128 numbers.
        for a, s in zip(alone["seen"], saves["seen"], strict=True):
            torch.testing.assert_close(a, s, rtol=1e-4, atol=1e-4)


def test_a_kept_piece_is_not_changed_by_what_comes_later(engine):
    layer = engine.model.model.layers[1]
    with engine.edit("keeps") as (tracer, edit):
        kept, copies = [].save(), [].save()
        for _ in tracer.all():
            value = layer.output[0]
            kept.append(value)
            copies.append(value.clone())
    for saves in run(engine, "keeps"):
        assert equal(saves["kept"], saves["copies"])
