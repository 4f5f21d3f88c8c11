"""Numbers as a PNG picture, a few lines and no library: what a page shows where nothing else can draw."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

_PALETTE, _RGBA = 3, 6


def png(
    pixels: npt.NDArray[np.uint8], palette: npt.NDArray[np.uint8] | None = None, *, level: int = 6
) -> bytes:
    """A picture, top line first.

    Args:
        pixels: ``[row, column, 4]`` red, green, blue, alpha, or with a palette ``[row, column]`` its indices.
        palette: Up to 256 colours ``[index, 4]``.
        level: How hard zlib tries, 1 to 9.
    """
    height, width = pixels.shape[:2]
    flat = pixels.reshape(height, -1)
    lines = np.zeros((height, 1 + flat.shape[1]), dtype=np.uint8)  # each begins with its filter: none
    lines[:, 1:] = flat
    kind = _RGBA if palette is None else _PALETTE
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    if palette is not None:
        chunks += [(b"PLTE", palette[:, :3].tobytes()), (b"tRNS", palette[:, 3].tobytes())]
    chunks += [(b"IDAT", zlib.compress(lines.tobytes(), level)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
