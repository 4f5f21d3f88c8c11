"""Two tensor-parallel ranks on a CPU: the values of one rank, each brought home by one of them."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import os

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import starting
from tests import models
from tests.parity import hugging_face
from tests.waiting import GREEDY, TOWER, idle, until


@pytest.fixture(scope="module")
def two_ranks(one_engine, llama_path):
    # The worker copies everything through shared memory, so what each rank moved can be seen.
    engine = one_engine.want(
        llama_path,
        "sync",
        worker="tests.worker.inplace.InPlaceCPUWorker",
        dtype="float32",
        max_model_len=models.CONTEXT,
        tensor_parallel_size=2,
    )
    yield engine
    one_engine.stop()


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
    assert starting._cpus_of_ranks(options) == shares


def test_a_binding_that_somebody_chose_is_left_alone(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert starting._cpus_of_ranks({"tensor_parallel_size": 2}) is None
