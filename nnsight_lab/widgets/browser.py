"""A table of everything a store holds, to sort, search, open and compare.

A hundred thousand saves are more than a page holds and more than a person reads: the kernel keeps the rows,
sorted and searched, and a view asks for those in sight, then for their statistics. A save is drawn by a
heatmap of its own, which reads it by label. The store is held while somebody looks; a browser in a forgotten
output keeps no gigabytes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import traitlets

from nnsight_lab.errors import CellUsageError, SaveNotFound, SavesError, WidgetError
from nnsight_lab.lens.tokens import visible
from nnsight_lab.saves.label import SaveLabel, leaves_of
from nnsight_lab.saves.recipe import recipe_of
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.table import as_html
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.axes_of import axes_of
from nnsight_lab.widgets.base import Answer, LabWidget, Question, answers, long
from nnsight_lab.widgets.comparison import likeness
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.jobs import Stopped
from nnsight_lab.widgets.saves_index import (
    SORTS,
    STATISTICS,
    Order,
    Row,
    SavesIndex,
    is_tensor,
    summary_of,
    words_of,
)
from nnsight_lab.widgets.sources import DifferenceSource, SavedSource
from nnsight_lab.widgets.sparkline import Sparkline, sparkline
from nnsight_lab.widgets.words import counted, short, shown_line
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.sizes import shown_bytes

#: Of one message.
MAX_ROWS: Final = 200
#: What a view waits at most for rows that were not read yet, and for statistics.
_FIRST_READ_S: Final = 0.02
#: Reading more than this for its statistics is seen.
_LARGE_BYTES: Final = 64 * 2**20
#: A screen of them.
_FIRST_ROWS: Final = 16
_READ_S: Final = 0.1
_STATISTICS_S: Final = 0.15
#: Between two words about what is read for long.
_SAY_S: Final = 1.0
#: Views are told of changes no more often.
_WATCH_S: Final = 0.5
_PROMPT_CHARS: Final = 120
_TEXT_CHARS: Final = 20_000
_PICTURE_HEIGHT: Final = 300

#: The tokens of a save's prompt as texts; None where they are not known.
Tokens = Callable[[SaveLabel], Sequence[str] | None]


class SavesBrowser(LabWidget):
    """The saves of a store as a table; select one to see it, pin two to compare them.

    Args:
        store: What it shows.
        name: What the store is called in expressions to copy.
        height: Of the table, in pixels.
        requests: Show what these requests saved, and nothing else.
        tokens: The tokens of a save's prompt, where they are known: they label its axes.

    Attributes:
        height: Of the table, in pixels.
        begun: The first rows, which a view shows while it waits for the rest.
        opening: The number of a row to be opened; 0 for none.
        bound: The name it has in the notebook, where that is known: a view says how to read what it opened.
    """

    module: ClassVar[str] = "browser"

    described = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(300).tag(sync=True)
    begun = traitlets.Dict().tag(sync=True)
    opening = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        store: SavesStore,
        *,
        name: str = "engine.saves",
        height: int = 300,
        requests: Sequence[str] | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        if not isinstance(store, SavesStore):
            raise CellUsageError(
                f"a store of saves can be browsed, and this is {type(store).__name__}: "
                "SavesBrowser(engine.saves)"
            )
        self._held: SavesStore | None = store
        self._weak = weakref.ref(store)
        self._name = name
        self._requests = None if requests is None else frozenset(requests)
        self._tokens = tokens
        self._index = SavesIndex.of(store)
        self.bound = ""
        self._read_s = _FIRST_READ_S
        self._selected: Row | None = None
        self._pictures: dict[str, list[Heatmap]] = {}
        self._turns: dict[str, int] = {}
        self._guard = threading.Lock()
        self._watching: threading.Event | None = None
        super().__init__(height=int(height), begun=self._first_rows(store), described=self.plain())

    @property
    def selected(self) -> SaveLabel | None:
        """The save that was opened last; None before that, and once it was dropped."""
        row, store = self._selected, self._weak()
        if row is None or store is None:
            return None
        self._index.update(store, 0)
        here = self._index.row(row.number) is not None
        return row.label if here or row.label in store.labels(row.label.request_id) else None

    @property
    def value(self) -> Any:
        """What was saved there: the tensor, text or number that was opened last.

        Raises:
            SaveNotFound: Nothing was opened, or it was dropped.
        """
        label = self.selected
        if label is None:
            raise SaveNotFound("no save is opened in this browser, or it was dropped")
        value = self._store().get(label.request_id, label.name, block=label.block, sequence=label.sequence)
        return next((leaf.value for leaf in leaves_of(value) if leaf.path == label.path), value)

    # -- what the browser asks -----------------------------------------------------------------

    @answers(kinds.PAGE)
    @long
    def _give_page(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        store, order = self._store(), replace(_order_of(question), requests=self._requests)
        self._index.update(store, self._read_s, self._requests or ())
        self._read_s = _READ_S
        version = self._index.version
        rows = self._index.ordered(
            store, order, stopped, lambda done, of: self._tell_progress(question, done, of)
        )
        first = max(0, int(question["first"]))
        count = min(max(0, int(question["count"])), MAX_ROWS)
        places = self._places(rows, question.get("find", ()))
        yield Answer(
            {
                "version": version,
                "complete": self._index.complete,
                "total": len(self._index) if self._requests is None else self._total(store),
                "matched": len(rows),
                "first": first,
                "rows": [_cells(row) for row in rows[first : first + count]],
                "places": places,
                "unused": list(self._index.unused),
                "store": ""
                if self._requests is not None
                else repr(store).strip("<>").removeprefix("SavesStore: "),
            }
        )

    @answers(kinds.STATISTICS)
    @long
    def _give_statistics(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        store = self._store()
        found: dict[str, list[str]] = {}
        ended_s = time.monotonic() + _STATISTICS_S
        asked = [(int(number), self._index.row(int(number))) for number in question["numbers"][:MAX_ROWS]]
        # What is quick is not kept waiting by what is read for seconds.
        for number, row in sorted(asked, key=lambda one: 0 if one[1] is None else one[1].label.bytes):
            if stopped() or time.monotonic() > ended_s:
                break
            large = row is not None and row.label.bytes > _LARGE_BYTES
            if large and found:
                break
            try:
                found[str(number)] = self._statistics(
                    store, row, self._reading(question, row.label, stopped) if large and row else stopped
                )
            except Stopped:
                break
        yield Answer({"statistics": found})

    @answers(kinds.OPEN)
    def _open(self, question: Question) -> Answer:
        self._draw(question, [])
        if question.get("number") is None:
            self._selected = None
            return Answer()
        store, row = self._store(), self._row(question["number"])
        label = row.label
        content: dict[str, Any] = {
            "title": f"{visible(label.name)}{visible(label.path)}",
            "about": _about(label),
            "prompt": shown_line(label.prompt, 4 * _PROMPT_CHARS),
            "expression": self._expression(store, label),
            "bound": self.bound,
            "recipe": _recipe(store, label),
            "request": label.request_id,
            "kept": store.is_kept(label.request_id),
            "parts": sum(other.key[:4] == label.key[:4] for other in store.labels(label.request_id)),
            "pictures": [],
        }
        self._selected = row
        if is_tensor(label):
            axes = axes_of(label, self._tokens(label) if self._tokens is not None else None)
            picture = Heatmap(
                store, label, name=content["expression"], height=_PICTURE_HEIGHT, **axes._asdict()
            )
            content["pictures"] = self._draw(question, [("", picture)])
        return Answer(content)

    @answers(kinds.TEXT)
    @long
    def _give_text(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        store, label = self._store(), self._row(question["number"]).label
        value = store.get(label.request_id, label.name, block=label.block, sequence=label.sequence)
        if stopped():
            return
        found = next((leaf.value for leaf in leaves_of(value) if leaf.path == label.path), value)
        text = found if isinstance(found, str) else repr(found)
        lines = "\n".join(shown_line(line, _TEXT_CHARS) for line in text[:_TEXT_CHARS].split("\n"))
        more = f"{len(text) - _TEXT_CHARS:,} more characters" if len(text) > _TEXT_CHARS else ""
        yield Answer({"text": lines, "more": more})

    @answers(kinds.COMPARE)
    @long
    def _compare(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        store = self._store()
        pair = [self._row(number).label for number in question["numbers"]]
        if len(pair) != 2:
            raise CellUsageError("two saves are compared: pin two")
        for label in pair:
            if not is_tensor(label):
                raise CellUsageError(
                    f"{label.name}{label.path} is no tensor but a {label.dtype}: only tensors are compared"
                )
        one, other = pair
        first, second = (SavedSource(store, label) for label in pair)
        difference = DifferenceSource(first, second)
        alike = likeness(first, second, stopped)
        expression = f"({self._expression(store, one)} - {self._expression(store, other)})"
        pictures = [("Difference", Heatmap(difference, name=expression, height=_PICTURE_HEIGHT))]
        words = [f"largest difference {short(alike.largest)}"]
        for title, values in (("Cosine", alike.cosine), ("Norm ratio", alike.norm_ratio)):
            if len(values) == 1:
                words.append(f"{title.lower()} {short(values.item())}")
            elif len(values):
                words.append(f"{title.lower()} per row {_range(values)}")
                name = title.lower().replace(" ", "_")
                pictures.append((f"{title} per row", Heatmap(values, name=name, axes=["row"], height=140)))
        titles = [f"{shown_line(label.name, 40)}{label.path} of {label.request_id}" for label in pair]
        yield Answer(
            {
                "title": f"{titles[0]}, less {titles[1]}",
                "words": "; ".join(words),
                "pictures": self._draw(question, pictures),
            }
        )

    @answers(kinds.WRITE)
    @long
    def _write(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        store, label = self._store(), self._row(question["number"]).label
        path = str(question["path"]).strip()
        if not path:
            raise CellUsageError("say where to: a path such as run/first")
        try:
            written = store.write(Path(path).expanduser(), label.request_id if question["whole"] else label)
        except OSError as error:
            raise WidgetError(f"{path} cannot be written: {error.strerror or error}") from error
        yield Answer({"written": str(written)})

    @answers(kinds.KEEP)
    def _keep(self, question: Question) -> Answer:
        store, label = self._store(), self._row(question["number"]).label
        store.keep(label.request_id, bool(question["on"]))
        return Answer({"kept": store.is_kept(label.request_id)})

    @answers(kinds.DROP)
    @long
    def _drop_save(self, question: Question, stopped: Callable[[], bool]) -> Iterator[Answer]:
        self._store().drop(self._row(question["number"]).label)
        yield Answer({"gone": True})

    # -- where no widget runs ------------------------------------------------------------------

    def plain(self) -> str:
        """As in ``"Saves browser: 12 requests, 3 MB in memory …"``."""
        store = self._weak()
        about = "its store is gone" if store is None else repr(store).strip("<>").partition(": ")[2]
        return f"Saves browser: {about}"

    def fallback(self) -> str:
        """The newest saves as a table."""
        store = self._weak()
        if store is None:
            return super().fallback()
        rows, more = store.rows(requests=self._requests)
        return as_html(repr(store).strip("<>"), rows, more)

    # -- its life ------------------------------------------------------------------------------

    def looked_at(self) -> None:
        """The store stays while it is looked at, and is watched for changes."""
        store = self._held = self._weak()
        if store is not None:
            self._index = SavesIndex.of(store)
        if self._watching is None and not self._closed:
            self._watching = threading.Event()
            threading.Thread(
                target=self._watch, args=(self._watching,), name="nnsight-lab watch", daemon=True
            ).start()

    def out_of_sight(self) -> None:
        """Nothing is kept for nobody."""
        if self._watching is not None:
            self._watching.set()
            self._watching = None
        self._close_pictures()
        self._index = SavesIndex()  # the rows go with their last browser
        self._read_s = _FIRST_READ_S
        self._held = None

    def released(self) -> None:
        """Let go of the store and the pictures."""
        self.out_of_sight()
        self._selected = None

    # -- inside --------------------------------------------------------------------------------

    def _first_rows(self, store: SavesStore) -> dict[str, Any]:
        """What a view shows before it was answered: of the newest request alone, where that has as many."""
        self._index.update(store, _FIRST_READ_S, self._requests or (), rows=_FIRST_ROWS)
        rows = self._index.ordered(store, Order(requests=self._requests))[:_FIRST_ROWS]
        return {"rows": [_cells(row) for row in rows], "unused": list(self._index.unused)} if rows else {}

    def _total(self, store: SavesStore) -> int:
        return len(self._index.ordered(store, Order(requests=self._requests)))

    def show_row(self, name: str, block: str) -> None:
        """Open the newest save of that name and block in every view."""
        store = self._store()
        self._index.update(store, _READ_S, self._requests or ())
        for row in self._index.ordered(store, Order(requests=self._requests)):
            if row.label.name == name and row.label.block == block:
                if self.opening == row.number:
                    self.opening = 0  # else nothing would have changed
                self.opening = row.number
                return

    def _store(self) -> SavesStore:
        store = self._weak()
        if store is None:
            raise WidgetError("the store of these saves is gone: run the cell again")
        return store

    def _row(self, number: Any) -> Row:
        row = self._index.row(int(number))
        if row is None:
            raise SaveNotFound("it was dropped")
        return row

    def _watch(self, ended: threading.Event) -> None:
        seen = -1
        while not ended.wait(_WATCH_S):
            store = self._weak()
            if store is None:
                return
            if store.changes != seen:
                if seen >= 0:
                    self.send({kinds.KIND: kinds.CHANGED})
                seen = store.changes
            del store

    def _tell_progress(self, question: Question, done: int, of: int) -> None:
        text = f"Reading the numbers to sort by: {done:,} of {of:,}"
        self._say(question, {"progress": text}, (), last=False)

    def _places(self, rows: Sequence[Row], numbers: Sequence[int]) -> dict[str, int]:
        """Where rows are now, by number; those that are not there are left out."""
        wanted = {int(number) for number in numbers}
        if not wanted:
            return {}
        return {str(row.number): place for place, row in enumerate(rows) if row.number in wanted}

    def _reading(
        self, question: Question, label: SaveLabel, stopped: Callable[[], bool]
    ) -> Callable[[], bool]:
        """Whether to go on with what takes seconds: not while another question waits. Says what is read."""
        said_s = -_SAY_S

        def given_way() -> bool:
            nonlocal said_s
            if time.monotonic() - said_s > _SAY_S:
                said_s = time.monotonic()
                name = shown_line(f"{label.name}{label.path}", 40)
                text = f"Reading the {shown_bytes(label.bytes)} of {name} for its statistics"
                self._say(question, {"progress": text}, (), last=False)
            return stopped() or self._jobs.awaited

        return given_way

    def _statistics(self, store: SavesStore, row: Row | None, stopped: Callable[[], bool]) -> list[str]:
        if row is None:
            return ["dropped"]
        if not is_tensor(row.label):
            return []
        found = summary_of(store, row.label, stopped)
        if found is None:
            return ["dropped" if not store.labels(row.label.request_id) else "cannot be read"]
        values = (found.min, found.max, found.mean, found.std)
        numbers = ["" if value is None else short(value) for value in values]
        try:
            line = sparkline(SavedSource(store, row.label))
        except SavesError:  # it was dropped meanwhile, or is no picture: a dtype that packs two numbers
            line = Sparkline("", "")
        return [*numbers, counted(found.nan, found.posinf, found.neginf), *line]

    def _expression(self, store: SavesStore, label: SaveLabel) -> str:
        """Python that reads it."""
        others = {one.block for one in store.labels(label.request_id, name=label.name)}
        named = f", block={label.block!r}" if label.block != TRACE_BLOCK or len(others) > 1 else ""
        at = f", sequence={label.sequence}" if label.sequence else ""
        return f"{self._name}.get({label.request_id!r}, {label.name!r}{named}{at}){label.path}"

    def _draw(self, question: Question, pictures: Sequence[tuple[str, Heatmap]]) -> list[dict[str, str]]:
        """Show these in the view that asks, in place of what it showed; unless it has gone on meanwhile."""
        view, turn = str(question.get(kinds.VIEW, "")), int(question.get("turn", 0))
        made = [picture for _, picture in pictures]
        with self._guard:
            late = self._closed or turn < self._turns.get(view, 0)
            if late:
                older = made
            else:
                self._turns[view] = turn
                older = self._pictures.pop(view, [])
                if made:
                    self._pictures[view] = made
        for picture in older:
            picture.close()
        return [] if late else [{"title": title, "model": one.model_id or ""} for title, one in pictures]

    def _close_pictures(self) -> None:
        with self._guard:
            older = [picture for pictures in self._pictures.values() for picture in pictures]
            self._pictures.clear()
            self._turns.clear()
        for picture in older:
            picture.close()


def _cells(row: Row) -> list[Any]:
    """A row as a view has it: its number, then the table's columns."""
    label = row.label
    tensor = is_tensor(label)
    return [
        row.number,
        shown_line(label.prompt, _PROMPT_CHARS),
        label.request_id,
        visible(label.block),
        f"{visible(label.name)}{visible(label.path)}",
        label.module_path,
        "" if label.step is None else f"{label.step:,}",
        f"{label.sequence}",
        ("×".join(map(str, label.shape)) or "0-d") if tensor else "",
        visible(label.dtype),
        shown_bytes(label.bytes) if tensor else "",
    ]


