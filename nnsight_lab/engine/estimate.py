"""What a call would save and how long it would take, said before it runs.

Bytes are linear in what matters: a block that saves a layer saves so much per prompt token, one that
appends at every step so much per new token, one that saves a row so much in all. So two tiny requests
(and two that go on for some steps) give the line of each name, and the rest is a sum over the requests.
Where a block saves less than in proportion (``hidden[:100]``) the line lies above it, where it saves
more (attention-like squares) below; the worker's own check stands behind both.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.limits import REPLY_BYTES as INLINE_BYTES  # sent in the reply, outside the budgets
from nnsight_lab.wire.messages import RequestSaves
from nnsight_lab.wire.packed import Layout
from nnsight_lab.wire.sizes import shown_bytes

_NAMED = 4


class NameBytes(NamedTuple):
    """What is saved under one name, over all requests of a call.

    Attributes:
        block: ``"trace"``, or the edit's name.
        name: The saved name.
        nbytes: Its bytes.
    """

    block: str
    name: str
    nbytes: int

    def __str__(self) -> str:
        name = self.name if self.block == TRACE_BLOCK else f"{self.block}.{self.name}"
        return f"{name} ({shown_bytes(self.nbytes)})"


class Demand(NamedTuple):
    """One request, as far as an estimate needs it.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        new_tokens: Tokens it may generate, each sequence.
        sequences: Its ``n``.
        allowed_bytes: Its own ``save_budget``, or None.
    """

    prompt_tokens: int
    new_tokens: int
    sequences: int = 1
    allowed_bytes: int | None = None


class Sample(NamedTuple):
    """What one sequence of a finished request saved.

    Attributes:
        blocks: Bytes of each block, as they lie in shared memory: every tensor, or list of small ones, up to
            a multiple of 64.
        names: The same of each (block, name).
    """

    blocks: dict[str, int]
    names: dict[tuple[str, str], int]

    @classmethod
    def of(cls, saves: RequestSaves | None) -> Sample:
        """Measure a request's first sequence."""
        blocks: dict[str, int] = {}
        names: dict[tuple[str, str], int] = {}
        for block in saves.sequences[0].blocks if saves is not None and saves.sequences else ():
            blocks[block.block] = Layout.of(dict(block.values), name="saves").nbytes
            for name, value in block.values.items():
                names[block.block, name] = Layout.of(value, name=name).nbytes
        return cls(blocks, names)


class Growth(NamedTuple):
    """Bytes as a line in prompt tokens; past the first step, ``later + per_step * step`` more."""

    base: float
    per_token: float
    later: float = 0.0
    per_step: float = 0.0

    def at(self, prompt_tokens: int, new_tokens: int) -> int:
        """Bytes of one sequence."""
        nbytes = self.base + self.per_token * prompt_tokens
        if new_tokens > 1:
            nbytes += self.later + self.per_step * (new_tokens - 1)
        return max(0, round(nbytes))


@dataclass(frozen=True)
class Growths:
    """The lines of everything that one kind of request saves.

    Attributes:
        blocks: Of each block as a whole.
        names: Of each (block, name).
        unknown: Why there are none, in one line; "" where there are.
        over: Whether ``unknown`` says that even the probe was over the engine's budget.
    """

    blocks: Mapping[str, Growth] = field(default_factory=dict)
    names: Mapping[tuple[str, str], Growth] = field(default_factory=dict)
    unknown: str = ""
    over: bool = False

    @property
    def grows(self) -> bool:
        """Whether more is saved the longer a request generates."""
        return any(growth.per_step > 0 for growth in self.blocks.values())

    @classmethod
    def through(cls, samples: Mapping[tuple[int, int], Sample]) -> Growths:
        """The lines through what was measured.

        Args:
            samples: By (prompt tokens, new tokens): two lengths with one new token, and of the shorter
                one up to two more with more new tokens.
        """
        short, long = sorted(prompt for prompt, new in samples if new == 1)
        steps = sorted(new for _, new in samples)
        steps = [new for new in steps if new > 1]

        def line(sizes: Mapping[tuple[int, int], int]) -> Growth:
            per_token = (sizes[long, 1] - sizes[short, 1]) / (long - short)
            base = sizes[short, 1] - per_token * short
            if not steps:
                return Growth(base, per_token)
            first, last = (1, steps[0]) if len(steps) == 1 else steps
            per_step = (sizes[short, last] - sizes[short, first]) / (last - first)
            later = sizes[short, last] - sizes[short, 1] - per_step * (last - 1)
            return Growth(base, per_token, later, per_step)

        blocks = {key for sample in samples.values() for key in sample.blocks}
        # In the order of binding, which is the order a reader expects.
        names = dict.fromkeys(key for sample in samples.values() for key in sample.names)
        return cls(
            {key: line({at: s.blocks.get(key, 0) for at, s in samples.items()}) for key in blocks},
            {key: line({at: s.names.get(key, 0) for at, s in samples.items()}) for key in names},
        )


