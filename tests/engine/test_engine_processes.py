"""The processes of engines: recognised by their mark, ended by pid, orphans told apart."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import psutil
import pytest

from nnsight_lab.engine import processes
from nnsight_lab.wire.keys import STOP_SIGNAL
from nnsight_lab.worker import process as worker_process
from tests.waiting import CAT, GREEDY, pid_of, until


@pytest.fixture
def spawn():
    """Starts a process that waits for ever, with an environment of its own; ended afterwards."""
    started = []

    def start(code="import sys; print('up', flush=True); sys.stdin.read()", **environment):
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(child)
        assert child.stdout.readline() == "up\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def marks(engine, owner=None):
    return {
        processes.ENGINE_ENV: engine,
        processes.OWNER_ENV: owner or processes.this_owner(),
        processes.LOG_ENV: "some.log",
    }


@pytest.fixture
def dead_owner():
    """The signature of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = f"{child.pid}:{psutil.Process(child.pid).create_time():.2f}"
        child.communicate(b"\n")
    return owner


def test_the_marks_are_the_ones_the_workers_read():
    for name in ("ENGINE_ENV", "OWNER_ENV", "LOG_ENV"):
        assert getattr(processes, name) == getattr(worker_process, name)


def test_an_engines_processes_are_found_by_their_mark(spawn):
    child = spawn(**marks("test-engine-1"))
    spawn(**marks("test-engine-2"))
    (found,) = processes.engine_processes("test-engine-1")
    assert (found.pid, found.engine, found.log) == (child.pid, "test-engine-1", "some.log")
    assert found.owner == processes.this_owner()
    assert found.rss_bytes > 0
    assert not found.orphaned
    assert {p.engine for p in processes.engine_processes()} >= {"test-engine-1", "test-engine-2"}


def test_a_process_whose_owner_is_gone_is_a_leftover(spawn, dead_owner):
    orphan = spawn(**marks("test-engine-1", dead_owner))
    spawn(**marks("test-engine-2"))
    mine = {"test-engine-1", "test-engine-2"}
    assert [p.pid for p in processes.leftovers() if p.engine in mine] == [orphan.pid]
    assert processes.end([orphan.pid]) == []
    assert [p for p in processes.leftovers() if p.engine in mine] == []


def test_an_owner_whose_pid_was_given_away_is_gone(spawn):
    other = spawn()
    started = psutil.Process(other.pid).create_time() - 60
    child = spawn(**marks("test-engine-1", f"{other.pid}:{started:.2f}"))
    assert child.pid in [p.pid for p in processes.leftovers()]


def test_an_owner_whose_start_time_moved_with_the_clock_lives_as_long_as_its_child(spawn):
    pid, _, started = processes.this_owner().partition(":")
    spawn(**marks("test-engine-1", f"{pid}:{float(started) - 60:.2f}"))
    assert [p.orphaned for p in processes.engine_processes("test-engine-1")] == [False]
    assert processes.end_orphan("test-engine-1") == ([], [])


def test_a_process_in_another_world_of_pids_is_no_leftover(spawn, dead_owner, monkeypatch):
    orphan = spawn(**marks("test-engine-1", dead_owner))
    real = os.readlink
    elsewhere = f"/proc/{orphan.pid}/ns/pid"
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if path == elsewhere else real(path))
    assert processes.end_orphan("test-engine-1") == ([], [])
    assert orphan.poll() is None


def test_a_process_without_an_owner_is_no_leftover(spawn):
    child = spawn(**{processes.ENGINE_ENV: "test-engine-1", processes.OWNER_ENV: ""})
    assert child.pid not in [p.pid for p in processes.leftovers()]


def test_a_pid_that_was_given_away_meanwhile_is_not_ended(spawn, dead_owner):
    orphan = spawn(**marks("test-engine-1", dead_owner))
    (found,) = processes.engine_processes("test-engine-1")
    before = dataclasses.replace(found, started=found.started - 1)
    assert processes.end_found([before]) == ([], [])
    assert orphan.poll() is None
    assert processes.end_found([found]) == ([orphan.pid], [])


def test_a_process_that_ignores_sigterm_is_killed(spawn):
    stubborn = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
        "sys.stdin.read()"
    )
    child = spawn(stubborn)
    assert processes.end([child.pid], grace_s=0.3) == []
    assert not psutil.pid_exists(child.pid)


def test_a_process_that_ended_counts_as_ended_though_its_parent_takes_no_note(spawn):
    parent = spawn(
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600'])\n"
        "print('up', flush=True); print(child.pid, flush=True); sys.stdin.read()"
    )
    pid = int(parent.stdout.readline())
    began = time.monotonic()
    assert processes.end([pid]) == []
    assert time.monotonic() - began < 4
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ending_a_process_that_is_gone_is_harmless(spawn):
    child = spawn()
    child.kill()
    child.wait()
    assert processes.end([child.pid]) == []


def test_waiting_until_an_engine_is_gone_names_who_is_left(spawn):
    child = spawn(**marks("test-engine-1"))
    assert [p.pid for p in processes.wait_gone("test-engine-1", 0.2)] == [child.pid]
    child.kill()
    child.wait()
    assert processes.wait_gone("test-engine-1", 5) == []


def test_the_mark_is_in_the_environment_only_while_a_start_lasts(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "before")
    with processes.marked("test-engine-1", tmp_path / "log", {"OTHER": "within"}):
        assert os.environ[processes.ENGINE_ENV] == "test-engine-1"
        assert os.environ["OTHER"] == "within"
    assert processes.ENGINE_ENV not in os.environ
    assert os.environ["OTHER"] == "before"


def test_an_engine_process_follows_the_death_of_its_parent(spawn, tmp_path):
    """The plugin, in a real grandchild: its parent is killed, and it ends too."""
    child = (
        "import multiprocessing as mp, sys, os\n"
        "def work(pipe):\n"
        "    from nnsight_lab.worker.process import plugin\n"
        "    plugin()\n"
        "    pipe.send((os.getpid(), os.getpgid(0)))\n"
        "    pipe.recv()\n"
        "if __name__ == '__main__':\n"
        "    here, there = mp.Pipe()\n"
        "    process = mp.get_context('fork').Process(target=work, args=(there,))\n"
        "    process.start()\n"
        "    pid, group = here.recv()\n"
        "    print('up', flush=True)\n"
        "    print(pid, group, os.getpgid(0), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = spawn(child, **{**marks("test-engine-1"), processes.LOG_ENV: str(tmp_path / "log")})
    pid, group, parents_group = map(int, parent.stdout.readline().split())
    assert group == pid != parents_group
    parent.kill()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 5)


def test_the_plugin_leaves_other_processes_of_vllm_alone(spawn):
    code = (
        "import os\nfrom nnsight_lab.worker.process import plugin\n"
        "before = os.getpgid(0)\nplugin()\nassert os.getpgid(0) == before\nprint('up', flush=True)\ninput()\n"
    )
    spawn(code)
    spawn(code, **marks("test-engine-1"))  # marked, and yet no child of vLLM's


def test_a_signal_reaches_only_processes_that_take_it(engine):
    sent = processes.send(engine.id, STOP_SIGNAL)
    assert sent == [pid_of(engine, "Worker")]  # the others would be ended by it
    assert engine.generate(CAT, **GREEDY)[0].finished
    assert engine.alive
