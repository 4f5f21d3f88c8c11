"""The models a start form offers: those started before, then those in Hugging Face's local cache.

Only names, only from this disk: a form that asks a hub at every key is a form that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from nnsight_lab.saves.state import state_dir

_FILE = "models.json"
_KEPT = 10
_DEMO = "demo"


def known_models() -> list[str]:
    """Started before, the newest first; then ``demo``; then what is cached."""
    return list(dict.fromkeys([*_recent(), _DEMO, *_cached()]))


def note_model(model: str) -> None:
    """It was started; a disk that refuses is no reason to fail."""
    recent = [model, *(name for name in _recent() if name != model)][:_KEPT]
    with contextlib.suppress(OSError):
        (state_dir() / _FILE).write_text(json.dumps(recent))


def _recent() -> list[str]:
    try:
        found = json.loads((state_dir() / _FILE).read_text())
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def cache_folder() -> Path:
    """Hugging Face's own rule for where its cache is."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(home) / "hub"


def _cached() -> list[str]:
    try:
        names = sorted(entry.name for entry in cache_folder().iterdir() if entry.name.startswith("models--"))
    except OSError:
        return []
    return [name.removeprefix("models--").replace("--", "/") for name in names]
