"""Large saves of a shared engine: fetched in pieces, or mapped by kernels of its own machine and user."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from nnsight_lab.engine import fetching, remote_driver
from nnsight_lab.engine.call import Call
from nnsight_lab.engine.same_host import NextDoor
from nnsight_lab.errors import EngineDied, OverBudget
from nnsight_lab.wire.codec import encode
from nnsight_lab.wire.door import address
from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.serving import CONTENT_TYPE, PREFIX
from tests.server.conftest import TOKENS
from tests.waiting import until

pytestmark = pytest.mark.engine

#: More than a frame takes.
COUNT = 3 * 2**20


@pytest.fixture(params=["mapped", "fetched"])
def road(request, monkeypatch):
    """The two ways in which large saves come."""
    if request.param == "fetched":
        monkeypatch.setattr(remote_driver.NextDoor, "find", lambda name: None)
    return request.param


def nothing_left(server):
    """Wait until nothing waits for anybody and nothing is lent."""

    def left():
        gc.collect()
        figures = server.figures()
        return [figures[name] for name in ("parked", "parked_bytes", "lent", "lent_bytes")] == [0] * 4

    until(left, 20, "nothing waits and nothing is lent")


def large(engine, fill=1, **more):
    """One large value."""
    with engine.trace("One", max_tokens=1, **more):
        engine.model.model.layers[0].output[0].mean()
        big = torch.full((COUNT,), fill, dtype=torch.float32).save()
    return big  # noqa: RET504  # it is there only now


def several_prompts(engine):
    """Each prompt's own values, nested ones among them."""
    model = engine.model
    with engine.trace(["One", "Two two"], max_tokens=1):
        tokens = model.model.layers[0].output[0].shape[0]
        found = {
            "big": torch.arange(COUNT, dtype=torch.int32) + tokens,
            "nested": [torch.ones(5, dtype=torch.bfloat16), ("word", 7)],
            "again": model.model.layers[0].output[0],
        }.save()
    for one, tokens in zip(found, (1, 2), strict=True):
        assert one["big"].dtype == torch.int32
        assert torch.equal(one["big"], torch.arange(COUNT, dtype=torch.int32) + tokens)
        assert torch.equal(one["nested"][0], torch.ones(5, dtype=torch.bfloat16))
        assert one["nested"][1] == ("word", 7)
        assert one["again"].shape == (tokens, 576)


def several_invokes(engine):
    """Each invoke's own names."""
    model = engine.model
    with engine.trace(max_tokens=1) as tracer:
        with tracer.invoke("One"):
            model.model.layers[0].output[0].mean()
            a = torch.full((COUNT,), 1.0).save()
        with tracer.invoke("Two"):
            model.model.layers[0].output[0].mean()
            b = torch.full((COUNT,), 2.0).save()
    assert (a.min(), a.max(), b.min(), b.max()) == (1, 1, 2, 2)


def several_answers(engine):
    """Each answer's own run of an edit."""
    model = engine.model
    with engine.edit("wide") as (_tracer, edit):
        wide = model.model.layers[0].output[0].repeat(1, 2000).save()  # noqa: F841
    answers = engine.generate("One", n=3, max_tokens=1, temperature=0.8, seed=7)[0].outputs
    edit.clear()
    assert len(answers) == 3
    for answer in answers:
        assert answer.saves["wide"].shape == (1, 576 * 2000)
        assert torch.equal(answer.saves["wide"], answers[0].saves["wide"])


def test_large_saves_of_several_answers_and_prompts_come_whole_and_nothing_stays(attach, server, road):
    engine = attach()
    assert (engine._driver._door is not None) == (road == "mapped")
    # Each in a function of its own: a frame that was looked into remembers what its variables were.
    several_prompts(engine)
    several_invokes(engine)
    several_answers(engine)
    until(lambda: server.figures()["lent"] == (7 if road == "mapped" else 0), 5, "the store holds them")
    label = next(one for one in engine.saves.labels() if one.name == "b")
    assert engine.saves.slice(label, slice(5, 7)).tolist() == [2, 2]
    engine.saves.clear()
    nothing_left(server)


