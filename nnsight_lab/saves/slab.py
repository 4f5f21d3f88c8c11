"""Shared memory that saved tensors travel through: written by a worker, mapped by the kernel.

nnsight pickles CUDA tensors through two processes at 0.2 GB/s and lands them on the *client's* GPU. A
worker of ours copies them once, into a file that the kernel maps: no pickle, no second copy, no CUDA
context. A pool of such files ("slabs") grows on demand and is reused when the kernel lets go; past its
budget in memory it goes on in files on disk, and past that it refuses, naming what did not fit.

The hard facts: pages are reserved when a slab is made (``posix_fallocate``, or by faulting all of them in
where they are pinned next), for a sparse file in a
full ``/dev/shm`` kills its writer with SIGBUS at the first touch; and the reader unlinks a slab as soon
as it has it mapped, so that nothing is left behind whichever process dies first.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nnsight_lab.wire.extent import ALIGN, Extent

_MIB = 2**20
#: The smallest slab; one large request gets a slab of its own size.
MIN_SLAB = 64 * _MIB
_PREFIX = "nnsight_lab."
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATE_CHUNK = 8 * _MIB


class NoRoom(Exception):
    """The pool's budget, in memory and on disk, does not hold what was asked for."""

    def __init__(self, asked_bytes: int, allowed_bytes: int) -> None:
        super().__init__(f"{asked_bytes} bytes asked, {allowed_bytes} left")
        self.asked_bytes = asked_bytes
        self.allowed_bytes = allowed_bytes


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next multiple of `ALIGN`."""
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


@dataclass
class Place:
    """A directory slabs may be made in, and how many bytes of them."""

    folder: Path
    budget_bytes: int
    used_bytes: int = 0


@dataclass(eq=False)
class _Slab:
    path: Path
    size: int
    place: Place
    memory: mmap.mmap
    tensor: torch.Tensor
    #: Free pieces as (offset, size), by offset; neighbours are merged.
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.free == [(0, self.size)]

    def take(self, nbytes: int) -> int | None:
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                if size == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (offset + nbytes, size - nbytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        index = bisect.bisect(self.free, (offset, nbytes))
        self.free.insert(index, (offset, nbytes))
        merged: list[tuple[int, int]] = []
        for start, size in self.free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self.free = merged


class SlabPool:
    """A worker's slabs.

    Args:
        name: Unique to the engine; part of the file names.
        rank: The worker's rank.
        places: Where slabs may be made, best first: memory, then disk.
        pin: Called with a new slab's tensor, to make it fit for asynchronous copies; None on CPU.
        unpin: Called before a slab is given up.
        warm_bytes: How much idle memory is kept for the next requests.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        places: Sequence[Place],
        *,
        pin: Callable[[torch.Tensor], None] | None = None,
        unpin: Callable[[torch.Tensor], None] | None = None,
        warm_bytes: int = 2**30,
    ) -> None:
        self._name = name
        self._rank = rank
        self._places = list(places)
        self._pin = pin
        self._unpin = unpin
        self._warm_bytes = warm_bytes
        self._slabs: dict[str, _Slab] = {}
        self._made = 0
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        """What all slabs take, used or not."""
        return sum(place.used_bytes for place in self._places)

    @property
    def used_bytes(self) -> int:
        """What the pieces in use take."""
        with self._lock:
            free = sum(size for slab in self._slabs.values() for _, size in slab.free)
            return self.total_bytes - free

    def allocate(self, nbytes: int) -> Extent:
        """Reserve a piece.

        Raises:
            NoRoom: When neither memory nor disk has it.
        """
        wanted = aligned(max(nbytes, 1))
        with self._lock:
            for slab in self._slabs.values():
                offset = slab.take(wanted)
                if offset is not None:
                    return Extent(str(slab.path), slab.size, offset, wanted, self._rank)
            slab = self._grow(wanted)
            offset = slab.take(wanted)
            assert offset is not None
            return Extent(str(slab.path), slab.size, offset, wanted, self._rank)

    def view(self, extent: Extent) -> torch.Tensor:
        """The piece as bytes ``[byte]``, uint8."""
        slab = self._slabs[extent.path]
        return slab.tensor[extent.offset : extent.offset + extent.nbytes]

    def release(self, extents: Sequence[Extent]) -> list[str]:
        """Take pieces back; what is idle beyond the warm bytes returns to the system.

        Returns:
            The files of slabs that were given up: their readers should let go of them too.
        """
        gone = []
        with self._lock:
            for extent in extents:
                slab = self._slabs.get(extent.path)
                if slab is not None:
                    slab.give(extent.offset, extent.nbytes)
            idle = [slab for slab in self._slabs.values() if slab.idle]
            kept = 0
            for slab in sorted(idle, key=lambda slab: slab.place is not self._places[0]):
                if slab.place is self._places[0] and kept + slab.size <= self._warm_bytes:
                    kept += slab.size
                else:
                    self._drop(slab)
                    gone.append(str(slab.path))
        return gone

    def close(self) -> None:
        """Give every slab up; mappings of a reader live on."""
        with self._lock:
            for slab in list(self._slabs.values()):
                self._drop(slab)

    def _grow(self, wanted: int) -> _Slab:
        allowed = 0
        for place in self._places:
            left = place.budget_bytes - place.used_bytes
            allowed = max(allowed, left)
            if left < wanted:
                continue
            for size in dict.fromkeys((min(max(wanted, MIN_SLAB), left), wanted)):
                slab = self._make(place, size)
                if slab is not None:
                    return slab
        raise NoRoom(wanted, allowed)

    def _make(self, place: Place, size: int) -> _Slab | None:
        """A new slab, or None where the file system is full."""
        place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = place.folder / f"{_PREFIX}{self._name}.{os.getpid()}.{self._rank}.{self._made}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        pinned = self._pin is not None and place is self._places[0]
        try:
            if pinned:
                os.ftruncate(descriptor, size)
            else:
                os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            if pinned and not _populate(tensor):
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                return None
            raise
        finally:
            os.close(descriptor)
        self._made += 1
        if self._pin is not None and pinned:
            self._pin(tensor)
        slab = _Slab(path, size, place, memory, tensor, [(0, size)])
        place.used_bytes += size
        self._slabs[str(path)] = slab
        return slab

    def _drop(self, slab: _Slab) -> None:
        del self._slabs[str(slab.path)]
        slab.place.used_bytes -= slab.size
        if self._unpin is not None and slab.place is self._places[0]:
            self._unpin(slab.tensor)
        slab.path.unlink(missing_ok=True)


