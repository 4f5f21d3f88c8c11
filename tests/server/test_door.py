"""The door by itself: real slabs, real sockets, and no engine."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_lab.engine.same_host import NextDoor
from nnsight_lab.errors import EngineDied
from nnsight_lab.saves.slab import Place, SlabPool, SlabReader
from nnsight_lab.server.door import Door
from nnsight_lab.server.limits import Limits
from nnsight_lab.wire.extent import Extent

SHM = Path("/dev/shm")
MIB = 2**20


class Room:
    """A worker's slabs, the server's reader of them, and its door."""

    def __init__(self, parked_bytes: int) -> None:
        self.let_go: list[Extent] = []
        #: What was done to the slabs, in order.
        self.done: list[str] = []
        self.pool = SlabPool(f"door{os.getpid()}", 0, [Place(SHM, 256 * MIB)])
        self.reader = SlabReader(self._released)
        self.door = Door(self.reader, self._retired, Limits(parked_bytes=parked_bytes))

    def _released(self, extent: Extent) -> None:
        self.done.append("released")
        self.let_go.append(extent)
        self.pool.release([extent])

    def _retired(self, paths: list[str]) -> asyncio.Future[Any]:
        self.done.append("retired")
        self.pool.retire(paths)
        return asyncio.ensure_future(asyncio.sleep(0))

    def piece(self, fill: int, owner: str = "alice", lease: str = "k") -> tuple[Extent, torch.Tensor]:
        """A piece that the worker wrote and the server opened."""
        extent = self.pool.allocate(MIB, self.door.share(owner, lease))
        self.pool.view(extent).fill_(fill)
        return extent, self.reader.open(extent)

    async def enter(self, owner: str = "alice", lease: str = "k") -> NextDoor:
        """A kernel that came in."""
        kernel = NextDoor.find(self.door.name)
        assert kernel is not None
        assert await asyncio.to_thread(kernel.enter, self.door.ticket(owner, lease))
        return kernel


async def soon(condition: Callable[[], bool]) -> None:
    """Wait for something of the loop's."""
    for _ in range(2000):
        gc.collect()
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 10 s")


@pytest.fixture
def inside() -> Iterator[Callable[..., None]]:
    """Runs a test in a room, and looks that nothing of it is left."""

    def run(test: Callable[[Room], Awaitable[None]], parked_bytes: int = 64 * MIB) -> None:
        async def main() -> None:
            room = Room(parked_bytes)
            try:
                await test(room)
            finally:
                room.door.close()
                room.pool.close()
                await asyncio.sleep(0)

        asyncio.run(main())

    yield run
    assert not list(SHM.glob(f"nnsight_lab.door{os.getpid()}.*"))


def test_what_is_lent_is_mapped_and_goes_back(inside: Callable[..., None]) -> None:
    async def test(room: Room) -> None:
        assert not room.door.share("alice", "k")
        assert not room.door.lend("alice", "k", "call", [room.piece(9)])
        kernel = await room.enter()
        extent, memory = room.piece(7)
        assert room.door.lend("alice", "k", "call", [(extent, memory)])
        del memory
        mapped = await asyncio.to_thread(kernel.open, extent)
        assert mapped[extent.offset] == 7
        mapped[extent.offset] = 1  # the kernel's own
        assert room.pool.view(extent)[0] == 7
        assert room.door.figures() == {"lent": 1, "lent_bytes": extent.nbytes}
        room.let_go.clear()
        assert room.door.give_back("bob", "k", [extent]) == []
        assert room.let_go == []
        room.door.give_back("alice", "k", [extent])
        gc.collect()
        assert room.let_go == [extent]
        again, memory = room.piece(8)
        assert again.path == extent.path  # given back in order, it is used again
        kernel.close()

    inside(test)


def test_what_a_kernel_may_have_kept_is_retired_before_it_goes_back(inside: Callable[..., None]) -> None:
    async def test(room: Room) -> None:
        for end in ("lease", "call", "connection"):
            kernel = await room.enter()
            extent, memory = room.piece(7)
            room.door.lend("alice", "k", "call", [(extent, memory)])
            del memory
            mapped = await asyncio.to_thread(kernel.open, extent)
            room.done.clear()
            if end == "lease":
                room.door.end_lease("alice", "k")
            elif end == "call":
                room.door.withdraw("alice", "k", "another")
                assert room.door.figures()["lent"] == 1
                room.door.withdraw("alice", "k", "call")
            else:
                kernel.close()
            await soon(lambda: "released" in room.done)
            assert room.done == ["retired", "released"]
            assert room.door.figures() == {"lent": 0, "lent_bytes": 0}
            other, memory = room.piece(1)
            assert other.path != extent.path
            assert mapped[extent.offset] == 7
            del memory
            if end != "connection":
                with pytest.raises(EngineDied):
                    await asyncio.to_thread(kernel.open, extent)
                kernel.close()
            await soon(lambda: not room.door.share("alice", "k"))

    inside(test)


def test_a_user_who_holds_much_is_sent_bytes(inside: Callable[..., None]) -> None:
    async def test(room: Room) -> None:
        first, second = await room.enter(), await room.enter(lease="second")
        bob = await room.enter("bob")
        held, more = room.piece(1), room.piece(2, lease="second")
        assert room.door.lend("alice", "k", "call", [held])
        assert not room.door.lend("alice", "second", "call", [more])
        assert room.door.lend("bob", "k", "call", [room.piece(3, "bob")])
        room.door.give_back("alice", "k", [held[0]])
        assert room.door.lend("alice", "second", "call", [more])
        for kernel in (first, second, bob):
            kernel.close()

    inside(test, parked_bytes=MIB)


def test_one_user_cannot_have_what_anothers_kernel_was_lent(inside: Callable[..., None]) -> None:
    async def test(room: Room) -> None:
        alice, bob = await room.enter(), await room.enter("bob")
        mine, theirs = room.piece(1), room.piece(2, "bob")
        assert mine[0].path != theirs[0].path
        room.door.lend("alice", "k", "call", [mine])
        room.door.lend("bob", "k", "call", [theirs])
        for kernel, extent in ((alice, theirs[0]), (bob, mine[0])):
            with pytest.raises(EngineDied, match="lends this memory no more"):
                await asyncio.to_thread(kernel.open, extent)
        assert (await asyncio.to_thread(bob.open, theirs[0]))[theirs[0].offset] == 2
        alice.close()
        bob.close()

    inside(test)
