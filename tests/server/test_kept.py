"""Kept engines: they outlive the kernel that started them, and nothing outlives them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import httpx
import pytest

import nnsight_lab as lab
from nnsight_lab.engine import keeping, kept, processes
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.manager import check_kept
from nnsight_lab.errors import CellUsageError, EngineDied, EngineMismatch, EngineNotStarted, Interrupted
from nnsight_lab.wire.keys import ENGINE_ENV
from nnsight_lab.wire.serving import LEASE_S, PREFIX
from tests.notebook.kernels import Kernel
from tests.server.lora import tiny_lora
from tests.waiting import interrupt, until

TOWER = "The Eiffel Tower is in the city of"
PARIS = " Paris, France."
GREEDY = {"max_tokens": 4, "temperature": 0}
START = "%engine start demo max_model_len=1024 --keep"
TEXT = f"lab.generate({TOWER!r}, max_tokens=4, temperature=0)[0].outputs[0].text"
MUTE = "%%edit mute\nmodel.model.layers[2].output[1][:] = 0\nhidden = model.model.layers[3].output[0].save()"
TRACE = f"%%trace {TOWER!r}, max_tokens=1, edits=[]\nhidden = model.model.layers[12].output[0].save()"
ATTACH = """import time
began = time.perf_counter()
get_ipython().run_line_magic("engine", "attach")
layers = len(list(engine.model.model.layers))
attach_s = time.perf_counter() - began"""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """A runtime directory that no other test and no engine of whoever runs the tests is in."""
    found = tmp_path_factory.mktemp("run")
    found.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kept.FOLDER_ENV, str(found))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield found
    for left in kept.all_kept():
        kept.end(left)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Makes kernels with the extension loaded."""
    made = []
    version = ".".join(metadata.version("ipykernel").split(".")[:2])

    def make():
        kernel = Kernel(version, tmp_path_factory.mktemp("kernel"))
        made.append(kernel)
        kernel.good("%load_ext nnsight_lab\nimport nnsight_lab as lab")
        return kernel

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture(scope="module")
def outlived(kernels, folder):
    """A kernel that found an engine whose own kernel was killed while it had an edit on; and that engine."""
    first = kernels()
    ready = first.good(START, limit_s=600)
    assert "engine main: demo ready in" in ready.texts[-1]
    assert first.value("'vllm' in __import__('sys').modules") is False
    first.good(MUTE)
    first.good(TRACE)
    norm = first.value("hidden.float().norm().item()")
    assert first.value(TEXT) != PARIS
    (record,) = lab.kept()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not first.alive, 10, "the kernel's end")
    second = kernels()
    second.good(ATTACH)
    second.good(TRACE)
    assert second.value("hidden.float().norm().item()") == norm
    return second, record


def figures(record):
    """The server's books."""
    pipe = httpx.HTTPTransport(uds=record.socket)
    with httpx.Client(transport=pipe, base_url="http://localhost") as http:
        return http.get(f"{PREFIX}/health").raise_for_status().json()


@pytest.mark.engine
def test_a_killed_kernels_engine_is_taken_by_the_next_within_seconds(outlived):
    kernel, record = outlived
    # 3 s is promised, on a machine that does nothing else; tests run on others.
    assert kernel.value("attach_s") < 20
    assert kernel.value("layers") == 30
    assert kernel.value("[edit.name for edit in engine.edits]") == []
    until(lambda: figures(record)["edits"] == 0, LEASE_S + 20, "the dead kernel's edits go with its lease")
    assert kernel.value(TEXT) == PARIS
    assert figures(record)["level"] == "solo"
    assert stat.S_IMODE(os.stat(record.socket).st_mode) == 0o600


@pytest.mark.engine
def test_all_its_processes_carry_its_mark_and_none_a_secret(outlived):
    _, record = outlived
    found = processes.engine_processes(record.engine)
    assert record.pid in [process.pid for process in found]
    assert any("EngineCore" in process.name for process in found)
    assert not any(process.orphaned for process in found)
    assert os.getsid(record.pid) == record.pid  # a session of its own
    environment = Path(f"/proc/{record.pid}/environ").read_bytes()
    assert b"NNSIGHT_LAB_TOKEN" not in environment
    assert b"JUPYTERHUB_API_TOKEN" not in environment


