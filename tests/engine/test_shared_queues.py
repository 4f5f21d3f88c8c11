"""Shared memory of a killed engine's queues is removed; what cannot be proven to be that stays."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nnsight_lab.engine import processes, shared_queues

MAPS = """
import mmap, os, sys
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
print("up", flush=True)
sys.stdin.read()
"""


class Killed:
    """An engine whose process maps a file, was noted, and was killed."""

    def __init__(self) -> None:
        self.engine = secrets.token_hex(6)
        self.path = shared_queues.MEMORY / f"psm_{secrets.token_hex(4)}"
        self.path.write_bytes(bytes(4096))
        with subprocess.Popen(
            [sys.executable, "-c", MAPS, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, processes.ENGINE_ENV: self.engine},
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            owner = f"{child.pid}:{psutil.Process(child.pid).create_time():.2f}"
            self.record = shared_queues.note(self.engine, owner=owner)
            assert shared_queues.reclaim() == []
            assert self.path.exists(), "it lives"
            child.kill()


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Killed]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    engine = Killed()
    yield engine
    engine.path.unlink(missing_ok=True)


def test_what_a_killed_engine_had_mapped_is_removed_by_the_next_start(killed: Killed) -> None:
    assert shared_queues.reclaim() == [killed.path]
    assert not killed.path.exists()
    assert killed.record is not None
    assert not killed.record.exists()
    assert shared_queues.reclaim() == []


def test_a_file_that_somebody_has_mapped_stays(killed: Killed) -> None:
    descriptor = os.open(killed.path, os.O_RDWR)
    with mmap.mmap(descriptor, 4096):
        assert shared_queues.reclaim() == []
    os.close(descriptor)
    assert killed.path.exists()


def test_another_file_of_the_same_name_stays(killed: Killed) -> None:
    other = killed.path.with_name(f"psm_{secrets.token_hex(4)}")
    other.write_bytes(b"somebody else's")
    other.rename(killed.path)
    assert shared_queues.reclaim() == []
    assert killed.path.read_bytes() == b"somebody else's"


def test_what_another_container_noted_stays(killed: Killed) -> None:
    assert killed.record is not None
    told = json.loads(killed.record.read_text())
    told["where"][1] = "pid:[1]"
    killed.record.write_text(json.dumps(told))
    assert shared_queues.reclaim() == []
    assert killed.path.exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"owner": "1:0", "files": {"../../tmp/x": 3}}'])
def test_a_damaged_record_removes_nothing(killed: Killed, text: str) -> None:
    assert killed.record is not None
    killed.record.write_text(text)
    assert shared_queues.reclaim() == []
    assert killed.path.exists()


def test_a_file_that_was_never_noted_stays(killed: Killed) -> None:
    stranger = shared_queues.MEMORY / f"psm_{secrets.token_hex(4)}"
    stranger.write_bytes(b"1")
    try:
        shared_queues.reclaim()
        assert stranger.exists()
    finally:
        stranger.unlink()