def _populate(tensor: torch.Tensor) -> bool:
    """Fault a mapping's pages in, on several threads: registering them one by one takes seconds a GB.

    Returns:
        Whether they are all there; False where the system does not know how (Linux before 5.14).

    Raises:
        OSError: There are not so many.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size = tensor.data_ptr(), tensor.numel()

    def fault(offset: int) -> int:
        length = min(_POPULATE_CHUNK, size - offset)
        return ctypes.get_errno() if libc.madvise(start + offset, length, _POPULATE_WRITE) else 0

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        failed = {error for error in threads.map(fault, range(0, size, _POPULATE_CHUNK)) if error}
    if failed - {errno.EINVAL}:
        raise OSError(errno.ENOSPC, "not enough memory for a slab")  # EFAULT: a touch would be a SIGBUS
    return not failed


class SlabReader:
    """The kernel's side: maps slabs, and knows when a piece is no longer looked at.

    Args:
        let_go: Called, from any thread, with a piece whose last tensor is gone.
    """

    def __init__(self, let_go: Callable[[Extent], None]) -> None:
        self._let_go = let_go
        self._mapped: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def open(self, extent: Extent) -> torch.Tensor:
        """The piece as bytes ``[byte]``, uint8; its memory is let go with the last tensor over it.

        Raises:
            FileNotFoundError: When the slab is gone: its worker has ended.
            ValueError: When the piece does not lie in the slab.
        """
        import weakref

        import numpy as np

        memory = self._map(extent)
        if extent.offset < 0 or extent.nbytes <= 0 or extent.offset + extent.nbytes > len(memory):
            raise ValueError(f"piece {extent.offset}+{extent.nbytes} is not in a slab of {len(memory)} bytes")
        piece = np.frombuffer(memory, dtype=np.uint8, count=extent.nbytes, offset=extent.offset)
        # A tensor over an array holds the array; a view of its own, so that it alone is watched.
        watched = piece.view()
        weakref.finalize(watched, self._let_go, extent).atexit = False
        return torch.from_numpy(watched)

    def _map(self, extent: Extent) -> mmap.mmap:
        with self._lock:
            memory = self._mapped.get(extent.path)
            if memory is None:
                name = os.path.basename(extent.path)
                if not name.startswith(_PREFIX):
                    raise ValueError(f"{extent.path} is not a slab")
                descriptor = os.open(extent.path, os.O_RDWR)
                try:
                    if os.fstat(descriptor).st_size != extent.slab_bytes:
                        raise ValueError(f"{extent.path} is not {extent.slab_bytes} bytes long")
                    memory = mmap.mmap(descriptor, extent.slab_bytes)
                finally:
                    os.close(descriptor)
                # Mapped on both sides now: without a name it cannot outlive them.
                os.unlink(extent.path)
                self._mapped[extent.path] = memory
            return memory

    def close(self) -> None:
        """Drop every mapping; living tensors keep theirs."""
        with self._lock:
            self._mapped.clear()

    def forget(self, paths: Sequence[str]) -> None:
        """Drop mappings of slabs their worker gave up; living tensors keep their memory."""
        with self._lock:
            for path in paths:
                self._mapped.pop(path, None)


def sweep(folders: Sequence[Path]) -> list[Path]:
    """Remove slabs whose worker is gone; returns what was removed."""
    removed = []
    for folder in folders:
        for path in folder.glob(f"{_PREFIX}*"):
            parts = path.name.rsplit(".", 3)
            if len(parts) != 4 or not parts[1].isdigit() or path.stat().st_uid != os.getuid():
                continue
            if not os.path.exists(f"/proc/{parts[1]}"):
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed
