"""Processes and GPU memory of engines, looked up beside everything else.

Reading the environment of every process of a user, or asking `nvidia-smi`, takes 10 to 500 ms: too long for
the thread that also takes interrupts. So a look is taken by a thread of its own, at most every few seconds
and only when somebody asks, and the answer is the look before.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from nnsight_lab.engine import gpus, processes

_EVERY_S = 4.0
#: A machine without a GPU seldom gets one.
_NO_GPU_S = 15.0


@dataclass(frozen=True)
class Held:
    """What the processes of one engine hold."""

    pids: tuple[int, ...] = ()
    memory_bytes: int = 0
    gpu_bytes: int = 0
    log: str = ""
    orphaned: bool = False


@dataclass(frozen=True)
class Tenant:
    """A process on a GPU.

    Attributes:
        owner: Its user; "" where that may not be seen.
        nbytes: 0 where the driver does not tell.
        engine: The id of the engine of this user that it belongs to; "" where it is none's.
    """

    pid: int
    owner: str
    nbytes: int
    engine: str


@dataclass(frozen=True)
class Device:
    """A GPU and who is on it."""

    gpu: gpus.Gpu
    tenants: tuple[Tenant, ...]


@dataclass(frozen=True)
class Look:
    """One look around.

    Attributes:
        engines: By engine id.
        gpus: How many GPUs this machine has; -1 until that was looked up.
        devices: The same, one by one.
    """

    engines: Mapping[str, Held] = field(default_factory=dict)
    gpus: int = -1
    devices: tuple[Device, ...] = ()


class Surroundings:
    """The latest look, and the thread that takes the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = Look()
        self._looked = 0.0
        self._thread: threading.Thread | None = None
        #: When `nvidia-smi` is worth asking again, by `time.monotonic`.
        self._ask_again = 0.0

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
        pids = {process.pid: engine for engine, found in by_engine.items() for process in found}
        devices: list[Device] = []
        if time.monotonic() >= self._ask_again:
            devices = _devices(pids)
            if not devices:  # none, or a driver that does not answer now
                self._ask_again = time.monotonic() + _NO_GPU_S
        held: dict[str, int] = defaultdict(int)
        for device in devices:
            for tenant in device.tenants:
                held[tenant.engine] += tenant.nbytes
        look = Look(
            {
                engine: Held(
                    pids=tuple(sorted(process.pid for process in found)),
                    memory_bytes=sum(process.rss_bytes for process in found),
                    gpu_bytes=held[engine],
                    log=found[0].log,
                    orphaned=all(process.orphaned for process in found),
                )
                for engine, found in by_engine.items()
            },
            len(devices),
            tuple(devices),
        )
        with self._lock:
            self._latest, self._looked = look, time.monotonic()
        return look

    def forget(self) -> None:
        """What is known is old: processes were started or ended."""
        with self._lock:
            self._looked = 0.0


def _devices(engines: Mapping[int, str]) -> list[Device]:
    return [
        Device(
            gpu,
            tuple(
                Tenant(one.pid, processes.user_of(one.pid), one.used_bytes, engines.get(one.pid, ""))
                for one in gpu.processes
            ),
        )
        for gpu in gpus.look().gpus
    ]
