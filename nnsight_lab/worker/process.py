"""The first thing every engine process runs: leave the kernel's group, follow its death, log to a file.

A notebook's stop button sends SIGINT to the kernel's whole process *group*, and vLLM's EngineCore
and workers take that as "exit": the model is gone. A SIGKILLed kernel, on the other hand, leaves
EngineCore running as an orphan. So a process of a lab engine moves into a group of its own and
asks the operating system to be killed with its parent. vLLM loads this through
its ``vllm.general_plugins`` entry point in each process; without the environment that
`nnsight_lab.engine` sets it does nothing, so other uses of vLLM in the same environment are not
touched. Linux only, as vLLM's engine is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal

from nnsight_lab.wire.keys import ENGINE_ENV, LOG_ENV, OWNER_ENV  # noqa: F401  (one mark, three parts)

_PR_SET_PDEATHSIG = 1


def plugin() -> None:
    """Detach this process from the notebook's interrupts and tie it to its parent's life."""
    if not os.environ.get(ENGINE_ENV) or multiprocessing.parent_process() is None:
        return
    _log_to_file()
    # At its exit Python collects torch's and vLLM's whole heap, for longer than the 5 s after which vLLM
    # kills: then EngineCore dies with it and its shared memory stays. What is frozen is not looked at.
    atexit.register(gc.freeze)
    with contextlib.suppress(OSError):  # already a leader: the group is its own
        os.setpgid(0, 0)
    parent = os.getppid()
    # SIGKILL: vLLM's handler of SIGTERM can wait for itself for ever when several arrive at once, and
    # a process whose kernel is gone has nothing left to put in order.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The parent may have ended between its fork and the line above; then no signal will come.
    if os.getppid() != parent or parent == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def in_ray_actor() -> None:
    """The same for a rank in a Ray actor, which Ray has put in a group of its own and ends with its own."""
    if os.environ.get(ENGINE_ENV):
        _log_to_file()
        atexit.register(gc.freeze)


def _log_to_file() -> None:
    """Point fd 1 and 2 at the engine's log: else they appear in whatever cell is current."""
    path = os.environ.get(LOG_ENV)
    if not path:
        return
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
