"""Where this package keeps what outlives a process: logs, and the list of files that were written."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """``$XDG_STATE_HOME/nnsight_lab``, only this user's; made where it is not there.

    Raises:
        OSError: It may not be made.
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(base) / "nnsight_lab"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
