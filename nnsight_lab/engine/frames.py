"""The messages of a call's answer, out of the chunks it arrives in.

A frame says its length first. It is believed up to `FRAME_MOST` and no further: nobody makes a kernel
allocate what only a number claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nnsight_lab.wire.codec import WireError
from nnsight_lab.wire.serving import FRAME_BYTES, FRAME_MOST


def messages(chunks: Iterable[bytes]) -> Iterator[bytearray]:
    """The messages of an answer, each in memory of its own, which what is in it will look into.

    Raises:
        WireError: One claims to be longer than any is.
    """
    prefix = bytearray()
    message: bytearray | None = None
    filled = 0
    for chunk in chunks:
        view = memoryview(chunk)
        while view:
            if message is None:
                need = FRAME_BYTES - len(prefix)
                prefix += view[:need]
                view = view[need:]
                if len(prefix) == FRAME_BYTES:
                    length = int.from_bytes(prefix, "little")
                    if length > FRAME_MOST:
                        raise WireError(f"a frame claims {length:,} bytes; {FRAME_MOST:,} is the most")
                    message, filled = bytearray(length), 0
                    prefix = bytearray()
                continue
            took = min(len(view), len(message) - filled)
            message[filled : filled + took] = view[:took]
            filled += took
            view = view[took:]
            if filled == len(message):
                yield message
                message = None
