"""A block that never ends is broken off when its request is given up.

While a block runs ``while True: pass`` its worker reads no message, so an abort cannot reach it, and every
request of everybody waits. A signal does: Python runs its handler in the main thread, where blocks run,
between two instructions. The handler raises in the block, but only where the block that runs at that moment
belongs to a request that was given up; the kernel names those in a file beside the engine's log. What is
left of their other blocks is not run either. Nothing is paid for it until then. Code in C that does not
return to Python, and blocks that catch everything and go on, are not broken off by it; neither is a worker
whose blocks run in another thread (Ray).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

from greenlet import getcurrent

from nnsight_lab.wire.keys import LOG_ENV, STOP_SIGNAL, stop_file
from nnsight_lab.worker.greenlets import GIVEN_UP, BlockMediator, BlockStopped, given_up


def listen() -> None:
    """Take the signal from now on; only in a worker process of an engine of ours, in its main thread."""
    in_worker = multiprocessing.parent_process() is not None and bool(os.environ.get(LOG_ENV))
    if in_worker and threading.current_thread() is threading.main_thread():
        signal.signal(STOP_SIGNAL, _stop)


def _stop(signum: int, frame: Any) -> None:
    GIVEN_UP.clear()
    GIVEN_UP.update(_named())
    mediator = getattr(getcurrent(), "mediator", None)
    block = mediator() if mediator is not None else None
    if isinstance(block, BlockMediator) and given_up(block.rider_of):
        raise BlockStopped("its request was given up")


def _named() -> set[str]:
    """The requests that the kernel named."""
    try:
        return set(stop_file(Path(os.environ[LOG_ENV])).read_text().split())
    except (OSError, KeyError):
        return set()
