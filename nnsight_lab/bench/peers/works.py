"""The works, as plain data: what every peer is asked to do.

Only the standard library is imported here, because this is read in each peer's own environment. A work says
nothing about how a peer does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: What is asked for beside the generated tokens: nothing; the residual stream of the prompt after the middle
#: layer; after every layer; after every layer, at the prompt's last token only; or that the residual stream
#: after the middle layer is moved at every token.
NOTHING, SAVE, ALL, LAST, STEER = "nothing", "save", "all", "last", "steer"

#: What steering adds to every component of the residual stream.
STRENGTH: Final = 1.0


@dataclass(frozen=True)
class Work:
    """One row of the comparison.

    Attributes:
        name: As in rows and on the command line.
        title: For people.
        what: One of the kinds above.
        prompts: How many, all at once.
        prompt_tokens: Of each prompt.
        new_tokens: Generated for each, greedily, never stopped earlier.
    """

    name: str
    title: str
    what: str
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def plain(self) -> str:
        """The work that asks for nothing, and is otherwise the same."""
        return f"{self.name.rpartition('_')[0]}_{NOTHING}"

    @property
    def tokens(self) -> int:
        """What a rate counts: new tokens, or the prompts' where only one new token is asked for."""
        return self.prompts * (self.new_tokens if self.new_tokens > 1 else self.prompt_tokens)

    def ids(self, vocabulary: int) -> list[list[int]]:
        """The prompts, all different, as ids of tokens that the model has."""
        some = min(vocabulary, 20_000) - 100
        return [
            [(7 * row + 3 * place + row * place % 11) % some + 100 for place in range(self.prompt_tokens)]
            for row in range(self.prompts)
        ]


def works(scale: int = 1) -> list[Work]:
    """Every work, with ``scale`` times fewer prompts where there are many.

    W1 is 128 prompts of 128 tokens that go on for 64, W2 is 64 prompts of 512 tokens that do not.
    """
    many, long, some = max(1, 128 // scale), max(1, 64 // scale), 8
    said = {
        NOTHING: "nothing asked",
        SAVE: "one layer saved",
        STEER: "one layer steered at every token",
        ALL: "all layers saved",
        LAST: "all layers saved, last token",
    }
    shapes: list[tuple[str, str, tuple[str, ...], tuple[int, int, int]]] = [
        ("single", "one stream", (NOTHING, SAVE, STEER), (1, 128, 64)),
        ("streams8", "8 streams", (NOTHING, SAVE, STEER), (some, 128, 64)),
        ("w1", "W1", (NOTHING, SAVE, STEER), (many, 128, 64)),
        ("w2", "W2", (NOTHING, SAVE, LAST, ALL), (long, 512, 1)),
    ]
    return [
        Work(f"{name}_{what}", f"{title}: {said[what]}", what, *numbers)
        for name, title, whats, numbers in shapes
        for what in whats
    ]
