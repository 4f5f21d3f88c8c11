"""The kernel's end of the way home: saves mapped where the worker left them, and given back.

Tensors are views of shared memory until the user lets go of them; a piece is given back to its
worker a moment later, so that the next request can use it. Finalizers run anywhere, in the middle
of anything, so all they do is append to a queue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch

from nnsight_lab.saves import slab
from nnsight_lab.saves.budget import size_of
from nnsight_lab.saves.slab import SlabReader
from nnsight_lab.saves.slab_files import PREFIX, sweep
from nnsight_lab.saves.spill import sweep_spills
from nnsight_lab.wire.codec import encode
from nnsight_lab.wire.extent import Extent, Packed
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.many import ManySaves
from nnsight_lab.wire.packed import Form

_MEMORY = Path("/dev/shm")
_TICK_S = 0.25
#: How long after pieces went back by the way the workers are asked which files they gave up.
_TELL_S = 1.0


def settings(engine_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """How the workers of an engine bring saves home.

    Args:
        engine_id: Names the slabs.
        options: ``save_budget`` bounds shared memory (a quarter of what is free by default),
            ``spill_budget`` what goes on to disk past that (half of what is free, at most 64 GiB).
    """
    memory = min(_free(_MEMORY) // 2, psutil.virtual_memory().available // 4)
    if "save_budget" in options:
        memory = size_of(options["save_budget"], name="save_budget")
    folder = spill_folder()
    spill = min(_free(folder) // 2, 64 * 2**30)
    if "spill_budget" in options:
        spill = size_of(options["spill_budget"], name="spill_budget")
    return {
        "name": engine_id,
        "memory_dir": str(_MEMORY),
        "memory_bytes": memory,
        "spill_dir": str(folder),
        "spill_bytes": spill,
    }


def _free(folder: Path) -> int:
    """What is free where slabs can be made; 0 where they cannot."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return 0
    return shutil.disk_usage(folder).free


