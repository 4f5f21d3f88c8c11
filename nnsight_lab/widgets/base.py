"""What every widget here is: a tiny state, questions answered by id, and nothing left when it is closed.

The state is saved in notebooks and sent to every page, so it holds ids, sizes and settings, and never
numbers of a tensor: those are asked for, and come as binary buffers. A view's error is shown in the view
and logged here. Where no widget runs (a saved notebook, an export, a web page), the output's html is read
instead, so every widget has one.

Messages while a cell runs: ipykernel 7 hands JupyterLab's messages to a thread of their own, so views are
answered at once; 7.4 routes them back to the busy thread, which `pins.answer_on_any_subshell` undoes for
our widgets alone. ipykernel 6 has one thread: there a view is answered when the cell is done, or awaits.
What a question once started, the drawing of tiles for one, goes on beside the cell in every version.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import anywidget
import traitlets

from nnsight_lab import pins
from nnsight_lab.errors import CellUsageError, LabError, WidgetError, nearest
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.jobs import Jobs, Stopped

logger = logging.getLogger("nnsight_lab.widgets")

STATIC: Final = Path(__file__).parent / "static"
#: Of one buffer: larger ones make a browser stutter.
MAX_BUFFER_BYTES: Final = 2 * 2**20


@dataclass(frozen=True)
class Answer:
    """One message back to a view.

    Attributes:
        content: Plain values.
        buffers: Binary, each within `MAX_BUFFER_BYTES`.
    """

    content: Mapping[str, Any] = field(default_factory=dict)
    buffers: tuple[bytes, ...] = ()


Question = Mapping[str, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def answers(kind: str) -> Callable[[Method], Method]:
    """Mark a method as what answers questions of a kind.

    It takes the question and returns an `Answer`. One that may take long is marked by `long` too.
    """

    def mark(method: Method) -> Method:
        method._answers = kind  # type: ignore[attr-defined]
        return method

    return mark


def long(method: Method) -> Method:
    """Mark an answering method that takes the question and a function that says whether to stop, and yields
    answers: it runs on the widget's own thread.
    """
    method._is_long = True  # type: ignore[attr-defined]
    return method


@cache
def _static(name: str) -> str:
    path = STATIC / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WidgetError(
            f"{name} of the widgets was not built: scripts/setup.sh widgets (it needs node and npm)"
        ) from None


class LabWidget(anywidget.AnyWidget):
    """A view of something in the kernel.

    Subclasses name their ``module`` (of ``labextension/src/widgets``), mark methods with `answers`, and say
    what stands where no widget runs.

    Args:
        **state: Of traits; an unknown name is refused.
    """

    module: ClassVar[str] = ""

    #: Until it was opened there is nothing to close; ipywidgets closes also what was refused when made.
    _closed = True

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    def __init__(self, **state: Any) -> None:
        unknown = [name for name in state if not self.has_trait(name)]
        if unknown:
            known = [name for name in self.trait_names() if not name.startswith("_")]
            raise CellUsageError(f"{type(self).__name__} has no {unknown[0]!r}.{nearest(unknown[0], known)}")
        self._jobs = Jobs(f"nnsight-lab {self.module}")
        self._views: set[str] = set()
        self._closed = False
        self._methods = _methods(type(self))
        super().__init__(**state)
        self.on_msg(type(self)._heard)

    @traitlets.default("_esm")
    def _read_esm(self) -> str:
        return _static(f"{self.module}.js")

    @traitlets.default("_css")
    def _read_css(self) -> str:
        return _static(f"{self.module}.css")

    # -- for subclasses ------------------------------------------------------------------------

    def plain(self) -> str:
        """What it shows, as one line of text."""
        return f"{type(self).__name__}"

    def fallback(self) -> str:
        """What it shows, as html that needs neither a kernel nor scripts."""
        return f"<div>{html.escape(self.plain())}</div>"

    def looked_at(self) -> None:
        """The first view is there."""

    def out_of_sight(self) -> None:
        """The last view is gone."""

    def released(self) -> None:
        """It was closed: let go of everything."""

    # -- its life ------------------------------------------------------------------------------

    def open(self) -> None:
        """Open its comm; called by ipywidgets."""
        super().open()
        if self.comm is not None:
            pins.answer_on_any_subshell(self.comm)

    def close(self) -> None:
        """Close every view of it, and let go of what it shows."""
        if not self._closed:
            self._closed = True
            self._jobs.close()
            self._views.clear()
            self.on_msg(type(self)._heard, remove=True)
            self.released()
            self.layout.close()  # made with it, and in ipywidgets' list of living widgets for ever else
        super().close()

    def __repr__(self) -> str:
        return f"<{self.plain()}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if self._closed:
            return {"text/plain": f"<closed: {self.plain()}>"}, {}
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/plain": self.plain(), "text/html": self.fallback()}, metadata

    # -- questions and answers -----------------------------------------------------------------

    def _heard(self, content: Any, buffers: Any) -> None:
        del buffers
        if self._closed or not isinstance(content, Mapping):
            return
        kind, view = content.get(kinds.KIND), str(content.get(kinds.VIEW, ""))
        if kind == kinds.HERE:
            first = not self._views
            self._views.add(view)
            if first:
                self._safely(content, self.looked_at)
        elif kind == kinds.GONE:
            self._views.discard(view)
            if not self._views:
                self._safely(content, self.out_of_sight)
        elif kind == kinds.FAILED:
            logger.error("a view of %s failed in the browser: %s", self.plain(), content.get(kinds.ERROR))
        else:
            self._asked(content, kind, view)

    def _asked(self, question: Question, kind: Any, view: str) -> None:
        name = self._methods.get(kind)
        if name is None:
            self._say(question, {kinds.ERROR: f"this kernel does not know {kind!r}: restart it"}, ())
            return
        method = getattr(self, name)
        if not getattr(method, "_is_long", False):
            self._safely(question, lambda: self._reply(question, method(question)))
            return
        self._jobs.submit(
            (view, kind),
            lambda stopped: self._safely(question, lambda: self._reply_all(question, method, stopped)),
            lambda: self._drop(question),
        )

    def _reply(self, question: Question, answer: Answer) -> None:
        self._say(question, answer.content, answer.buffers)

    def _reply_all(
        self,
        question: Question,
        method: Callable[[Question, Callable[[], bool]], Iterator[Answer]],
        stopped: Callable[[], bool],
    ) -> None:
        if stopped():
            self._drop(question)
            return
        for answer in method(question, stopped):
            self._say(question, answer.content, answer.buffers, last=False)
            if stopped():
                self._drop(question)
                return
        self._say(question, {}, ())

    def _drop(self, question: Question) -> None:
        self._say(question, {kinds.DROPPED: True}, ())

    def _safely(self, question: Question, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            self._drop(question)
        except LabError as error:
            logger.warning("%s: %s", self.plain(), str(error))  # a kept record keeps no frames
            self._say(question, {kinds.ERROR: str(error)}, ())
        except Exception as error:  # whatever it is belongs in the view, not in a cell that has no part in it
            logger.exception("%s: no answer to %s", self.plain(), question.get(kinds.KIND))
            text = f"{type(error).__name__}: {error} (the kernel's log has more)"
            self._say(question, {kinds.ERROR: text}, ())

    def _say(
        self, question: Question, content: Mapping[str, Any], buffers: tuple[bytes, ...], *, last: bool = True
    ) -> None:
        if self._closed:
            return
        for buffer in buffers:
            if len(buffer) > MAX_BUFFER_BYTES:
                raise WidgetError(f"a buffer of {len(buffer):,} bytes is too large for a view")
        message = {kinds.ANSWER: question.get(kinds.ASK), kinds.LAST: last, **content}
        self.send(message, list(buffers) or None)


def _methods(kind: type[LabWidget]) -> dict[str, str]:
    """The names of answering methods by the kind they answer."""
    return {
        method._answers: name
        for one in reversed(kind.__mro__)
        for name, method in vars(one).items()
        if hasattr(method, "_answers")
    }