@dataclass(frozen=True)
class Estimate:
    """What a call would save, and how long it would take.

    Attributes:
        requests: How many requests.
        prompt_tokens: Tokens of their prompts.
        new_tokens: Tokens they may generate, over all sequences.
        saved_bytes: Bytes of everything saved; None where it is not known (``unknown`` says why).
        packed_bytes: Of those, what counts against the budgets: blocks of at most 64 KiB a sequence ride
            the reply.
        seconds: About how long the call would take; None where nothing is known about the engine's speed.
        budget_bytes: What is left for saves, in memory and on disk.
        memory_budget_bytes: What is left of it in memory.
        fits: Whether ``packed_bytes`` is within ``budget_bytes`` and no request over its own
            ``save_budget``; None where it is not known.
        names: Bytes of each saved name, most first.
        how: ``"layers"`` (by formula) or ``"probe"`` (measured on tiny requests).
        refused: How many requests would be over their own ``save_budget``.
        at_most: Whether requests that stop early would save less.
        unknown: Why nothing could be said, in one line; "" otherwise.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    saved_bytes: int | None
    packed_bytes: int | None
    seconds: float | None
    budget_bytes: int
    memory_budget_bytes: int
    fits: bool | None
    names: tuple[NameBytes, ...]
    how: str
    refused: int = 0
    at_most: bool = False
    unknown: str = ""

    def __str__(self) -> str:
        count = f"{self.requests:,} prompt{'' if self.requests == 1 else 's'}, {self.prompt_tokens:,} tokens"
        if self.new_tokens > self.requests:
            count += f" and up to {self.new_tokens:,} new"
        if self.saved_bytes is None:
            return f"{count}: not known, {self.unknown}"
        size = f"{'at most ' if self.at_most else ''}{shown_bytes(self.saved_bytes)}"
        time = "" if self.seconds is None else f" in about {_seconds(self.seconds)}"
        lines = [f"{count}: {size}{time}; {self._fit()}"]
        if self.how == "probe" and self.names:
            lines.append(named(self.names))
        return "\n".join(lines)

    def _fit(self) -> str:
        packed = self.packed_bytes or 0
        if self.refused:
            return f"does not fit ({self.refused} of the requests are over their own save_budget)"
        if not self.fits:
            return f"does not fit ({shown_bytes(self.budget_bytes)} left of save_budget and spill_budget)"
        if packed <= self.memory_budget_bytes:
            return f"fits in memory ({shown_bytes(self.memory_budget_bytes)} left of save_budget)"
        return f"fits, {shown_bytes(packed - self.memory_budget_bytes)} of it by disk (spill_budget)"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return f'<div style="white-space:pre-wrap">{html.escape(str(self))}</div>'


class Tally:
    """The sum over requests."""

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.packed_bytes = 0
        #: Requests a block of which is over their own ``save_budget``; the first one's bytes and budget.
        self.refused = 0
        self.first_refused: tuple[int, int] | None = None
        self._names: dict[tuple[str, str], int] = {}

    def add(self, demand: Demand, growths: Growths) -> None:
        """Count one request."""
        largest = 0
        for growth in growths.blocks.values():
            nbytes = growth.at(demand.prompt_tokens, demand.new_tokens)
            largest = max(largest, nbytes)
            self.saved_bytes += nbytes * demand.sequences
            if nbytes > INLINE_BYTES:
                self.packed_bytes += nbytes * demand.sequences
        if demand.allowed_bytes is not None and largest > demand.allowed_bytes:
            self.refused += 1
            self.first_refused = self.first_refused or (largest, demand.allowed_bytes)
        for key, growth in growths.names.items():
            nbytes = growth.at(demand.prompt_tokens, demand.new_tokens) * demand.sequences
            self._names[key] = self._names.get(key, 0) + nbytes

    @property
    def names(self) -> tuple[NameBytes, ...]:
        """Every name with its bytes, most first."""
        found = [NameBytes(block, name, nbytes) for (block, name), nbytes in self._names.items()]
        return tuple(sorted(found, key=lambda named: -named.nbytes))


def named(names: Sequence[NameBytes]) -> str:
    """The largest names with their bytes, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more


def totals(demands: Iterable[Demand]) -> tuple[int, int]:
    """Prompt tokens and new tokens over all requests."""
    listed = list(demands)
    return sum(d.prompt_tokens for d in listed), sum(d.new_tokens * d.sequences for d in listed)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