def spill_folder() -> Path:
    """Where slabs go past the memory budget: ``$XDG_CACHE_HOME/nnsight_lab/spill``.

    A home that cannot be written to has none: then nothing is spilled, and no engine fails for it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "nnsight_lab" / "spill"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def reclaim() -> list[Path]:
    """Remove what is left of processes that are gone: slabs in memory and on disk, and spilled saves."""
    return [*sweep([_MEMORY, spill_folder()]), *sweep_spills()]


class Parcel:
    """A packed value whose memory was opened once, so that it can be rebuilt as often as asked.

    Args:
        form: How it lies.
        memory: Where, bytes ``[byte]``, uint8.
        extent: The piece of memory that is given back when nobody looks at it; None where others share it.
        names: What it saved, by name.
        start: Where in ``memory`` it begins.
        nbytes: What it takes of that.
    """

    __slots__ = ("_extent", "_form", "_memory", "_start", "names", "nbytes")

    def __init__(
        self,
        form: Form,
        memory: torch.Tensor,
        extent: Extent | None,
        names: Collection[str],
        start: int,
        nbytes: int,
    ) -> None:
        self._form = form
        self._memory = memory
        self._extent = extent
        self.names = names
        self._start = start
        self.nbytes = nbytes

    @property
    def pieces(self) -> Mapping[Extent, torch.Tensor]:
        """The pieces of memory that are its own."""
        return {} if self._extent is None else {self._extent: self._memory}

    def value(self) -> Any:
        """The value, anew: other containers each time, tensors over the same memory."""
        return self._form.over(self._memory[self._start : self._start + self.nbytes])


#: By sequence and block what came through shared memory, of the earliest rank first.
Parcels: TypeAlias = dict[tuple[int, str], tuple[Parcel, ...]]


class Room(NamedTuple):
    """What is left for saves.

    Attributes:
        memory_bytes: In shared memory.
        spill_bytes: On disk past that.
    """

    memory_bytes: int
    spill_bytes: int


def remove(engine_id: str) -> None:
    """Remove the slabs of an engine that has ended, whether or not its workers are wholly gone yet."""
    for folder in (_MEMORY, spill_folder()):
        for path in folder.glob(f"{PREFIX}{engine_id}.*"):
            with contextlib.suppress(OSError):
                path.unlink()


class Homecoming:
    """Opens what the workers packed, and tells them what nobody looks at any more.

    Args:
        release: Sends pieces back to the workers; returns the files they gave up, or None when it
            could not be sent now.

    Attributes:
        limits: The engine's `settings`, once it is started.
        opened_bytes: What was ever opened.
    """

    def __init__(self, release: Callable[[bytes], list[str] | None]) -> None:
        self.limits: Mapping[str, Any] | None = None
        self.opened_bytes = 0
        self._release = release
        self._lock = threading.Lock()
        #: Bytes of the pieces somebody looks at, in memory and on disk.
        self._in_memory = self._on_disk = 0
        self._let_go: deque[Extent] = deque()
        #: Let go and counted, not given back yet.
        self._going: deque[Extent] = deque()
        self._reader = SlabReader(self._let_go.append)
        #: Slabs mapped and pieces sent when the workers last said which files they gave up.
        self._asked: tuple[int, int] = (0, 0)
        self._sent = 0
        self._asked_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nnsight-lab-saves")
        self._thread.start()

    @property
    def reader(self) -> SlabReader:
        """What maps slabs."""
        return self._reader

    def open(self, packed: Packed) -> tuple[Parcel, dict[str, Any]]:
        """A packed value, and it for the caller; its tensors are views of the worker's memory."""
        form, extent = Form.read(packed.tree, packed.tensors), packed.extent
        memory = self._open(extent) if form.specs else torch.empty(0, dtype=torch.uint8)
        value: dict[str, Any] = form.over(memory)
        own = extent if form.specs else None
        return Parcel(form, memory, own, tuple(value), 0, memory.numel()), value

    def open_many(self, many: ManySaves) -> list[Parcel]:
        """The same of each of many requests; the first one's is looked at, and the others are like it.

        Raises:
            WireError: The message is malformed, or points outside its memory.
        """
        form = Form.read(many.tree, many.tensors)
        extent, nbytes = many.extent, many.nbytes
        # Pieces of their own lie in any order: a worker packs the block that ended last first.
        if nbytes <= 0 or (many.shared and min(many.offsets, default=0) < extent.offset):
            raise WireError(f"a piece of {nbytes} bytes is before the memory at {extent.offset}")
        if many.shared and max(many.offsets, default=0) + nbytes > extent.offset + extent.nbytes:
            raise WireError(f"a piece of {nbytes} bytes is past the {extent.nbytes} that it lies in")
        pieces: list[tuple[Extent | None, torch.Tensor, int]]
        if many.shared:
            memory = self._open(extent)
            pieces = [(None, memory, at - extent.offset) for at in many.offsets]
        else:
            path, size, rank = extent.path, extent.slab_bytes, extent.rank
            owns = [Extent(path, size, at, nbytes, rank) for at in many.offsets]
            pieces = [(own, self._open(own), 0) for own in owns]
        names: Collection[str] = ()
        parcels: list[Parcel] = []
        for own, memory, start in pieces:
            if not parcels:
                names = tuple(form.over(memory[start : start + nbytes]))
            parcels.append(Parcel(form, memory, own, names, start, nbytes))
        return parcels

    def room(self) -> Room:
        """What is left of the budgets, less what the user still looks at.

        Kept here and not asked of the workers: what was let go is free, whether they know it yet or not.
        """
        limits = self.limits or {"memory_bytes": 0, "spill_bytes": 0}
        self._drain()
        with self._lock:
            memory, disk = self._in_memory, self._on_disk
        return Room(max(0, limits["memory_bytes"] - memory), max(0, limits["spill_bytes"] - disk))

    def _open(self, extent: Extent) -> Any:
        piece = self._reader.open(extent)
        self.opened_bytes += extent.nbytes
        self._count(extent, extent.nbytes)
        return piece

    def _count(self, extent: Extent, nbytes: int) -> None:
        with self._lock:
            if _in_memory(extent):
                self._in_memory += nbytes
            else:
                self._on_disk += nbytes

    def returned(self) -> bytes | None:
        """The pieces let go since last asked, encoded for the workers."""
        self._drain()
        pieces = list(_taken(self._going))
        self._reader.returned(pieces)
        self._sent += len(pieces)
        return encode(pieces) if pieces else None

    def _drain(self) -> None:
        """Count what was let go, and keep it for the workers."""
        for piece in _taken(self._let_go):
            self._count(piece, -piece.nbytes)
            self._going.append(piece)

    def flush(self) -> None:
        """Give back what was let go, and let go of what the workers gave up."""
        pieces = self.returned()
        if pieces is None and self._worth_asking():
            pieces = encode([])
        if pieces is not None:
            state = (self._reader.opened, self._sent)
            gone = self._release(pieces)
            self._asked_at = time.monotonic()
            if gone is not None:
                self._asked = state
                self._reader.forget(gone)

    def close(self) -> None:
        """The engine is gone: its memory lives as long as somebody looks at it."""
        self._ended.set()
        self._reader.close()

    def _worth_asking(self) -> bool:
        """Whether workers may have given slabs up unheard, or would: they have no clock of their own."""
        since = time.monotonic() - self._asked_at
        if since > _TELL_S and (self._reader.opened, self._sent) != self._asked:
            return True
        return since > slab.IDLE_S / 2 and self._reader.idle_bytes() > slab.KEEP_BYTES

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self.flush()


def _taken(queue: deque[Extent]) -> Iterator[Extent]:
    """Empty a queue that other threads empty, too."""
    while True:
        try:
            piece = queue.popleft()
        except IndexError:
            return
        yield piece


def _in_memory(extent: Extent) -> bool:
    return extent.path.startswith(f"{_MEMORY}/")
