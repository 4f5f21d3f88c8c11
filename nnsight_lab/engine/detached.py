"""Run as a script, with ``python -I``: starts a command that is nobody's child, and prints its pid.

A kernel ends its children when it ends, and whoever ends a kernel signals its process group. The command gets
a session of its own, and its parent (this script) ends at once, so that nobody has to wait for it either.
"""

from __future__ import annotations

import subprocess
import sys


def main(log: str, *command: str) -> None:
    """Start it with what it prints in a log.

    Args:
        log: Appended to.
        *command: The words.
    """
    with open(log, "ab") as out:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            close_fds=True,
        )
    print(started.pid, flush=True)
    started.returncode = 0  # nobody waits for it here


if __name__ == "__main__":
    main(*sys.argv[1:])
