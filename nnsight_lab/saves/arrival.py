"""What a request brought home, before anybody asked for it.

Entering is on the way of every call, and most saves are never asked for by label: so a request enters as a
few references, and is taken apart, labelled and counted exactly when it is first looked at, or must go to a
file. What it is rebuilt from is the message it came in, so a list that the notebook got and appends to is
another list than the store's; the tensors are over the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from nnsight_lab.saves.held import Blocks, Held, hold
from nnsight_lab.wire.codec import Handle, Node, flatten, unflatten

#: Nobody can change these where they are, or they are tensors, which are shared.
_SHARED = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray})


class Fields(NamedTuple):
    """What the labels of a request say besides its values.

    Attributes:
        common: The label fields that all saves share.
        module_paths: By block and name, the module a value was read at.
    """

    common: Mapping[str, Any]
    module_paths: Mapping[tuple[str, str], str]


@dataclass(eq=False)
class Arrival:
    """The saves of one finished request, still as they came.

    Attributes:
        request_id: The request.
        nbytes: About what its tensors take; exact once it is taken apart.
        blocks: Rebuilds what each sequence's blocks saved.
        fields: Finds out what its labels say.
    """

    request_id: str
    nbytes: int
    blocks: Callable[[], Mapping[int, Blocks]]
    fields: Callable[[], Fields]
    _held: Held | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def taken_apart(self) -> Held:
        """The request as a store keeps it; the same one however often this is asked.

        Raises:
            SavesError: A value has too many parts to be labelled.
        """
        with self._lock:
            if self._held is None:
                fields = self.fields()
                self._held = hold(self.request_id, self.blocks(), fields.common, fields.module_paths)
            return self._held


class Inline:
    """Small values that came in a reply, fit to be rebuilt.

    Args:
        values: By name, as decoded; the caller goes on to use them.

    Raises:
        CannotTravel: One has no form outside this process.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._tree: Node | None = None
        if all(type(value) in _SHARED for value in values.values()):
            self._plain = dict(values)
        else:
            self._plain = {}
            self._tree = flatten(dict(values), self._put)

    @property
    def nbytes(self) -> int:
        """What its tensors and arrays take."""
        plain = (value for value in self._plain.values() if type(value) in (torch.Tensor, np.ndarray))
        return sum(value.nbytes for value in (*plain, *self._tensors))

    def value(self) -> dict[str, Any]:
        """The values, in containers of their own."""
        if self._tree is None:
            return dict(self._plain)
        rebuilt: dict[str, Any] = unflatten(self._tree, self._get)
        return rebuilt

    def _put(self, tensor: torch.Tensor) -> Handle:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _get(self, handle: Handle) -> torch.Tensor:
        assert isinstance(handle, int)
        return self._tensors[handle]
