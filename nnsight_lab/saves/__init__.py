"""Saved values after they left the model. Called, ``lab.saves()``, it is the store of the current engine.

A room and a function of one name: importing any module of a room binds the room's name in the package, and
would put it in place of a function there. So the room itself can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, engine: str | None = None) -> Any:
        """The saves of every request of an engine, by label.

        Args:
            engine: The engine's name; the current one where it is None.

        Raises:
            EngineNotStarted: There is no such engine.
        """
        # By name: rooms import downward only, and the package is above them all.
        return importlib.import_module("nnsight_lab").get_engine(engine).saves


sys.modules[__name__].__class__ = _Room
