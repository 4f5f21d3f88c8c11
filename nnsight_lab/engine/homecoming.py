"""The kernel's end of the way home: saves mapped where the worker left them, and given back.

Tensors are views of shared memory until the user lets go of them; a piece is given back to its
worker a moment later, so that the next request can use it. Finalizers run anywhere, in the middle
of anything, so all they do is append to a queue.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from nnsight_lab.errors import CellUsageError
from nnsight_lab.saves.slab import SlabReader, sweep
from nnsight_lab.saves.spill import sweep_spills
from nnsight_lab.wire.codec import encode
from nnsight_lab.wire.extent import Extent, Packed
from nnsight_lab.wire.packed import unpack

#: Engine options of ours, taken out before vLLM sees the rest.
OPTIONS = ("save_budget", "spill_budget")
_MEMORY = Path("/dev/shm")
_TICK_S = 0.25
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_of(text: Any, *, name: str) -> int:
    """Bytes from ``2_000_000``, ``"500MB"`` or ``"2 GiB"``.

    Raises:
        CellUsageError: For anything else.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return int(text)
    if isinstance(text, str):
        number = text.strip().rstrip("BKMGIbkmgi").strip()
        unit = text.strip()[len(number) :].strip().upper()
        try:
            return int(float(number.replace("_", "")) * _UNITS[unit])
        except (ValueError, KeyError):
            pass
    raise CellUsageError(f'{name}={text!r} is not a size: write bytes, "500MB" or "2GiB".')


def settings(engine_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """How the workers of an engine bring saves home.

    Args:
        engine_id: Names the slabs.
        options: ``save_budget`` bounds shared memory (a quarter of what is free by default),
            ``spill_budget`` what goes on to disk past that (half of what is free, at most 64 GiB).
    """
    shm_free = shutil.disk_usage(_MEMORY).free if _MEMORY.is_dir() else 0
    memory = min(shm_free // 2, psutil.virtual_memory().available // 4)
    if "save_budget" in options:
        memory = size_of(options["save_budget"], name="save_budget")
    folder = spill_folder()
    spill = min(shutil.disk_usage(folder).free // 2, 64 * 2**30)
    if "spill_budget" in options:
        spill = size_of(options["spill_budget"], name="spill_budget")
    return {
        "name": engine_id,
        "memory_dir": str(_MEMORY),
        "memory_bytes": memory,
        "spill_dir": str(folder),
        "spill_bytes": spill,
    }


def spill_folder() -> Path:
    """Where slabs go past the memory budget: ``$XDG_CACHE_HOME/nnsight_lab/spill``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "nnsight_lab" / "spill"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def reclaim() -> list[Path]:
    """Remove what is left of processes that are gone: slabs in memory and on disk, and spilled saves."""
    return [*sweep([_MEMORY, spill_folder()]), *sweep_spills()]


class Parcel:
    """A packed value whose memory was opened once, so that it can be rebuilt as often as asked.

    Args:
        packed: As it came.
        open_extent: Opens a piece of memory, which is let go with the last tensor over it.
    """

    def __init__(self, packed: Packed, open_extent: Callable[[Extent], torch.Tensor]) -> None:
        self._packed = packed
        self._memory: dict[Extent, torch.Tensor] = {}
        self._open_extent = open_extent
        #: The value for the caller, who takes it.
        self.first = unpack(packed, self._opened)
        #: What it saved, by name.
        self.names = frozenset(self.first)

    @property
    def nbytes(self) -> int:
        """What its pieces of memory take."""
        return sum(piece.numel() for piece in self._memory.values())

    def value(self) -> Any:
        """The value once more: other containers, tensors over the same memory."""
        return unpack(self._packed, self._opened)

    def _opened(self, extent: Extent) -> torch.Tensor:
        piece = self._memory.get(extent)
        if piece is None:
            piece = self._memory[extent] = self._open_extent(extent)
        return piece


class Homecoming:
    """Opens what the workers packed, and tells them what nobody looks at any more.

    Args:
        release: Sends pieces back to the workers; returns the files they gave up, or None when it
            could not be sent now.
    """

    def __init__(self, release: Callable[[bytes], list[str] | None]) -> None:
        self._release = release
        self._let_go: deque[Extent] = deque()
        self._reader = SlabReader(self._let_go.append)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nnsight-lab-saves")
        self._thread.start()

    def open(self, packed: Packed) -> Parcel:
        """A packed value; its tensors are views of the worker's memory."""
        return Parcel(packed, self._reader.open)

    def returned(self) -> bytes | None:
        """The pieces let go since last asked, encoded for the workers."""
        pieces = []
        while self._let_go:
            pieces.append(self._let_go.popleft())
        return encode(pieces) if pieces else None

    def flush(self) -> None:
        """Give back what was let go."""
        pieces = self.returned()
        if pieces is not None:
            self._reader.forget(self._release(pieces) or ())

    def close(self) -> None:
        """The engine is gone: its memory lives as long as somebody looks at it."""
        self._ended.set()
        self._reader.close()

    def _run(self) -> None:
        while not self._ended.wait(_TICK_S):
            self.flush()
