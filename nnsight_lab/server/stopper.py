"""Breaks off a block that holds the engine up, and where that does not help, ends the engine's processes.

A worker in a block's ``while True`` reads no message. It takes a signal, between two instructions of Python,
and looks into a file for whose block is meant (see `nnsight_lab.worker.stopping`). A worker that is stuck
elsewhere, in C, is killed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import psutil

from nnsight_lab.engine import processes
from nnsight_lab.wire.keys import STOP_ENV, STOP_SIGNAL, WHICHEVER


def prepare(environment: MutableMapping[str, str]) -> None:
    """Choose the file, before a process of the engine is born."""
    # Readable for a worker that runs as another user; it holds ids of requests and nothing else.
    folder = Path(tempfile.mkdtemp(prefix="nnsight-lab-serve-"))
    folder.chmod(0o755)
    environment[STOP_ENV] = str(folder / "stop")


def engine_processes() -> list[psutil.Process]:
    """The engine's, among what this process started.

    They are known by their titles: vLLM writes those over the environment that would mark them.
    """
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = one.cmdline()
            if words and (
                words[0].startswith("VLLM") or any("multiprocessing.spawn" in word for word in words)
            ):
                found.append(one)
    return found


class Stopper:
    """Of this server's engine."""

    def __init__(self) -> None:
        self._file = Path(os.environ.get(STOP_ENV, os.devnull))

    def break_off(self, request_ids: Sequence[str]) -> bool:
        """Break off the block that runs, if it is one of these requests'; whether a worker was told."""
        self._file.write_text("\n".join(request_ids))
        told = [one for one in engine_processes() if processes.takes(one.pid, STOP_SIGNAL)]
        for one in told:
            with contextlib.suppress(psutil.Error):
                one.send_signal(STOP_SIGNAL)
        return bool(told)

    def break_off_whichever(self) -> bool:
        """Break off whichever block runs at this moment."""
        return self.break_off([WHICHEVER])

    def kill(self) -> None:
        """End the engine's processes at once."""
        for one in engine_processes():
            with contextlib.suppress(psutil.Error):
                one.kill()

    def tidy(self) -> None:
        """Remove the file; the server ends."""
        if self._file.parent.name.startswith("nnsight-lab-serve-"):
            self._file.unlink(missing_ok=True)
            self._file.parent.rmdir()
