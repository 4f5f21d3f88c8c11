"""What a worker tells of requests that are over: of many that differ in numbers only, in one message.

What their blocks saved is packed here, too, where one run of a block has it stacked: one copy, cut into
everybody's piece. Pieces that are small stay one, which is given back when nobody looks at any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from nnsight_lab.wire.extent import Extent
from nnsight_lab.wire.many import ManySaves
from nnsight_lab.wire.messages import BlockSaves, RequestSaves, SequenceSaves, WorkerError
from nnsight_lab.wire.packed import Stack
from nnsight_lab.wire.step_figures import StepFigures
from nnsight_lab.worker.courier import Courier, Parcel
from nnsight_lab.worker.stacked import Seat, StackedRun

if TYPE_CHECKING:
    from nnsight_lab.worker.requests import LabRequest

#: Of many requests' pieces together: past that each is given back by itself.
_SHARED_BYTES: Final = 2**20


class Over(NamedTuple):
    """A request that is over.

    Attributes:
        engine_id: As the engine knows it.
        sequence: Which completion.
        steps: How its steps ran.
    """

    request: LabRequest
    engine_id: str
    sequence: int
    steps: StepFigures | None


def pack_runs(over: Sequence[Over], courier: Courier) -> tuple[list[ManySaves], list[Parcel], set[str]]:
    """Pack what requests saved whose only block ran for many.

    Returns:
        What is told of them; what it waits for; and who they are. The others are to be packed one by one.
    """
    alike: dict[tuple[object, ...], list[Over]] = {}
    for one in over:
        request = one.request
        if len(request.riders) != 1 or type(seat := request.riders[0]) is not Seat or seat.run is None:
            continue
        if request.error is not None or request.block_errors or request.share or len(request.copies) != 1:
            continue
        key = (id(seat.run), seat.run.steps_of(seat), request.allowed_bytes, id(one.steps))
        alike.setdefault(key, []).append(one)
    told: list[ManySaves] = []
    parcels: list[Parcel] = []
    done: set[str] = set()
    for group in alike.values():
        found = _packed(group, courier) if len(group) > 1 else None
        if found is not None:
            told.append(found[0])
            parcels.append(found[1])
            done.update(one.request.id for one in group)
    return told, parcels, done


def _packed(group: Sequence[Over], courier: Courier) -> tuple[ManySaves, Parcel] | None:
    seats: list[Seat] = [one.request.riders[0] for one in group]
    first = group[0].request
    run: StackedRun | None = seats[0].run
    assert run is not None
    values = run.stacked(seats)
    if values is None:
        return None
    stack = Stack.of(values, run.block.names)
    allowed = first.allowed_bytes
    if not stack.nbytes or (allowed is not None and stack.nbytes + len(stack.tree) > allowed):
        return None
    taken = courier.pack_stack(stack)
    if taken is None:
        return None
    extent, parcel = taken
    if parcel.copies is not None:  # what it was gathered from lives until then, too
        copies = parcel.copies._replace(sources=(*parcel.copies.sources, *run.kept))
        parcel = parcel._replace(copies=copies)
    shared = extent.nbytes <= _SHARED_BYTES
    (name,) = first.names.values()
    return (
        ManySaves(
            name,
            stack.tree,
            stack.tensors,
            extent if shared else Extent(*_piece(extent, extent.offset, stack.nbytes)),
            tuple(range(extent.offset, extent.offset + len(group) * stack.nbytes, stack.nbytes)),
            stack.nbytes,
            shared,
            tuple(one.engine_id for one in group),
            tuple(one.sequence for one in group),
            group[0].steps,
        ),
        parcel,
    )


def _piece(extent: Extent, offset: int, nbytes: int) -> tuple[str, int, int, int, int]:
    return extent.path, extent.slab_bytes, offset, nbytes, extent.rank


def told(
    over: Sequence[Over], saves: Sequence[Sequence[BlockSaves]]
) -> tuple[list[ManySaves], list[RequestSaves]]:
    """What is told of requests whose blocks are packed.

    Args:
        over: The requests.
        saves: Of each, what its blocks saved.
    """
    alike: dict[tuple[object, ...], list[tuple[Over, Extent]]] = {}
    collected: dict[str, dict[int, SequenceSaves]] = {}
    failures: dict[str, WorkerError] = {}
    ran: dict[str, StepFigures] = {}
    for one, blocks in zip(over, saves, strict=True):
        only = blocks[0] if len(blocks) == 1 else None
        if (
            only is not None
            and only.packed is not None
            and only.error is None
            and not only.values
            and one.request.error is None
            and not one.request.share
        ):
            packed = only.packed
            key = (only.block, packed.tree, packed.tensors, packed.extent.path, packed.extent.nbytes)
            alike.setdefault((*key, id(one.steps)), []).append((one, packed.extent))
            continue
        collected.setdefault(one.engine_id, {})[one.sequence] = SequenceSaves(one.sequence, tuple(blocks))
        if one.steps is not None:
            # Of several answers, the one that took longest.
            ran[one.engine_id] = max(ran.get(one.engine_id, one.steps), one.steps, key=_total)
        if one.request.error is not None:
            failures.setdefault(one.engine_id, one.request.error)
    many = [
        ManySaves(
            str(block),
            str(tree),
            str(tensors),
            group[0][1],
            tuple(extent.offset for _, extent in group),
            group[0][1].nbytes,
            False,
            tuple(one.engine_id for one, _ in group),
            tuple(one.sequence for one, _ in group),
            group[0][0].steps,
        )
        for (block, tree, tensors, *_), group in alike.items()
    ]
    return many, [
        RequestSaves(
            engine_id,
            tuple(found[i] for i in sorted(found)),
            failures.get(engine_id),
            ran.get(engine_id),
        )
        for engine_id, found in collected.items()
    ]


def _total(steps: StepFigures) -> int:
    return steps.total
