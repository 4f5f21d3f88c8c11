"""Blocks that are this package's own: which of them, and plain data for it, are all that travels.

The payload is the codec's, so nothing is unpickled to read it, and the text that is compiled is one of those
below, whatever the data says: no name of it goes into source. That is why a server of level ``strict`` takes
these and no others.
"""

from __future__ import annotations

from typing import Any, Final

from nnsight_lab.blocks.block import Block
from nnsight_lab.wire.codec import WireError, decode, encode

#: The text of each kind.
_TEXTS: Final = {
    "steps": "from nnsight_lab.worker.stepping import run\nrun(steps, tracer, globals())\n",
    "lens": "from nnsight_lab.worker.looking import lens_of_request\nlens_of_request(model, **asked)\n",
    "attention": (
        "from nnsight_lab.worker.looking import attention_of_request\nattention_of_request(model, **asked)\n"
    ),
}


class DeclaredBlock(Block):
    """One of them, in the kernel.

    Attributes:
        kind: Which.
        asked: Its data, for the codec.
    """

    kind: str
    asked: dict[str, Any]

    @classmethod
    def of(cls, kind: str, asked: dict[str, Any]) -> DeclaredBlock:
        """A block of that kind."""
        block = cls(_TEXTS[kind], "<nnsight_lab>", 1, {}, {})
        block.kind, block.asked = kind, asked
        return block

    def dumps(self) -> bytes:
        """As it travels: nothing in it is code."""
        return encode({"kind": self.kind, "asked": self.asked})


def told(payload: bytes) -> tuple[str, dict[str, Any]]:
    """Kind and data of a block that travelled.

    Raises:
        WireError: It is none.
    """
    found = decode(payload)
    if type(found) is not dict or set(found) != {"kind", "asked"}:
        raise WireError("it is no declared block")
    kind, asked = found["kind"], found["asked"]
    if kind not in _TEXTS or type(asked) is not dict or not all(type(name) is str for name in asked):
        raise WireError(f"there is no declared block {kind!r:.60}")
    return kind, asked


def block_of(kind: str, presaved: frozenset[str] = frozenset(), **names: Any) -> Block:
    """The block that runs, with what its text reads."""
    return Block(_TEXTS[kind], "<nnsight_lab>", 1, {}, names, presaved)
