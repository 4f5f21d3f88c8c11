"""An engine whose process is killed: everybody who waits is told at once, and a restart brings it back."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import processes
from nnsight_lab.errors import EngineDied
from tests.waiting import CAT, GREEDY, LONG, TOWER, in_background, owned, pid_of, until


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_killing_a_process_ends_every_wait_and_a_restart_brings_the_edits_back(engine, victim):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[0].output[0].shape[0])
    with engine.edit("quiet") as (_, quiet):
        hidden = model.model.layers[1].output[0].save()
    quiet.switch_off()

    def timed(work):
        with pytest.raises(EngineDied) as raised:
            work()
        return time.monotonic(), raised.value

    def traced():
        with engine.trace(TOWER, **LONG):
            hidden = model.model.layers[0].output[0].save()

    kept = read_hidden(engine)
    assert len(engine._blocks) > 0
    waits = [
        in_background(lambda: timed(lambda: engine.generate([TOWER] * 4, **LONG))),
        in_background(lambda: timed(lambda: asyncio.run(engine.agenerate([CAT] * 4, **LONG)))),
        in_background(lambda: timed(lambda: list(engine.stream(TOWER, **LONG)))),
        in_background(lambda: timed(traced)),
    ]
    until(lambda: engine.request_count() == 10, 10, "the calls did not start")
    left = processes.engine_processes(engine.id)
    os.kill(pid_of(engine, victim), signal.SIGKILL)
    killed = time.monotonic()
    for wait in waits:
        noticed, error = wait()
        assert noticed - killed < 3
        assert "`%engine restart` brings it back with its edits" in str(error)
        assert error.cause
        if victim == "Worker":  # whoever waits, on whichever kind of engine, is told the same
            # vLLM may look at the exit code before the system has told it.
            assert re.match(
                "the worker process VllmWorker-0 (was killed by SIGKILL|ended .*killed)", error.cause
            )
        assert len(str(error).splitlines()) == 1

    assert not engine.alive
    assert engine.status().state == "dead"
    assert repr(engine).endswith(f"{engine.mode}, dead>")
    for call in (lambda: engine.generate(CAT), lambda: engine.trace(CAT), engine.request_count):
        with pytest.raises(EngineDied):
            call()

    again = lab.restart()
    assert again is engine
    assert len(engine._blocks) == 0, "a new engine has none of the blocks that the old one kept"
    assert not {process.pid for process in left} & {process.pid for process in owned()}
    assert [(e.name, e.on, e.version) for e in engine.edits] == [("probe", True, 1), ("quiet", False, 1)]
    (output,) = engine.generate(CAT, **GREEDY)
    assert output.saves["rows"] == [4, 1, 1]
    (output,) = asyncio.run(engine.agenerate(CAT, edits=["quiet"], **GREEDY))
    assert output.saves["hidden"].shape == (4, 128)
    assert torch.equal(read_hidden(engine), kept)


def read_hidden(engine):
    model = engine.model
    with engine.trace(CAT, edits=[], **GREEDY):
        hidden = model.model.layers[0].output[0].save()
    return hidden  # noqa: RET504  (bound when the block ends)


def test_the_engines_processes_are_out_of_reach_of_an_interrupt_and_follow_their_kernel(engine):
    group = os.getpgid(0)
    found = processes.engine_processes(engine.id)
    assert {process.name for process in found} == {"VLLM::EngineCore", "VLLM::Worker"}
    for process in found:
        assert os.getpgid(process.pid) != group
        assert not process.orphaned
        assert process.owner == processes.this_owner()
        assert Path(process.log) == engine.log.path
