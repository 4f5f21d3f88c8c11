"""What of a prompt blocks touch, as a word: `nnsight_lab.blocks.reach` reads it off a block.

Apart from that because those who only pass the word on load neither torch nor nnsight: a kernel that has the
package's extension, until it starts an engine.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple


class Reach(enum.Enum):
    """What of a prompt the blocks of one request touch."""

    #: Nothing: logits, samples and the result only.
    ANSWERS = "answers"
    #: Every row alike, and nothing is read: the same prefix always has the same keys and values.
    ROWS = "rows"
    #: Some blocks are of the first kind, the others of the second.
    MIXED = "mixed"
    #: Rows by their place, or all of them to be read.
    PROMPT = "prompt"

    @classmethod
    def said(cls, word: object) -> Reach:
        """What a word of a request stands for; of any other, and of none, the prompt."""
        return _SAID.get(word, cls.PROMPT) if isinstance(word, str) else cls.PROMPT

    @property
    def whole(self) -> bool:
        """Whether the prompt has to run in one step."""
        return self in (Reach.MIXED, Reach.PROMPT)


_SAID: Final = {one.value: one for one in Reach}


class Touch(NamedTuple):
    """What one block touches.

    Attributes:
        reach: Of the kinds that one block can be of.
        content: What tells it from another of reach `Reach.ROWS`; empty for the others.
    """

    reach: Reach
    content: bytes = b""


UNKNOWN: Final = Touch(Reach.PROMPT)


def together(touches: Iterable[Touch]) -> Reach | None:
    """What the blocks of one request touch; None where there are none."""
    found = {touch.reach for touch in touches}
    if not found:
        return None
    if len(found) == 1:
        return found.pop()
    return Reach.MIXED if found == {Reach.ANSWERS, Reach.ROWS} else Reach.PROMPT