def test_what_is_mapped_is_ones_own_to_change_and_comes_anew(attach, server):
    engine, other = attach(), attach()
    big = large(engine)
    big[:] = 5  # in this kernel alone
    again = large(other)
    assert again.min() == again.max() == 1
    assert big.min() == 5
    paths = {path for one in (engine, other) for path in one._driver.home.reader._mapped}
    bob = attach("bob")
    theirs = large(bob, 2)
    assert theirs.max() == 2
    # No slab holds pieces of two users, and no name of one's gets anybody the other's.
    assert not paths & set(bob._driver.home.reader._mapped)
    for path in (*paths, "/etc/passwd", "../x", ""):
        with pytest.raises(EngineDied, match=r"no more|cannot be reached"):
            bob._driver._door.open(Extent(path or "x", 64, 0, 64, 0))
    for one in (engine, other, bob):
        one.saves.clear()
    del big, again, theirs
    nothing_left(server)


def test_what_a_kernel_holds_never_changes_though_its_lease_ended(attach, server):
    engine, other = attach(), attach()
    held = large(engine, 1)  # not one page of it was read yet
    with server.http() as http:
        assert http.delete(f"{PREFIX}/leases/{engine._remote.lease}").status_code == 204
    nothing_left(server)
    for fill in (2, 3):
        assert large(other, fill).min() == fill
        other.saves.clear()
    assert held.min() == held.max() == 1


def test_a_call_that_is_not_heard_out_leaves_nothing_and_what_it_left_is_not_written_again(
    attach, server, road, monkeypatch
):
    engine = attach()
    took = engine._remote._took
    heard = []

    def deaf(call, start, seen):
        heard.append(seen)
        if type(seen).__name__ in ("SavesHere", "Parked"):
            took(call, start, seen)
            raise ConnectionError("on purpose")
        return took(call, start, seen)

    monkeypatch.setattr(engine._remote, "_took", deaf)
    with pytest.raises(ConnectionError):
        large(engine)
    assert ("SavesHere" if road == "mapped" else "Parked") in {type(one).__name__ for one in heard}
    monkeypatch.undo()
    heard.clear()
    nothing_left(server)
    assert large(engine, 2).min() == 2
    engine.saves.clear()
    nothing_left(server)


def test_an_interrupt_ends_a_fetch_between_two_reads(attach, server, monkeypatch):
    monkeypatch.setattr(remote_driver.NextDoor, "find", lambda name: None)
    monkeypatch.setattr(fetching, "_READ_BYTES", 4096)
    engine = attach()
    with engine.edit("wide") as (_tracer, edit):
        engine.model.model.layers[0].output[0].mean()
        big = torch.ones(COUNT).save()  # noqa: F841
    request = engine.request("One", {"max_tokens": 1}, engine.edits.chosen(None))
    call = Call([request])
    brought, call.brought = call.brought, lambda nbytes: (brought(nbytes), call.aborted.set())
    engine.submit(call)
    call.future.result(timeout=60)
    assert 0 <= call.brought_bytes <= 4096 < call.home_bytes
    assert request.saves is None
    edit.clear()
    nothing_left(server)


def test_a_reply_that_this_machine_has_no_memory_for_is_refused_and_let_go(attach, server, monkeypatch):
    monkeypatch.setattr(remote_driver.NextDoor, "find", lambda name: None)
    engine = attach()
    with monkeypatch.context() as patch:
        patch.setattr(fetching.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10**6}))
        with pytest.raises(OverBudget, match=r"The reply has 12\.5\d MB, and this machine has 1 MB free"):
            large(engine)
    nothing_left(server)
    assert large(engine).max() == 1


