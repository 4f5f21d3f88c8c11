"""The shared memory of vLLM's own queues, removed after an engine that was killed with all its helpers.

vLLM's processes talk through files in ``/dev/shm`` with random names (``psm_027edbf3``, 160 to 250 MB each).
Python's resource tracker removes them after a crash, unless it is killed as well, as a container's or a
cluster's out-of-memory killer does. By its name nobody can tell whose such a file is, so which ones an engine
has mapped is written down once it is ready, before any block has run: name and inode. They are removed by a
later start only when the engine's owner and all its processes are gone, the file is still that very inode and
this user's, and no process that can be looked at has it mapped; and only in the same container of the same
boot, since of others' processes nothing is seen. A file that cannot be proven ours stays.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from nnsight_lab.engine import processes
from nnsight_lab.saves.state import state_dir

MEMORY = Path("/dev/shm")
#: How Python names shared memory and semaphores.
_NAMES = ("psm_", "sem.")
#: In the name of what ranks on a CPU exchange tensors through.
_OF_RANKS = "-cpushm_"


def note(engine: str, *, owner: str | None = None) -> Path | None:
    """Write down which files the processes of ``engine`` have mapped.

    Args:
        engine: Its id; it must be ready and not have run a block yet.
        owner: Who signs for it; this process where it is None.

    Returns:
        The record; None where there is nothing to write down.
    """
    found: dict[str, int] = {}
    for process in processes.engine_processes(engine):
        for name in _mapped(process.pid):
            with contextlib.suppress(OSError):
                found[name] = (MEMORY / name).lstat().st_ino
    if not found:
        return None
    record = _folder() / f"{engine}.json"
    told = {"owner": owner or processes.this_owner(), "where": _where(), "files": found}
    record.write_text(json.dumps(told))
    return record


def reclaim_of(engine: str) -> list[Path]:
    """Remove what an engine left whose processes are all gone; mostly vLLM has done it."""
    removed: list[Path] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = _folder() / f"{engine}.json"
        told = json.loads(record.read_text())
        if told["where"] == _where():
            removed = _remove(told["files"])
            record.unlink()
    return removed


def reclaim() -> list[Path]:
    """Remove what engines left that were killed; returns what was removed."""
    removed: list[Path] = []
    try:
        records = list(_folder().glob("*.json"))
    except OSError:
        return removed
    for record in records:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(record.read_text())
            if processes.owner_alive(told["owner"]) or processes.engine_processes(record.stem):
                continue
            removed += reclaim_of(record.stem)
    return removed


def _remove(files: dict[str, int]) -> list[Path]:
    removed = []
    mapped = {name for pid in _pids() for name in _mapped(pid)}
    for name, inode in files.items():
        path = MEMORY / name
        if not _ours(name) or name in mapped:
            continue
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_ino == inode and status.st_uid == os.getuid():
                path.unlink()
                removed.append(path)
    return removed


def _mapped(pid: int) -> set[str]:
    """Names of Python's shared memory that a process has mapped; none of one that may not be looked at."""
    names = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, _, path = line.partition(f"{MEMORY}/")
            if path and not path.endswith("(deleted)") and _ours(path):
                names.add(path)
    return names


def _ours(name: str) -> bool:
    """Whether a name can be one of Python's or of ranks', and is a name in `MEMORY`, not a way out of it."""
    return (name.startswith(_NAMES) or _OF_RANKS in name) and "/" not in name


def _where() -> list[str]:
    """The boot, and the process namespace: what is seen of processes from here is seen from there."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _folder() -> Path:
    folder = state_dir() / "queues"
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder
