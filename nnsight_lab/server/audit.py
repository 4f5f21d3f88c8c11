"""Who did what, and what was refused: a line of JSON each, for whoever runs the server.

A line says when, who, what, to which lease, edit or request, and how many; never a prompt, a generated token,
a tensor or a secret. The file is this user's alone (0600), and is opened anew when it was moved away, so
logrotate needs no signal. A line that cannot be written is counted and said once on the server's own output:
no request fails for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nnsight_lab.errors import ServeRefused

#: Of one word of a client's own, such as an edit's id.
_LONGEST = 100
#: What a refusal quotes may be anything that its request said.
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
#: Answers that are refusals.
REFUSALS = frozenset({400, 401, 403, 404, 409, 413, 429})

#: Of the HTTP request that this task answers: why it was refused.
reason: ContextVar[list[str] | None] = ContextVar("reason", default=None)


class Audit:
    """The file; nothing is written until it is opened.

    Attributes:
        missed: Lines that could not be written.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self._lock = threading.Lock()
        self.missed = 0

    def open(self, path: str | os.PathLike[str]) -> None:
        """Write to this file from now on.

        Raises:
            ServeRefused: It cannot be written.
        """
        self._path = Path(path).absolute()
        try:
            with self._lock:
                self._reopen()
        except OSError as error:
            raise ServeRefused(f"--audit {path} cannot be written: {error.strerror or error}.") from None

    def close(self) -> None:
        """Write nothing any more."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor, self._path = -1, None

    def note(
        self, action: str, user: str, thing: str = "", *, decision: str = "done", why: str = "", **counts: Any
    ) -> None:
        """Write a line; it never fails.

        Args:
            action: What was asked for.
            user: Who asked.
            thing: The id of the lease, edit or request.
            decision: ``done``, ``refused``, ``aborted``, ``failed``, or ``unknown``: nothing of theirs.
            why: The reason, where there is one to say.
            **counts: Numbers, and words of this package's own.
        """
        if self._path is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "user": user[:_LONGEST],
            "action": action,
            "object": thing[:_LONGEST],
            "decision": decision,
            "reason": _QUOTED.sub("'…'", why)[:300],
            **({"counts": counts} if counts else {}),
        }
        try:
            self._write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
        except Exception as error:  # whatever it is: a request goes on without
            if not self.missed:
                with contextlib.suppress(Exception):
                    print(
                        f"nnsight-lab: the audit log cannot be written: {error}", file=sys.stderr, flush=True
                    )
            self.missed += 1

    def _write(self, line: bytes) -> None:
        with self._lock:
            if not self._same():
                self._reopen()
            if os.write(self._descriptor, line) != len(line):
                raise OSError("the disk is full")

    def _same(self) -> bool:
        """Whether the file is still where it was opened."""
        assert self._path is not None
        try:
            there, open_one = os.stat(self._path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (open_one.st_dev, open_one.st_ino)

    def _reopen(self) -> None:
        assert self._path is not None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._descriptor = os.open(self._path, flags, 0o600)
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.fchmod(self._descriptor, 0o600)


#: Of this server.
audit = Audit()


def refused(user: str, method: str, path: str, status: int, why: str, token: str) -> None:
    """Note a request that was refused; what it named itself by is not said, wherever it stands."""
    for secret in filter(None, (token, token.strip())):
        path, why = path.replace(secret, "…"), why.replace(secret, "…")
    audit.note("request", user, f"{method} {path}", decision="refused", why=why, status=status)