@pytest.mark.engine
def test_two_kernels_of_a_user_have_their_own_edits_under_one_name(outlived):
    kernel, record = outlived
    kernel.good(MUTE)
    other = lab.attach("main", name="other")
    try:
        model = other.model
        with other.edit("mute"):
            hidden = model.model.layers[7].output[0].save()  # noqa: F841
        mine = other.generate(TOWER, **GREEDY)[0]
        assert mine.outputs[0].text == PARIS
        assert kernel.value(TEXT) != PARIS
        theirs = (
            f"lab.generate({TOWER!r}, max_tokens=4, temperature=0)[0].saves['hidden'].float().norm().item()"
        )
        assert kernel.value(theirs) != mine.saves["hidden"].float().norm().item()
        assert len(lab.kept()) == 1
    finally:
        lab.detach("other")
    # The other let go: its edit is gone, and this kernel's is not.
    assert kernel.value(TEXT) != PARIS
    until(lambda: figures(record)["edits"] == 1, 10, "one edit is left")
    kernel.good("%edits clear --all")
    assert kernel.value(TEXT) == PARIS


@pytest.mark.engine
def test_it_is_listed_let_go_of_and_found_again_by_its_start_line(outlived):
    kernel, record = outlived
    kernel.good("%engine detach")
    assert record.alive()
    assert "%engine attach main (demo)" in kernel.run(TRACE).error
    listed = kernel.good("%engine list").texts[-1]
    assert "kept" in listed
    assert "%engine attach main" in listed
    assert "already running with this configuration" in kernel.good(START).texts[-1]
    assert kernel.value("lab.kept()[0].pid") == record.pid
    assert "max_model_len: 1024 -> 512" in kernel.run(START.replace("1024", "512")).error
    assert "keep: True -> False" in kernel.run("%engine start demo max_model_len=1024").error
    assert (
        "no engine called 'mian', but main. Did you mean 'main'?" in kernel.run("%engine attach mian").error
    )
    status = kernel.good("%engine status").texts[-1]
    assert str(record.pid) in status
    assert "keep=True" in status


@pytest.mark.engine
def test_a_death_is_one_line_with_its_cause_and_leaves_nothing(outlived):
    kernel, record = outlived
    found = processes.engine_processes(record.engine)
    core = next(process for process in found if "EngineCore" in process.name)
    os.kill(core.pid, signal.SIGKILL)
    told = kernel.run(f"lab.generate({TOWER!r}, max_tokens=900, ignore_eos=True)")
    assert "Engine 'main' died: a process was ended from outside" in told.error
    assert "Traceback" not in told.error
    until(lambda: not processes.engine_processes(record.engine), 60, "its server ends by itself")
    assert lab.kept() == []
    assert not Path(record.socket).exists()
    assert "died" in kernel.run(TRACE).error


@pytest.mark.engine
def test_a_lora_is_chosen_by_name_and_an_engine_that_nobody_uses_ends_itself(llama_path, tmp_path, folder):
    import openai

    lora = {"name": "noisy", "path": str(tiny_lora(tmp_path / "lora"))}
    engine = lab.start(
        str(llama_path),
        name="short",
        keep=True,
        idle_minutes=0.1,
        max_model_len=256,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        lora_modules=[lora],
    )
    (record,) = lab.kept()
    pipe = httpx.HTTPTransport(uds=record.socket)
    with openai.OpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=httpx.Client(transport=pipe)
    ) as client:
        plain, noisy = [one.id for one in client.models.list()]
        assert noisy == "noisy"
        asked = {"prompt": "cats", "max_tokens": 6, "temperature": 0}
        texts = [client.completions.create(model=one, **asked).choices[0].text for one in (plain, noisy)]
    assert texts[0] != texts[1]
    model, norms = engine.model, []
    for text, more in zip(texts, ({}, {"lora_request": "noisy"}), strict=True):
        with engine.trace("cats", max_tokens=6, temperature=0, **more) as tracer:
            hidden = model.model.layers[2].output[0].save()
        assert tracer.output.outputs[0].text == text
        norms.append(hidden.norm().item())
    assert norms[0] != norms[1]
    with pytest.raises(lab.errors.LabError, match="No LoRA is served as 'nope'"):
        engine.generate("cats", max_tokens=1, lora_request="nope")

    lab.detach("short")
    until(lambda: not processes.engine_processes(record.engine), 60, "it ends when nobody uses it")
    assert not record.alive()
    assert list(folder.glob("*.json")) == list(folder.glob("*.sock")) == []
    assert "no kernel and no request for 0.1 minutes" in Path(record.log).read_text()


