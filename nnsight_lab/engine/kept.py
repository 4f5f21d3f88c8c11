"""Kept engines of this user: servers in sessions of their own that outlive the kernels which started them.

Each has a record beside its Unix socket, in a folder that only this user can enter: whoever reaches the
socket is taken for its owner. A record says which process serves; what it says is believed as long as that
process lives, known by the mark in its environment or by its start time, since a pid alone may be another's
by now. A record without its process is removed by whoever meets it. Only processes with the record's own mark
are ever ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil

from nnsight_lab.engine import processes
from nnsight_lab.engine.processes import Ended
from nnsight_lab.errors import CellUsageError, EngineNotStarted, EngineStartFailed, nearest
from nnsight_lab.wire.keys import ENGINE_ENV

#: In place of the runtime directory, where that does not suit.
FOLDER_ENV = "NNSIGHT_LAB_RUNTIME_DIR"
#: Minutes without a kernel and without a request, after which a kept engine ends itself: longer than a
#: meeting and a lunch, shorter than a night.
IDLE_MINUTES = 240.0

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: What fits into a socket's address, with its end.
_SOCKET_BYTES = 107
_KINDS: dict[str, Any] = {"str": str, "float": (int, float), "int": int, "bool": bool}


@dataclass(frozen=True)
class Kept:
    """One kept engine.

    Attributes:
        name: What its user calls it.
        engine: The mark of its processes.
        model: As it was asked for.
        pid: Of its server.
        started: When that process began, in seconds since the epoch; 0 where it was not looked at.
        socket: Where it listens.
        log: Its log file.
        since: When the start was asked for, in seconds since the epoch.
        idle_minutes: Without a kernel and a request, until it ends itself; 0 for never.
        ready: Whether its engine is up.
        options: vLLM's, as they were asked for.
    """

    name: str
    engine: str
    model: str
    pid: int
    started: float
    socket: str
    log: str
    since: float
    idle_minutes: float = IDLE_MINUTES
    ready: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """For `nnsight_lab.attach`."""
        return f"unix:{self.socket}"

    @property
    def attach_line(self) -> str:
        """The line that attaches a kernel to it."""
        return f"%engine attach {self.name}"

    def alive(self) -> bool:
        """Whether its server runs."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE or process.uids().real != os.getuid():
                return False
            if self.started and abs(process.create_time() - self.started) < 0.1:
                return True
            # A clock that was set moves every start time; the mark is nobody else's.
            return processes.mark_of(self.pid, ENGINE_ENV) == self.engine
        except (psutil.Error, OSError):
            return False

    def __str__(self) -> str:
        state = "ready" if self.ready else "starting"
        return f"{self.name}: {self.model}, {state}, up since {clock(self.since)} (process {self.pid})"


def clock(seconds: float) -> str:
    """``Mon 14:05``."""
    return time.strftime("%a %H:%M", time.localtime(seconds))


def named_well(name: str) -> bool:
    """Whether a kept engine can be called so; anything else that is attached to is an address."""
    return bool(_NAME.fullmatch(name))


# -- where they are ------------------------------------------------------------------------------


def folder() -> Path:
    """Where new ones are recorded: only this user's, made where it is not there.

    Raises:
        EngineStartFailed: Somebody else could reach what is in it.
    """
    found = _folders()[0]
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartFailed(
            f"A kept engine needs a folder for its socket, and {found} cannot be made ({error.strerror}): "
            f"name another in ${FOLDER_ENV}."
        ) from None
    if not _private(found):
        raise EngineStartFailed(
            f"{found} can be entered by others, and whoever reaches a kept engine's socket is taken for you: "
            f"chmod 700 it, or name another folder in ${FOLDER_ENV}."
        )
    return found


def _folders() -> list[Path]:
    """Where they are looked for: a shell and a service of one user may have different environments."""
    named = os.environ.get(FOLDER_ENV)
    if named:
        return [Path(named)]
    shared = Path(f"/tmp/nnsight_lab-{os.getuid()}")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and len(os.fsencode(runtime)) < _SOCKET_BYTES - 40:
        return [Path(runtime) / "nnsight_lab", shared]
    return [shared]


