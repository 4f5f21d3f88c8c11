"""The operating-system processes of an engine: which they are, and that they are gone.

Every process of an engine inherits two environment variables, the engine's id and its owner (pid
and start time), so that they can be told apart from anybody else's and an orphan can be recognised
after its kernel died. Only processes of this user that carry the mark are ever ended, by pid.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, OWNER_ENV


@dataclass(frozen=True)
class EngineProcess:
    """One process of an engine.

    Attributes:
        pid: Its id.
        engine: The id of the engine it belongs to.
        owner: ``"pid:start time"`` of the kernel that started it.
        name: Its command name, such as ``VLLM::EngineCore``.
        rss_bytes: Resident memory.
        log: The engine's log file.
    """

    pid: int
    engine: str
    owner: str
    name: str
    rss_bytes: int
    log: str = ""

    @property
    def orphaned(self) -> bool:
        """Whether its owner is gone."""
        return not owner_alive(self.owner)


def this_owner() -> str:
    """How this process signs the engines it starts."""
    return f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def owner_alive(owner: str) -> bool:
    """Whether the process that signed so is still there."""
    pid, _, started = owner.partition(":")
    try:
        process = psutil.Process(int(pid))
        alive: bool = process.status() != psutil.STATUS_ZOMBIE
        return alive and abs(process.create_time() - float(started)) < 0.1
    except (psutil.Error, ValueError):
        return False


@contextmanager
def marked(engine: str, log: Path, extra: Mapping[str, str]) -> Iterator[None]:
    """Mark every process started within as ``engine``'s; the environment is put back afterwards."""
    marks = {ENGINE_ENV: engine, OWNER_ENV: this_owner(), LOG_ENV: str(log), **extra}
    before = {name: os.environ.get(name) for name in marks}
    os.environ.update(marks)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_processes(engine: str | None = None) -> list[EngineProcess]:
    """The living processes of this user that carry an engine's mark.

    Args:
        engine: Only this engine's.
    """
    found = []
    uid = os.getuid()
    for process in psutil.process_iter(["pid", "uids", "status"]):
        try:
            if process.info["uids"].real != uid or process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            environ = _environ(process.pid)
            mark = environ.get(ENGINE_ENV)
            if mark is None or (engine is not None and mark != engine):
                continue
            if process.pid == os.getpid():
                continue
            found.append(
                EngineProcess(
                    pid=process.pid,
                    engine=mark,
                    owner=environ.get(OWNER_ENV, ""),
                    name=_title(process),
                    rss_bytes=process.memory_info().rss,
                    log=environ.get(LOG_ENV, ""),
                )
            )
        except (psutil.Error, OSError, AttributeError):
            continue
    return found


def leftovers() -> list[EngineProcess]:
    """Processes of engines of this user whose owner is gone."""
    return [process for process in engine_processes() if process.orphaned]


def end(pids: list[int], *, grace_s: float = 5.0) -> list[int]:
    """End processes by pid: SIGTERM, then SIGKILL after ``grace_s``.

    Returns:
        Those that are still there, which is none unless the system refuses.
    """
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            process.send_signal(signal.SIGTERM)
            processes.append(process)
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.Error:
            continue
    _, alive = psutil.wait_procs(alive, timeout=grace_s)
    return [process.pid for process in alive]


def send(engine: str, number: signal.Signals) -> list[int]:
    """Send a signal to the processes of ``engine`` that take it, and to no other: it would end those.

    Returns:
        Their pids.
    """
    sent = []
    for process in engine_processes(engine):
        if takes(process.pid, number):
            try:
                os.kill(process.pid, number)
                sent.append(process.pid)
            except OSError:
                continue
    return sent


def takes(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def wait_gone(engine: str, timeout_s: float) -> list[EngineProcess]:
    """Wait until no process of ``engine`` is left; returns those still there."""
    deadline = time.monotonic() + timeout_s
    while left := engine_processes(engine):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


class GpuApp(NamedTuple):
    """A process that holds memory of a GPU, as the driver tells.

    Attributes:
        gpu: The GPU's UUID.
        nbytes: None where the driver does not tell (a MIG device, a container without the right).
    """

    gpu: str
    pid: int
    nbytes: int | None


class Gpu(NamedTuple):
    """A GPU of this machine.

    Attributes:
        uuid: As the driver names it.
        used_bytes: By every process together, also those that are not told of.
    """

    number: int
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine; none where the driver does not answer."""
    rows = _nvidia("--query-gpu=index,uuid,name,memory.used,memory.total")
    return [
        Gpu(int(row[0]), row[1], row[2], _mib(row[3]) or 0, _mib(row[4]) or 0)
        for row in rows
        if len(row) == 5 and row[0].isdigit()
    ]


def gpu_apps() -> list[GpuApp]:
    """Every process that holds GPU memory, as far as the driver tells."""
    rows = _nvidia("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [GpuApp(row[0], int(row[1]), _mib(row[2])) for row in rows if len(row) == 3 and row[1].isdigit()]


def gpu_bytes(pids: Iterable[int]) -> int:
    """GPU memory those processes hold, as the driver tells; 0 where there is no NVIDIA GPU."""
    wanted = set(pids)
    return sum(app.nbytes or 0 for app in gpu_apps() if app.pid in wanted) if wanted else 0


def _nvidia(query: str) -> list[list[str]]:
    """A table of ``nvidia-smi``, which is asked so that this process needs no CUDA context to know."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def _environ(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    # vLLM renames its processes by rewriting their command line.
    return str(words[0] if words and words[0].startswith("VLLM") else process.name())