def test_an_interrupted_start_leaves_nothing(folder):
    marks = []

    def pressed(state):
        if "process of its own" in state.phase and not marks:
            marks.append(next(one.engine for one in kept.all_kept() if one.name == "never"))
            interrupt()

    with pytest.raises(Interrupted, match="nothing is left running"):
        lab.start("demo", keep=True, name="never", progress=pressed)
    assert lab.kept() == []
    assert lab.engines() == {}
    assert list(folder.glob("*.sock")) == []
    assert len(marks) == 1
    assert processes.engine_processes(marks[0]) == []


# -- without an engine ---------------------------------------------------------------------------


@pytest.fixture
def stands_in(folder):
    """Makes kept engines whose server is a process that waits."""
    made = []

    def make(name, engine=None, **more):
        engine = engine or f"{len(made)}abcdef01234"
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, ENGINE_ENV: engine}
        )
        made.append(process)
        until(lambda: processes.mark_of(process.pid, ENGINE_ENV) == engine, 10)
        record = Kept(
            name,
            engine,
            "demo",
            process.pid,
            0.0,
            str(folder / f"{engine}.sock"),
            "",
            time.time(),
            ready=True,
        )
        record = kept.process_of(record)
        kept.write(record)
        return process, record

    yield make
    for process in made:
        process.kill()
        process.wait()
        process.stdin.close()
    assert kept.all_kept() == []


def test_an_interrupt_ends_ones_own_start_only(stands_in):
    def pressed(_):
        raise KeyboardInterrupt

    process, record = stands_in("another")  # nothing answers there yet
    with pytest.raises(Interrupted, match=r"goes on: %engine attach another takes it when it is up"):
        keeping.wait(record, pressed, threading.Event(), 0.0, mine=False)
    assert process.poll() is None
    with pytest.raises(Interrupted, match="nothing is left running"):
        keeping.wait(record, pressed, threading.Event(), 0.0)
    assert process.wait(10) is not None


def test_of_several_the_user_says_which(stands_in):
    stands_in("one")
    stands_in("two")
    assert [one.name for one in lab.kept()] == ["one", "two"]
    with pytest.raises(
        EngineNotStarted, match=r"You keep 2 engines; say which: %engine attach one \(demo\); "
    ):
        lab.attach()
    with pytest.raises(EngineNotStarted, match="say which"):
        kept.chosen(None)
    assert kept.chosen("two").name == "two"
    with pytest.raises(EngineNotStarted, match="You keep 2"):
        lab.get_engine()


def test_a_record_whose_process_is_gone_goes_with_its_socket(stands_in, folder):
    process, record = stands_in("gone")
    Path(record.socket).touch()
    process.kill()
    process.wait()
    assert lab.kept() == []
    assert list(folder.glob("gone*")) == []
    assert not Path(record.socket).exists()


