"""Starts: found again, refused by what differs, replaced on request; and failed ones leave nothing."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest

import nnsight_lab as lab
from nnsight_lab.engine import processes
from nnsight_lab.errors import (
    CellUsageError,
    EngineMismatch,
    EngineNotStarted,
    EngineStartFailed,
    ModelNotFound,
)
from tests import models
from tests.waiting import CAT, GREEDY, TOWER, owned


def test_starting_twice_with_one_configuration_is_one_engine(engine, mode, llama_path):
    for asked in (mode, "auto"):
        again = lab.start(str(llama_path), mode=asked, dtype="float32", max_model_len=models.CONTEXT)
        assert again is engine
        assert again.already_running
    assert lab.get_engine() is lab.get_engine("main") is engine
    assert list(lab.engines()) == ["main"]
    assert {process.engine for process in owned()} == {engine.id}


def test_starting_with_another_configuration_is_refused_by_what_differs(engine, mode, llama_path, gpt2_path):
    other = "async" if mode == "sync" else "sync"
    cases = [
        (str(llama_path), mode, {"dtype": "bfloat16"}, "dtype: 'float32' -> 'bfloat16'"),
        (str(llama_path), mode, {"seed": 1}, "seed: 'default' -> 1"),
        (str(llama_path), other, {}, f"mode: '{mode}' -> '{other}'"),
        (str(gpt2_path), mode, {}, f"model: '{llama_path}' -> '{gpt2_path}'"),
    ]
    for model, asked, options, said in cases:
        options = {"dtype": "float32", "max_model_len": models.CONTEXT, **options}
        with pytest.raises(EngineMismatch, match=re.escape(f"({said}).")):
            lab.start(model, mode=asked, **options)
    assert engine.alive


def test_the_status_of_an_engine_says_what_it_is(engine, mode, llama_path):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[0].output[0].save()
    status = engine.status()
    assert (status.state, status.mode, status.device, status.dtype) == ("ready", mode, "cpu", "float32")
    assert status.model == str(llama_path)
    assert status.edits == ("probe (on)",)
    assert len(status.pids) == 2
    assert status.memory_bytes > 2**28
    assert dict(status.options)["max_model_len"] == models.CONTEXT
    assert "ready" in str(status)


def test_a_start_leaves_the_hook_for_uncaught_errors_alone(engine):
    assert "distributed" not in sys.excepthook.__qualname__


def test_an_engine_is_replaced_on_request_and_a_stopped_one_is_gone(one_engine, llama_path):
    first = one_engine.want(llama_path, "sync", dtype="float32", max_model_len=128)
    model = first.model
    with first.edit("probe") as (_, edit):
        hidden = model.model.layers[0].output[0].save()
    before = owned()
    mapped = shared_memory(first.id)
    assert mapped

    phases = []
    second = lab.start(
        str(llama_path),
        mode="async",
        restart=True,
        progress=lambda progress: phases.append(progress.phase),
        dtype="float32",
        max_model_len=256,
    )
    assert second is not first
    assert second.edits["probe"] is edit
    (output,) = second.generate(CAT, **GREEDY)
    assert output.saves["hidden"].shape == (4, 128)
    assert not any(psutil.pid_exists(process.pid) for process in before)
    assert [path for path in mapped if path.exists()] == []
    wanted = ["finding the model", "reading the model's structure", "starting the processes", "ready"]
    assert [phase for phase in dict.fromkeys(phases) if phase in wanted] == wanted, list(
        dict.fromkeys(phases)
    )
    with pytest.raises(EngineNotStarted):
        first.generate(CAT, **GREEDY)

    pids = [process.pid for process in owned()]
    mapped = shared_memory(second.id)
    report = lab.stop()
    assert sorted(report.pids) == sorted(pids)
    assert report.left == ()
    assert report.freed_bytes > 2**28
    assert "2 processes gone" in str(report)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [path for path in mapped if path.exists()] == []
    assert owned() == []
    assert lab.engines() == {}
    assert second.stop().pids == ()
    with pytest.raises(EngineNotStarted, match="%engine start demo"):
        lab.get_engine()
    with pytest.raises(EngineNotStarted):
        second.trace(TOWER)


def shared_memory(engine):
    """The files of shared memory that the processes of an engine have mapped."""
    found = set()
    for process in processes.engine_processes(engine):
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(Path(line[line.index("/dev/shm/") :]))
    return found


@pytest.fixture
def copied(llama_path, tmp_path):
    return Path(shutil.copytree(llama_path, tmp_path / "copied"))


@pytest.fixture
def nothing_started(one_engine):
    """No engine before, and no process of a failed one afterwards."""
    one_engine.stop()
    yield
    assert owned() == []
    assert lab.engines() == {}


def refused(kind, model, said, **options):
    with pytest.raises(kind, match=said) as raised:
        lab.start(str(model), mode="sync", **options)
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value._render_traceback_() == [f"\x1b[31m{kind.__name__}\x1b[0m: {raised.value}"]
    return raised.value


def test_a_model_that_nobody_has_is_refused_by_its_name(nothing_started, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # what a machine without a network sees
    refused(
        ModelNotFound,
        "nobody/no-such-model",
        "'nobody/no-such-model' is not a local folder.*cannot be reached",
    )
    refused(ModelNotFound, "dmeo", "Did you mean 'demo'")


def test_a_start_that_cannot_work_is_refused_before_anything_is_started(nothing_started, copied, tmp_path):
    refused(
        CellUsageError, copied, "'max_model_length' is not.*Did you mean 'max_model_len'", max_model_length=8
    )
    refused(CellUsageError, copied, "worker_cls cannot be set", worker_cls="mine.Worker")
    refused(ModelNotFound, tmp_path / "copid", "There is no model at .*Did you mean 'copied'")
    refused(ModelNotFound, "not a possible name", "neither a local folder nor a possible Hugging Face id")
    refused(ModelNotFound, copied / "config.json", "is a file; give the folder")
    with pytest.raises(CellUsageError, match="mode='fast' is not one of"):
        lab.start(str(copied), mode="fast")
    (copied / "model.safetensors").unlink()
    refused(ModelNotFound, copied, "has a configuration but no weights")
    (copied / "config.json").unlink()
    refused(ModelNotFound, copied, r"has no config\.json")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what vLLM had opened when its start failed
@pytest.mark.parametrize("case", ["no json", "no architecture", "unknown architecture", "bad value"])
def test_a_broken_configuration_is_one_line_with_its_cause(nothing_started, copied, case):
    path = copied / "config.json"
    config = json.loads(path.read_text())
    if case == "no json":
        path.write_text("{ this is no json")
    elif case == "no architecture":
        path.write_text(json.dumps({"hidden_size": 4}))
    elif case == "unknown architecture":
        path.write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    else:
        path.write_text(json.dumps({**config, "num_attention_heads": 5}))
    said = {
        "no json": "not a valid JSON|JSON",
        "no architecture": "model_type",
        "unknown architecture": "NobodysForCausalLM",
        "bad value": "128.*5|5.*128|attention heads",
    }
    error = refused(EngineStartFailed, copied, said[case], dtype="float32")
    assert error.cause
    assert Path(error.log_path).exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_option_value_that_vllm_refuses_is_one_line_with_its_cause(nothing_started, copied):
    refused(EngineStartFailed, copied, "99999", max_model_len=99999, dtype="float32")
    refused(EngineStartFailed, copied, "dtype|float3", dtype="float3")
    refused(EngineStartFailed, copied, "gpu_memory_utilization", gpu_memory_utilization=7.0)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_too_little_memory_is_one_line_with_its_cause(nothing_started, copied, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")
    error = refused(EngineStartFailed, copied, "memory|KV cache", dtype="float32")
    assert "root cause above" not in str(error)
    assert "Engine core initialization failed" not in error.cause


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_weights_are_one_line_with_their_cause_and_a_mended_model_starts(nothing_started, copied):
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    error = refused(EngineStartFailed, copied, "[Ss]afetensor", dtype="float32")
    assert "Engine core initialization failed" not in error.cause
    assert owned() == []
    weights.write_bytes(whole)
    engine = lab.start(str(copied), mode="sync", dtype="float32", max_model_len=128)
    assert len(engine.generate(CAT, **GREEDY)[0].outputs[0].token_ids) == 3
    assert lab.stop().left == ()
