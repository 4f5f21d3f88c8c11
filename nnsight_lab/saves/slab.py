"""Shared memory that saved tensors travel through: written by a worker, mapped by the kernel.

nnsight pickles CUDA tensors through two processes at 0.2 GB/s and lands them on the *client's* GPU. A
worker of ours copies them once, into a file that the kernel maps: no pickle, no second copy, no CUDA
context. A pool of such files ("slabs") grows on demand and is reused when the kernel lets go; past its
budget in memory it goes on in files on disk, and past that it refuses, naming what did not fit.

The hard fact: the reader unlinks a slab as soon as it has it mapped, so that nothing is left behind
whichever process dies first. So a slab is gone only when both ends let go: the pool keeps a list of what
it gave up, and the reader asks for it. How the files are made and swept: `slab_files`.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from nnsight_lab.saves import slab_files
from nnsight_lab.wire.extent import Extent, aligned

_MIB = 2**20
#: The smallest slab; one large request gets a slab of its own size.
MIN_SLAB = 64 * _MIB
#: Idle memory up to this stays for the next requests, however long they take to come.
KEEP_BYTES = 2**30
#: Idle memory beyond that stays this long.
IDLE_S = 60.0
_log = logging.getLogger(__name__)


class NoRoom(Exception):
    """The pool's budget, in memory and on disk, does not hold what was asked for."""

    def __init__(self, asked_bytes: int, allowed_bytes: int) -> None:
        super().__init__(f"{asked_bytes} bytes asked, {allowed_bytes} left")
        self.asked_bytes = asked_bytes
        self.allowed_bytes = allowed_bytes


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
    #: Whose pieces alone go in, for a reader maps all of it; "" for those of everybody else.
    share: str
    #: Free pieces as (offset, size), by offset; neighbours are merged.
    free: list[tuple[int, int]] = field(default_factory=list)
    #: Since when nothing of it is in use (`time.monotonic`).
    idle_since: float = 0.0
    #: Whether nothing new may go in: somebody may look at what was there.
    retired: bool = False

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
        if self.idle:
            self.idle_since = time.monotonic()


