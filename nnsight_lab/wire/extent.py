"""Where a value's tensors lie in shared memory, as a message; `packed` reads and writes them.

Apart from `packed` because messages are read where torch is not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnsight_lab.wire.registry import register

#: Every tensor starts at a multiple of this, whatever its dtype.
ALIGN = 64


def aligned(nbytes: int) -> int:
    """``nbytes`` up to the next multiple of `ALIGN`."""
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


@register
@dataclass(frozen=True)
class Extent:
    """A piece of a file of shared memory: one block's tensors.

    Attributes:
        path: The file.
        slab_bytes: The size of that file.
        offset: Where the piece begins.
        nbytes: How long it is.
        rank: The worker that owns the file.
    """

    path: str
    slab_bytes: int
    offset: int
    nbytes: int
    rank: int


@register
@dataclass(frozen=True)
class Packed:
    """A value taken apart.

    Attributes:
        tree: The codec's tree, as JSON; a tensor is its index in ``tensors``.
        extent: Where the tensors' bytes are.
        tensors: Of each tensor offset in the extent, dtype's name and shape, as JSON: hundreds of them
            are written and read at once between two steps of the model.
    """

    tree: str
    extent: Extent
    tensors: str
