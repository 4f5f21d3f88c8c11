"""What each user had of the engine: lately, for their turn; this minute, for their limit; ever, for figures.

Tokens are those of prompts and those generated. They are counted while requests run, not when they are over:
a flood that is under way must weigh as much as one that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: After that long, what a user had counts half.
_HALF_S = 60.0
#: How much a request that ends moves the idea of how long a user's requests take.
_NEW = 0.3
_MOST_RETRY_S = 60.0


@dataclass
class Used:
    """One user's.

    Attributes:
        requests: That ended, ever.
        prompt_tokens: Ever.
        generated_tokens: Ever.
        saved_bytes: Ever, by blocks.
        recent: Tokens, those of long ago counting less; as of `at`.
        left: Of this minute's tokens, below 0 where more were had; as of `at`.
        at: By the clock.
        request_s: How long a request takes, about.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    saved_bytes: int = 0
    recent: float = 0.0
    left: float = 0.0
    at: float = 0.0
    request_s: float = 0.0


class Usage:
    """All users'.

    Args:
        tokens_per_minute: What one user may have; None for any number.
        clock: Seconds.
    """

    def __init__(
        self, tokens_per_minute: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = tokens_per_minute
        self._clock = clock
        self.users: dict[str, Used] = {}

    def of(self, user: str) -> Used:
        """A user's, as of now."""
        now = self._clock()
        used = self.users.get(user)
        if used is None:
            used = self.users[user] = Used(left=float(self._per_minute or 0), at=now)
        passed = max(0.0, now - used.at)
        used.at = now
        used.recent *= 0.5 ** (passed / _HALF_S)
        if self._per_minute is not None:
            used.left = min(float(self._per_minute), used.left + passed * self._per_minute / 60)
        return used

    def spent(self, user: str, prompt_tokens: int, generated_tokens: int) -> None:
        """Note tokens that a user just had."""
        used = self.of(user)
        tokens = prompt_tokens + generated_tokens
        used.prompt_tokens += prompt_tokens
        used.generated_tokens += generated_tokens
        used.recent += tokens
        used.left -= tokens

    def ended(self, user: str, seconds: float) -> None:
        """Note that a request of a user ended."""
        used = self.of(user)
        used.request_s = seconds if not used.requests else used.request_s * (1 - _NEW) + seconds * _NEW
        used.requests += 1

    def recent(self, user: str) -> float:
        """Tokens that a user had, those of long ago counting less."""
        return self.of(user).recent

    def wait_s(self, user: str) -> float:
        """When a user may ask again; 0 for now.

        What a request takes is known when it took it. So one may begin while anything is left, and who then
        has more than the minute's tokens waits until they are made up for.
        """
        if self._per_minute is None:
            return 0.0
        left = self.of(user).left
        return 0.0 if left > 0 else (1 - left) * 60 / self._per_minute

    def next_end_s(self, user: str, running: int) -> float:
        """About when the next of a user's running requests ends."""
        return min(_MOST_RETRY_S, max(1.0, self.of(user).request_s / max(1, running)))
