"""Importing torch, nnsight and vLLM where it can be watched and interrupted.

They take 5 to 15 seconds, which is most of what a user sees of a first start; an interrupt that
lands in an import leaves half-made modules behind, so a thread does it and the caller only waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from nnsight_lab.engine.status import StartProgress
from nnsight_lab.errors import EngineStartFailed, Interrupted

_TICK_S = 0.2
_MODULES = ("nnsight_lab.engine.manager", "vllm.engine.arg_utils", "nnsight_lab.engine.model")
PHASE = "importing vLLM and nnsight"


def load(progress: Callable[[StartProgress], None] | None = None) -> float:
    """Import everything an engine needs; immediate the second time.

    Returns:
        The seconds it took.

    Raises:
        EngineStartFailed: There is no vLLM here.
        Interrupted: When the stop button was pressed; the import goes on in the background.
    """
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        raise EngineStartFailed(
            "vLLM is not installed here, so no engine can be started: pip install 'nnsight-lab[gpu]' (or "
            "'nnsight-lab[cpu]'). An engine that a server runs needs none: %engine attach URL."
        )
    if all(name in sys.modules for name in _MODULES) and not _thread_alive():
        return 0.0
    began = time.monotonic()
    thread = _begin()
    try:
        while thread.is_alive():
            if progress is not None:
                progress(StartProgress(PHASE, time.monotonic() - began))
            thread.join(_TICK_S)
    except KeyboardInterrupt:
        raise Interrupted("while importing vLLM; nothing was started.") from None
    if _failure:
        raise _failure[0]
    return time.monotonic() - began


def later(
    progress: Callable[[StartProgress], None] | None, spent_s: float
) -> Callable[[StartProgress], None] | None:
    """``progress`` for what follows an import that took ``spent_s``: one clock for the whole start."""
    if progress is None or spent_s < _TICK_S:
        return progress

    def told(state: StartProgress) -> None:
        progress(StartProgress(state.phase, state.elapsed_s + spent_s, ((PHASE, spent_s), *state.done)))

    return told


_thread: threading.Thread | None = None
_failure: list[BaseException] = []


_began = 0.0


def under_way_s() -> float | None:
    """How long the import has been going on; None where none is."""
    return time.monotonic() - _began if _thread_alive() else None


def _thread_alive() -> bool:
    return _thread is not None and _thread.is_alive()


def _begin() -> threading.Thread:
    global _thread, _began
    if _thread is None or not _thread.is_alive():
        _failure.clear()
        _began = time.monotonic()
        _thread = threading.Thread(target=_import, daemon=True, name="nnsight-lab-import")
        _thread.start()
    return _thread


def _import() -> None:
    # vLLM sets its loggers up to print when it is imported, and greets; this process's records go
    # to the engine's log once there is one. A user's own settings are left alone.
    own = {"VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"}.isdisjoint(os.environ)
    if own:
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
        logging.getLogger("vllm").addHandler(logging.NullHandler())
        logging.getLogger("vllm").propagate = False
    try:
        for name in _MODULES:
            importlib.import_module(name)
    except BaseException as error:  # handed to the waiting thread
        _failure.append(error)
    finally:
        if own:
            os.environ.pop("VLLM_CONFIGURE_LOGGING", None)
