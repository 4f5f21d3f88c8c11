"""One line below a cell that says what it saved, and opens the browser on it.

Most cells are run to read a variable, not to look at a table; and ipywidgets keeps every widget there ever
was. So the line is small (names, shapes, sizes), knows its requests by id, keeps no store and no tensor, and
makes a browser only for as long as it is opened. It says what was saved when the cell ended: what was dropped
since is said by the browser.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, NamedTuple

import traitlets

from nnsight_lab.errors import WidgetError
from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.table import as_html
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import Answer, LabWidget, Question, answers
from nnsight_lab.widgets.browser import SavesBrowser, Tokens
from nnsight_lab.widgets.saves_index import is_tensor
from nnsight_lab.widgets.words import shown_line
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.sizes import shown_bytes

#: Names in the line.
_NAMES: Final = 12
_ROWS: Final = 8
_NAME_CHARS: Final = 40
_ROW_PX, _TABLE_PX = 24, (100, 240)


class Named(NamedTuple):
    """What was saved under one name, of the newest request.

    Attributes:
        name: The name.
        block: Whose block saved it.
        about: Type, shape and size, in a few words.
    """

    name: str
    block: str
    about: str


class CellSaves(LabWidget):
    """What the requests of one cell saved.

    Args:
        store: Where it is.
        requests: Their ids.
        name: What the store is called in expressions to copy.
        tokens: As for `SavesBrowser`.
        opened: Told of each browser that is made.
    """

    module: ClassVar[str] = "strip"

    names = traitlets.List(traitlets.List(traitlets.Unicode())).tag(sync=True)
    words = traitlets.Unicode().tag(sync=True)
    described = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        store: SavesStore,
        requests: Sequence[str],
        *,
        name: str = "engine.saves",
        tokens: Tokens | None = None,
        opened: Callable[[SavesBrowser], object] | None = None,
    ) -> None:
        self._weak = weakref.ref(store)
        self._requests = tuple(requests)
        self._name, self._tokens, self._opened = name, tokens, opened
        self._browsers: dict[str, SavesBrowser] = {}
        self._named, more = _names_of(store, self._requests)
        super().__init__(
            names=[[_title(one), one.about] for one in self._named], words=_words(self._requests, more)
        )
        self.described = self.plain()

    @answers(kinds.OPEN)
    def _open(self, question: Question) -> Answer:
        store, view = self._weak(), str(question.get(kinds.VIEW, ""))
        if store is None:
            raise WidgetError("the store of these saves is gone: run the cell again")
        if not any(request in store for request in self._requests):
            raise WidgetError("what this cell saved was dropped: run it again")
        browser = self._browsers.get(view)
        if browser is None:
            rows = len(self._requests) * max(1, len(self._named))
            height = min(max((rows + 2) * _ROW_PX, _TABLE_PX[0]), _TABLE_PX[1])
            browser = self._browsers[view] = SavesBrowser(
                store, name=self._name, height=height, requests=self._requests, tokens=self._tokens
            )
            if self._opened is not None:
                self._opened(browser)
        item = question.get("item")
        if item is not None:
            one = self._named[int(item)]
            browser.show_row(one.name, one.block)
        return Answer({"model": browser.model_id or ""})

    @answers(kinds.CLOSE)
    def _shut(self, question: Question) -> Answer:
        browser = self._browsers.pop(str(question.get(kinds.VIEW, "")), None)
        if browser is not None:
            browser.close()
        return Answer()

    def plain(self) -> str:
        """As in ``"Saved: hidden bfloat16 [8, 576] 9.22 kB"``."""
        names = "; ".join(f"{_title(one)} {one.about}" for one in self._named)
        return f"Saved: {names}{'; ' if names and self.words else ''}{self.words}"

    def fallback(self) -> str:
        """A small table."""
        store = self._weak()
        if store is None:
            return super().fallback()
        rows, more = store.rows(_ROWS, requests=self._requests)
        return as_html("Saved", rows, more)

    def out_of_sight(self) -> None:
        """Nothing is kept for nobody."""
        browsers = list(self._browsers.values())
        self._browsers.clear()
        for browser in browsers:
            browser.close()

    def released(self) -> None:
        """Close what was opened."""
        self.out_of_sight()


class Strips:
    """The lines below cells: one a cell, and of cells that cannot be told apart the newest.

    Args:
        most: So many, of those whose cell is not known.
    """

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._strips: OrderedDict[str, CellSaves] = OrderedDict()
        self._count = 0

    def add(self, strip: CellSaves, cell: str = "") -> None:
        """Remember it, and close the one whose output this cell's has replaced."""
        self._count += 1
        key = cell or f"unknown {self._count}"
        older = self._strips.pop(key, None)
        self._strips[key] = strip
        if older is not None:
            older.close()
        unknown = [key for key in self._strips if key.startswith("unknown ")]
        for old in unknown[: max(0, len(unknown) - self._most)]:
            self._strips.pop(old).close()

    def close(self) -> None:
        """Close all."""
        while self._strips:
            self._strips.popitem()[1].close()


def _names_of(store: SavesStore, requests: Sequence[str]) -> tuple[list[Named], int]:
    """The names that the newest request saved, and how many are not among them."""
    labels: list[SaveLabel] = []
    for request in requests:
        labels = store.labels(request)
        if labels:
            break
    saves: dict[tuple[str, str], list[SaveLabel]] = {}
    for label in labels:
        if not label.sequence:
            saves.setdefault((label.block, label.name), []).append(label)
    # The cell's own come first.
    order = sorted(saves, key=lambda slot: slot[0] != TRACE_BLOCK)
    named = [Named(name, block, _about(saves[block, name])) for block, name in order[:_NAMES]]
    return named, len(order) - len(named)


def _about(labels: Sequence[SaveLabel]) -> str:
    tensors = [label for label in labels if is_tensor(label)]
    if not tensors:
        return labels[0].dtype
    shapes = {label.shape for label in tensors}
    dtypes = sorted({label.dtype for label in tensors})
    shape = f"[{', '.join(map(str, tensors[0].shape))}]" if len(shapes) == 1 else "several shapes"
    times = f" × {len(tensors):,}" if len(tensors) > 1 else ""
    return f"{', '.join(dtypes)} {shape}{times} {shown_bytes(sum(label.bytes for label in tensors))}"


def _title(one: Named) -> str:
    name = shown_line(one.name, _NAME_CHARS)
    return name if one.block == TRACE_BLOCK else f"{shown_line(one.block, _NAME_CHARS)}: {name}"


def _words(requests: Sequence[str], more: int) -> str:
    parts = [f"{more:,} more names" if more else ""]
    parts.append(f"of each of {len(requests):,} requests" if len(requests) > 1 else "")
    return ", ".join(part for part in parts if part)
