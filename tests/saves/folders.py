"""Folders that are looked at afterwards, and questions that need a process of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_files() -> set[str]:
    """What this process has open, of regular files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith("/") and not target.startswith("/dev"):
            found.add(target)
    return found


@contextmanager
def watched(folder: Path) -> Iterator[Path]:
    """A folder in which nothing unfinished is left, and of which nothing stays open."""
    yield folder
    gc.collect()
    assert [path.name for path in folder.rglob("*") if "unfinished" in path.name] == []
    assert [name for name in open_files() if name.startswith(str(folder))] == []


def python(code: str, *arguments: str) -> str:
    """What a program prints, run in a process of its own."""
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()
