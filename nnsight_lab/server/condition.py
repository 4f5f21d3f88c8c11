"""Whether the engine takes requests now, and what is said where it does not.

One for the process, as a process is one server: the guard answers ``/health`` and ``/ready`` by it before
there is an app, and the command that began the server ends by it.
"""

from __future__ import annotations

import time

from nnsight_lab.server.limits import Refused


class Condition:
    """How the server stands.

    Attributes:
        state: ``starting``, ``ready``, ``restarting`` or ``ending``.
        why: In words, where it is not ready.
        cause: The same, of an engine that died, for those whose requests it ran.
        failed: Why the process ends by itself; "" where it does not.
        deaths: How often the engine died.
        start_s: How long an engine takes to be there, about.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.why = "The engine is starting."
        self.cause = ""
        self.failed = ""
        self.deaths = 0
        self.start_s = 30.0
        self._since = time.monotonic()
        self._retry_s = 30.0

    @property
    def ending(self) -> bool:
        """Whether the server ends: nothing new is begun, and nothing restarted."""
        return self.state == "ending"

    def ready(self) -> None:
        """The engine takes requests."""
        if not self.ending:
            self.state, self.why, self.cause = "ready", "", ""

    def restarting(self, cause: str) -> None:
        """The engine died, and is started again."""
        if self.ending:
            return
        self.state, self._since, self._retry_s = "restarting", time.monotonic(), self.start_s
        self.why = f"The engine died ({cause}) and is being started again; edits and leases are kept."
        self.cause = (
            f"{cause}; it is being started again, and keeps your edits: try again in about "
            f"{self.retry_after_s:.0f} s"
        )

    def end(self, retry_after_s: float) -> None:
        """The server ends."""
        self.state, self._since, self._retry_s = "ending", time.monotonic(), retry_after_s
        self.why = "The server is shutting down."
        self.cause = "the server was shut down"

    @property
    def retry_after_s(self) -> float:
        """When it may be worth asking again."""
        return max(1.0, self._retry_s - (time.monotonic() - self._since))

    def require(self) -> None:
        """Refuse a request where the engine takes none.

        Raises:
            Refused: With the reason, and when to come again.
        """
        if self.state != "ready":
            raise Refused(503, self.why, retry_after_s=self.retry_after_s)


CONDITION = Condition()