def test_a_kernel_that_is_killed_leaves_no_memory_behind(server):
    script = f"""
        import sys, torch, nnsight_lab as lab
        from nnsight_lab.engine import remote_driver
        if sys.argv[1] == "parked_bytes":
            remote_driver.NextDoor.find = lambda name: None
            remote_driver.RemoteDriver._fetched = lambda self, call, parked: sys.stdin.read()
        engine = lab.attach({server.url!r})
        with lab.trace("One", max_tokens=1):
            engine.model.model.layers[0].output[0].mean()
            big = torch.ones({COUNT}).save()
        print(float(big.max()), flush=True)
        sys.stdin.read()
    """
    env = {**os.environ, "NNSIGHT_LAB_TOKEN": TOKENS["alice"]}
    words = [sys.executable, "-c", textwrap.dedent(script)]
    names = ("lent_bytes", "parked_bytes")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        kernels = [stack.enter_context(subprocess.Popen([*words, name], env=env, **pipes)) for name in names]
        until(lambda: all(server.figures()[name] >= 4 * COUNT for name in names), 90, "what they asked for")
        for kernel in kernels:
            kernel.send_signal(signal.SIGKILL)
            kernel.wait()
        until(lambda: server.figures()["lent_bytes"] == 0, 10, "nothing is mapped")
        until(lambda: server.figures()["parked_bytes"] == 0, 40, "nothing waits")
    until(lambda: server.figures()["leases"] == 0, 30, "no lease")


def test_nobody_comes_in_without_a_ticket_nor_twice_with_one(attach, server):
    engine = attach()
    name, lease = engine.served.door, engine._remote.lease
    with server.http() as http:
        ticket = http.post(f"{PREFIX}/leases/{lease}/door").json()["ticket"]
    for said in ("", "x", "0" * 32, "é" * 2000, ticket, ticket):  # it is in already
        door = NextDoor.find(name)
        assert door is not None
        assert not door.enter(said)
        door.close()
    with server.http("bob") as http:
        assert http.post(f"{PREFIX}/leases/{lease}/door").status_code == 404
        for pieces in ([5], [Extent("/x", 1, 0, 1, 0), "y"], {"a": 1}):
            answer = http.post(
                f"{PREFIX}/leases/{lease}/pieces",
                content=encode(pieces),
                headers={"Content-Type": CONTENT_TYPE},
            )
            assert answer.status_code == 400
        assert http.get(f"{PREFIX}/leases/{lease}/parked/x?start=0&stop=1").status_code == 404
    assert large(engine).max() == 1


def test_text_that_would_cost_the_server_many_times_its_size_is_refused(attach, server):
    engine = attach()
    text = "x" * 17 * 2**20
    with server.http() as http:
        for path in ("/v1/completions", f"{PREFIX}/look", f"{PREFIX}/leases/{engine._remote.lease}/pieces"):
            assert http.post(path, content=text).status_code == 413
        answer = http.post(f"{PREFIX}/calls", content=encode([text]), headers={"Content-Type": CONTENT_TYPE})
        assert answer.status_code == 400
        assert "claims a header" in answer.text
    assert engine.generate("One", max_tokens=1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_process_of_another_user_gets_nothing(attach, server):
    engine = attach()
    script = (
        "import os, socket\n"
        "os.setuid(1234)\n"
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"one.connect({address(engine.served.door)!r})\n"
        "print(one.recv(100))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "b''", done.stderr


def test_a_door_that_another_user_opened_is_none(monkeypatch):
    name = f"nnsight_lab.test.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        mine.bind(address(name))
        mine.listen()
        door = NextDoor.find(name)
        assert door is not None
        door.close()
        monkeypatch.setattr("nnsight_lab.engine.same_host.peer_uid", lambda connection: os.getuid() + 1)
        assert NextDoor.find(name) is None
    assert NextDoor.find(name) is None
    assert NextDoor.find("") is None
