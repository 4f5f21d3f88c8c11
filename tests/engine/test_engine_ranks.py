"""Two tensor-parallel ranks on a CPU: the values of one rank, each brought home by one of them."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import os

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import starting
from nnsight_lab.wire.keys import STEPS
from tests.parity import hugging_face
from tests.waiting import GREEDY, TOWER, idle, until
from tests.worker import acting


@pytest.fixture(scope="module")
def two_ranks(one_engine, llama_path):
    return acting.two_ranks(one_engine, llama_path)


@pytest.fixture
def engine(two_ranks):
    idle(two_ranks)
    yield two_ranks
    two_ranks.edits.clear()
    idle(two_ranks)


def test_a_trace_reads_what_hugging_face_computes(engine, llama_path):
    expected, expected_logits = hugging_face(llama_path, TOWER)
    model = engine.model
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        streams = [lab.residual(layer.output) for layer in model.model.layers].save()
        logits = model.logits.save()
    for stream, wanted in zip(streams, expected, strict=True):
        torch.testing.assert_close(stream, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[-1], expected_logits[-1], rtol=1e-3, atol=1e-3)


def test_the_saves_of_an_edit_and_of_a_trace_come_home_once(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = model.model.layers[1].output[0].save()
    with engine.trace(TOWER, **GREEDY):
        own = model.model.layers[2].output[0].save()
    outputs = engine.generate([TOWER, "cats"], **GREEDY)
    assert [output.saves["hidden"].shape[0] for output in outputs] == [len(TOWER), len("cats")]
    used = engine.rpc("used_bytes")
    assert used[0] > 0
    assert used[1] == 0
    del outputs, own
    engine.edits.clear()
    engine.saves.clear()
    until(lambda: engine.rpc("used_bytes") == [0, 0], 3, "shared memory was not given back")


def test_an_edit_in_place_reaches_both_ranks(engine):
    model = engine.model
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        model.model.layers[1].output[0][:] *= 0.5
        in_place = model.logits.save()
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        hidden, residual = model.model.layers[1].output
        model.model.layers[1].output = (hidden * 0.5, residual)
        assigned = model.logits.save()
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        plain = model.logits.save()
    assert torch.equal(in_place, assigned)
    assert (in_place - plain).abs().max() > 0.01


def test_both_ranks_replay_the_same_steps_and_give_the_values_of_one_that_runs_every_module(engine):
    model = engine.model
    with engine.edit("tap") as (tracer, _):
        tap = [].save()
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += 0.2
            tap.append(model.model.layers[2].output[0][-1])
    with engine.edit("module") as (tracer, _):
        module = [].save()
        for _ in tracer.iter[2:4]:
            # Each rank has half of it: it is gathered where somebody reads it, and only there.
            module.append(model.model.layers[1].mlp.gate_up_proj.output[0][-1])
    with engine.edit("logits") as (tracer, _):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits[-1])

    def run():
        sampling = {**GREEDY, "max_tokens": 7}
        alone = [engine.generate(TOWER, edits=[name], **sampling)[0] for name in ("tap", "module", "logits")]
        sampling |= {"n": 2, "temperature": 1.0, "seed": 4}
        both = engine.generate([TOWER, "cats"], edits=["tap", "logits"], **sampling)
        saves = [one.saves for output in (*alone, *both) for one in output.outputs]
        return [value for each in saves for name in each for value in each[name]]

    wanted = run()
    before = engine.rpc(STEPS)
    engine.rpc("act_replays", True)
    try:
        found = run()
    finally:
        engine.rpc("act_replays", False)
    first, second = engine.rpc(STEPS)
    assert first["steps"] == second["steps"]
    assert first["reasons"] == second["reasons"]
    ran = {kind: count - before[0]["steps"].get(kind, 0) for kind, count in first["steps"].items()}
    assert ran["replayed with taps"] >= 10  # which step a prompt runs in is the scheduler's
    assert ran["replayed"] == 10
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cores", "options", "shares"),
    [
        ({0, 1}, {"tensor_parallel_size": 2}, "0|1"),
        ({0, 1, 2, 3}, {"tensor_parallel_size": 2}, "0,1|2,3"),
        ({4, 5, 6, 7}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "4|5|6|7"),
        ({3}, {"pipeline_parallel_size": 2}, "3|3"),
        ({0, 1}, {}, None),
        ({0, 1}, {"tensor_parallel_size": 1}, None),
    ],
)
def test_each_rank_gets_its_share_of_the_cores(monkeypatch, cores, options, shares):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert starting.cpus_of_ranks(options) == shares


def test_a_binding_that_somebody_chose_is_left_alone(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert starting.cpus_of_ranks({"tensor_parallel_size": 2}) is None