def _private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def socket_of(engine: str) -> Path:
    """Where an engine's server is to listen.

    Raises:
        EngineStartFailed: The path is longer than a socket's may be.
    """
    path = folder() / f"{engine}.sock"
    if len(os.fsencode(path)) > _SOCKET_BYTES:
        raise EngineStartFailed(f"{path} is too long for a socket: name a shorter folder in ${FOLDER_ENV}.")
    return path


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """Nobody else adds a record meanwhile."""
    with open(folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- records -------------------------------------------------------------------------------------


def all_kept() -> list[Kept]:
    """Those that run, by name; records of those that do not are removed."""
    found: dict[str, Kept] = {}
    for where in _folders():
        if not _private(where):
            continue
        for path in sorted(where.glob("*.json")):
            record = _read(path)
            if record is None:
                continue
            if record.alive():
                found.setdefault(record.name, record)
            else:
                forget(record)
    return [found[name] for name in sorted(found)]


def named(name: str) -> Kept | None:
    """The one that is called so, where there is one."""
    return next((one for one in all_kept() if one.name == name), None)


def chosen(name: str | None) -> Kept:
    """The one of that name, or the only one.

    Raises:
        EngineNotStarted: There is none, or one of several has to be named.
    """
    known = all_kept()
    if not known:
        raise EngineNotStarted(
            "You keep no engine here: %engine start MODEL --keep starts one; one of a server is attached "
            "by its address, %engine attach http://host:8000."
        )
    if name is None and len(known) > 1:
        listed = "; ".join(f"%engine attach {one.name} ({one.model})" for one in known)
        raise EngineNotStarted(f"You keep {len(known)} engines; say which: {listed}.")
    found = known[0] if name is None else next((one for one in known if one.name == name), None)
    if found is None:
        assert name is not None
        names = [one.name for one in known]
        raise EngineNotStarted(
            f"You keep no engine called {name!r}, but {', '.join(names)}.{nearest(name, names)}"
        )
    return found


def none_here() -> str:
    """What to do where this kernel has no engine."""
    lines = [f"{one.attach_line} ({one.model})" for one in all_kept()]
    if not lines:
        return "No engine is running: %engine start demo (or a Hugging Face id or path)."
    count = "one" if len(lines) == 1 else f"{len(lines)}"
    return f"No engine is attached to this kernel. You keep {count}: {'; '.join(lines)}."


def write(record: Kept) -> Path:
    """Write a record, as a whole."""
    path = path_of(record)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text_of(record))
    beside.chmod(0o600)
    beside.replace(path)
    return path


def forget(record: Kept) -> None:
    """Remove a record and its socket; that of a later engine of the name is left alone."""
    path = path_of(record)
    found = _read(path)
    with contextlib.suppress(OSError):
        if found is not None and found.engine == record.engine:
            path.unlink()
    with contextlib.suppress(OSError):
        os.unlink(record.socket)


def path_of(record: Kept) -> Path:
    """Where its record is."""
    return Path(record.socket).with_name(f"{record.name}.json")


def _read(path: Path) -> Kept | None:
    """A record, or None where it is none: whatever is in the folder is not ours to trust."""
    try:
        record = of_text(path.read_text())
    except (OSError, ValueError):
        return None
    # The socket of a record is beside it: nothing else is removed with it.
    if record is None or Path(record.socket) != path.with_name(f"{record.engine}.sock"):
        return None
    return record if path.stem == record.name and record.pid > 1 else None


def of_text(text: str) -> Kept | None:
    """A record as it was written; None where it is none.

    Raises:
        ValueError: It is no JSON.
    """
    told = json.loads(text)
    known = {one.name: str(one.type) for one in fields(Kept)}
    if not isinstance(told, dict) or not all(
        isinstance(told.get(name), _KINDS.get(kind, dict)) for name, kind in known.items()
    ):
        return None
    record = Kept(**{name: told[name] for name in known})
    return record if named_well(record.name) else None


def text_of(record: Kept) -> str:
    """A record as it is written."""
    return json.dumps(asdict(record))


def process_of(record: Kept) -> Kept:
    """The record with its server's start time, which tells it from a later process of that pid."""
    try:
        return replace(record, started=psutil.Process(record.pid).create_time())
    except psutil.Error:
        return record


# -- their end -----------------------------------------------------------------------------------


def end(record: Kept, *, grace_s: float = 10.0) -> Ended:
    """End a kept engine: its server first, which ends what it started; then whatever is left.

    Returns:
        The processes it had, and those that would not end.
    """
    found = processes.engine_processes(record.engine)
    server = [process for process in found if process.pid == record.pid]
    ended = processes.end_found(server, grace_s=grace_s)
    processes.wait_gone(record.engine, timeout_s=5.0)
    rest = processes.end_found(processes.engine_processes(record.engine), grace_s=2.0)
    forget(record)
    return Ended([process.pid for process in found], [*ended.left, *rest.left])


def end_engine(engine: str) -> Ended | None:
    """End the one whose processes carry a mark; None where no kept engine's do.

    Raises:
        CellUsageError: It is not the mark of an engine at all.
    """
    if not engine:
        raise CellUsageError("Which engine is to end was not said.")
    found = next((one for one in all_kept() if one.engine == engine), None)
    return None if found is None else end(found)
