"""The operating-system processes of an engine: which they are, and that they are gone.

Every process of an engine inherits two environment variables, the engine's id and its owner (pid
and start time), so that they can be told apart from anybody else's and an orphan can be recognised
after its kernel died. Only processes of this user that carry the mark are ever ended, by pid. Where it
cannot be known whether a kernel lives, it is taken to live.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from nnsight_lab.engine import gpus
from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, MODEL_ENV, OWNER_ENV

_TICK_S = 0.1
#: vLLM names its processes by writing over their arguments and, unless told not to, over as much of the
#: environment as it takes for memory of its own: the mark is in it.
KEEP_MARKS = {"SPT_NOENV": "1"}


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
        started: When the process began, which tells it from a later one of the same pid.
        model: The engine's, as it was asked for; "" where that is not known.
    """

    pid: int
    engine: str
    owner: str
    name: str
    rss_bytes: int
    log: str = ""
    started: float = 0.0
    model: str = ""

    @property
    def orphaned(self) -> bool:
        """Whether its owner is gone."""
        if not self.owner or owner_alive(self.owner):
            return False
        # A clock that was set moves every start time; a parent stays the parent. And in another world of
        # pids than this, as in a container, the owner's pid says nothing here.
        return _sees(self.pid) and not _descends(self.pid, self.owner)


class Ended(NamedTuple):
    """What came of ending an engine.

    Attributes:
        pids: Of the processes that were asked to end.
        left: Of those that did not.
    """

    pids: list[int]
    left: list[int]


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
    marks = {ENGINE_ENV: engine, OWNER_ENV: this_owner(), LOG_ENV: str(log), **KEEP_MARKS, **extra}
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
                    started=process.create_time(),
                    model=environ.get(MODEL_ENV, ""),
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
            processes.append(psutil.Process(pid))
        except psutil.Error:
            continue
    return _end(processes, grace_s)


def end_orphan(engine: str, *, grace_s: float = 5.0) -> Ended:
    """End what is left of an engine whose kernel is gone; nothing where the kernel lives."""
    found = engine_processes(engine)
    return end_found(found, grace_s=grace_s) if all(process.orphaned for process in found) else Ended([], [])


def end_found(found: Iterable[EngineProcess], *, grace_s: float = 5.0) -> Ended:
    """End these processes, and none that has the pid of one of them by now."""
    processes = []
    for known in found:
        try:
            process = psutil.Process(known.pid)
            if process.create_time() == known.started:
                processes.append(process)
        except psutil.Error:
            continue
    return Ended([process.pid for process in processes], _end(processes, grace_s))


def _end(processes: Iterable[psutil.Process], grace_s: float) -> list[int]:
    asked = []
    for process in processes:
        try:
            process.send_signal(signal.SIGTERM)  # which looks again whether it is the same process
            asked.append(process)
        except psutil.Error:
            continue
    alive = _outlast(asked, grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.Error:
            continue
    return [process.pid for process in _outlast(alive, grace_s)]


def _outlast(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run after ``limit_s``. One that ended counts as ended, though nobody took note of it:
    the first process of a container often does not.
    """
    deadline, alive = time.monotonic() + limit_s, processes
    while alive:
        alive = [process for process in psutil.wait_procs(alive, timeout=_TICK_S)[1] if _runs(process)]
        if time.monotonic() > deadline:
            break
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


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


def gpu_bytes(pids: Iterable[int]) -> int:
    """GPU memory those processes hold, as the driver tells; 0 where there is no NVIDIA GPU."""
    wanted = set(pids)
    if not wanted:
        return 0
    return sum(held for pid, held in gpus.bytes_by_pid().items() if pid in wanted)


def user_of(pid: int) -> str:
    """The user a process runs as; "" where it is out of sight, as from within a container."""
    try:
        return str(psutil.Process(pid).username())
    except (psutil.Error, KeyError, OSError):
        return ""


def mark_of(pid: int, name: str) -> str:
    """A part of the mark that a process carries; "" where it carries none.

    Raises:
        OSError: There is no such process, or it is another user's.
    """
    return _environ(pid).get(name, "")


def _sees(pid: int) -> bool:
    """Whether a process lives in the same world of pids as this one."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _descends(pid: int, owner: str) -> bool:
    """Whether the process with the owner's pid started that of ``pid``, or what started it."""
    try:
        return owner.partition(":")[0] in {str(parent.pid) for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return False


def _environ(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes()
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    # vLLM renames its processes by rewriting their command line.
    return str(words[0] if words and words[0].startswith("VLLM") else process.name())