class SlabPool:
    """A worker's slabs.

    Args:
        name: Unique to the engine; part of the file names.
        rank: The worker's rank.
        places: Where slabs may be made, best first: memory, then disk.
        pin: Called with a new slab's tensor, to make it fit for asynchronous copies; None on CPU.
        unpin: Called before a slab is given up.
        warm_bytes: The most idle memory that is kept at all.
        keep_bytes: How much of it is kept however long it is idle (`KEEP_BYTES`).
        idle_s: How long the rest is kept (`IDLE_S`).

    Attributes:
        made: How many slabs were made.
        made_s: Seconds spent making them.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        places: Sequence[Place],
        *,
        pin: Callable[[torch.Tensor], None] | None = None,
        unpin: Callable[[torch.Tensor], None] | None = None,
        warm_bytes: int = KEEP_BYTES,
        keep_bytes: int | None = None,
        idle_s: float | None = None,
    ) -> None:
        self._name = name
        self._rank = rank
        self._places = list(places)
        self._pin = pin
        self._unpin = unpin
        self._warm_bytes = warm_bytes
        self._keep_bytes = KEEP_BYTES if keep_bytes is None else keep_bytes
        self._idle_s = IDLE_S if idle_s is None else idle_s
        self._slabs: dict[str, _Slab] = {}
        self._gone: list[str] = []
        self._tried = 0
        self._lock = threading.Lock()
        self.made = 0
        self.made_s = 0.0

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

    def figures(self) -> dict[str, Any]:
        """``used_bytes``, ``total_bytes``, ``count`` of slabs now, and ``made``, ``made_s`` over its life."""
        return {
            "used_bytes": self.used_bytes,
            "total_bytes": self.total_bytes,
            "count": len(self._slabs),
            "made": self.made,
            "made_s": self.made_s,
        }

    def allocate(self, nbytes: int, share: str = "") -> Extent:
        """Reserve a piece.

        Args:
            nbytes: Its size.
            share: Whose it is: pieces of two are never in one slab, not even one after the other.

        Raises:
            NoRoom: When neither memory nor disk has it.
        """
        wanted = aligned(max(nbytes, 1))
        allowed = 0
        with self._lock:
            for place in self._places:
                # Into slabs in use first, so that idle ones stay whole and can be given up.
                slabs = [
                    slab
                    for slab in self._slabs.values()
                    if slab.place is place and slab.share == share and not slab.retired
                ]
                for slab in sorted(slabs, key=lambda slab: slab.idle):
                    offset = slab.take(wanted)
                    if offset is not None:
                        return Extent(str(slab.path), slab.size, offset, wanted, self._rank)
                grown = self._grow(place, wanted, share)
                if grown is not None:
                    offset = grown.take(wanted)
                    assert offset is not None
                    return Extent(str(grown.path), grown.size, offset, wanted, self._rank)
                left = place.budget_bytes - place.used_bytes
                room = slab_files.free_bytes(place.folder)
                pieces = max((size for slab in slabs for _, size in slab.free), default=0)
                allowed = max(allowed, pieces, left if room is None else min(left, room))
        # A folder may have room and still not take a file of ours; what was asked was not allowed.
        raise NoRoom(wanted, min(allowed, wanted - 1))

    def view(self, extent: Extent) -> torch.Tensor:
        """The piece as bytes ``[byte]``, uint8."""
        slab = self._slabs[extent.path]
        return slab.tensor[extent.offset : extent.offset + extent.nbytes]

    def release(self, extents: Sequence[Extent]) -> list[str]:
        """Take pieces back; what has been idle for long, or is too much to keep, returns to the system.

        Returns:
            The files of slabs that were given up: their readers should let go of them too.
        """
        with self._lock:
            before = len(self._gone)
            for extent in extents:
                slab = self._slabs.get(extent.path)
                if slab is not None:
                    slab.give(extent.offset, extent.nbytes)
            self._trim()
            return self._gone[before:]

    def retire(self, paths: Sequence[str]) -> None:
        """Give slabs up that a reader may look at for ever: nothing new is written into them.

        Pieces in use are given back as always, and may still be on their way in; the last one takes the slab
        with it.
        """
        with self._lock:
            for path in paths:
                if path in self._slabs:
                    self._slabs[path].retired = True
            self._trim()

    def given_up(self) -> list[str]:
        """The files of all slabs given up since this was last asked."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def close(self) -> None:
        """Give every slab up; mappings of a reader live on."""
        with self._lock:
            for slab in list(self._slabs.values()):
                self._drop(slab)

    def _trim(self) -> None:
        now, memory = time.monotonic(), self._places[0]
        idle = sorted((s for s in self._slabs.values() if s.idle), key=lambda slab: slab.idle_since)
        kept = sum(slab.size for slab in idle if slab.place is memory and not slab.retired)
        for slab in idle:
            if slab.place is not memory or slab.retired:
                self._drop(slab)
            elif kept > self._warm_bytes or (
                kept > self._keep_bytes and now - slab.idle_since >= self._idle_s
            ):
                self._drop(slab)
                kept -= slab.size

    def _grow(self, place: Place, wanted: int, share: str) -> _Slab | None:
        """A new slab, or None where the place has no room for it."""
        left = place.budget_bytes - place.used_bytes
        if left < wanted:
            # Idle slabs are all too small for this one; together they may hold what it needs.
            idle = sorted(
                (slab for slab in self._slabs.values() if slab.idle and slab.place is place),
                key=lambda slab: slab.idle_since,
            )
            if left + sum(slab.size for slab in idle) < wanted:
                return None
            for slab in idle:
                if left < wanted:
                    self._drop(slab)
                    left += slab.size
        # Pieces of a call are mostly alike: a slab that holds a whole number of them has no rest that none
        # fits into. With such rests, memory that would have held a call went by disk, up to a quarter of it.
        fitting = MIN_SLAB // wanted * wanted if wanted > MIN_SLAB // 16 else MIN_SLAB
        for size in dict.fromkeys((min(max(wanted, fitting), left), wanted)):
            made = self._make(place, size, share)
            if made is not None:
                return made
        return None

    def _make(self, place: Place, size: int, share: str) -> _Slab | None:
        """A new slab, or None where the file system has no room or cannot be written to."""
        began = time.perf_counter()
        path = place.folder / f"{slab_files.PREFIX}{self._name}.{os.getpid()}.{self._rank}.{self._tried}"
        self._tried += 1
        pin = self._pin if place is self._places[0] else None
        memory = slab_files.create(path, size, touched=pin is not None)
        if memory is None:
            return None
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if pin is not None:
            try:
                pin(tensor)
            except Exception:  # a limit on locked memory: the next place is not pinned
                _log.exception("a slab of %d bytes could not be pinned", size)
                path.unlink(missing_ok=True)
                return None
        slab = _Slab(path, size, place, memory, tensor, share, [(0, size)], time.monotonic())
        place.used_bytes += size
        self._slabs[str(path)] = slab
        self.made += 1
        self.made_s += time.perf_counter() - began
        return slab

    def _drop(self, slab: _Slab) -> None:
        del self._slabs[str(slab.path)]
        slab.place.used_bytes -= slab.size
        if self._unpin is not None and slab.place is self._places[0]:
            self._unpin(slab.tensor)
        slab.path.unlink(missing_ok=True)
        self._gone.append(str(slab.path))


