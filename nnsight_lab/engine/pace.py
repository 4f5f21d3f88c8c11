"""How fast an engine has been: what its finished calls say about the next one.

A prompt costs by its tokens, generating costs by steps (a step of 60 sequences takes about as long as a
step of one), and saves cost by their bytes on the way home. Two running least-squares sums hold all of
that; later calls weigh more, for an engine's first ones are slow.
"""

from __future__ import annotations

import threading

#: What an older call's weight is multiplied with at each new one.
_FADE = 0.95
#: A call of fewer prompt tokens says more about a step's fixed cost than about tokens.
ENOUGH_TOKENS = 256
ENOUGH_STEPS = 3
#: Ways home of fewer bytes are all latency.
_ENOUGH_BYTES = 10**6
#: Bytes a second on the way home, until it was seen: what one CPU core copies.
_HOME_RATE = 2e9


def steps_of(longest: int, sequences: int, at_once: int) -> int:
    """About how many steps generating takes: the longest sequence's, in as many rounds as are needed.

    Args:
        longest: New tokens of the longest sequence.
        sequences: How many there are.
        at_once: How many the engine runs together.
    """
    return longest * max(1, -(-sequences // at_once))


class Pace:
    """Seconds of finished calls by prompt tokens and steps, and of ways home by bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tt = self._ts = self._ss = self._t_seconds = self._s_seconds = 0.0
        self._most_tokens = self._most_steps = 0
        self._home_bytes = self._home_s = 0.0

    def call(self, prompt_tokens: int, steps: int, seconds: float) -> None:
        """Note a finished call, without its way home."""
        tokens = float(prompt_tokens)
        with self._lock:
            self._tt = self._tt * _FADE + tokens * tokens
            self._ts = self._ts * _FADE + tokens * steps
            self._ss = self._ss * _FADE + steps * steps
            self._t_seconds = self._t_seconds * _FADE + tokens * seconds
            self._s_seconds = self._s_seconds * _FADE + steps * seconds
            self._most_tokens = max(self._most_tokens, prompt_tokens)
            self._most_steps = max(self._most_steps, steps)

    def home(self, nbytes: int, seconds: float) -> None:
        """Note a way home that brought ``nbytes`` through shared memory."""
        if nbytes >= _ENOUGH_BYTES:
            with self._lock:
                self._home_bytes += nbytes
                self._home_s += seconds

    def knows(self, prompt_tokens: int, steps: int) -> bool:
        """Whether calls like that one were seen, or large enough ones to tell."""
        return self._most_tokens >= min(prompt_tokens, ENOUGH_TOKENS) and self._most_steps >= min(
            steps, ENOUGH_STEPS
        )

    def seconds(self, prompt_tokens: int, steps: int, nbytes: int) -> float | None:
        """About how long a call would take, or None where none was seen."""
        with self._lock:
            if self._ss == 0:
                return None
            per_token, per_step = self._costs()
            rate = self._home_bytes / self._home_s if self._home_s > 0 else _HOME_RATE
        return per_token * prompt_tokens + per_step * steps + nbytes / rate

    def _costs(self) -> tuple[float, float]:
        determinant = self._tt * self._ss - self._ts * self._ts
        if determinant > 1e-6 * self._tt * self._ss:
            per_token = (self._t_seconds * self._ss - self._s_seconds * self._ts) / determinant
            per_step = (self._s_seconds * self._tt - self._t_seconds * self._ts) / determinant
            if per_token >= 0 and per_step >= 0:
                return per_token, per_step
        # All calls alike, or noise: one of the two explains them all.
        if self._most_tokens >= ENOUGH_TOKENS:
            return self._t_seconds / self._tt, 0.0
        return 0.0, self._s_seconds / self._ss
