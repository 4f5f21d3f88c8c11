"""The models this user started last, over all kernels: a small file in the state directory.

Several kernels write it, so it is replaced as a whole and never half read; a disk that refuses is no reason
for a start to fail.
"""

from __future__ import annotations

import contextlib
import json
import os

from nnsight_lab.saves.state import state_dir

_FILE = "models.json"
_KEPT = 10


def recent_models() -> list[str]:
    """The newest first."""
    try:
        found = json.loads((state_dir() / _FILE).read_text())
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def note_model(model: str) -> None:
    """It was started."""
    recent = [model, *(name for name in recent_models() if name != model)][:_KEPT]
    with contextlib.suppress(OSError):
        path = state_dir() / _FILE
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(recent))
        beside.replace(path)
