"""GPUs as the driver tells of them, and a driver that does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnsight_lab.engine import gpus
from nnsight_lab.engine.processes import gpu_bytes

#: What `nvidia-smi` prints for each of the two questions, as on a machine with two GPUs.
CARDS = """\
0, GPU-aa, NVIDIA H200, 41943, 143771, 37
1, GPU-bb, NVIDIA H200, [N/A], 143771, [N/A]
"""
APPS = """\
GPU-aa, 101, 40000
GPU-aa, 102, [N/A]
GPU-bb, 101, 5
"""


class Driver:
    """An `nvidia-smi` of its own on the path."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "nvidia-smi"

    def runs(self, script: str) -> None:
        self._program.write_text(f"#!/bin/sh\n{script}\n")
        self._program.chmod(0o755)

    def answers(self, cards: str, apps: str) -> None:
        self.runs(f"case $1 in --query-gpu=*) printf '%s' '{cards}';; *) printf '%s' '{apps}';; esac")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Driver(tmp_path)


def test_each_gpu_is_told_with_its_processes(driver: Driver) -> None:
    driver.answers(CARDS, APPS)
    first, second = gpus.look().gpus
    assert (first.index, first.name, first.busy) == (0, "NVIDIA H200", 37)
    assert (first.used_bytes, first.total_bytes) == (41943 << 20, 143771 << 20)
    assert first.processes == (gpus.GpuProcess(101, 40000 << 20), gpus.GpuProcess(102, 0))
    # What the driver may not say is not made up.
    assert (second.used_bytes, second.busy) == (0, -1)


def test_the_memory_of_a_process_is_that_on_all_gpus(driver: Driver) -> None:
    driver.answers(CARDS, APPS)
    assert gpus.bytes_by_pid() == {101: 40005 << 20, 102: 0}
    assert gpu_bytes([101, 999]) == 40005 << 20


def test_no_gpu_is_no_trouble(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver.answers("", "")
    assert gpus.look() == gpus.GpuLook()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpus.look() == gpus.GpuLook()
    assert gpus.bytes_by_pid() == {}


def test_a_driver_that_fails_is_said_in_its_words(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.runs("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert gpus.look() == gpus.GpuLook((), "Failed to initialize NVML: Driver/library version mismatch")
    driver.runs("exit 9")
    assert gpus.look().trouble == "nvidia-smi failed (exit code 9)."
    monkeypatch.setattr(gpus, "_LIMIT_S", 0.2)
    driver.runs("exec sleep 5")
    assert "did not answer" in gpus.look().trouble
