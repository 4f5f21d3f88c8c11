"""The root cause and the phase, from what vLLM's processes write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnsight_lab.engine.log import EngineLog

SAMPLES = Path(__file__).parent / "logs"


def log_of(name):
    return EngineLog(SAMPLES / f"{name}.txt")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        (
            "too_little_memory",
            "ValueError: Available memory on node 0 (18.01/23.34 GiB) on kv cache allocation is less than",
        ),
        (
            "broken_weights",
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header",
        ),
        ("out_of_memory_on_a_gpu", "torch.OutOfMemoryError: CUDA out of memory."),
        ("only_consequences", "RuntimeError: Engine core initialization failed. See root cause above."),
        ("killed_worker_async", "the worker process VLLM::Worker-0 was killed by SIGKILL"),
        ("nothing_wrong", ""),
    ],
)
def test_the_root_cause_is_the_first_exception_that_is_no_consequence(name, cause):
    found = log_of(name).root_cause()
    assert found.startswith(cause) if cause else found == ""


def test_a_process_that_died_is_the_cause_only_where_no_exception_came_before(tmp_path):
    death = "ERROR 11-29 18:00:09 [x.py:1] Worker proc VLLM::Worker-0 died unexpectedly (exit code: {}), so\n"
    path = tmp_path / "some.log"
    for code, said in (
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (3, "ended by itself (exit code 3)"),
    ):
        path.write_text(
            "asyncio.exceptions.CancelledError: cancelled\n" + death.format(code) + "ValueError: x\n"
        )
        assert said in EngineLog(path).root_cause()
    path.write_text(death.format("None"))
    assert "Worker-0 ended unexpectedly (killed" in EngineLog(path).root_cause()
    path.write_text("ValueError: the cause\n" + death.format(1))
    assert EngineLog(path).root_cause() == "ValueError: the cause"
    path.write_text(
        "ERROR 11-29 18:00:09 [x.py:1] Engine core proc EngineCore died unexpectedly, shutting down\n"
    )
    assert EngineLog(path).root_cause().startswith("the engine core process EngineCore ended")


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        (0, None),
        (2, "starting the processes"),
        (3, "loading the weights"),
        (4, "preparing memory"),
        (5, "warming up"),
        (6, "warming up"),
    ],
)
def test_the_phase_follows_the_log(tmp_path, lines, phase):
    text = (SAMPLES / "nothing_wrong.txt").read_text().splitlines(keepends=True)
    path = tmp_path / "some.log"
    path.write_text("".join(text[:lines]))
    assert EngineLog(path).phase() == phase


def test_a_log_is_the_users_alone_and_old_ones_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    logs = [EngineLog.new("a name/with a slash") for _ in range(EngineLog.KEPT + 5)]
    assert len({log.path for log in logs}) == len(logs)
    kept = list(logs[0].path.parent.glob("*.log"))
    assert len(kept) == EngineLog.KEPT + 1
    assert logs[-1].path in kept
    assert os.stat(logs[-1].path).st_mode & 0o777 == 0o600
    assert os.stat(logs[-1].path.parent).st_mode & 0o777 == 0o700
    assert logs[-1].path.name.startswith("a_name_with_a_slash-")


def test_the_tail_is_the_last_lines_and_a_missing_log_is_empty(tmp_path):
    path = tmp_path / "some.log"
    path.write_text("\n".join(map(str, range(100))))
    assert EngineLog(path).tail(3) == "97\n98\n99"
    assert EngineLog(tmp_path / "none.log").tail() == ""
    assert EngineLog(tmp_path / "none.log").root_cause() == ""


def test_logs_that_another_kernel_removes_meanwhile_are_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = EngineLog.new("one")
    glob = Path.glob

    def and_one_that_is_gone(folder, pattern):
        yield from glob(folder, pattern)
        yield folder / "removed.log"

    monkeypatch.setattr(Path, "glob", and_one_that_is_gone)
    second = EngineLog.new("two")
    assert first.path.exists()
    assert second.path.exists()


def test_what_a_start_said_on_its_way_is_no_cause_of_what_happened_later(tmp_path):
    path = tmp_path / "some.log"
    path.write_text("ImportError: an optional part is missing – and that is fine\n")
    log = EngineLog(path)
    assert log.root_cause().startswith("ImportError")
    log.started()
    assert log.root_cause() == ""
    with path.open("a") as out:
        out.write(
            "ERROR 11-29 18:00:09 [x.py:1] Worker proc VLLM::Worker-1 died unexpectedly (exit code: -9), so\n"
        )
    assert "Worker-1 was killed by SIGKILL" in log.root_cause()
    path.unlink()
    assert log.root_cause() == ""
