"""The memory that a server on this machine has saves in, mapped here instead of fetched.

The file comes over a Unix socket, so there is nothing to name but what this kernel was lent. It is mapped
private and writable, as a file of saves is: a change of a tensor is this kernel's own, and neither the server
nor another kernel ever sees it. Whoever listens at the other end is asked for by Linux before a word is said:
another user could wait there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from typing import Final

from nnsight_lab.errors import EngineDied
from nnsight_lab.wire.door import PACKET_BYTES, address, peer_uid
from nnsight_lab.wire.extent import Extent

_TIMEOUT_S: Final = 20.0
#: Python names it from 3.13 on; without it a slab larger than what is free cannot be mapped privately.
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


def no_door(extent: Extent) -> mmap.mmap:
    """Refused: a server names memory to a kernel that has no door to it. No file is opened on its word."""
    raise EngineDied("The server says that saves are in memory which it did not lend.", cause="not lent")


class NextDoor:
    """This kernel's connection to the door of a server.

    Args:
        connection: To a process of this user.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def find(cls, name: str) -> NextDoor | None:
        """The door of that name, where it is on this machine and this user's; else None."""
        if not name:
            return None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(_TIMEOUT_S)
            connection.connect(address(name))
            if peer_uid(connection) == os.getuid():
                return cls(connection)
        connection.close()
        return None

    def enter(self, ticket: str) -> bool:
        """Say the ticket; whether it was taken."""
        try:
            self._connection.send(ticket.encode())
            return self._connection.recv(PACKET_BYTES) == b"ok"
        except OSError:
            return False

    def open(self, extent: Extent) -> mmap.mmap:
        """The slab that a lent piece lies in.

        Raises:
            EngineDied: The server is gone, or lends it no more.
        """
        with self._lock:
            try:
                self._connection.send(extent.path.encode())
                told, descriptors, _, _ = socket.recv_fds(self._connection, PACKET_BYTES, 1)
            except OSError as error:
                raise EngineDied(
                    f"The server's memory cannot be reached ({error}).", cause=str(error)
                ) from None
        try:
            size = os.fstat(descriptors[0]).st_size if descriptors else 0
            if not descriptors or len(told) != 8 or struct.unpack("<Q", told)[0] != size:
                raise EngineDied(
                    "The server lends this memory no more: run the cell again.", cause="not lent"
                )
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptors[0], size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=protection)
        finally:
            for one in descriptors:
                os.close(one)

    def close(self) -> None:
        """Leave; what is mapped stays mapped."""
        self._connection.close()
