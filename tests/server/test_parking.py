"""Replies that wait: whose they are, how long, how many at a time, and what a frame may claim."""

from __future__ import annotations

import asyncio

import pytest
import torch

from nnsight_lab.engine.frames import messages
from nnsight_lab.server.limits import Limits, Refused
from nnsight_lab.server.parking import Parking
from nnsight_lab.wire.codec import WireError, check_head, decode, encode, encode_parts, head_of
from nnsight_lab.wire.serving import ASKED_HEADER_BYTES, FRAME_MOST, PARK_BYTES, Parked

MIB = 2**20


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def parts(mib: float, fill: int = 1) -> list[object]:
    return encode_parts({"x": torch.full((int(mib * MIB),), fill, dtype=torch.uint8), "name": "hidden"})


def whole(
    parking: Parking, told: Parked, owner: str = "alice", lease: str = "k", step: int = 700_001
) -> bytes:
    """A message in pieces of an odd size."""
    found = bytearray()
    for start in range(0, told.nbytes, step):
        for chunk in parking.piece(owner, lease, told.id, start, min(start + step, told.nbytes)):
            found += chunk
    return bytes(found)


def parked(frame: list[object]) -> Parked:
    """What a frame says of a message that waits."""
    found = decode(b"".join(frame))  # type: ignore[arg-type]
    assert type(found) is Parked
    return found


def test_a_small_message_rides_its_frame_and_a_large_one_waits_and_comes_in_pieces() -> None:
    async def run() -> None:
        parking = Parking(Limits())
        parking.open("alice", "k")
        small = parts(0.5)
        assert await parking.framed("alice", "k", "call", small) is small
        frame = await parking.framed("alice", "k", "call", parts(3))
        assert sum(len(part) for part in frame) < PARK_BYTES  # type: ignore[arg-type,misc]
        told = parked(frame)
        assert told.head == whole(parking, told)[: told.head_bytes]
        check_head(told.head, told.nbytes)
        value = decode(whole(parking, told))
        assert value["name"] == "hidden"
        assert torch.equal(value["x"], torch.full((3 * MIB,), 1, dtype=torch.uint8))
        assert parking.figures() == {"parked": 1, "parked_bytes": told.nbytes, "parked_forgotten": 0}
        parking.drop("alice", "k", told.id)
        parking.drop("alice", "k", told.id)
        assert parking.figures() == {"parked": 0, "parked_bytes": 0, "parked_forgotten": 0}

    asyncio.run(run())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float8_e5m2, torch.bool])
def test_values_of_every_kind_wait_as_bytes(dtype: torch.dtype) -> None:
    async def run() -> None:
        parking = Parking(Limits())
        parking.open("alice", "k")
        value = torch.randn(3 * MIB).to(dtype)
        frame = await parking.framed("alice", "k", "call", encode_parts([value, value[5], value[:0]]))
        found = decode(bytearray(whole(parking, parked(frame))))
        assert encode(found) == encode([value, value[5], value[:0]])

    asyncio.run(run())


def test_nobody_else_names_what_waits_and_it_ends_with_its_lease_or_its_time() -> None:
    async def run() -> None:
        clock = Clock()
        parking = Parking(Limits(parked_s=10), clock)
        for owner in ("alice", "bob"):
            parking.open(owner, "k")
        told = parked(await parking.framed("alice", "k", "call", parts(2)))
        for owner, lease in (("bob", "k"), ("alice", "other")):
            with pytest.raises(Refused, match="There is no reply of yours"):
                parking.piece(owner, lease, told.id, 0, 1)
            parking.drop(owner, lease, told.id)
        for start, stop in ((-1, 5), (5, 5), (0, told.nbytes + 1), (9, 3)):
            with pytest.raises(Refused) as raised:
                parking.piece("alice", "k", told.id, start, stop)
            assert raised.value.status == 416
        clock.now = 9
        parking.piece("alice", "k", told.id, 0, 1)  # it is being fetched
        clock.now = 18
        parking.sweep()
        assert parking.figures()["parked"] == 1
        clock.now = 20
        parking.sweep()
        assert parking.figures() == {"parked": 0, "parked_bytes": 0, "parked_forgotten": 1}
        await parking.framed("alice", "k", "call", parts(2))
        parking.close("alice", "k")
        assert parking.figures()["parked_bytes"] == 0
        with pytest.raises(Refused, match="There is no lease of yours"):
            await parking.framed("alice", "k", "call", parts(2))

    asyncio.run(run())


def test_what_is_too_much_at_once_waits_for_what_is_fetched_and_hinders_nobody_else() -> None:
    async def run() -> None:
        parking = Parking(Limits(parked_bytes=5 * MIB))
        for owner in ("alice", "bob"):
            parking.open(owner, "k")
        first = parked(await parking.framed("alice", "k", "call", parts(4)))
        second = asyncio.ensure_future(parking.framed("alice", "k", "call", parts(4)))
        await parking.framed("bob", "k", "call", parts(4))
        await asyncio.sleep(0)
        assert not second.done()
        parking.drop("alice", "k", first.id)
        told = parked(await asyncio.wait_for(second, 10))
        parking.drop("alice", "k", told.id)
        # One that is more than there may be at all waits alone.
        assert (
            parked(await asyncio.wait_for(parking.framed("alice", "k", "call", parts(9)), 10)).nbytes
            > 9 * MIB
        )
        third = asyncio.ensure_future(parking.framed("alice", "k", "call", parts(2)))
        await asyncio.sleep(0)
        parking.close("alice", "k")
        with pytest.raises(Refused):
            await asyncio.wait_for(third, 10)

    asyncio.run(run())


def test_a_frame_is_not_believed_beyond_what_any_has() -> None:
    frames = [encode(one) for one in ("a", list(range(1000)))]
    stream = b"".join(len(one).to_bytes(8, "little") + one for one in frames)
    cut = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    assert [decode(one) for one in messages(cut)] == ["a", list(range(1000))]
    for claimed in (FRAME_MOST + 1, 2**40, 2**64 - 1):
        with pytest.raises(WireError, match="a frame claims"):
            next(messages([claimed.to_bytes(8, "little")]))


def test_a_head_is_that_of_its_message_and_of_no_other() -> None:
    head = head_of(parts(2))
    check_head(head.contents, head.nbytes)
    for nbytes in (head.nbytes - 1, head.nbytes + 1, 2**50):
        with pytest.raises(WireError, match="should have"):
            check_head(head.contents, nbytes)
    with pytest.raises(WireError):
        check_head(head.contents[:-1], head.nbytes)


def test_text_that_would_become_too_many_objects_is_not_read() -> None:
    said = encode(["x" * 1000] * 200)
    assert len(decode(said, max_header_bytes=ASKED_HEADER_BYTES)) == 200
    with pytest.raises(WireError, match="claims a header"):
        decode(said, max_header_bytes=100_000)
