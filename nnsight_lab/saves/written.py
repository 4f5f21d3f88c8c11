"""Which files of saves were written, so that the next kernel finds them again.

A line of JSON per file in ``written-saves.jsonl``, the newest last. It is a convenience: where it cannot be
read or written, nothing else fails. What it says is not believed: each file is read, or refused, anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nnsight_lab.errors import FileRefused
from nnsight_lab.saves.files import LABELS, Found, find, read
from nnsight_lab.saves.state import state_dir

INDEX: Final = "written-saves.jsonl"
MOST: Final = 500
_MOST_BYTES: Final = 4 * 2**20
#: What this process wrote.
_own: Final[set[Path]] = set()


def note(path: Path) -> None:
    """Remember that a file was written; of the newest `MOST`, and where the list can be kept."""
    _own.add(path.absolute())
    with contextlib.suppress(OSError), _alone() as index:
        lines = [(at, known) for at, known in _lines(index) if known != path.absolute()]
        lines.append((time.time(), path.absolute()))
        text = "".join(json.dumps({"path": str(known), "time": at}) + "\n" for at, known in lines[-MOST:])
        fresh = index.with_name(f".{INDEX}.{secrets.token_hex(4)}")
        try:
            fresh.write_text(text, "utf-8")
            os.replace(fresh, index)
        finally:
            fresh.unlink(missing_ok=True)


def listed() -> list[Path]:
    """The files that were written and still are there, newest first."""
    try:
        paths = [path for _, path in reversed(_lines(state_dir() / INDEX))]
    except OSError:
        return []
    return [path for path in paths if _is_there(path)]


def found(directory: str | os.PathLike[str] = ".", most: int = MOST) -> list[Found]:
    """Files that were written, newest first, then others with labels in ``directory``.

    First stand those of this process, then those below the working directory, then what others wrote
    elsewhere. Those that cannot be read are among them, each with the reason.
    """
    paths = sorted(listed(), key=_distance)[:most]
    results: list[Found] = []
    for path in paths:
        try:
            results.append(Found(path, read(path)))
        except FileRefused as refusal:
            results.append(Found(path, None, str(refusal)))
    known = {path.resolve() for path in paths}
    with contextlib.suppress(OSError):
        for other in find(directory):
            labelled = other.path.with_suffix(LABELS).exists()  # else it may be a model's weights
            if labelled and other.path.resolve() not in known:
                results.append(other)
    return results[:most]


def _distance(path: Path) -> int:
    """0 for a file of this process, 1 for one below the working directory, 2 for any other."""
    if path in _own:
        return 0
    try:
        return 1 if path.is_relative_to(Path.cwd()) else 2
    except OSError:  # the working directory is gone
        return 2


def _lines(index: Path) -> list[tuple[float, Path]]:
    """What the list says; lines that cannot be read are passed over."""
    try:
        with open(index, "rb") as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return []
    lines: list[tuple[float, Path]] = []
    for line in text.decode("utf-8", "replace").splitlines():
        try:
            entry = json.loads(line)
            path, at = entry["path"], float(entry["time"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(path, str) and os.path.isabs(path) and "\0" not in path:
            lines.append((at, Path(path)))
    return lines


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """The list, while no other process writes it."""
    index = state_dir() / INDEX
    descriptor = os.open(index.with_name(f".{INDEX}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield index
    finally:
        os.close(descriptor)
