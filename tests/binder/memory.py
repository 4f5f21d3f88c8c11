"""The memory of all that one command started, at its highest: what a container's limit is compared with.

A container is charged for anonymous and shared memory, which nothing can take back, and for file pages, which
the system drops when room is needed; the first sum is what must fit. Processes are found by a variable that
they inherit and by their parents, so that one whose parent has ended counts as well. Of shared pages each
process is counted its part (PSS). It is sampled: a peak shorter than the pause may be missed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

#: Reading it makes the system walk the pages of each process, some ten milliseconds per gigabyte.
PAUSE_S = 0.25
MARK = "NNSIGHT_LAB_MEASURED"


class Use(NamedTuple):
    """Memory of several processes together.

    Attributes:
        held_bytes: Anonymous and shared memory.
        file_bytes: Pages of mapped files, which the system can drop and read again.
    """

    held_bytes: int
    file_bytes: int


def started(mark: str) -> set[int]:
    """The processes that inherited ``MARK=mark``, and their children: a new title hides the variables."""
    wanted = f"{MARK}={mark}".encode()
    found, parents = set(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text("utf-8").rpartition(")")[2].split()[1]
                )
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue  # it has ended, or is not ours
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def used(pid: int) -> Use | None:
    """One process's part; None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    except OSError:
        return None
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    held = kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"]
    return Use(held * 1024, kilobytes["Pss_File"] * 1024)


class Peak:
    """Samples the marked processes until it is closed."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.highest = Use(0, 0)
        #: What each process held at the peak, by its command's last words.
        self.parts: dict[str, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(PAUSE_S):
            uses = {pid: use for pid in started(self.mark) if (use := used(pid)) is not None}
            held = sum(use.held_bytes for use in uses.values())
            if held > self.highest.held_bytes:
                self.highest = Use(held, sum(use.file_bytes for use in uses.values()))
                self.parts = {f"{pid} {_command(pid)}": use.held_bytes for pid, use in uses.items()}


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(os.path.basename(word) for word in words if word)[:60]
