"""What the panel may ask for that needs no engine: judged, refused, and only what is this user's is ended."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nnsight_lab
from nnsight_lab.engine.processes import this_owner
from nnsight_lab.panel.actions import Actions
from nnsight_lab.panel.snapshot import Snapshots
from nnsight_lab.panel.surroundings import Surroundings
from nnsight_lab.wire import panel as wire
from nnsight_lab.wire.keys import ENGINE_ENV, OWNER_ENV
from tests.waiting import until

GONE = f"{2**22 - 1}:1.00"


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> Actions:
    # Other tests of this process may share an engine, which an action here would stop.
    loaded = sys.modules.get("nnsight_lab.engine.manager")
    if loaded is not None:
        monkeypatch.setattr(loaded, "manager", type(loaded.manager)())
    return Actions(Surroundings(), {"wide": 512})


@pytest.fixture
def marked() -> Iterator[Any]:
    """Starts processes that carry an engine's mark."""
    started: list[subprocess.Popen[bytes]] = []

    def start(engine: str, owner: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, ENGINE_ENV: engine, OWNER_ENV: owner}
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
        started.append(process)
        # Until it is that program, it still has this one's environment.
        until(lambda: "sleep" in "".join(psutil.Process(process.pid).cmdline()), 10, "a marked process")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_an_orphan_is_told_and_ended_and_an_engine_with_a_kernel_is_not(
    actions: Actions, marked: Any
) -> None:
    orphan, owned = marked("orphan", GONE), marked("owned", this_owner())
    surroundings = Surroundings()
    surroundings.look()
    told = Snapshots(surroundings).take([]).orphans
    assert [(one.engine, one.pids) for one in told if one.engine in ("orphan", "owned")] == [
        ("orphan", [orphan.pid])
    ]
    for engine in ("owned", "orphan"):
        assert actions.take({wire.ACTION: wire.END_ORPHAN, "engine": engine})["ok"]
    until(lambda: all(a.state != wire.RUNNING for a in actions.latest()), 20, "the end of both actions")
    assert [action.text for action in actions.latest()] == ["0 processes ended.", "1 process ended."]
    until(lambda: orphan.poll() is not None, 10, "the orphan's end")
    assert owned.poll() is None


def test_options_are_read_as_on_a_start_line_with_the_notebooks_own_names(actions: Actions) -> None:
    def check(model: str, options: str = "") -> dict[str, Any]:
        return actions.take({wire.ACTION: wire.CHECK, "model": model, "options": options})

    assert check("demo", "max_model_len=$wide name=second")["ok"]
    assert check("a model with spaces/x", "")["ok"]
    assert check("demo", "--keep mode=async save_budget=1GB idle_minutes=5 enable_lora=True lora_modules=[]")[
        "ok"
    ]
    for options, words in (
        ("max_model_len=", "has no value yet"),
        ("max_model_len=$narrow", "narrow"),
        ("hf_overrides={", "closed"),
        ("x=1 x=2", "x"),
        ("--restart", "button"),
        ("another", "one model"),
    ):
        answer = check("demo", options)
        assert not answer["ok"], options
        assert words in answer["text"]


def test_an_engine_that_others_may_use_is_let_go_of_and_not_stopped(
    actions: Actions, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    for name in ("stop", "detach"):
        monkeypatch.setattr(nnsight_lab, name, lambda engine, name=name: done.append((name, engine)))

    class Fake:
        def __init__(self, name: str, line: str) -> None:
            self.name, self.line = name, line

        def state(self) -> tuple[str, str]:
            return "ready", ""

        def attach_line(self) -> str:
            return self.line

    for fake in (Fake("mine", ""), Fake("kept", "%engine attach kept")):
        monkeypatch.setattr(nnsight_lab, "get_engine", lambda _=None, fake=fake: fake)
        assert actions.take({wire.ACTION: wire.STOP, "engine": fake.name})["ok"]
        until(lambda: all(a.state != wire.RUNNING for a in actions.latest()), 20, "its end")
    assert done == [("stop", "mine"), ("detach", "kept")]


def test_without_an_engine_every_action_is_one_plain_line(actions: Actions) -> None:
    for action in (wire.STOP, wire.RESTART, wire.INTERRUPT, wire.LOG, wire.EDIT_ON, wire.EDIT_CLEAR):
        answer = actions.take({wire.ACTION: action})
        assert not answer["ok"]
        assert answer["text"].startswith("No engine is running")


def test_a_misspelt_option_is_answered_with_the_nearest_before_vllm_is_imported() -> None:
    program = (
        "import sys, nnsight_lab.panel.actions as a, nnsight_lab.panel.surroundings as s\n"
        "actions = a.Actions(s.Surroundings(), {})\n"
        "for options in sys.argv[1:]:\n"
        "    told = actions.take({'action': 'check', 'model': 'demo', 'options': options})\n"
        "    print(told.get('text', 'fine'))\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    asked = [
        "max_model_length=5",
        "save_budget=1GB taps=[]",
        "dtype=bfloat16 mode=sync",
        "mode=fast",
        "worker_cls=x",
    ]
    told = subprocess.run(
        [sys.executable, "-c", program, *asked], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert "Did you mean 'max_model_len'" in lines[0]
    assert lines[1:3] == ["fine", "fine"]
    assert "mode='fast' is not one of" in lines[3]
    assert "worker_cls cannot be set" in lines[4]


def test_the_names_read_from_vllms_source_are_those_it_has() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from nnsight_lab.engine import option_names

    assert option_names._from_source() == {field.name for field in dataclasses.fields(EngineArgs)}


#: As the real one answers: a process of another container's, one whose memory is not told, and noise.
NVIDIA = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "0, GPU-aaa, NVIDIA H200, 20480, 143771, 5"
    echo "1, GPU-bbb, NVIDIA H200, 0, 143771, [N/A]" ;;
--query-compute-apps=*) echo "GPU-aaa, {ours}, 12288"; echo "GPU-aaa, {init}, 4096"
    echo "GPU-aaa, 4190000, [N/A]"; echo "no devices were found" ;;
esac
"""


def test_the_processes_of_each_gpu_are_told_with_their_owners_where_that_may_be_seen(
    marked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = marked("mine", this_owner())
    fake = tmp_path / "nvidia-smi"
    fake.write_text(NVIDIA.format(ours=ours.pid, init=os.getppid()))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    surroundings = Surroundings()
    look = surroundings.look()
    assert look.engines["mine"].gpu_bytes == 12 * 2**30
    told = Snapshots(surroundings).take([])
    assert told.gpus == 2
    first, second = told.devices
    assert (first.index, first.name, first.used_bytes) == (0, "NVIDIA H200", 20 * 2**30)
    me = psutil.Process(ours.pid).username()
    assert [(one.pid, one.owner, one.bytes, one.ours) for one in first.processes] == [
        (ours.pid, me, 12 * 2**30, True),
        (os.getppid(), psutil.Process(os.getppid()).username(), 4 * 2**30, False),
        (4190000, "", -1, False),
    ]
    assert second.processes == []


def test_nvidias_program_that_tells_of_no_gpu_is_not_asked_at_every_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho x >>" + str(tmp_path / "asked") + "\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    surroundings = Surroundings()
    for _ in range(3):
        assert surroundings.look().devices == ()
    assert len((tmp_path / "asked").read_text().splitlines()) <= 2
