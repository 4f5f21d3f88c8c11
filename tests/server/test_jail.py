"""What a block tries beside computing is refused, is its request's own error, and nobody else's."""

from __future__ import annotations

import json
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import nnsight_lab as lab
from nnsight_lab.errors import ServeRefused, TraceError
from nnsight_lab.server.jailing import jailer
from nnsight_lab.worker.jail import program
from tests.server.conftest import TOKENS
from tests.server.test_served import PARIS, TOWER, text_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter is known"),
]

ATTEMPTS = {
    "a program": "import subprocess; subprocess.run(['true'])",
    "a shell": "import os; x = os.system('true'); assert x == 0, PermissionError('no shell')",
    "a fork": "import os; os.fork()",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', 80), timeout=1)",
    "a server": "import socket; socket.socket(socket.AF_UNIX)",
    "the server's environment": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "another's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "a file": "open('/tmp/nnsight-lab-was-here', 'w')",
    "a file of its own": "import os; open(os.path.expanduser('~/was-here'), 'w')",
    "a folder": "import os; os.mkdir('/tmp/nnsight-lab-was-here')",
    "the package's code": "import nnsight_lab; open(nnsight_lab.__file__, 'a')",
    "the end of its parent": "import os; os.kill(os.getppid(), 9)",
    "the end of everybody": "import os; os.kill(-1, 9)",
    "tracing": "import ctypes; x = ctypes.CDLL(None, use_errno=True); y = x.ptrace(16, os.getppid(), 0, 0); "
    "assert y == 0, PermissionError('no tracing')",
    "a mount": "import ctypes; x = ctypes.CDLL(None); y = x.mount(b'x', b'/tmp', b'tmpfs', 0, None); "
    "assert y == 0, PermissionError('no mount')",
}


def tried(engine, code):
    model = engine.model
    with engine.trace(TOWER, max_tokens=1):
        model.model.layers[0].output[0].mean()
        exec(code)


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_block_does_not_get(attach, server, attempt):
    engine = attach()
    files = server.figures()["jail_layers"]["files"].startswith("yes")
    if not files and attempt in ("a file", "a folder", "a file of its own", "the package's code"):
        pytest.skip("this kernel has no Landlock")
    with pytest.raises(TraceError, match=r"PermissionError|Errno 13|Errno 1\b|no shell|no tracing|no mount"):
        tried(engine, "import os\n" + ATTEMPTS[attempt])
    assert not os.path.exists("/tmp/nnsight-lab-was-here")
    assert text_of(attach("bob")) == PARIS


def test_there_is_no_secret_in_a_worker(attach, server):
    engine = attach()
    model = engine.model
    with engine.trace(TOWER, max_tokens=1):
        model.model.layers[0].output[0].mean()
        import os as there

        seen = [*there.environ, *there.environ.values(), Path("/proc/self/environ").read_text()].save()
        who = there.getuid().save()
    text = "\n".join(seen)
    assert "PATH" in text
    for secret in (*TOKENS.values(), "NNSIGHT_LAB_SERVE", "NNSIGHT_LAB_TOKEN", "JUPYTERHUB_API_TOKEN"):
        assert secret not in text
    if server.figures()["jail_layers"]["own user"].startswith("yes"):
        assert who != os.getuid()


def test_the_jail_is_said_where_people_look(attach, server):
    engine = attach()
    figures = server.figures()
    assert (figures["level"], figures["jail"]) == ("team", "auto")
    layers = figures["jail_layers"]
    assert set(layers) == {"own user", "no privileges", "system calls", "files"}
    assert all(re.match(r"yes \(.+\)|no: .+", said) for said in layers.values())
    assert layers["system calls"].startswith("yes")
    rows = dict(engine.status().rows())
    assert rows["level"].startswith("team: users who trust each other")
    assert "system calls: yes (no programs, sockets" in rows["jail"]
    whole = all(said.startswith("yes") for said in layers.values())
    assert engine.shown_options() == (
        ("level", "team"),
        ("jail", "on" if whole else "in part"),
        ("saves are", "mapped"),
    )
    assert "level team (users who trust each other" in server.log.read_text(errors="replace")


