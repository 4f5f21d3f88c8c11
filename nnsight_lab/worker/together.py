"""All blocks that wait at one location are served in one pass: one copy, cut into everybody's rows.

nnsight serves one block after another, each with its own slice of every tensor: 30 to 40 µs a block, at every
step, which a hundred streams cannot hide. Here the step's rows are copied once and split once, and each block
is handed its piece; of what is large each has a copy of its own. Only the plain case is taken: a read, of
tensors with a row for each token, by the first block of each request. Whatever else is asked at the same
visit (a second read, an assignment, a skip, the request's next block) goes nnsight's way afterwards, with
what was given on record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from nnsight.intervention.interleaver import Event

from nnsight_lab import pins
from nnsight_lab.worker import batching
from nnsight_lab.worker.batching import Common, Commons, Served, Visit, private
from nnsight_lab.worker.steps import is_module_location

#: Where a step's rows are too many bytes to be kept for one of them, but hardly anybody keeps one.
_LOOKED_AT = "logits"


class Together:
    """Serves what it can of a visit.

    Attributes:
        kept: Locations whose large copies somebody kept: there each block has a copy of its own.
    """

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def serve(self, interleaver: Any, provider: str, value: Any, commons: Commons) -> bool:
        """Serve the blocks that wait for a plain read here.

        Args:
            interleaver: The worker's; those that are not served stay as they are.
            provider: The location.
            value: What the model has there: a tensor, or a tuple of them.
            commons: The copies of this visit.

        Returns:
            Whether the model has to wait for what is done here: something was written, or somebody asks for
            more, and is to be served nnsight's way.
        """
        values = (value,) if isinstance(value, torch.Tensor) else value
        if type(values) is not tuple or not values:
            return True
        total = interleaver.batcher.total
        nbytes = 0
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or not tensor.ndim or tensor.shape[0] != total:
                return True
            nbytes = max(nbytes, tensor.nbytes)
        large = nbytes > batching.COMMON_BYTES
        apart = large and (not _looked_at(provider) or provider in self.kept)
        visit = interleaver.counts.get(provider, 0)
        first, sizes, places, others = _firsts(interleaver.mediators, provider, visit, total)
        if not first:
            return True
        copies: list[Common] = []
        pieces: list[Sequence[torch.Tensor]] = []
        if not apart:
            starts = {mediator.batch_group[0] for mediator in first}
            copies = [commons.first(tensor, starts) for tensor in values]
            pieces = [common.split(sizes) for common in copies]
            if interleaver.aside is not None:
                interleaver.aside.copied()
        alone = isinstance(value, torch.Tensor)
        written = apart  # the model may not go on before the last one's rows are copied
        for mediator, place in zip(first, places, strict=True):
            # Of what is large, each has a copy of its own, made when it is its turn: most keep a row of it.
            own = (
                tuple(private(tensor.narrow(0, *mediator.batch_group)) for tensor in values)
                if apart
                else tuple(split[place] for split in pieces)
            )
            if mediator.iteration:  # nnsight's: the first hit of a pinned step
                mediator.iteration = None
            try:
                pending = mediator.pending = mediator.switch(own[0] if alone else own)
            except Exception as exception:
                if not interleaver.defer_exceptions:
                    raise
                mediator.exception, pending = exception, None
                mediator.pending = None
            stays = (
                pending is not None
                and pending.provider == provider
                and pending.iteration == visit - (mediator.counts_at_start.get(provider, 0))
            )
            if stays:
                written = True
                mediator.visit = _visit(values, copies, own, mediator.batch_group)
            elif apart:
                for tensor, piece in zip(values, own, strict=True):
                    rows = tensor.narrow(0, *mediator.batch_group)
                    if piece._version and piece.shape == rows.shape:
                        rows.copy_(piece)
            else:
                for common, piece in zip(copies, own, strict=True):
                    if piece._version:
                        written = True
                        common.changed_first(mediator.batch_group, piece)
            del own
        interleaver._reindex_parked()
        return written or others

    def learn(self, provider: str, commons: Commons) -> None:
        """Note whether somebody kept a piece of a large copy; asked when the visit is over."""
        if _looked_at(provider) and provider not in self.kept:
            for copy in commons.copies():
                if copy.nbytes > batching.COMMON_BYTES and pins.storage_users(copy):
                    self.kept.add(provider)


def _looked_at(provider: str) -> bool:
    return provider.rpartition(".")[2] == _LOOKED_AT


def _firsts(
    mediators: Sequence[Any], provider: str, visit: int, total: int
) -> tuple[list[Any], list[int], list[int], bool]:
    """The blocks to serve; how the rows are cut; which piece is whose; and whether others wait here, too."""
    others = False
    first: list[Any] = []
    sizes: list[int] = []
    places: list[int] = []
    module = is_module_location(provider)
    taken = -1
    at = 0
    for mediator in mediators:
        pending = mediator.pending
        if pending is None or pending.provider != provider:
            continue
        if pending.iteration != visit - mediator.counts_at_start.get(provider, 0):
            continue
        if module and mediator.answers_only:
            others = True
            continue  # it may not ask for that, as it is told nnsight's way
        start, size = mediator.batch_group
        if start == taken:
            others = True
            continue  # another block of the same request: after the first
        taken = start
        if pending.event is not Event.VALUE:
            others = True
            continue
        if start < at:
            return [], [], [], True  # not in the order of their rows: nnsight's way
        if start > at:
            sizes.append(start - at)
        places.append(len(sizes))
        sizes.append(size)
        first.append(mediator)
        at = start + size
    if at < total:
        sizes.append(total - at)
    return first, sizes, places, others


def _visit(
    values: Sequence[torch.Tensor],
    copies: Sequence[Common],
    own: Sequence[torch.Tensor],
    group: Sequence[int],
) -> Visit:
    """What a block was given, for one that asks for more at the same visit."""
    visit = Visit()
    start, size = group
    commons: Sequence[Common | None] = copies or [None] * len(values)
    for tensor, common, piece in zip(values, commons, own, strict=True):
        visit.given.append(Served(tensor.narrow(0, start, size), piece, 0, 0, common))
    return visit