def _recipe(store: SavesStore, label: SaveLabel) -> str:
    """The code that makes a save again; of an edit's save, with the trace that ran beside it."""
    if label.block == TRACE_BLOCK:
        return recipe_of(label)
    traced = store.labels(label.request_id, block=TRACE_BLOCK)
    return recipe_of(label, traced[0].block_source if traced else "")


def _range(values: torch.Tensor) -> str:
    """As in ``"from 0.1 to 0.9, 2 rows without"``."""
    finite = values[values.isfinite()]
    without = len(values) - len(finite)
    none = f", {without:,} {'row' if without == 1 else 'rows'} without" if without else ""
    if not len(finite):
        return "cannot be said of any row"
    return f"from {short(finite.min().item())} to {short(finite.max().item())}{none}"


def _about(label: SaveLabel) -> str:
    """What is known of a save, in a line."""
    parts = [
        f"{label.dtype} [{', '.join(map(str, label.shape))}]" if is_tensor(label) else label.dtype,
        shown_bytes(label.bytes) if is_tensor(label) else "",
        "trace" if label.block == TRACE_BLOCK else f"edit {visible(label.block)} v{label.edit_version}",
        label.module_path,
        "" if label.step is None else f"step {label.step:,}",
        f"sequence {label.sequence}" if label.sequence else "",
        f"request {label.request_id}",
    ]
    return " · ".join(part for part in parts if part)


def _order_of(question: Question) -> Order:
    sort = str(question.get("sort", ""))
    if sort and sort not in SORTS and sort not in STATISTICS:
        raise CellUsageError(f"there is no column {sort!r}")
    return Order(sort, bool(question.get("descending")), words_of(str(question.get("words", ""))))
