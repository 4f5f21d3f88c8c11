"""The models a start form offers: those started before, then those in Hugging Face's local cache.

Only names, only from this disk: a form that asks a hub at every key is a form that waits.
"""

from __future__ import annotations

import os
from pathlib import Path

from nnsight_lab.engine.recent import recent_models

_DEMO = "demo"


def known_models() -> list[str]:
    """Started before, the newest first; then ``demo``; then what is cached."""
    return list(dict.fromkeys([*recent_models(), _DEMO, *_cached()]))


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
