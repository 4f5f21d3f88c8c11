"""A block that never ends is broken off when its request is given up.

While a block runs ``while True: pass`` its worker reads no message, so an abort cannot reach it, and every
request of everybody waits. A signal does: Python runs its handler in the main thread, where blocks run,
between two instructions. The handler raises in the block, but only where the block that runs at that moment
belongs to a request that was given up; the kernel names those in a file beside the engine's log (a server in
one of its own, and there it may mean whichever block runs). What is left of their other blocks is not run
either. Nothing is paid for it until then. Code in C that does not return to Python, and blocks that catch
everything and go on, are not broken off by it; neither is a worker whose blocks run in another thread (Ray).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

from greenlet import getcurrent

from nnsight_lab.wire.keys import LOG_ENV, STOP_ENV, STOP_SIGNAL, WHICHEVER, stop_file
from nnsight_lab.worker.greenlets import GIVEN_UP, BlockMediator, BlockStopped, given_up


def listen() -> None:
    """Take the signal from now on; only in a worker process of an engine of ours, in its main thread."""
    in_worker = multiprocessing.parent_process() is not None and _file() is not None
    if in_worker and threading.current_thread() is threading.main_thread():
        signal.signal(STOP_SIGNAL, _stop)


def _stop(signum: int, frame: Any) -> None:
    named, why = _named(), "its request was given up"
    mediator = getattr(getcurrent(), "mediator", None)
    block = mediator() if mediator is not None else None
    if WHICHEVER in named:
        named = {block.rider_of} if isinstance(block, BlockMediator) else set()
        why = "it held up everybody for longer than this server lets one step take"
    GIVEN_UP.clear()
    GIVEN_UP.update(named)
    if isinstance(block, BlockMediator) and not block.to_the_end and given_up(block.rider_of):
        raise BlockStopped(why)


def _named() -> set[str]:
    """The requests that the kernel, or the server, named."""
    path = _file()
    try:
        return set() if path is None else set(path.read_text().split())
    except OSError:
        return set()


def _file() -> Path | None:
    """Where they are named."""
    own, log = os.environ.get(STOP_ENV), os.environ.get(LOG_ENV)
    return Path(own) if own else stop_file(Path(log)) if log else None