def test_another_process_with_the_pid_of_a_record_is_neither_believed_nor_ended(stands_in, folder):
    process, record = stands_in("mine")
    other = Kept(**{**vars(record), "name": "other", "engine": "ffffffffffff", "started": 5.0})
    other = Kept(**{**vars(other), "socket": str(folder / "ffffffffffff.sock")})
    kept.write(other)
    assert not other.alive()
    assert kept.end(other).pids == []
    assert process.poll() is None
    assert [one.name for one in lab.kept()] == ["mine"]
    # A clock that was set: the start time is another, the mark is the same.
    moved = Kept(**{**vars(record), "started": record.started + 3600})
    assert moved.alive()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"name": 5}', '{"name": "../x", "pid": 1}', "\x00", "null", '"a"']
)
def test_what_is_no_record_is_no_engine(folder, text):
    path = folder / "odd.json"
    path.write_text(text)
    assert lab.kept() == []
    path.unlink()


def test_a_record_may_not_name_a_socket_elsewhere(stands_in, folder, tmp_path):
    process, record = stands_in("here")
    target = tmp_path / "precious.sock"
    target.touch()
    (folder / "bad.json").write_text(
        json.dumps(
            {**json.loads(kept.text_of(record)), "name": "bad", "pid": 2**22 - 1, "socket": str(target)}
        )
    )
    assert [one.name for one in lab.kept()] == ["here"]
    assert target.exists()
    (folder / "bad.json").unlink()


def test_a_folder_that_others_can_enter_is_refused_and_nothing_in_it_believed(stands_in, folder, monkeypatch):
    stands_in("seen")
    folder.chmod(0o755)
    try:
        assert lab.kept() == []
        with pytest.raises(lab.errors.EngineStartFailed, match="can be entered by others"):
            kept.folder()
    finally:
        folder.chmod(0o700)
    assert [one.name for one in lab.kept()] == ["seen"]


@pytest.mark.parametrize("name", ["", "a b", "../x", "http://x", "unix:/x", "-x", "a" * 65, "ä"])
def test_a_name_that_would_be_no_file_or_an_address_is_refused(name):
    with pytest.raises(CellUsageError, match="cannot be called"):
        check_kept(name, 1)


@pytest.mark.parametrize("minutes", [-1, "4h", True, None])
def test_an_idle_time_is_a_number_of_minutes(minutes):
    with pytest.raises(CellUsageError, match="not a number of minutes"):
        check_kept("main", minutes)


def test_an_engine_of_the_kernels_own_is_not_let_go_of(monkeypatch):
    from nnsight_lab.engine.manager import manager

    monkeypatch.setattr(manager, "_engines", {"own": type("Own", (), {"name": "own"})()})
    with pytest.raises(EngineMismatch, match="this kernel's own, and ends with it"):
        lab.detach("own")


class Ledgers:
    """A ledger's figures, as they are set."""

    def __init__(self):
        self.begun = self.leases = self.requests = 0

    def figures(self):
        return {"leases": self.leases, "requests": self.requests}


def test_the_time_without_anybody_counts_from_the_last_who_was_there(tmp_path):
    from nnsight_lab.server.keeping import Watch

    now, books = [0.0], Ledgers()
    record = Kept("a", "b", "demo", 2, 0.0, str(tmp_path / "b.sock"), "", 0.0, idle_minutes=10)
    Path(record.socket).touch()
    kept.write(record)
    watch = Watch(record, books, clock=lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return watch.over()

    assert after(599) == ""
    books.requests = 1  # silent, and busy for a day
    assert after(86_400) == ""
    books.requests = 0
    assert after(599) == ""
    books.begun = 1  # a request that came and went between two looks
    assert after(500) == ""
    assert after(599) == ""
    books.leases = 1  # an attached kernel that does nothing
    assert after(86_400) == ""
    books.leases = 0
    assert after(599) == ""
    assert after(2) == "no kernel and no request for 10 minutes"
    forever = Watch(Kept(**{**vars(record), "idle_minutes": 0.0}), books, clock=lambda: now[0])
    now[0] += 10**9
    assert forever.over() == ""
    os.unlink(record.socket)
    assert "its socket was removed" in forever.over()


def test_what_died_is_told_apart_from_what_only_followed():
    from nnsight_lab.engine.log import consequence

    assert consequence("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    assert not consequence("ValueError: max_model_len is too large")
    assert issubclass(EngineDied, lab.errors.EngineError)
