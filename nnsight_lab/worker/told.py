"""What a block was given at a module, as one pipeline stage tells it to another.

Only rows of requests whose blocks are told travel; the stage that is told puts them where they were among the
step's rows, so that rows are found there as they are in a module's own value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from nnsight.intervention.source import NO_SKIP

from nnsight_lab.blocks.home import names_of
from nnsight_lab.worker.elsewhere import Lacking

_ROWS: Final = "\0rows"
_STAYS: Final = "\0stays"
_PLAIN: Final = (type(None), bool, int, float, str, torch.dtype, torch.device)

Group = tuple[int, int]


class Stays:
    """An object of a stage's own that is no tensor and no plain value."""

    def __init__(self, type_name: str) -> None:
        self._type_name = type_name

    def __getattr__(self, name: str) -> Any:
        raise Lacking(f"{name!r} of a {self._type_name}, which stays on its pipeline stage")


def packed(value: Any, groups: Sequence[Group], total: int, dim_of: Callable[[Any], int | None]) -> Any:
    """A copy of a module's value with some of its rows.

    Args:
        value: The module's.
        groups: First row and number of rows of each request, in their order.
        total: Rows of the step.
        dim_of: The axis of a tensor that has the rows; None where it has none.
    """
    if isinstance(value, torch.Tensor):
        dim = dim_of(value) if value.dim() else None
        if dim is None or sum(size for _, size in groups) == total:
            return value.detach().clone()
        rows = torch.cat([value.narrow(dim, start, size) for start, size in groups], dim)
        return {_ROWS: rows, "dim": dim}
    if isinstance(value, tuple | list):
        parts = [packed(one, groups, total, dim_of) for one in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: packed(one, groups, total, dim_of) for name, one in value.items()}
    if value is NO_SKIP or isinstance(value, _PLAIN):
        return None if value is NO_SKIP else value
    return {_STAYS: type(value).__name__}


def unpacked(value: Any, groups: Sequence[Group], total: int) -> Any:
    """The value again, with rows that nobody was told of left as they happen to be."""
    if isinstance(value, tuple | list):
        parts = [unpacked(one, groups, total) for one in value]
        return parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, dict):
        return value
    if _STAYS in value:
        return Stays(value[_STAYS])
    if _ROWS not in value:
        return {name: unpacked(one, groups, total) for name, one in value.items()}
    rows, dim = value[_ROWS], value["dim"]
    shape = [*rows.shape]
    shape[dim] = total
    with torch.inference_mode(False):
        whole = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    at = 0
    for start, size in groups:
        whole.narrow(dim, start, size).copy_(rows.narrow(dim, at, size))
        at += size
    return whole


def versions(value: Any) -> list[int]:
    """How often each tensor of a value was written to."""
    if isinstance(value, torch.Tensor):
        return [value._version]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in versions(part)] if isinstance(value, tuple | list) else []


def names_asked(code: Any, scope: Mapping[str, Any]) -> frozenset[str]:
    """The names by which a block may ask for modules: its own, its functions', those it was given as text."""
    found = {"input", "output", *names_of(code)}
    for value in scope.values():
        if isinstance(value, FunctionType):
            found |= names_of(value.__code__)
        elif isinstance(value, dict):
            found.update(part for one in value.values() if isinstance(one, str) for part in one.split("."))
    return frozenset(found)
