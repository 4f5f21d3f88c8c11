"""Processes and GPU memory of engines, looked up beside everything else.

Reading the environment of every process of a user, or asking `nvidia-smi`, takes 10 to 500 ms: too long for
the thread that also takes interrupts. So a look is taken by a thread of its own, at most every few seconds
and only when somebody asks, and the answer is the look before.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from nnsight_lab.engine import processes

_EVERY_S = 4.0
_NVIDIA_S = 5.0


@dataclass(frozen=True)
class Held:
    """What the processes of one engine hold."""

    pids: tuple[int, ...] = ()
    memory_bytes: int = 0
    gpu_bytes: int = 0
    log: str = ""
    orphaned: bool = False


@dataclass(frozen=True)
class Look:
    """One look around.

    Attributes:
        engines: By engine id.
        gpus: How many GPUs this machine has; -1 until that was looked up.
    """

    engines: Mapping[str, Held] = field(default_factory=dict)
    gpus: int = -1


class Surroundings:
    """The latest look, and the thread that takes the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = Look()
        self._looked = 0.0
        self._thread: threading.Thread | None = None
        self._gpus: int | None = None

    def latest(self) -> Look:
        """The latest look; begins another where it is old."""
        with self._lock:
            idle = self._thread is None or not self._thread.is_alive()
            if idle and time.monotonic() - self._looked > _EVERY_S:
                self._thread = threading.Thread(target=self.look, daemon=True, name="nnsight-lab-look")
                self._thread.start()
            return self._latest

    def look(self) -> Look:
        """Take a look now."""
        by_engine: dict[str, list[processes.EngineProcess]] = defaultdict(list)
        for process in processes.engine_processes():
            by_engine[process.engine].append(process)
        if self._gpus is None:
            self._gpus = _gpus()
        look = Look(
            {
                engine: Held(
                    pids=tuple(sorted(process.pid for process in found)),
                    memory_bytes=sum(process.rss_bytes for process in found),
                    gpu_bytes=processes.gpu_bytes(process.pid for process in found) if self._gpus else 0,
                    log=found[0].log,
                    orphaned=all(process.orphaned for process in found),
                )
                for engine, found in by_engine.items()
            },
            self._gpus,
        )
        with self._lock:
            self._latest, self._looked = look, time.monotonic()
        return look

    def forget(self) -> None:
        """What is known is old: processes were started or ended."""
        with self._lock:
            self._looked = 0.0


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        told = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in told.stdout.splitlines())
