"""How a kernel and the server's door speak: packets on a Unix socket that has no file.

Abstract names are Linux's: they belong to the network namespace, vanish with their socket, and are guarded by
nothing, so both ends ask Linux who the other one is before they say or believe anything.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

#: No packet is longer.
PACKET_BYTES: Final = 4096
_CREDENTIALS: Final = struct.Struct("3i")


def address(name: str) -> bytes:
    """The socket address of a door."""
    return b"\0" + name.encode()


def peer_uid(connection: socket.socket) -> int:
    """The user that the other end of a connection runs as, as Linux has it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
