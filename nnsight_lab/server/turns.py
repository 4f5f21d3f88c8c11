"""Whose request goes to the engine next.

The engine runs a number of sequences together and, once one runs, lets it: vLLM's own priorities order what
waits, and put a running request off only where the KV cache is full. So a user whose long requests take every
place would hold up all others until one ends. Requests wait here instead, where it is known whose they are:
a user may have most of the places, never the last ones, and of those who wait the one who had the fewest
tokens lately goes first. Each request carries that number to vLLM as its priority, for when memory is short.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnsight_lab.server.usage import Usage

#: A user may have this many times the places that stay free besides: seven eighths of all, alone.
_SHARE = 7
_MOST_PRIORITY = 2**31 - 1


@dataclass(eq=False)
class Turn:
    """One request's place in the engine.

    Attributes:
        user: Whose.
        request_id: As vLLM was told.
        places: Sequences that run together.
        blocks: Whether code of a user runs in it.
        priority: Lower goes first.
        began: By ``time.monotonic()``.
        prompt_tokens: That were counted.
        generated_tokens: That were counted.
    """

    user: str
    request_id: str
    places: int
    blocks: bool = False
    priority: int = 0
    began: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Turns:
    """The places of one engine.

    Args:
        places: Sequences that it runs together.
        usage: Who had what.
        fair: Whether requests wait here; else they all go to vLLM as they come.
        most: Places that one user may have, whatever is free; None for any number.
    """

    def __init__(self, places: int, usage: Usage, *, fair: bool = True, most: int | None = None) -> None:
        self._places = max(1, places)
        self._usage = usage
        self._fair = fair
        self._most = most
        self._free = self._places
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[Turn, asyncio.Future[None]]]] = {}
        #: By what vLLM calls them.
        self.running: dict[str, Turn] = {}

    def waiting(self, user: str) -> int:
        """Requests of a user that wait for a place."""
        return len(self._waiting.get(user, ()))

    def waiters(self) -> list[Turn]:
        """Everything that waits."""
        return [turn for queue in self._waiting.values() for turn, _ in queue]

    def taken(self, user: str) -> int:
        """Places that a user has."""
        return self._taken.get(user, 0)

    async def take(self, user: str, request_id: str, places: int, *, blocks: bool = False) -> Turn:
        """Wait for a place; `give` it back."""
        turn = Turn(user, request_id, min(places, self._alone()), blocks)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append((turn, granted))
        self._next()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._back(turn)
            else:
                self._leave(turn)
            raise
        return turn

    def refuse(self, error: Exception) -> None:
        """Give everybody who waits an error instead."""
        for queue in self._waiting.values():
            for _, granted in queue:
                if not granted.done():
                    granted.set_exception(error)
        self._waiting.clear()

    def give(self, turn: Turn) -> None:
        """A request is over."""
        self._usage.ended(turn.user, time.monotonic() - turn.began)
        self._back(turn)

    def _back(self, turn: Turn) -> None:
        self.running.pop(turn.request_id, None)
        self._free += turn.places
        left = self._taken[turn.user] - turn.places
        if left:
            self._taken[turn.user] = left
        else:
            del self._taken[turn.user]
        self._next()

    def saw(self, turn: Turn, prompt_tokens: int, generated_tokens: int) -> None:
        """A request has had so many tokens by now."""
        prompt = max(0, prompt_tokens - turn.prompt_tokens)
        generated = max(0, generated_tokens - turn.generated_tokens)
        if prompt or generated:
            turn.prompt_tokens += prompt
            turn.generated_tokens += generated
            self._usage.spent(turn.user, prompt, generated)

    def look(self, states: Mapping[str, Any]) -> None:
        """Count the tokens of what runs.

        Args:
            states: vLLM's ``OutputProcessor.request_states``: one for each sequence.
        """
        seen: dict[str, tuple[int, int]] = {}
        for state in list(states.values()):
            request_id = str(getattr(state, "external_req_id", None) or state.request_id)
            generated = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()
            read = 0 if state.is_prefilling else state.prompt_len
            known = seen.get(request_id, (0, 0))
            seen[request_id] = (max(known[0], read), known[1] + generated)
        for request_id, (read, generated) in seen.items():
            turn = self.running.get(request_id)
            if turn is not None:
                self.saw(turn, read, generated)

    def _alone(self) -> int:
        """How many places a user has who is alone."""
        if not self._fair:
            return self._places
        taken = 0
        while taken < self._places and self._may(taken, self._places - taken, 1):
            taken += 1
        return max(1, taken)

    def _may(self, taken: int, free: int, places: int) -> bool:
        if self._most is not None and taken and taken + places > self._most:
            return False
        if not self._fair:
            return True
        if not taken:
            return free >= places or free == self._places
        return taken + places - 1 < _SHARE * (free - places)

    def _next(self) -> None:
        """Let in whoever may go now."""
        while True:
            heads = [
                (self._usage.recent(user), queue)
                for user, queue in self._waiting.items()
                if self._may(self.taken(user), self._free, queue[0][0].places)
            ]
            if not heads:
                return
            recent, queue = min(heads, key=lambda head: head[0])
            turn, granted = queue.popleft()
            if not queue:
                del self._waiting[turn.user]
            if granted.cancelled():
                continue
            turn.priority = min(int(recent), _MOST_PRIORITY)
            turn.began = time.monotonic()
            self._free -= turn.places
            self._taken[turn.user] = self.taken(turn.user) + turn.places
            self.running[turn.request_id] = turn
            granted.set_result(None)

    def _leave(self, turn: Turn) -> None:
        queue = self._waiting.get(turn.user)
        if queue is None:
            return
        kept = deque(one for one in queue if one[0] is not turn)
        if kept:
            self._waiting[turn.user] = kept
        else:
            del self._waiting[turn.user]
        self._next()
