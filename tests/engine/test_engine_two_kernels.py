"""Kernels of one user side by side, both saving: one is killed in the middle of it, the other goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnsight_lab.engine import homecoming, processes
from nnsight_lab.saves import slab_files
from tests.conftest import ROOT
from tests.waiting import until

SHM = Path("/dev/shm")


class SavingKernel:
    """A process of ``saving_kernel.py``."""

    def __init__(self, model: Path, spill: Path, **options: Any) -> None:
        self.spill = spill
        script = Path(__file__).with_name("saving_kernel.py")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(model), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.id = ""

    def answer(self) -> None:
        """Wait for the answer to the last order."""
        assert self.process.stdout is not None
        word, self.id = self.process.stdout.readline().split()
        assert word in ("ready", "done")

    def tell(self, order: str) -> None:
        """Give an order, and do not wait."""
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)

    def do(self, order: str) -> None:
        """Give an order and wait for its end."""
        self.tell(order)
        self.answer()

    def files(self) -> list[Path]:
        """The slabs of its engine that have a name."""
        return [path for folder in (SHM, self.spill) for path in folder.glob(f"nnsight_lab.{self.id}.*")]

    def kill_in_the_middle(self) -> None:
        """SIGKILL while its worker copies: a slab is made, and the kernel has not mapped it yet."""
        self.tell("keep 150")
        until(self.files, 60, "no slab was made")
        self.process.kill()
        self.process.wait()
        until(lambda: not processes.engine_processes(self.id), 10, "engine processes outlive their kernel")
        # The system takes a moment to tear a large process down, and until then its memory is its own.
        until(lambda: all(slab_files._abandoned(path) for path in self.files()), 10)

    def close(self) -> None:
        """End it; harmless once it is killed."""
        self.process.kill()
        self.process.communicate()
        until(lambda: not processes.engine_processes(self.id), 10)


@pytest.fixture
def kernels(
    one_engine: Any, llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SavingKernel, SavingKernel]]:
    """Two kernels with an engine each: one saves by disk, one through memory."""
    one_engine.stop()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spill = tmp_path / "nnsight_lab" / "spill"
    by_disk = SavingKernel(llama_path, spill, save_budget=0)
    by_memory = SavingKernel(llama_path, spill, spill_budget=0)
    try:
        by_disk.answer()
        by_memory.answer()
        yield by_disk, by_memory
    finally:
        by_disk.close()
        by_memory.close()


@pytest.mark.engine
def test_of_two_saving_kernels_one_is_killed_and_the_other_goes_on(
    kernels: tuple[SavingKernel, SavingKernel],
) -> None:
    by_disk, by_memory = kernels
    for _ in range(3):  # at once, over and over, each checks its own values
        by_disk.tell("save 100")
        by_memory.tell("save 100")
        by_disk.answer()
        by_memory.answer()
    assert by_disk.files() == by_memory.files() == []

    by_disk.kill_in_the_middle()
    by_memory.do("save 100")
    dead = by_memory.id
    by_memory.do("restart")  # its start sweeps
    assert by_disk.files() == []
    assert not [name for name in os.listdir(SHM) if dead in name]
    by_memory.do("save 100")

    by_memory.kill_in_the_middle()
    homecoming.reclaim()  # as the next start does, whoever's it is
    assert by_memory.files() == []
