"""What lives on this machine: this user's engines by their processes, and the GPUs.

Every page that is open asks, so a look serves all who ask within a few seconds; where nobody asks, nothing is
looked at. An engine is known by the mark that its processes carry. Only its own kind of processes is ended:
this user's, with the mark, whose kernel is gone, looked up at that moment and by pid and start time together.
A kept engine needs no kernel, and is ended as one.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from nnsight_lab import __version__
from nnsight_lab.engine import gpus, kept, log, processes
from nnsight_lab.engine.kept import Kept
from nnsight_lab.engine.processes import EngineProcess
from nnsight_lab.errors import LabError
from nnsight_lab.wire import machine as wire

_EVERY_S = 3.0
_LOG_BYTES = 64 * 1024


class Machine:
    """The latest look, and who takes the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: wire.MachineStatus | None = None
        self._looked = float("-inf")

    def status(self, kernels: Mapping[int, str]) -> wire.MachineStatus:
        """Everything, at most a few seconds old.

        Args:
            kernels: The ids of the server's kernels by their pids.
        """
        with self._lock:  # who comes meanwhile waits for the same look
            if self._latest is None or time.monotonic() - self._looked > _EVERY_S:
                self._latest = _look(kernels)
                self._looked = time.monotonic()
            return self._latest

    def end(self, engine: str) -> str:
        """End the processes of an orphan; says how many.

        Raises:
            LookupError: No orphan of this user's is called so.
            LabError: Some would not end.
        """
        ended = processes.end_orphan(engine)
        with self._lock:
            self._looked = float("-inf")
        if ended.left:
            raise LabError(f"Processes {', '.join(map(str, ended.left))} would not end.")
        if not ended.pids:
            raise LookupError(
                "No engine of yours without a kernel has that name: it may have ended meanwhile."
            )
        return f"{len(ended.pids)} process{'' if len(ended.pids) == 1 else 'es'} ended."

    def end_kept(self, engine: str) -> str:
        """End a kept engine, with everything of it; says how many processes.

        Raises:
            LookupError: This user keeps none that is called so.
            LabError: Some would not end.
        """
        ended = kept.end_engine(engine)
        with self._lock:
            self._looked = float("-inf")
        if ended is None:
            raise LookupError("You keep no engine of that name: it may have ended meanwhile.")
        if ended.left:
            raise LabError(f"Processes {', '.join(map(str, ended.left))} would not end.")
        return f"{len(ended.pids)} process{'' if len(ended.pids) == 1 else 'es'} ended."

    def log(self, engine: str) -> str:
        """The end of an engine's log.

        Raises:
            LookupError: There is no such engine, or no log of it that is this user's.
        """
        found = processes.engine_processes(engine) if engine else []
        if not found:
            raise LookupError("No engine of yours has that name: it may have ended meanwhile.")
        text = _tail(found[0].log)
        if text is None:
            raise LookupError("The engine has no log that can be read.")
        return text


def _look(kernels: Mapping[int, str]) -> wire.MachineStatus:
    by_engine: dict[str, list[EngineProcess]] = defaultdict(list)
    for process in processes.engine_processes():
        by_engine[process.engine].append(process)
    records = {record.engine: record for record in kept.all_kept()}
    told = gpus.look()
    on_gpu: dict[int, int] = defaultdict(int)
    for gpu in told.gpus:
        for holder in gpu.processes:
            on_gpu[holder.pid] += holder.used_bytes
    engine_of = {process.pid: process.engine for found in by_engine.values() for process in found}
    return wire.MachineStatus(
        protocol=wire.PROTOCOL,
        version=__version__,
        host=socket.gethostname(),
        user=_user(os.getuid()),
        engines=[
            _engine(engine, found, kernels, on_gpu, records.get(engine))
            for engine, found in sorted(by_engine.items())
        ],
        gpus=[
            wire.MachineGpu(
                index=gpu.index,
                name=gpu.name,
                used_bytes=gpu.used_bytes,
                total_bytes=gpu.total_bytes,
                busy=gpu.busy,
                processes=[
                    wire.MachineGpuProcess(
                        holder.pid,
                        holder.used_bytes,
                        processes.user_of(holder.pid),
                        engine_of.get(holder.pid, ""),
                    )
                    for holder in gpu.processes
                ],
            )
            for gpu in told.gpus
        ],
        gpus_trouble=told.trouble,
    )


def _engine(
    engine: str,
    found: Sequence[EngineProcess],
    kernels: Mapping[int, str],
    on_gpu: Mapping[int, int],
    record: Kept | None,
) -> wire.MachineEngine:
    # The server of a kept engine has no owner, and owns the others.
    owner = next((process.owner for process in found if process.owner), "").partition(":")[0]
    owner_pid = int(owner) if owner.isdigit() else 0
    orphaned = all(process.orphaned for process in found)
    return wire.MachineEngine(
        engine=engine,
        kind=wire.KEPT if record is not None else wire.ORPHAN if orphaned else wire.KERNEL,
        name=log.engine_name(found[0].log) if record is None else record.name,
        model=found[0].model if record is None else record.model,
        owner_pid=owner_pid,
        # Another process may have the pid of a kernel that is gone.
        kernel_id="" if orphaned else kernels.get(owner_pid, ""),
        pids=sorted(process.pid for process in found),
        memory_bytes=sum(process.rss_bytes for process in found),
        gpu_bytes=sum(on_gpu.get(process.pid, 0) for process in found),
        age_s=max(0.0, time.time() - min(process.started for process in found)),
        log=found[0].log,
        attach=record.attach_line if record is not None and record.ready else "",
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's user may have no name
        return str(uid)


def _tail(path: str) -> str | None:
    """The end of a log; None where that is no plain file of this user's."""
    if not os.path.isabs(path) or not path.endswith(".log"):
        return None
    try:
        # Neither followed nor waited for: it may have been replaced by a link or a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return None
        begin = max(0, found.st_size - _LOG_BYTES)
        file.seek(begin)
        lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
    return "\n".join(lines[1:] if begin else lines)  # the first of a piece is torn
