"""How much memory saves may take when nobody has said: half of what this process could still get.

A notebook server in a container sees the whole machine's memory and is killed at the container's limit, so
the control group's limit counts where it is the lower one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

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
