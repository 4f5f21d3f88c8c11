"""What a running request's blocks have saved so far, for whoever watches it.

Saves leave a worker when their request is over. A list that a block appends to at every step can be looked at
before: between two steps the block is parked, and what it has appended is its own copy and is not changed any
more. So a look takes the elements that were not there at the last one, up to a number of bytes, and touches
neither the list nor what will go home. Nothing is done for a request that nobody asks about. Only lists of
numbers, and of tensors of at most two dimensions, are looked at; what else is saved waits for the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.worker.stacked import Seat

if TYPE_CHECKING:
    from nnsight_lab.worker.greenlets import BlockMediator
    from nnsight_lab.worker.requests import LabRequests

#: A number in a list takes about this much on its way.
_NUMBER_BYTES = 24


def peek(
    requests: LabRequests,
    request_id: str,
    have: Mapping[str, Mapping[str, int]],
    names: Sequence[str] | None,
    most_bytes: int,
) -> dict[str, dict[str, Any]]:
    """The new elements of the lists that a request's blocks save, of its first sequence.

    Args:
        requests: This worker's.
        request_id: As the engine knows it; nothing is found of one that is not tracked here.
        have: By block and name, how many elements were seen before.
        names: Which names; all where it is None.
        most_bytes: How much may be brought; what is left out is brought by the next look.

    Returns:
        By block and name: ``{"first": n, "items": [...]}``, tensors in float32 or float64 on the CPU; or
        ``{"refused": why}``.
    """
    found: dict[str, dict[str, Any]] = {}
    room = most_bytes
    for request in list(requests.requests.values()):
        if not request.named({request_id}) or request.key({request_id})[1] != 0:
            continue
        blocks = [(request.names[one], copy) for one, copy in request.copies.items()]
        if request.mediator is not None:
            blocks.append((TRACE_BLOCK, request.mediator))
        for block, mediator in blocks:
            if not requests.answers(mediator):
                continue
            for name, value in _lists(mediator):
                if names is not None and name not in names:
                    continue
                new, room = _new(value, have.get(block, {}).get(name, 0), room, most_bytes)
                if new:
                    found.setdefault(block, {})[name] = new
    return found


def _lists(mediator: BlockMediator | Seat) -> list[tuple[str, list[Any]]]:
    """The lists that a block saves, by name."""
    if isinstance(mediator, Seat):
        return [(name, value) for name, value in mediator.values().items() if type(value) is list]
    marked, before = mediator.marks, mediator.before
    return [
        (name, [*before[name], *value] if name in before else value)
        for name, value in list(mediator.lcls.items())
        if type(value) is list and (id(value) in marked or name in mediator.presaved)
    ]


def _new(values: list[Any], first: int, room: int, most_bytes: int) -> tuple[dict[str, Any], int]:
    """The elements from ``first`` on, as far as there is room, and the room left."""
    items: list[Any] = []
    for value in values[first:]:
        if isinstance(value, bool | int | float):
            nbytes = _NUMBER_BYTES
        elif isinstance(value, torch.Tensor) and value.dim() <= 2 and not value.is_complex():
            nbytes = value.numel() * _dtype_of(value).itemsize
            if nbytes > most_bytes:
                return {"refused": f"an element of shape {list(value.shape)} is too large to watch"}, room
        else:
            kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else None
            return {"refused": f"it holds {kind or type(value).__name__}"}, room
        if nbytes > room:
            break
        # Only what goes is copied: from a device this waits for the step that made it.
        items.append(
            value.detach().to(device="cpu", dtype=_dtype_of(value))
            if isinstance(value, torch.Tensor)
            else float(value)
        )
        room -= nbytes
    return ({"first": first, "items": items} if items else {}), room


def _dtype_of(value: torch.Tensor) -> torch.dtype:
    """What holds its numbers exactly."""
    return torch.float32 if value.is_floating_point() and value.itemsize <= 4 else torch.float64
