"""One runner as a process: its lines as they come, an end to it at a limit or a Ctrl-C, and why it failed.

It runs in a session of its own, so that a Ctrl-C reaches this program alone, which then ends the runner
with all it started: an engine's processes would otherwise stay behind and hold the device's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

_TICK_S: Final = 0.1
_GRACE_S: Final = 10.0
#: The last line of a log that looks like this says why.
_REASON: Final = re.compile(r"(?:\b[A-Za-z_.]*(?:Error|Exception|Refused|NotFound|Failed)\b: .+)")


class Ended(Exception):
    """A runner that did not finish; its text says why, in one line."""


def lines(
    command: Sequence[str], environment: Mapping[str, str], results: Path, log: Path, limit_s: float
) -> Iterator[dict[str, Any]]:
    """Run a runner, and give its lines as it writes them.

    Args:
        command: What to run.
        environment: Of the process.
        results: The file it writes lines to.
        log: Where everything it prints goes.
        limit_s: After which it is ended.

    Raises:
        Ended: It failed, or took too long.
    """
    results.touch()
    deadline = time.monotonic() + limit_s
    with log.open("ab") as out, results.open(encoding="utf-8") as given:
        process = None
        done, rest = False, ""
        try:
            with _undisturbed():
                process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            while True:
                over = process.poll() is not None
                rest += given.read()
                *whole, rest = rest.split("\n")
                for text in filter(None, whole):
                    line = json.loads(text)
                    done = done or "done" in line
                    yield line
                if done:
                    return
                if over:
                    raise Ended(reason(log) or f"it ended with {process.returncode}")
                if time.monotonic() > deadline:
                    raise Ended(f"ended after its {limit_s:.0f} s")
                time.sleep(_TICK_S)
        finally:
            if process is not None:
                end(process, _GRACE_S if done else 0.0)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until the block is left: a process started, and not yet known here, would stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a runner and every process it started, those too that left its group.

    Args:
        process: The runner.
        grace_s: How long it may take to end by itself.
    """
    family = _family(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s or 0.01)
    family |= _family(process.pid)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal_number)
        alive = [other for other in family if other.is_running()]
        for other in alive:
            with contextlib.suppress(psutil.Error):
                other.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S / 4)
        psutil.wait_procs([other for other in alive if other.pid != process.pid], timeout=_GRACE_S / 4)
    process.wait()


def _family(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def reason(log: Path) -> str:
    """The last error that a log tells, in one line; empty where there is none."""
    found: list[str] = _REASON.findall(log.read_text(encoding="utf-8", errors="replace"))
    # vLLM's last words are that something above them failed.
    telling = [text for text in found if "root cause" not in text]
    return (telling or found or [""])[-1][:300]
