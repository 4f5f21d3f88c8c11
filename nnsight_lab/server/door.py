"""Where a kernel on this machine asks for the memory its saves are in, instead of their bytes.

A kernel is believed two things, and neither because it says so: whose it is, by a ticket that it got over
HTTP with its token; and that it runs on this machine as this server's own user, by what Linux says of the
other end of a Unix socket. Memory is handed over as an open file, so there is no name by which anybody could
reach another's: one slab holds pieces of one user alone, and only those slabs are handed over of which this
kernel was lent a piece. The socket has no file and leaves none.

The hard fact: nobody can take memory back from a process. So what a kernel had when its lease or its
connection ended, or a call that it did not hear out, is never written again: its slabs are retired, and go
with the last process that maps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nnsight_lab.saves.slab import SlabReader, open_slab
from nnsight_lab.server.limits import Limits
from nnsight_lab.wire.door import PACKET_BYTES, address, peer_uid
from nnsight_lab.wire.extent import Extent

_TICKET_S = 30.0
#: What Linux says of a user it has no number for.
_NOBODY = 65534


class Slab(mmap.mmap):
    """A slab that can be handed over.

    Attributes:
        descriptor: Of its file, for reading only.
    """

    descriptor = -1

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def opened(extent: Extent) -> mmap.mmap:
    """`open_slab`, and a descriptor of it that can be handed over."""
    descriptor = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        slab = open_slab(extent, Slab)
        slab.descriptor, descriptor = descriptor, -1
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return slab


class Piece(NamedTuple):
    """A piece of memory that is lent.

    Attributes:
        memory: A tensor over it: while there is one, its worker does not have it back.
        call: Which call's it is.
    """

    memory: Any
    call: str


@dataclass(eq=False)
class Lent:
    """What one kernel maps.

    Attributes:
        connection: Of the kernel; None once it is gone.
        pieces: What it was lent and did not give back.
        slabs: Those that pieces are in, by what they are called.
        sent: Of those, the ones whose file it has.
    """

    connection: socket.socket | None = None
    pieces: dict[Extent, Piece] = field(default_factory=dict)
    slabs: dict[str, Slab] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """What its pieces take."""
        return sum(piece.nbytes for piece in self.pieces)


class Door:
    """One server's; on its loop alone.

    Args:
        reader: What maps the workers' slabs in this process.
        retire: Tells the workers never to write to slabs again; resolves when they will not.
        limits: Each user's.
    """

    def __init__(
        self, reader: SlabReader, retire: Callable[[list[str]], asyncio.Future[Any]], limits: Limits
    ) -> None:
        self._reader = reader
        self._retire = retire
        self._limits = limits
        self._lent: dict[tuple[str, str], Lent] = {}
        self._tickets: dict[str, tuple[str, str]] = {}
        self._shares: dict[str, str] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._socket: socket.socket | None = None
        #: What kernels ask it by; "" where there is no door.
        self.name = ""
        if os.getuid() != _NOBODY:
            reader.opener = opened
            self._open()

    def _open(self) -> None:
        self.name = f"nnsight_lab.{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(address(self.name))
            self._socket.listen(64)
        except OSError:  # a system without such sockets: bytes travel
            self.close()
            return
        self._start(self._accept(self._socket))

    def close(self) -> None:
        """The server ends."""
        self.name = ""
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            self._socket.close()

    # -- who comes in --------------------------------------------------------------------------------

    def ticket(self, owner: str, lease: str) -> str:
        """What a kernel of this lease says at the door, once and soon."""
        ticket = secrets.token_hex(16)
        self._tickets[ticket] = (owner, lease)
        asyncio.get_running_loop().call_later(_TICKET_S, self._tickets.pop, ticket, None)
        return ticket

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listening)
            connection.setblocking(False)
            self._start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        key: tuple[str, str] | None = None
        try:
            if peer_uid(connection) != os.getuid():
                return
            said = await asyncio.wait_for(loop.sock_recv(connection, PACKET_BYTES), _TICKET_S)
            key = self._tickets.pop(said.decode("ascii", "replace"), None)
            if key is None or key in self._lent:
                key = None
                return
            lent = self._lent[key] = Lent(connection)
            connection.send(b"ok")
            while said := await loop.sock_recv(connection, PACKET_BYTES):
                self._hand_over(lent, said.decode(errors="replace"))
        except (OSError, TimeoutError):
            return  # it is gone, or takes nothing
        finally:
            connection.close()
            if key is not None:
                self._gone(key)

    def _hand_over(self, lent: Lent, path: str) -> None:
        """One slab's file, where it holds something that was lent to this kernel."""
        assert lent.connection is not None
        slab = lent.slabs.get(path)
        if slab is None:
            lent.connection.send(b"no")
            return
        socket.send_fds(lent.connection, [struct.pack("<Q", len(slab))], [slab.descriptor])
        lent.sent.add(path)

    # -- what is lent --------------------------------------------------------------------------------

    def share(self, owner: str, lease: str) -> str:
        """Whose slabs the saves of this kernel go to; "" where it maps none."""
        if (owner, lease) not in self._lent:
            return ""
        return self._shares.setdefault(owner, secrets.token_hex(8))

    def lend(self, owner: str, lease: str, call: str, pieces: Iterable[tuple[Extent, Any]]) -> bool:
        """Let a kernel map pieces of memory; whether it may: else their bytes travel."""
        lent = self._lent.get((owner, lease))
        found = dict(pieces)
        if lent is None or not found:
            return False
        others = sum(one.nbytes for (other, _), one in self._lent.items() if other == owner)
        if others + sum(piece.nbytes for piece in found) > self._limits.parked_bytes:
            return False
        slabs = {extent.path: self._reader.slab(extent.path) for extent in found}
        if not all(isinstance(slab, Slab) for slab in slabs.values()):
            return False
        lent.pieces.update({extent: Piece(memory, call) for extent, memory in found.items()})
        lent.slabs.update(slabs)  # type: ignore[arg-type]
        return True

    def take_back(self, owner: str, lease: str, pieces: Sequence[Extent]) -> None:
        """A kernel looks at these no more."""
        lent = self._lent.get((owner, lease))
        if lent is not None:
            for piece in pieces:
                lent.pieces.pop(piece, None)

    def give_back(self, owner: str, lease: str, pieces: Sequence[Extent]) -> list[str]:
        """`take_back`; returns slabs that the kernel need not map any longer."""
        self.take_back(owner, lease, pieces)
        lent = self._lent.get((owner, lease))
        if lent is None:
            return []
        self._forget_slabs(lent)
        gone = [path for path in lent.sent if path not in lent.slabs]
        lent.sent.difference_update(gone)
        return gone

    def sweep(self) -> None:
        """Let go of slabs that the workers gave up, whether or not their kernel asks."""
        for lent in self._lent.values():
            self._forget_slabs(lent)

    def _forget_slabs(self, lent: Lent) -> None:
        used = {piece.path for piece in lent.pieces}
        for path in list(lent.slabs):
            if path not in used and self._reader.slab(path) is None:
                del lent.slabs[path]

    def withdraw(self, owner: str, lease: str, call: str) -> None:
        """A kernel did not hear a call out: it may have what was lent for that, and will not give it back."""
        lent = self._lent.get((owner, lease))
        if lent is not None:
            self._let_go(lent, [extent for extent, piece in lent.pieces.items() if piece.call == call])

    def end_lease(self, owner: str, lease: str) -> None:
        """What a kernel mapped is the server's concern no more; a kernel that lives keeps what it has."""
        lent = self._lent.get((owner, lease))
        if lent is not None:
            self._let_go(lent, list(lent.pieces))

    def _gone(self, key: tuple[str, str]) -> None:
        lent = self._lent.pop(key)
        self._let_go(lent, list(lent.pieces))

    def _let_go(self, lent: Lent, extents: list[Extent]) -> None:
        kept = [lent.pieces.pop(extent) for extent in extents]
        used = {extent.path for extent in lent.pieces}
        paths = {extent.path for extent in extents}
        for path in paths - used:
            del lent.slabs[path]
        if kept:
            self._start(self._retired(kept, sorted(paths)))

    async def _retired(self, pieces: list[Piece], paths: list[str]) -> None:
        """Have slabs retired, and only then give their pieces back."""
        with contextlib.suppress(Exception):  # an engine that died writes no more
            await self._retire(paths)
        pieces.clear()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def figures(self) -> dict[str, int]:
        """What is lent, in figures."""
        return {
            "lent": sum(len(one.pieces) for one in self._lent.values()),
            "lent_bytes": sum(one.nbytes for one in self._lent.values()),
        }
