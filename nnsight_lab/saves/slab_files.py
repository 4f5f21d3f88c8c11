"""The files behind slabs: made whole or not at all, signed by their living worker, swept when it is gone.

The hard facts: pages are reserved when a file is made (``posix_fallocate``, or by touching all of them,
which pinned memory needs anyway), for a sparse file in a full ``/dev/shm`` kills its writer with SIGBUS
at the first touch, and vLLM's own queues live in the same ``/dev/shm``, so the last of it is never taken.
A pid does not say whose a file is: it is used again, a zombie has one, and a container with the host's
``/dev/shm`` sees other pids. A lock does: the kernel of the operating system keeps it as long as the
worker's mapping, whatever ends the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PREFIX = "nnsight_lab."
#: What is left free of a file system, for everybody else on it; of a small one a quarter. The queues of
#: one vLLM worker take up to 400 MiB of ``/dev/shm``, reserve none of it, and die with SIGBUS without it.
_RESERVE = 400 * 2**20
#: A file is made and locked within this, or it was left by somebody.
_YOUNG_S = 10.0
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_TOUCHED_AT_ONCE = 8 * 2**20


def free_bytes(folder: Path) -> int | None:
    """What slabs may still take of a folder's file system; None where it does not say."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    if found.f_blocks == 0:  # a tmpfs without a limit
        return None
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return max(0, free - min(_RESERVE, total // 4))


def create(path: Path, size: int, *, touched: bool = False) -> mmap.mmap | None:
    """A new file of ``size`` bytes, all of them reserved, mapped and locked; None where there is no room.

    A folder that is missing, full, read-only or not ours to write in has no room. ``touched`` also puts
    the pages into the mapping, so that they can be pinned at once.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        room = free_bytes(path.parent)
        if room is not None and room < size:
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        with contextlib.suppress(OSError):  # a file system without locks: its pid must do
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # a sweep may hold it, for a moment
        if not touched:
            os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
        # The mapping has a descriptor of its own to the same open file, and with it the lock.
        memory = mmap.mmap(descriptor, size)
        if touched and not _touch(memory):
            os.posix_fallocate(descriptor, 0, size)
        return memory
    except OSError:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)


def _touch(memory: mmap.mmap) -> bool:
    """Fault a mapping's pages in, on several threads: one after another they take seconds a GB.

    Returns:
        Whether they are all there; False where the system does not know how (Linux before 5.14).

    Raises:
        OSError: There are not so many.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)

    def fault(offset: int) -> int:
        length = min(_TOUCHED_AT_ONCE, size - offset)
        return ctypes.get_errno() if libc.madvise(start + offset, length, _POPULATE_WRITE) else 0

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        failed = {error for error in threads.map(fault, range(0, size, _TOUCHED_AT_ONCE)) if error}
    if failed - {errno.EINVAL}:
        raise OSError(errno.ENOSPC, "not enough memory for a slab")  # EFAULT: a touch would be a SIGBUS
    return not failed


def sweep(folders: Sequence[Path]) -> list[Path]:
    """Remove this user's slabs whose worker is gone; returns what was removed."""
    removed = []
    for folder in folders:
        for path in folder.glob(f"{PREFIX}*"):
            # Other kernels make, map and sweep files meanwhile: one that has just gone is no error.
            with contextlib.suppress(OSError):
                if _abandoned(path):
                    path.unlink()
                    removed.append(path)
    return removed


def _runs(pid: str) -> bool:
    """Whether there is such a process; one that only waits to be reaped is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def _abandoned(path: Path) -> bool:
    parts = path.name.rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdigit():
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if os.getuid() not in (found.st_uid, 0):  # root's servers have workers of other users
            return False
        alive = _runs(parts[1])
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return not alive
        return not alive or time.time() - found.st_mtime > _YOUNG_S
    finally:
        os.close(descriptor)
