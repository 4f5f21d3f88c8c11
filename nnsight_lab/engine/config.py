"""What makes two engines the same: model, mode and options, compared by value.

Re-running a start cell is the commonest thing a notebook does, so equality has to be exact and
cheap, and a difference has to be named.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from nnsight_lab.errors import CellUsageError, nearest

Mode = Literal["sync", "async"]
MODES = ("auto", "sync", "async")
#: Engine options of ours, taken out before vLLM sees the rest.
OWN_OPTIONS = ("save_budget", "spill_budget")


@dataclass(frozen=True)
class EngineConfig:
    """One engine's configuration.

    Attributes:
        model: As the user gave it: ``demo``, a Hugging Face id or a local path.
        mode: ``"async"``: vLLM's AsyncLLM on a loop of its own thread; ``"sync"``: vLLM's LLM.
        options: vLLM engine options, in name order.
    """

    model: str
    mode: Mode
    options: tuple[tuple[str, Any], ...] = field(default=())

    @classmethod
    def of(cls, model: str, mode: str, options: Mapping[str, Any]) -> EngineConfig:
        """Build a configuration, resolving ``mode="auto"`` by whether a loop is running here."""
        if mode not in MODES:
            raise CellUsageError(f"mode={mode!r} is not one of {', '.join(MODES)}.")
        if mode == "auto":
            mode = "async" if loop_is_running() else "sync"
        return cls(str(model), cast(Mode, mode), tuple(sorted(options.items())))

    def differences(self, other: EngineConfig) -> list[str]:
        """What ``other`` has that differs, one phrase each: ``"dtype: 'auto' -> 'float32'"``."""
        found = []
        for name in ("model", "mode"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name}: {mine!r} -> {theirs!r}")
        mine_options, their_options = dict(self.options), dict(other.options)
        for name in sorted({*mine_options, *their_options}):
            mine, theirs = mine_options.get(name, "default"), their_options.get(name, "default")
            if mine != theirs:
                found.append(f"{name}: {mine!r} -> {theirs!r}")
        return found


def loop_is_running() -> bool:
    """Whether the calling thread runs an event loop, as a notebook kernel's does in every cell."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


#: Set by the engine itself; a user who names them is told so.
RESERVED = {
    "worker_cls": "the engine sets its own worker",
    "mode": "give it as mode=, not as an engine option",
    "dispatch": "the engine is always started",
    "distributed_executor_backend": "",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option vLLM does not have before anything is started.

    Raises:
        CellUsageError: Naming the nearest real option.
    """
    from vllm.engine.arg_utils import EngineArgs  # seconds to import, and only a start needs it

    refuse_unknown(options, {f.name for f in dataclasses.fields(EngineArgs)})
    needs_ray(options)


def needs_ray(options: Mapping[str, Any]) -> None:
    """Refuse workers as Ray actors where there is no Ray.

    Raises:
        CellUsageError: With the way to get it.
    """
    if options.get("distributed_executor_backend") == "ray" and importlib.util.find_spec("ray") is None:
        raise CellUsageError(
            'distributed_executor_backend="ray" needs Ray, which is not installed here: '
            "pip install 'nnsight-lab[ray]'"
        )


def refuse_unknown(options: Iterable[str], names: Iterable[str]) -> None:
    """`check_options` with vLLM's names given, for who has not imported it.

    Raises:
        CellUsageError: Naming the nearest real option.
    """
    known = {*names, "taps"}
    for name in options:
        if RESERVED.get(name):
            raise CellUsageError(f"{name} cannot be set: {RESERVED[name]}.")
        if name not in known:
            raise CellUsageError(f"{name!r} is not a vLLM engine option.{nearest(name, known)}")
