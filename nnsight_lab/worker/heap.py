"""Memory of the C heap that is free, given back to the system.

On a CPU engine what blocks read are thousands of copies a step, made and freed among what vLLM keeps for
good. glibc gives back only what is free at the heap's end, so the worker stays as large as its largest step
has made it, some hundred MB, and grows by steps as other shapes come. What lies free in between goes back
with ``malloc_trim``: 20 ms for 200 MB, measured, so not after every request but once in a while, when the
kernel returns what it looked at. On GPUs copies are in the device's memory, and nothing is done.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

#: The least time between two; with it, what a trim costs is under a thousandth of any work.
EVERY_S = 30.0


class Heap:
    """Trims the heap of this process now and then.

    Args:
        on_cpu: Whether the model's values are in this process's own memory.
        every_s: At most so often.
    """

    def __init__(self, *, on_cpu: bool, every_s: float = EVERY_S) -> None:
        self._trim: Any = _malloc_trim() if on_cpu else None
        self._every_s = every_s
        self._last = time.monotonic()
        #: How often it was done.
        self.trims = 0

    def trim(self, *, at_once: bool = False) -> bool:
        """Give back what is free, unless it was done a moment ago; whether it was done.

        Args:
            at_once: Also where it was.
        """
        now = time.monotonic()
        if self._trim is None or (now - self._last < self._every_s and not at_once):
            return False
        self._last = now
        self._trim(0)
        self.trims += 1
        return True


def _malloc_trim() -> Any:
    """The function of glibc; None where the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
