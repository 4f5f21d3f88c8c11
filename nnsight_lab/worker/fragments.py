"""Every value that a block reads under tensor parallelism is the model's own: whole, or refused.

nnsight gathers what its own rules know, which is the two sides of a linear layer, and serves anything else
as the rank has it: half of the heads, silently, and ``qkv_proj`` in the order of the ranks. Here a value that
is known to be cut (see `nnsight_lab.worker.sharding`) is put together in the model's order, once at a visit
however many blocks read it, and what blocks left of it goes back to each rank's own columns.

What is not known to be cut is looked at the first time that a block reads it: the ranks compare what they
have. Where they have the same, it is whole. Where they do not, the block is told so, and what to read
instead; a wrong tensor is worse than none. Every rank serves the same blocks, and so comes to the same
collectives.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final

import torch
from nnsight.modeling.vllm import fragments as upstream
from torch import distributed
from vllm.distributed.parallel_state import get_tp_group

from nnsight_lab.worker.agreement import alike, seen, tensors_of
from nnsight_lab.worker.greenlets import aside_of
from nnsight_lab.worker.sharding import Cut, Sum, Ways, cuts_of, is_beside_cuts, places_of
from nnsight_lab.worker.steps import is_module_location
from nnsight_lab.worker.weights import cut_of, read_whole

_OPERATION: Final = re.compile(r"(?P<parent>.+)\.source\.self_(?P<name>\w+)_\d+")


class PieceOfARank(RuntimeError):
    """A block asked for a value of which each tensor-parallel rank has another part."""


class LabFragments(upstream.VLLMFragments):
    """What is cut in a model, and how it is put together.

    Args:
        model: The root envoy.

    Attributes:
        enabled: Whether there are several ranks.
        ways: Location -> how its value lies across them.
        agreed: Locations of which the ranks were found to have the same.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ranks = int(get_tp_group().world_size)
        self.rank = int(get_tp_group().rank_in_group)
        self.enabled = self.ranks > 1
        self.ways: dict[str, Ways] = {}
        self.agreed: set[str] = set()
        self._suspects: set[str] = set()
        self._operations: dict[str, str] = {}
        if self.enabled:
            modules = {envoy.path: envoy._module for envoy in model.modules()}
            for path, module in modules.items():
                above, _, name = path.rpartition(".")
                self._learn(path, module, name, modules.get(above))
            read_whole(model)

    def _learn(self, path: str, module: Any, name: str, parent: Any) -> None:
        for side in ("input", "output"):
            ways = cuts_of(module, name, parent, side)
            if ways is None and side == "output" and _leaves_a_sum(module):
                ways = partial(_summed, Sum(upstream._moe_group_size(module)))
            if ways is not None:
                self.ways[f"{path}.{side}"] = ways
        if f"{path}.output" not in self.ways and is_beside_cuts(module, parent):
            self._suspects.add(path)

    # -- nnsight's questions -------------------------------------------------------------------

    def instrument(self, envoy: Any) -> None:
        """Nothing: the tree was there before this."""

    def fragmented(self, location: str) -> bool:
        """Whether the value there is known to be cut."""
        return self.module_location(location) in self.ways

    def whole(self, location: str, value: Any) -> tuple[Any, Any]:
        """The model's value, and how each rank's piece is taken from what blocks left of it."""
        plan = self._plan(location, value, whole=False)
        if not plan:
            return value, None
        side = location.rpartition(".")[2]
        found = _mapped(value, side, {place: partial(self._joined, way) for place, way in plan.items()})
        return found, partial(self._cut, side, plan)

    def split(self, location: str, whole: Any) -> Any:
        """This rank's piece of a value that is whole because a block made it so."""
        return self._cut(location.rpartition(".")[2], self._plan(location, whole, whole=True), whole)

    # -- before a visit ------------------------------------------------------------------------

    def admit(self, interleaver: Any, location: str, value: Any) -> None:
        """See to it that whoever reads this visit is given what the model has, or an error.

        Args:
            interleaver: Of the blocks.
            location: Where the model is.
            value: What this rank has there.
        """
        read = location in interleaver.parked or location in interleaver.observers
        if not read or location in self.agreed or not is_module_location(location):
            return
        watching = [mediator for mediator, _, _ in interleaver.observers.get(location, ())]
        ready = interleaver._ready(location)
        if not ready and not watching:
            return
        side = location.rpartition(".")[2]
        if side == "skip":
            # Whether the replacement is whole depends on the output, which there is none of to look at.
            path = location.removesuffix(".skip")
            output = f"{path}.output"
            unknown = path in self._suspects or (".source." in path and not self.fragmented(output))
            if not unknown or output in self.agreed:
                return
        elif self._plan(location, value, whole=False) or self._agree(location, value):
            return
        error = self._refusal(location)
        with aside_of(interleaver):
            for mediator in ready:
                _throw(mediator, error)
        for mediator in watching:
            mediator.exception = error
        interleaver.observers.pop(location, None)
        interleaver._reindex_parked()

    def skipped(self, location: str, replacement: Any) -> Any:
        """A replacement for one operation, as this rank's piece; nnsight cuts only those of modules."""
        output = f"{location.removesuffix('.skip')}.output"
        return self.split(output, replacement) if self.fragmented(output) else replacement

    def parameter(self, path: str, module: Any, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter as the model has it; a copy, where ranks have their shares of it.

        Raises:
            PieceOfARank: How the shares belong together is not known.
        """
        cut = cut_of(module, name, value)
        if cut is not None:
            return self._joined(cut, value.detach())
        location = f"{path}.{name}"
        if location in self.agreed or self._agree(location, value):
            return value
        raise PieceOfARank(
            f"{location} is a parameter of which each of {self.ranks} tensor-parallel ranks has its own "
            "share, and how those belong together is not known"
        )

    def _agree(self, location: str, value: Any) -> bool:
        """Whether every rank has the same; asked on all of them."""
        mine = [seen(tensor) for tensor in tensors_of(value)]
        everybody: list[Any] = [None] * self.ranks
        distributed.all_gather_object(everybody, mine, group=get_tp_group().cpu_group)
        first, *others = everybody
        if not all(alike(first, other) for other in others):
            return False
        # Zeros say nothing: pieces of something may be all zero for once.
        if any(any(numbers) for _, _, numbers in first):
            self.agreed.add(location)
        elif first and ".source." in location:
            return not self._inside_cuts(location.partition(".source.")[0])
        return True

    def _inside_cuts(self, path: str) -> bool:
        """Whether a module, or one of its children, is known to be cut."""
        return any(path in (known.rpartition(".")[0], known.rsplit(".", 2)[0]) for known in self.ways)

    # -- how it lies -----------------------------------------------------------------------------

    def module_location(self, location: str) -> str:
        """Of the call of a child in ``.source``, the child's own location; else itself."""
        if ".source." not in location:
            return location
        known = self._operations.get(location)
        if known is None:
            known = self._operations[location] = self._called(location)
        return known

    def _called(self, location: str) -> str:
        path, _, side = location.rpartition(".")
        found = _OPERATION.fullmatch(path)
        if found is not None and ".source." not in found["parent"]:
            for known in self.ways:
                module, _, known_side = known.rpartition(".")
                below = module.removeprefix(f"{found['parent']}.").replace(".", "_")
                if module.startswith(f"{found['parent']}.") and (below, known_side) == (found["name"], side):
                    return known
        return location

    def _plan(self, location: str, value: Any, *, whole: bool) -> dict[int | str, Cut | Sum]:
        ways = self.ways.get(self.module_location(location))
        plan: dict[int | str, Cut | Sum] = {}
        if ways is None:
            return plan
        for place, tensor in places_of(value, location.rpartition(".")[2]):
            if not tensor.is_floating_point():
                continue
            for way in ways(place):
                if isinstance(way, Cut):
                    width = way.whole_width(self.ranks) if whole else way.width
                    if not way.fits(tensor.shape, width):
                        continue
                plan[place] = way
                break
        return plan

    def _joined(self, way: Cut | Sum, piece: torch.Tensor) -> torch.Tensor:
        group = get_tp_group()
        if isinstance(way, Sum):
            total: torch.Tensor = group.all_reduce(piece.clone())
            return total
        return way.joined(group.all_gather(piece.contiguous(), way.axis), self.ranks)

    def _cut(self, side: str, plan: dict[int | str, Cut | Sum], whole: Any) -> Any:
        return _mapped(whole, side, {place: partial(self._piece, way) for place, way in plan.items()})

    def _piece(self, way: Cut | Sum, whole: torch.Tensor) -> torch.Tensor:
        if isinstance(way, Sum):
            return whole / way.ranks  # shares that the model's own sum adds up again
        return way.piece(whole, self.rank, self.ranks)

    def _refusal(self, location: str) -> PieceOfARank:
        around = location.partition(".source.")[0] if ".source." in location else location.rpartition(".")[0]
        above = around if ".source." in location else around.rpartition(".")[0]
        beside = [known for known in self.ways if known.startswith(f"{above}.") and known != location]
        cure = ", ".join(beside[:6]) or f"{above}.output"
        return PieceOfARank(
            f"{location} is not one value under tensor parallelism: each of {self.ranks} ranks has another "
            f"part of it, and how they belong together is not known. Whole are: {cure}"
        )


def _leaves_a_sum(module: Any) -> bool:
    kind = upstream._moe_layer()
    return kind is not None and isinstance(module, kind) and upstream._is_piece(module, "output")


def _summed(way: Sum, place: int | str) -> tuple[Cut | Sum, ...]:
    return (way,)


def _throw(mediator: Any, error: PieceOfARank) -> None:
    try:
        mediator.pending = mediator.worker.throw(error)
    except Exception as thrown:
        mediator.exception = thrown
        mediator.pending = None


def _mapped(value: Any, side: str, by_place: dict[int | str, Any]) -> Any:
    """A value with some of its tensors replaced, by their place in it."""
    if not by_place:
        return value
    if side == "input":
        args, kwargs = value
        named = {name: _at(by_place, name, one) for name, one in kwargs.items()}
        return tuple(_at(by_place, place, one) for place, one in enumerate(args)), named
    if isinstance(value, torch.Tensor):
        return _at(by_place, 0, value)
    if isinstance(value, tuple | list):
        return type(value)(_at(by_place, place, one) for place, one in enumerate(value))
    return value


def _at(by_place: dict[int | str, Any], place: int | str, one: Any) -> Any:
    made = by_place.get(place)
    return one if made is None or not isinstance(one, torch.Tensor) else made(one)
