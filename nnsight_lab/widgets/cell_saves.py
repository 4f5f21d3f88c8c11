"""One line below a cell that says what it saved, and opens the browser on it.

Most cells are run to read a variable, not to look at a table; and ipywidgets keeps every widget there ever
was. So the line is small (names, shapes, sizes), knows its requests by id, keeps no store and no tensor, and
makes a browser only for as long as it is opened. It says what was saved when the cell ended: what was dropped
since is said by the browser.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import traitlets

from nnsight_lab.errors import WidgetError
from nnsight_lab.saves.said import said_of, table_of
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import Answer, LabWidget, Question, answers
from nnsight_lab.widgets.browser import SavesBrowser, Tokens

_ROW_PX, _TABLE_PX = 24, (100, 240)


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
        self._said = said_of(store, self._requests)
        named = [[one.title, one.about] for one in self._said.named]
        super().__init__(names=named, words=self._said.more)
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
            rows = len(self._requests) * max(1, len(self._said.named))
            height = min(max((rows + 2) * _ROW_PX, _TABLE_PX[0]), _TABLE_PX[1])
            browser = self._browsers[view] = SavesBrowser(
                store, name=self._name, height=height, requests=self._requests, tokens=self._tokens
            )
            if self._opened is not None:
                self._opened(browser)
        item = question.get("item")
        if item is not None:
            one = self._said.named[int(item)]
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
        return self._said.line()

    def fallback(self) -> str:
        """A small table."""
        store = self._weak()
        if store is None:
            return super().fallback()
        return table_of(store, self._requests)

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
    """The lines below cells, one a cell."""

    def __init__(self) -> None:
        self._strips: dict[str, CellSaves] = {}

    def add(self, strip: CellSaves, cell: str) -> None:
        """Remember it, and close the one whose output this cell's has replaced."""
        older = self._strips.pop(cell, None)
        self._strips[cell] = strip
        if older is not None:
            older.close()

    def close(self) -> None:
        """Close all."""
        while self._strips:
            self._strips.popitem()[1].close()
