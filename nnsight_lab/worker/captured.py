"""What a block captured, for each of its runs anew, without reading the block again.

A trace's block runs on its own copy of the lists, dictionaries and tensors that it read in the notebook: what
it changes in them is seen by no other run. Unpickling the block for each run would give it that too, at a few
milliseconds a request; most blocks capture modules and numbers, which nobody can change, and a small vector.

A tensor past `_CLONED_BYTES` is not copied for each of a hundred requests. It is looked at instead: where a
run changed it in place, the next run reads the block again. Whatever is of another kind has the block read
again for every run; if that is large, a call over many prompts has it read once, while any run of it lives.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from nnsight.intervention.envoy import Envoy

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.stubs import BlockEngine, BlockShell

_CLONED_BYTES: Final = 2**20
_FIXED: Final = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(...)),
    *(ModuleType, BuiltinFunctionType, MethodDescriptorType, Envoy),
    *(torch.dtype, torch.device, np.generic, np.dtype, BlockEngine, BlockShell),
)


class _Unknown(Exception):
    """A value of which nobody knows whether a run can change it."""


class Captured:
    """A block of the engine, and copies of it.

    Args:
        read: Reads the block.
        nbytes: What it was sent as.
    """

    def __init__(self, read: Callable[[], Block], nbytes: int) -> None:
        self._read = read
        self._large = nbytes > _CLONED_BYTES
        self._watched: list[tuple[torch.Tensor, int]] = []
        #: As it was sent; None where only reading it again gives that.
        self._sent: Block | None = None
        #: What the living runs of a call share, where that is large.
        self._shared: Callable[[], Block | None] = lambda: None

    # Not as inference tensors: those do not count what is written to them, and cannot be written to outside a
    # forward, where a block may go on once its request is over.
    @torch.inference_mode(False)
    def first(self) -> Block:
        """Read the block, to look at; not for a run.

        Raises:
            Exception: It cannot be read.
        """
        block = self._sent = self._read()
        try:
            self._copied(block)
        except _Unknown:
            self._sent = None
        return block

    @torch.inference_mode(False)
    def own(self, *, alone: bool) -> Block:
        """The block with its captured values as they were sent, for one run.

        Args:
            alone: Whether it is a run of its own, not one of a call's many.
        """
        if self._sent is not None and any(one._version != version for one, version in self._watched):
            self.first()
        if self._sent is not None:
            return self._copied(self._sent)
        if alone or not self._large:
            return self._read()
        block = self._shared() or self._read()
        self._shared = weakref.ref(block)
        return block

    def _copied(self, block: Block) -> Block:
        copies = _Copies()
        glbls, lcls = copies.scope(block.glbls), copies.scope(block.lcls)
        self._watched = copies.watched
        return Block(block.source, block.filename, block.first_line, glbls, lcls, block.presaved)


class _Copies:
    """Copies of one block's values: what two names share, their copies share."""

    def __init__(self) -> None:
        self.watched: list[tuple[torch.Tensor, int]] = []
        self._made: dict[int, Any] = {}
        self._storages: set[int] = set()
        self._functions: set[int] = set()

    def scope(self, names: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(value) for name, value in names.items()}

    def of(self, value: Any) -> Any:
        """The value for a run; itself where no run can change it."""
        if isinstance(value, _FIXED):
            return value
        made = self._made.get(id(value))
        if made is None:
            made = self._made[id(value)] = self._new(value)
        return made

    def _new(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is FunctionType:
            self._look_into(value)
            return value
        if kind is tuple:
            return tuple(map(self.of, value))
        if kind is frozenset:
            for one in value:
                self._fixed(one)
            return value
        if kind is set:
            return {self.of(one) for one in value}
        # In the table before what is in it: it may hold itself.
        if kind is list:
            listed: list[Any] = []
            self._made[id(value)] = listed
            listed.extend(map(self.of, value))
            return listed
        if kind is dict:
            made: dict[Any, Any] = {}
            self._made[id(value)] = made
            made.update((self.of(key), self.of(one)) for key, one in value.items())
            return made
        raise _Unknown

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage().data_ptr()
        if value.requires_grad or (storage and storage in self._storages):
            raise _Unknown  # a view of another one: writing to one writes to both
        self._storages.add(storage)
        if value.numel() * value.element_size() <= _CLONED_BYTES:
            return value.clone()
        self.watched.append((value, value._version))
        return value

    def _look_into(self, function: FunctionType) -> None:
        """A function is shared where nothing that it refers to can be changed.

        One of an imported module is the module's; one of the notebook travelled with the names it reads.
        """
        module = sys.modules.get(function.__module__)
        if id(function) in self._functions or function.__globals__ is getattr(module, "__dict__", None):
            return
        self._functions.add(id(function))
        for one in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._fixed(one)
        for cell in function.__closure__ or ():
            self._fixed(cell.cell_contents)
        for name, value in function.__globals__.items():
            if not name.startswith("__"):
                self._fixed(value)

    def _fixed(self, value: Any) -> None:
        if type(value) is FunctionType:
            self._look_into(value)
        elif type(value) is tuple:
            for one in value:
                self._fixed(one)
        elif not isinstance(value, _FIXED):
            raise _Unknown
