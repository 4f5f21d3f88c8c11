"""What one block saved for many requests, told once where it is the same for all of them.

A hundred requests that end in one step have mostly run the same block, and their messages differ in two
numbers each: a message for each of them is a hundred times the objects, written and read between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.registry import LATER, register
from nnsight_lab.wire.step_figures import StepFigures


@register
@dataclass(frozen=True)
class ManySaves:
    """The saves of requests that ran one block without an error, and no other.

    Attributes:
        block: As in `BlockSaves`.
        tree: As in `Packed`, of each of them.
        tensors: The same.
        extent: The first one's piece of shared memory; where they share one, all of it.
        offsets: Where in the file each one's begins.
        nbytes: Of each one's.
        shared: Whether they share one piece.
        requests: As in `RequestRecord`.
        indices: Of each, which completion.
        steps: As in `RequestSaves`.
    """

    block: str
    tree: str
    tensors: str
    extent: Extent
    offsets: tuple[int, ...]
    nbytes: int
    shared: bool
    requests: tuple[str, ...]
    indices: tuple[int, ...]
    steps: StepFigures | None = field(default=None, metadata=LATER)
