"""Interleaved rounds of several works, and the ratios between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """What was measured.

    Attributes:
        seconds: Work -> its seconds in each round.
    """

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, work: str) -> float:
        """Median seconds of a work."""
        return statistics.median(self.seconds[work])

    def ratio(self, work: str, to: str) -> float:
        """Median over rounds of ``work`` divided by ``to`` in the same round."""
        pairs = zip(self.seconds[work], self.seconds[to], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def difference_ms(self, work: str, to: str) -> float:
        """Median over rounds of ``work`` minus ``to``, in milliseconds."""
        pairs = zip(self.seconds[work], self.seconds[to], strict=True)
        return 1000 * statistics.median(mine - theirs for mine, theirs in pairs)


def run(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Rounds:
    """Run every work once a round, in an order that rotates, and time each.

    Args:
        works: Name -> what to do.
        rounds: How many rounds count.
        warm_up: How many run before that and do not.
        say: Told of each round.
    """
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            works[name]()
            took = time.perf_counter() - began
            if number >= 0:
                seconds[name].append(took)
        if number >= 0:
            latest = ", ".join(f"{name} {seconds[name][-1]:.3f} s" for name in names)
            say(f"round {number + 1}/{rounds}: {latest}")
    return Rounds({name: tuple(values) for name, values in seconds.items()})
