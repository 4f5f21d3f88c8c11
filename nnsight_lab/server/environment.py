"""Takes secrets off a process's environment, so that no block finds one.

Unsetting a variable is not enough: ``/proc/PID/environ`` shows the memory in which the process was given its
environment, to every process of the same user, and the engine's are. So that memory is written over.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

SECRETS = (
    "NNSIGHT_LAB_TOKEN",
    "JUPYTERHUB_API_TOKEN",
    "JPY_API_TOKEN",
    "VLLM_API_KEY",
    "CONFIGPROXY_AUTH_TOKEN",
)


def take(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Take every secret off; returns those that were there, by name.

    Args:
        environment: ``os.environ``, or a dictionary in a test.
    """
    taken = {}
    for name in SECRETS:
        if name in environment:
            if environment is os.environ:
                _write_over(name)
            taken[name] = environment.pop(name)
    return taken


def _write_over(name: str) -> None:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    at = libc.getenv(name.encode())
    if at:
        ctypes.memset(at, 0, len(ctypes.string_at(at)))
