"""How a result shows itself: as a view where a notebook's kernel runs, as plain html everywhere else.

The hard fact: a result is plain data in a low room, and its view needs the whole widget stack, which a
script must never load. So a result names its view by a dotted string, as the engine names its worker, and
the view is imported when a kernel's display asks for it: never in a script, never in a terminal. Where the
view cannot be made the html stands in its place, and the log says why.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, TypeVar

logger = logging.getLogger("nnsight_lab.lens")

T = TypeVar("T", bound="Shown")
Bundle = tuple[dict[str, Any], dict[str, Any]]


class Shown:
    """A result that a notebook shows as a view.

    Attributes:
        view: The widget that shows it, ``"package.module:Class"``; made of the result alone.
    """

    view: ClassVar[str] = ""

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle | None:
        """The view with the html beside it; None (the html alone) where no kernel runs."""
        del include, exclude
        return bundle_of(self, self.view)


class Several(list[T], Generic[T]):
    """Results of several prompts, in their order: a list that shows itself as one view with a picker.

    Args:
        results: Of one kind.
        of: How many there are, where these are the first ones only.
    """

    #: How many the html shows one below the other.
    MOST_IN_HTML: ClassVar[int] = 3

    def __init__(self, results: Iterable[T] = (), *, of: int | None = None) -> None:
        super().__init__(results)
        self._of = of

    def _repr_html_(self) -> str:
        shown = "".join(f"<div>{one._repr_html_()}</div>" for one in self[: self.MOST_IN_HTML])
        left = (self._of or len(self)) - self.MOST_IN_HTML
        return f"{shown}<div>{left:,} more of the list are not shown.</div>" if left > 0 else shown or "[]"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle | None:
        """As `Shown._repr_mimebundle_`."""
        del include, exclude
        return bundle_of(self, self[0].view) if self else None


def bundle_of(result: Any, view: str) -> Bundle | None:
    """What a page gets of a result: the view that was named, or None where none can be."""
    if not view or not _in_a_kernel():
        return None
    module, _, name = view.partition(":")
    try:
        bundle: Bundle | None = getattr(importlib.import_module(module), name)(result)._repr_mimebundle_()
    except Exception as error:  # a result is never lost for its view
        logger.warning("%r is shown as a table: its view could not be made (%s)", result, error)
        return None
    return bundle


def _in_a_kernel() -> bool:
    """Whether this process is a notebook's kernel; asks what is loaded and imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None
