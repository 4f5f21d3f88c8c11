"""An engine whose workers are Ray actors: the same values, the same stop button, and nothing left of Ray."""
# ruff: noqa: F841  (what a block saves is bound in the frame)

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import processes, shared_queues
from nnsight_lab.errors import EngineDied, Interrupted
from tests import models
from tests.parity import hugging_face
from tests.waiting import CAT, GREEDY, LONG, TOWER, idle, in_background, interrupt, owned, until, when_running

RAY = {"dtype": "float32", "max_model_len": models.CONTEXT, "distributed_executor_backend": "ray"}
SCRIPT = """
import sys
import nnsight_lab as lab

if __name__ == "__main__":
    engine = lab.start(sys.argv[1], mode="sync", dtype="float32", max_model_len=128,
                       distributed_executor_backend="ray")
    print("up", engine.id, flush=True)
    engine.generate("a", max_tokens=1)
    print("ran", flush=True)
    sys.stdin.read()
"""


def folders():
    return sorted(Path(tempfile.gettempdir()).glob("nnl-ray-*"))


@pytest.fixture(scope="module")
def on_ray(one_engine, llama_path):
    before = folders()
    yield one_engine.want(llama_path, "async", tensor_parallel_size=2, **RAY)
    one_engine.stop()
    until(lambda: not owned(), 5, "a process was left")
    until(lambda: folders() == before, 3, "Ray's folder was left")


@pytest.fixture
def engine(on_ray):
    idle(on_ray)
    yield on_ray
    on_ray.edits.clear()
    idle(on_ray)


def test_rays_processes_are_the_engines(engine):
    names = [process.name for process in processes.engine_processes(engine.id)]
    assert {"gcs_server", "raylet"} <= set(names)
    assert sum("LabRayWorkerProc" in name for name in names) == 2
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in processes.engine_processes(engine.id)}


def test_traces_and_edits_have_the_values_of_hugging_face(engine, llama_path):
    expected, logits = hugging_face(llama_path, TOWER)
    model = engine.model
    with engine.edit("half") as (tracer, _):
        for _ in tracer.all():
            model.model.layers[1].output[0][:] *= 0.5
    with engine.trace(TOWER, edits=[], max_tokens=1, temperature=0):
        streams = [lab.residual(layer.output) for layer in model.model.layers].save()
        found = model.logits.save()
    with engine.trace(TOWER, edits=["half"], max_tokens=1, temperature=0):
        halved = model.logits.save()
    for stream, wanted in zip(streams, expected, strict=True):
        torch.testing.assert_close(stream, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[-1], logits[-1], rtol=1e-3, atol=1e-3)
    assert (halved - found).abs().max() > 0.01


def test_saves_of_many_requests_come_home_through_shared_memory(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = torch.cat([layer.output[0] for layer in model.model.layers]).repeat(40, 1).save()
    outputs = engine.generate([TOWER, CAT] * 8, **GREEDY)
    rows = 40 * models.LAYERS
    assert [output.saves["hidden"].shape[0] for output in outputs] == [rows * len(TOWER), rows * len(CAT)] * 8
    used = engine.rpc("lab_used_bytes")
    assert used[0] > sum(output.saves["hidden"].nbytes for output in outputs) // 2
    assert used[1] == 0
    del outputs
    engine.edits.clear()
    engine.saves.clear()
    until(lambda: engine.rpc("lab_used_bytes") == [0, 0], 3, "shared memory was not given back")


def test_an_interrupt_ends_the_call_and_keeps_the_engine(engine):
    pids = {process.pid for process in processes.engine_processes(engine.id)}
    pressed = when_running(engine, interrupt)
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    with pytest.raises(Interrupted):
        engine.generate(TOWER, **LONG)
    assert time.monotonic() - pressed() < 2
    idle_of_edits(engine)
    assert {process.pid for process in processes.engine_processes(engine.id)} == pids
    assert len(engine.generate(CAT, **GREEDY)[0].outputs[0].token_ids) == 3


def idle_of_edits(engine):
    engine.edits.clear()
    idle(engine)


def test_an_actor_that_is_killed_ends_the_engine_and_all_of_ray(one_engine, llama_path):
    engine = one_engine.want(llama_path, "async", tensor_parallel_size=2, **RAY)
    call = in_background(lambda: engine.generate(TOWER, **LONG))
    until(lambda: engine._driver.unfinished(), 10, "the call did not start")
    actor = next(p.pid for p in processes.engine_processes(engine.id) if "LabRayWorkerProc" in p.name)
    os.kill(actor, signal.SIGKILL)
    with pytest.raises(EngineDied):
        call()
    one_engine.stop()
    assert owned() == []
    until(lambda: folders() == [], 3, "Ray's folder was left")


def test_a_killed_kernel_takes_ray_with_it(llama_path):
    before = folders()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(llama_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as kernel:
        assert kernel.stdout is not None
        words = until(kernel.stdout.readline, 1).split()
        assert words[0] == "up"
        assert kernel.stdout.readline() == "ran\n"
        assert len(processes.engine_processes(words[1])) >= 6
        kernel.kill()
    until(lambda: not processes.engine_processes(words[1]), 10, "processes outlived their kernel")
    until(lambda: folders() == before, 3, "Ray's folder was left")
    shared_queues.reclaim()


def test_a_kept_engine_has_a_ray_of_its_own_too(one_engine, llama_path, tmp_path):
    one_engine.stop()
    before = folders()
    engine = lab.start(str(llama_path), name="kept", keep=True, **RAY)
    try:
        model = engine.model
        with engine.trace(TOWER, max_tokens=1, temperature=0):
            hidden = model.model.layers[1].output[0].save()
        assert hidden.shape[0] == len(TOWER)
    finally:
        report = lab.stop("kept")
    assert report.left == ()
    until(lambda: folders() == before, 5, "Ray's folder was left")
