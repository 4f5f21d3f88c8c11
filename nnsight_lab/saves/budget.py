"""How much memory saves may take when nobody has said: half of what this process could still get.

A notebook server in a container sees the whole machine's memory and is killed at the container's limit, so
the control group's limit counts where it is the lower one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import psutil

from nnsight_lab.errors import CellUsageError

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_GROUPS: Final = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def default_budget_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Half of the memory that is free now."""
    free = int(psutil.virtual_memory().available)
    for limit_name, used_name in _GROUPS:
        try:
            limit, used = (int((groups / name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):  # not this version, or "max"
            continue
        free = min(free, max(limit - used, 0))
    return free // 2


def size_of(text: Any, *, name: str) -> int:
    """Bytes from ``2_000_000``, ``"500MB"`` or ``"2 GiB"``.

    Raises:
        CellUsageError: For anything else.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and text >= 0:
        return int(text)
    if isinstance(text, str):
        number = text.strip().rstrip("BKMGTIbkmgti").strip()
        unit = text.strip()[len(number) :].strip().upper()
        try:
            return int(float(number.replace("_", "")) * _UNITS[unit])
        except (ValueError, KeyError):
            pass
    raise CellUsageError(f'{name}={text!r} is not a size: write bytes, "500MB" or "2GiB".')
