"""The constants of a message, and the error of one that breaks them.

A message is ``MAGIC`` (7 bytes), the version (1 byte), the header's length (u64, little endian), the
header (JSON, UTF-8), then every tensor's bytes, each at a multiple of ``ALIGNMENT`` from the
message's start. There is exactly one layout for a given list of tensors, so a reader can check all
of it before it allocates anything.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nnsight_lab.errors import LabError

MAGIC: Final = b"nnslab\n"
VERSION: Final = 1
PREFIX_BYTES: Final = len(MAGIC) + 1 + 8
ALIGNMENT: Final = 64

#: A JSON text becomes roughly twenty times its size in Python objects, so it is capped.
MAX_HEADER_BYTES: Final = 256 * 2**20
#: Containers in containers. Each takes three frames of the interpreter's thousand.
MAX_DEPTH: Final = 100
#: What torch's iterators and numpy take.
MAX_DIMS: Final = 64
#: Elements times bytes of each; also bounds the strides of a tensor with a zero in its shape.
MAX_TENSOR_BYTES: Final = 2**62
#: Longer bytes travel beside the header, as a tensor does, rather than as hex inside it.
INLINE_BYTES: Final = 256
#: Up to this a block's tensors ride the reply itself: a page of shared memory costs more.
REPLY_BYTES: Final = 64 * 1024
#: What a look at a running request's saves may bring home at a time.
PEEK_BYTES: Final = 256 * 1024


class WireError(LabError):
    """A message that cannot be read; says what is wrong with it."""


def aligned(offset: int) -> int:
    """The next multiple of ``ALIGNMENT`` that is not below ``offset``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Extent(NamedTuple):
    """A shape that was checked, and the bytes it takes."""

    shape: list[int]
    nbytes: int


def extent(shape: object, itemsize: int) -> Extent:
    """Check a shape that came over the wire.

    Args:
        shape: What should be a list of non-negative integers.
        itemsize: Bytes of one element.

    Raises:
        WireError: It is not such a list, or no tensor can be that large.
    """
    if type(shape) is not list or len(shape) > MAX_DIMS:
        raise WireError(f"a shape is a list of at most {MAX_DIMS} sizes, not {shape!r:.80}")
    bound = itemsize
    empty = False
    for size in shape:
        if type(size) is not int or size < 0:
            raise WireError(f"a shape has sizes of zero or more, not {size!r:.80}")
        empty = empty or size == 0
        bound *= max(size, 1)
        if bound > MAX_TENSOR_BYTES:
            raise WireError(f"no tensor can have the shape {shape!r:.80}")
    return Extent(shape, 0 if empty else bound)