def test_large_saves_get_out_of_the_jail(attach):
    engine = attach()
    model = engine.model
    with engine.trace(TOWER, max_tokens=1):
        wide = model.model.layers[0].output[0].float().repeat(1, 800).save()
    assert wide.shape == (9, 576 * 800)
    assert lab.residual(wide).dtype == wide.dtype


@pytest.mark.parametrize("programs", [False, True])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_well_formed_on_every_machine_it_is_known_for(machine, programs):
    found = program(machine, 4321, programs=programs)
    assert len(found) % 8 == 0
    count = len(found) // 8
    assert count < 4096
    lines = [struct.unpack("HBBI", found[at : at + 8]) for at in range(0, len(found), 8)]
    for place, (code, yes, no, _) in enumerate(lines):
        if code & 0x07 == 0x05:
            assert place + 1 + max(yes, no) < count
    assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_a_worker_of_root_becomes_another_user_and_still_ends_with_its_parent(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can")
    code = (
        "import os, sys, pwd, ctypes, json\n"
        "from nnsight_lab.worker import jail\n"
        "layers = jail.enter(65534, ['/dev/shm'])\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)\n"
        "tried = []\n"
        "for what in (lambda: os.setuid(0), lambda: open('/etc/shadow').read(), lambda: os.fork()):\n"
        "    try: what(); tried.append('done')\n"
        "    except OSError as error: tried.append(type(error).__name__)\n"
        "print(json.dumps([layers, os.getresuid(), os.getgroups(), found.value, tried]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    layers, users, groups, signal_of_parent, tries = json.loads(done.stdout)
    assert layers["own user"] == "yes (nobody, 65534)"
    assert (users, groups, signal_of_parent) == ([65534] * 3, [], 9)
    assert tries == ["PermissionError"] * 3


def test_where_programs_are_needed_they_run_in_the_same_jail_with_a_cache_of_their_own(tmp_path):
    stale = tmp_path / "compiled-999999999"
    stale.mkdir()
    code = (
        "import os, subprocess, sys, tempfile, json\n"
        "from nnsight_lab.worker import jail\n"
        "layers = jail.enter(None, [sys.argv[1]], programs=True)\n"
        "heard = {'capture_output': True, 'text': True}\n"
        "said = subprocess.run(['/bin/sh', '-c', 'echo ran; echo no > ' + sys.argv[2]], **heard)\n"
        "inner = 'import socket; socket.socket()'\n"
        "net = subprocess.run([sys.executable, '-S', '-c', inner], **heard)\n"
        "with tempfile.TemporaryDirectory() as made: os.rename(made, made + '.x'); os.mkdir(made)\n"
        "try: os.kill(os.getppid(), 0); killed = 'done'\n"
        "except OSError as error: killed = type(error).__name__\n"
        "cache = os.environ['TRITON_CACHE_DIR']\n"
        "print(json.dumps([layers, said.stdout, net.stderr[-200:], made, cache, killed]))\n"
    )
    outside = tmp_path.parent / "written-from-the-jail"
    own = tmp_path
    done = subprocess.run(
        [sys.executable, "-c", code, str(own), str(outside)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    layers, ran, net, made, cache, killed = json.loads(done.stdout)
    assert layers["system calls"].startswith("yes")
    assert ran == "ran\n"
    assert "PermissionError" in net
    assert killed == "PermissionError"
    assert cache.startswith(str(own / "compiled-"))
    assert made.startswith(cache)
    assert not stale.exists()
    if layers["files"].startswith("yes"):
        assert not outside.exists()


def test_a_jail_that_cannot_be_had_is_not_promised():
    if os.getuid() == 0:
        with pytest.raises(ServeRefused, match="there is no user 'nobody-here'"):
            jailer("nobody-here")
        with pytest.raises(ServeRefused, match="root would be no jail"):
            jailer("root")
        found = jailer(None)
        assert (found.uid is None) == bool(found.why)
    else:
        with pytest.raises(ServeRefused, match="servers that root starts"):
            jailer("nobody")
        assert jailer(None) == (None, "the server is not root's")
