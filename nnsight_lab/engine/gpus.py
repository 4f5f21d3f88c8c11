"""The GPUs of this machine: how full each is, and which processes hold what.

Asked of ``nvidia-smi``, so that the asker needs no CUDA context to know; that takes from a tenth of a second
to some seconds, so it belongs on a thread. The driver names processes by pid, in a container those of the
machine around it, and says no more of them. No GPU is an answer; a driver that fails is another, in words.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field, replace

_LIMIT_S = 5.0
_MIB = 2**20


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU; `used_bytes` is 0 where the driver does not tell."""

    pid: int
    used_bytes: int


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        used_bytes: Of everybody.
        busy: Percent of the last second in which something ran on it; -1 where that is not known.
    """

    index: int
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    busy: int = -1
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuLook:
    """What the driver told.

    Attributes:
        trouble: Why it told nothing though it is there; "" where it did.
    """

    gpus: tuple[Gpu, ...] = field(default=())
    trouble: str = ""


def look() -> GpuLook:
    """Ask now."""
    if shutil.which("nvidia-smi") is None:
        return GpuLook()
    rows, trouble = _ask("--query-gpu=index,uuid,name,memory.used,memory.total,utilization.gpu")
    gpus = [_gpu(row) for row in rows if len(row) == 6 and row[0].isdigit()]
    if trouble or not gpus:
        return GpuLook((), trouble)
    held = _processes()
    return GpuLook(tuple(replace(gpu, processes=tuple(held.get(gpu.uuid, ()))) for gpu in gpus))


def bytes_by_pid() -> dict[int, int]:
    """What each computing process holds, on all GPUs together."""
    held: dict[int, int] = {}
    if shutil.which("nvidia-smi") is not None:
        for processes in _processes().values():
            for process in processes:
                held[process.pid] = held.get(process.pid, 0) + process.used_bytes
    return held


def _processes() -> dict[str, list[GpuProcess]]:
    rows, _ = _ask("--query-compute-apps=gpu_uuid,pid,used_memory")
    held: dict[str, list[GpuProcess]] = {}
    for row in rows:
        if len(row) == 3 and row[1].isdigit():
            held.setdefault(row[0], []).append(GpuProcess(int(row[1]), _bytes(row[2])))
    return held


def _ask(query: str) -> tuple[list[list[str]], str]:
    """Rows of fields; and what is wrong."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_LIMIT_S:.0f} s."
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error.strerror or error}."
    lines = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    if told.returncode != 0:
        said = lines or [line.strip() for line in told.stderr.splitlines() if line.strip()]
        return [], said[0] if said else f"nvidia-smi failed (exit code {told.returncode})."
    return [[part.strip() for part in line.split(",")] for line in lines], ""


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, used, total, busy = row
    return Gpu(int(index), uuid, name, _bytes(used), _bytes(total), int(busy) if busy.isdigit() else -1)


def _bytes(mib: str) -> int:
    # "[N/A]" and "[Insufficient Permissions]" are among the answers.
    return int(mib) * _MIB if mib.isdigit() else 0