@dataclass
class _Mapped:
    memory: mmap.mmap
    rank: int
    #: How many of its pieces are looked at.
    pieces: int = 0


_Map = TypeVar("_Map", bound=mmap.mmap)


def open_slab(extent: Extent, kind: type[_Map] = mmap.mmap) -> _Map:  # type: ignore[assignment]
    """The slab that a piece lies in, mapped by its name, which it loses."""
    if not os.path.basename(extent.path).startswith(slab_files.PREFIX):
        raise ValueError(f"{extent.path} is not a slab")
    descriptor = os.open(extent.path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size != extent.slab_bytes:
            raise ValueError(f"{extent.path} is not {extent.slab_bytes} bytes long")
        memory = kind(descriptor, extent.slab_bytes)
    finally:
        os.close(descriptor)
    # Mapped on both sides now: without a name it cannot outlive them.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(extent.path)
    return memory


class SlabReader:
    """The kernel's side: maps slabs, and knows when a piece is no longer looked at.

    Args:
        let_go: Called, from any thread, with a piece whose last tensor is gone.

    Attributes:
        opener: Maps a whole slab.
    """

    def __init__(self, let_go: Callable[[Extent], None]) -> None:
        self._let_go = let_go
        self.opener: Callable[[Extent], mmap.mmap] = open_slab
        self._mapped: dict[str, _Mapped] = {}
        self._lock = threading.Lock()
        #: How many slabs were ever mapped.
        self.opened = 0

    def open(self, extent: Extent) -> torch.Tensor:
        """The piece as bytes ``[byte]``, uint8; its memory is let go with the last tensor over it.

        Raises:
            FileNotFoundError: When the slab is gone: its worker has ended.
            ValueError: When the piece does not lie in the slab.
        """
        import weakref

        import numpy as np

        with self._lock:
            mapped = self._map(extent)
            memory = mapped.memory
            if extent.offset < 0 or extent.nbytes <= 0 or extent.offset + extent.nbytes > len(memory):
                raise ValueError(
                    f"piece {extent.offset}+{extent.nbytes} is not in a slab of {len(memory)} bytes"
                )
            mapped.pieces += 1
        piece = np.frombuffer(memory, dtype=np.uint8, count=extent.nbytes, offset=extent.offset)
        # A tensor over an array holds the array; a view of its own, so that it alone is watched.
        watched = piece.view()
        weakref.finalize(watched, self._let_go, extent).atexit = False
        return torch.from_numpy(watched)

    def _map(self, extent: Extent) -> _Mapped:
        mapped = self._mapped.get(extent.path)
        if mapped is None:
            mapped = self._mapped[extent.path] = _Mapped(self.opener(extent), extent.rank)
            self.opened += 1
        return mapped

    def slab(self, path: str) -> mmap.mmap | None:
        """The whole of a slab that is mapped."""
        mapped = self._mapped.get(path)
        return None if mapped is None else mapped.memory

    def returned(self, extents: Sequence[Extent]) -> None:
        """Count out pieces that were let go of."""
        with self._lock:
            for extent in extents:
                mapped = self._mapped.get(extent.path)
                if mapped is not None:
                    mapped.pieces -= 1

    def idle_bytes(self) -> int:
        """The size of mapped slabs of which nothing is looked at; of the rank that has most."""
        idle: dict[int, int] = {}
        with self._lock:
            for mapped in self._mapped.values():
                if mapped.pieces == 0:
                    idle[mapped.rank] = idle.get(mapped.rank, 0) + len(mapped.memory)
        return max(idle.values(), default=0)

    def close(self) -> None:
        """Drop every mapping; living tensors keep theirs."""
        with self._lock:
            self._mapped.clear()

    def forget(self, paths: Sequence[str]) -> None:
        """Drop mappings of slabs their worker gave up; living tensors keep their memory."""
        with self._lock:
            for path in paths:
                self._mapped.pop(path, None)
