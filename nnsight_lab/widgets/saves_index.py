"""The rows of a store's saves: found, sorted and searched in the kernel, so that a page gets what it shows.

A store of a thousand requests takes a moment to be labelled, and a first look needs only the newest: so the
rows are read a slice of time at a time, newest request first, and whoever asks is told whether there are
more. A row keeps its number for as long as its request's labels stay the same, so that a selection and a
scrolled place outlive whatever comes and goes. Rows hold labels, never tensors. Browsers of one store share
its rows, which go when the last of them lets go.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from nnsight_lab.errors import SavesError
from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.summary import Summary
from nnsight_lab.widgets.jobs import Stopped

#: Sorted and searched lists that are remembered: a view or two, and how they were before.
_ORDERS: Final = 4
#: Between two words about how far a long computation is.
_SAY_S: Final = 0.25


class Row(NamedTuple):
    """One saved tensor or plain value.

    Attributes:
        number: Its own, never used again.
        label: What is known of it.
    """

    number: int
    label: SaveLabel


@dataclass(frozen=True)
class Order:
    """Which rows are shown, and in what order.

    Attributes:
        sort: A column of `SORTS` or `STATISTICS`; newest request first where it is empty.
        descending: Largest first; what has no value stays last.
        words: All of which must be found.
        requests: Only of these; of all where it is None.
    """

    sort: str = ""
    descending: bool = False
    words: tuple[str, ...] = ()
    requests: frozenset[str] | None = None


#: What each column of the table is sorted by; None stays last.
SORTS: Final[dict[str, Callable[[SaveLabel], Any]]] = {
    "prompt": lambda label: label.prompt.casefold(),
    "request": lambda label: label.request_id,
    "block": lambda label: label.block.casefold(),
    "name": lambda label: (label.name.casefold(), label.step is not None, label.step or 0, label.path),
    "module": lambda label: label.module_path or None,
    "step": lambda label: label.step,
    "sequence": lambda label: label.sequence,
    "shape": lambda label: label.shape if is_tensor(label) else None,
    "dtype": lambda label: label.dtype,
    "bytes": lambda label: label.bytes if is_tensor(label) else None,
}
#: Columns that need the numbers themselves.
STATISTICS: Final[dict[str, Callable[[Summary], float | int | None]]] = {
    "min": lambda summary: summary.min,
    "max": lambda summary: summary.max,
    "mean": lambda summary: summary.mean,
    "std": lambda summary: summary.std,
    "special": lambda summary: summary.nan + summary.posinf + summary.neginf,
}


_numbers: Final = count(1)
#: By the id of their store; `SavesIndex.of` hands them out.
_shared: Final[weakref.WeakValueDictionary[int, SavesIndex]] = weakref.WeakValueDictionary()
_shared_lock: Final = threading.Lock()


#: Columns that are often empty, and whether a row fills them.
_USED: Final[dict[str, Callable[[Row], bool]]] = {
    "module": lambda row: bool(row.label.module_path),
    "step": lambda row: row.label.step is not None,
    "sequence": lambda row: row.label.sequence > 0,
}


def is_tensor(label: SaveLabel) -> bool:
    """Whether it has a shape and statistics."""
    return label.kind in ("tensor", "array")


def words_of(text: str) -> tuple[str, ...]:
    """The words of a search."""
    return tuple(text.casefold().split())


class SavesIndex:
    """The rows of a store; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests: dict[str, tuple[int, tuple[Row, ...]]] = {}
        self._prompts: dict[str, str] = {}
        self._rows: tuple[Row, ...] = ()
        self._by_number: dict[int, Row] = {}
        self._orders: dict[tuple[int, Order], tuple[Row, ...]] = {}
        self._changes = -1
        self._store: Callable[[], SavesStore | None] = lambda: None
        self.version = 0
        self.complete = False
        #: Columns in which nothing stands.
        self.unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, store: SavesStore) -> SavesIndex:
        """The rows of a store, the same ones for whoever asks while somebody holds them."""
        with _shared_lock:
            found = _shared.get(id(store))
            if found is None or found._store() is not store:
                found = _shared[id(store)] = cls()
                found._store = weakref.ref(store)
            return found

    def update(
        self, store: SavesStore, limit_s: float, first: Collection[str] = (), rows: int | None = None
    ) -> None:
        """Take in what changed; for as long as ``limit_s``, then `complete` says whether there is more.

        Args:
            store: Whose rows these are.
            limit_s: Reading takes about as long at the most; one request is read however long it takes.
            first: Requests to be read before the others.
            rows: Read no more than about so many.
        """
        with self._lock:
            changes = store.changes
            if self.complete and changes == self._changes:
                return
            ended_s = time.monotonic() + limit_s
            found: dict[str, tuple[int, tuple[Row, ...]]] = {}
            complete, changed, read = True, False, 0
            stamps = store.stamps()
            for request_id, stamp in sorted(stamps, key=lambda one: one[0] not in first) if first else stamps:
                known = self._requests.get(request_id)
                if known is None or known[0] != stamp:
                    changed = True
                    # At least one each time, however slow.
                    if read and (time.monotonic() > ended_s or (rows is not None and read >= rows)):
                        complete = False
                        continue
                    known = (stamp, self._read(store, request_id))
                    read += max(1, len(known[1]))
                found[request_id] = known
            if first:
                found = {request_id: found[request_id] for request_id, _ in stamps if request_id in found}
            if changed or found.keys() != self._requests.keys():
                self._requests = found
                self._rows = tuple(row for _, rows in found.values() for row in rows)
                self._by_number = {row.number: row for row in self._rows}
                self._prompts.clear()
                self.unused = tuple(name for name, used in _USED.items() if not any(map(used, self._rows)))
                self.version += 1
            self.complete, self._changes = complete, changes

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row | None:
        """The row of that number; None where it was dropped."""
        with self._lock:
            return self._by_number.get(number)

    def ordered(
        self,
        store: SavesStore,
        order: Order,
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[int, int], None] = lambda done, of: None,
    ) -> tuple[Row, ...]:
        """The rows that fit, in order.

        Args:
            store: Asked for statistics, where these are sorted by.
            order: Which rows, and how.
            stopped: Whether nobody waits any more.
            say: Told from time to time how many statistics there are, of how many.

        Raises:
            Stopped: Nobody waits.
        """
        with self._lock:
            version, rows, requests = self.version, self._rows, self._requests
            known = self._orders.get((version, order))
        if known is not None:
            return known
        if order.requests is not None:
            few = [part for name, (_, part) in requests.items() if name in order.requests]
            rows = tuple(row for part in few for row in part)
        if order.words:
            rows = tuple(row for row in rows if self._fits(row, order.words))
        if order.sort:
            rows = _sorted(rows, self._keys(store, rows, order.sort, stopped, say), order.descending)
        elif order.descending:
            rows = rows[::-1]
        with self._lock:
            self._orders[version, order] = rows
            while len(self._orders) > _ORDERS:
                del self._orders[next(iter(self._orders))]
        return rows

    # -- inside --------------------------------------------------------------------------------

    def _read(self, store: SavesStore, request_id: str) -> tuple[Row, ...]:
        return tuple(Row(next(_numbers), label) for label in store.labels(request_id))

    def _fits(self, row: Row, words: Sequence[str]) -> bool:
        """Whether all of the words are in what a row says; that is put together when it is first searched."""
        label = row.label
        prompt = self._prompts.get(label.request_id)
        if prompt is None:
            prompt = self._prompts[label.request_id] = label.prompt.casefold()
        text = (
            f"{label.request_id} {label.block} {label.name}{label.path} {label.module_path} "
            f"{label.dtype}".casefold()
        )
        return all(word in text or word in prompt for word in words)

    def _keys(
        self,
        store: SavesStore,
        rows: Sequence[Row],
        sort: str,
        stopped: Callable[[], bool],
        say: Callable[[int, int], None],
    ) -> list[Any]:
        if sort not in STATISTICS:
            key = SORTS[sort]
            return [key(row.label) for row in rows]
        keys: list[Any] = []
        said_s = time.monotonic()
        for number, row in enumerate(rows):
            if stopped():
                raise Stopped
            if time.monotonic() - said_s > _SAY_S:
                said_s = time.monotonic()
                say(number, len(rows))
            summary = summary_of(store, row.label, stopped)
            keys.append(None if summary is None else STATISTICS[sort](summary))
        return keys


def summary_of(
    store: SavesStore, label: SaveLabel, stopped: Callable[[], bool] = lambda: False
) -> Summary | None:
    """The statistics of a save; None where it is no tensor or is gone.

    Raises:
        Stopped: ``stopped`` said so, between two pieces of a large one.
    """

    def check() -> None:
        if stopped():
            raise Stopped

    if not is_tensor(label):
        return None
    try:
        return store.summary(label, check)
    except SavesError:
        return None


def _sorted(rows: Sequence[Row], keys: Sequence[Any], descending: bool) -> tuple[Row, ...]:
    """Sorted by their keys; those without one last, equal ones as they were."""
    places = sorted(
        (place for place, key in enumerate(keys) if key is not None),
        key=keys.__getitem__,
        reverse=descending,
    )
    places += [place for place, key in enumerate(keys) if key is None]
    return tuple(rows[place] for place in places)
