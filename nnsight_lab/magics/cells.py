"""The object that a `%%trace` or `%%edit` cell calls: `__lab__` in the user's namespace, hidden from `%who`.

It finds the engine, attaches the live view of the tokens, and hands back the engine's own context manager.
The hard fact behind this file: that object reads the block from the frame that enters it, so it is returned
from here as it is, never wrapped in a context manager of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from IPython.utils.capture import CapturedIO, capture_output

from nnsight_lab.magics.contract import Engine, chosen_engine
from nnsight_lab.magics.drawing import sentence
from nnsight_lab.magics.drawing import show as draw
from nnsight_lab.magics.live import TokenView
from nnsight_lab.magics.looking import CellViews, cell_id, shown_parts

#: The name under which transformed cells find the object.
HIDDEN_NAME = "__lab__"

T = TypeVar("T")


class Wrapping(Generic[T]):
    """A context manager that can be entered by `with` and by `async with`."""

    def __init__(self, manager: AbstractContextManager[T]) -> None:
        self._manager = manager

    def __enter__(self) -> T:
        return self._manager.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._manager.__exit__(*exception)

    async def __aenter__(self) -> T:
        return self.__enter__()

    async def __aexit__(self, *exception: Any) -> bool | None:
        return self.__exit__(*exception)


@contextmanager
def _timed() -> Iterator[None]:
    began_s = time.perf_counter()
    try:
        yield
    finally:
        print(f"Wall time: {time.perf_counter() - began_s:.3g} s")


class Cells:
    """What transformed cells call."""

    def __init__(self, shell: Any = None) -> None:
        self._shell = shell
        #: The lines below cells that say what was saved.
        self.saved = CellViews({} if shell is None else shell.user_ns)
        # By thread: a cell that ends in a subshell must not end the view of the main shell's cell.
        self._views: dict[int, TokenView] = {}
        self._estimating: dict[int, Any] = {}
        self._traced: dict[int, tuple[Engine, Any]] = {}
        self._captured: set[int] = set()

    def trace(
        self, *prompts: Any, engine: str | Engine | None = None, show: bool | str = True, **options: Any
    ) -> Any:
        """Runs the block inside one request per prompt.

        Args:
            *prompts: As `lab.trace` takes them.
            engine: The engine, or its name; the current one if not given.
            show: What to show: the tokens as they come (or the estimate), and below the cell what it saved
                (True); ``"tokens"`` or ``"saves"`` alone; nothing (False).
            **options: `edits=`, `estimate=True` (say what the block would save, and do not run it),
                `save_check=False`, and any sampling setting of vLLM.

        Returns:
            The engine's tracer, to be entered by the cell itself.
        """
        __tracebackhide__ = True
        tokens, saves = shown_parts(show)
        chosen = _chosen(engine)
        me = threading.get_ident()
        if options.get("estimate"):
            self.finish()
            tracer = chosen.trace(*prompts, **options)
            if show:
                self._estimating[me] = tracer
            return tracer
        self._traced.pop(me, None)
        if tokens and "watch" not in options:
            self.finish()
            options["watch"] = self._views[me] = TokenView()
        tracer = chosen.trace(*prompts, **options)
        if self.saved.on if saves is None else saves:
            self._traced[me] = (chosen, tracer)
            self.saved.warm(cell_id(self._shell))
        return tracer

    def edit(self, *name: str, engine: str | Engine | None = None, show: bool = True, **options: Any) -> Any:
        """Leaves the block on the engine, for every request that asks for it.

        Args:
            *name: The edit's name; also as ``name=``.
            engine: The engine, or its name; the current one if not given.
            show: Taken so that both forms read alike; an edit shows nothing.
            **options: As `lab.edit` takes them.

        Returns:
            The engine's context manager, to be entered by the cell itself.
        """
        __tracebackhide__ = True
        return _chosen(engine).edit(*name, **options)

    def timed(self) -> Wrapping[None]:
        """What `%%time` above a cell form stands for; the time is printed also when the block fails."""
        return Wrapping(_timed())

    def captured(
        self, stdout: bool = True, stderr: bool = True, display: bool = True
    ) -> Wrapping[CapturedIO]:
        """What `%%capture` above a cell form stands for."""
        if display:
            self._captured.add(threading.get_ident())
        return Wrapping(capture_output(stdout, stderr, display))

    def finish(self) -> None:
        """Draws the last state of the last view, or the estimate asked for.

        Called after every cell, for those that were interrupted.
        """
        me = threading.get_ident()
        view = self._views.pop(me, None)
        if view is not None:
            view.finish()
        tracer = self._estimating.pop(me, None)
        estimate = getattr(tracer, "estimate", None)
        if estimate is not None:
            draw(sentence(str(estimate)))

    def show_saved(self) -> None:
        """Shows what the cell that has ended saved, unless its outputs were captured."""
        me = threading.get_ident()
        captured = me in self._captured
        self._captured.discard(me)
        traced = self._traced.pop(me, None)
        if traced is None or captured:
            return
        engine, tracer = traced
        requests = [getattr(output, "request_id", "") for output in tracer.outputs]
        self.saved.show(engine, requests, cell_id(self._shell))


def _chosen(engine: str | Engine | None) -> Engine:
    return chosen_engine(engine) if engine is None or isinstance(engine, str) else engine
