"""The saves of many requests, kept within a budget of memory and asked for by label.

A research kernel runs for days and saves gigabytes an hour. So what is put here costs no copy and no
statistics; what an engine enters is not even taken apart before somebody asks; what does not fit in memory
goes to files whole requests at a time, the least recently used first, and is mapped back when it is asked
for; what is dropped is gone. The budget counts the bytes of tensors that the store holds: a tensor that a
notebook variable holds as well is freed when both let go. Its tensors are over the memory of those that were
put: changing one in place changes the store's, and its summary may be older.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from nnsight_lab.errors import (
    CannotTravel,
    CellUsageError,
    FileRefused,
    OverBudget,
    SaveNotFound,
    SavesError,
    nearest,
)
from nnsight_lab.saves import files
from nnsight_lab.saves.arrival import Arrival
from nnsight_lab.saves.asked import asked, only_of
from nnsight_lab.saves.budget import default_budget_bytes, size_of
from nnsight_lab.saves.held import Blocks, Held, Slot, hold
from nnsight_lab.saves.label import SaveKey, SaveLabel, key_of
from nnsight_lab.saves.label_file import common_tree
from nnsight_lab.saves.lazy import take
from nnsight_lab.saves.mapped import FileTensors
from nnsight_lab.saves.request import Saves
from nnsight_lab.saves.saved_file import SavedFile, selected
from nnsight_lab.saves.shelf import Item, Shelf
from nnsight_lab.saves.spill import Spill
from nnsight_lab.saves.summary import Summary, summarize
from nnsight_lab.saves.table import ROWS, Row, as_html, rows_of
from nnsight_lab.saves.written import note
from nnsight_lab.wire.sizes import shown_bytes

#: So that a kernel that runs for days stays flat.
MAX_REQUESTS = 1_000
_NAMED = 4

T = TypeVar("T")


@dataclass(frozen=True)
class StoredRequest:
    """What is known of a request in a store; holds no tensor.

    Attributes:
        request_id: The request.
        labels: Of everything it saved.
        nbytes: What its tensors take.
        on_disk: Whether they were in a file when this was asked.
        kept: Whether it was marked to be kept.
    """

    request_id: str
    labels: tuple[SaveLabel, ...]
    nbytes: int
    on_disk: bool
    kept: bool


class SavesStore:
    """The saves of many requests; every method may be called from any thread.

    Args:
        budget_bytes: What its tensors may take in memory; half of what is free now, where it is None.
        spill_dir: Where requests go that do not fit; files there outlive the process. A temporary
            directory, gone with the store, where it is None.
        max_requests: Past that many the oldest is dropped, from disk too, unless it was marked by `keep` or
            is of the newest call.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        budget = default_budget_bytes() if budget_bytes is None else budget_bytes
        self._shelf = Shelf(Spill(spill_dir), budget, max_requests)

    # -- putting and letting go ----------------------------------------------------------------

    def put(
        self,
        request_id: str,
        saves: Sequence[Blocks] | Mapping[int, Blocks],
        common: Mapping[str, Any] | None = None,
        *,
        module_paths: Mapping[tuple[str, str], str] | None = None,
    ) -> StoredRequest:
        """Keep what a request's blocks saved, in place of what was kept under that id.

        Args:
            request_id: The request.
            saves: Of each sequence: block, name, value. Tensors are not copied.
            common: The label fields that all saves share: ``engine``, ``prompt``, ``sampling``, ``edits``,
                ``block_source`` (the trace's), ``model``, ``model_revision``, ``versions``, ``created``.
            module_paths: By block and name, the module a value was read at.

        Raises:
            CannotTravel: A value has no form outside this process.
            OverBudget: It does not fit in memory, and could not be written to disk. Nothing of it is kept.
        """
        common = {"created": time.time(), **(common or {})}
        common_tree(common)  # refused here rather than when it is spilled
        held = hold(request_id, saves, common, module_paths or {})
        with self._shelf.lock:
            self._shelf.enter([held])
        try:
            self._shelf.make_room()
        except (OSError, CannotTravel) as error:
            with self._shelf.lock:
                if self._shelf.requests.get(request_id) is held:
                    self._shelf.forget(request_id)
            raise _over_budget(held, self.budget_bytes, error) from error
        return self._described(held)

    def enter(self, arrivals: Sequence[Arrival]) -> None:
        """Take in the requests of one call as they came home: a moment each, whatever they saved.

        Room is made by another thread, which drops what it cannot write; the repr says how many.
        """
        if arrivals:
            with self._shelf.lock:
                self._shelf.enter_cheaply(arrivals)

    def missed(self, count: int, error: Exception) -> None:
        """Note that so many requests could not be entered; the repr says so."""
        with self._shelf.lock:
            self._shelf.dropped[f"{type(error).__name__}: {error!s:.120}"] += count

    def adopt(self, file: SavedFile) -> list[StoredRequest]:
        """Take in what `files.read` or `files.find` found; its file is never deleted here.

        A request that is here already, from elsewhere, stays as it is.

        Returns:
            The file's requests as they are here now.
        """
        with self._shelf.lock:
            here = {held.request_id: self._shelf.requests.get(held.request_id) for held in file.held()}
            self._shelf.enter([h for h in file.held() if _in_file(here[h.request_id], file.path, none=True)])
        found = (self._shelf.taken_apart(held.request_id) for held in file.held())
        return [self._described(held) for held in found if held is not None]

    def keep(self, request_id: str, on: bool = True) -> None:
        """Never spill that request nor drop it by age; or do so again (``on=False``).

        Raises:
            SaveNotFound: There is no such request.
        """
        with self._shelf.lock:
            self._known(request_id)
            self._shelf.mark(request_id, on)

    def drop(self, what: str | SaveLabel | SaveKey | Iterable[SaveLabel | SaveKey]) -> None:
        """Let go of a request, or of the saved values that labels name, in memory and on disk.

        A label inside a nested value names the whole value. Labels of what is gone already are ignored.

        Raises:
            SaveNotFound: There is no such request.
        """
        if isinstance(what, str):
            with self._shelf.lock:
                self._known(what)
                self._shelf.forget(what)
            return
        slots: dict[str, set[Slot]] = {}
        for label in (what,) if isinstance(what, (SaveLabel, SaveKey)) else what:
            key = key_of(label)
            slots.setdefault(key.request_id, set()).add(Slot(*key[1:4]))
        for request_id, gone in slots.items():
            self._shelf.drop_slots(request_id, gone)

    def spill(self) -> None:
        """Put everything that was not marked to be kept into files, now, and let go of its memory.

        What cannot be written is dropped, and counted.
        """
        self._shelf.tidy(0)

    def clear(self) -> None:
        """Let go of everything, marked or not, with the files this store wrote."""
        with self._shelf.lock:
            for request_id in list(self._shelf.requests):
                self._shelf.forget(request_id)
            self._shelf.spill.unlink()

    # -- asking --------------------------------------------------------------------------------

    def labels(
        self,
        request_id: str | None = None,
        *,
        block: str | None = None,
        name: str | None = None,
        sequence: int | None = None,
        step: int | None = None,
    ) -> list[SaveLabel]:
        """The labels that fit, newest request first; nothing is loaded."""
        return [
            label
            for held in self._all(None if request_id is None else [request_id])
            for slot, save in held.saves.items()
            if (block is None or slot.block == block)
            and (name is None or slot.name == name)
            and (sequence is None or slot.sequence == sequence)
            for label in save.labels
            if step is None or label.step == step
        ]

    def get(
        self, *which: str, block: str | None = None, sequence: int = 0, request_id: str | None = None
    ) -> Any:
        """A saved value, nested as it was saved; from disk its tensors are mapped, and read when touched.

        ``store.get(request_id, "hidden")``, as of a file; ``store.get("hidden", request_id=…)`` is the same,
        and ``store.get("hidden")`` does where it has one request.

        Raises:
            SaveNotFound: There is none of that name, or several requests and none was said.
            AmbiguousSave: Two blocks have one, and ``block`` was not said.
        """
        named, name, block = asked(which, request_id, block)
        request = only_of(self.ids(), "the store") if named is None else named
        return self._ask(request, lambda held: held.value(held.slot(name, block, sequence)))

    def saves(self, request_id: str | None = None, sequence: int = 0) -> Saves:
        """All values of one sequence of a request, as its output had them; of the only one if not said."""
        request = only_of(self.ids(), "the store") if request_id is None else request_id
        return self._ask(request, lambda held: held.values(sequence))

    def slice(self, label: SaveLabel | SaveKey, index: Any) -> torch.Tensor:
        """``tensor[index]`` of one saved tensor, in memory of its own; on disk only those rows are read.

        Raises:
            SaveNotFound: It is not here.
            SavesError: What is there is no tensor.
        """
        key = key_of(label)
        return self._ask(key.request_id, lambda held: take(held.leaf(key), index))

    def label_of(self, tensor: torch.Tensor, newest: int = 64) -> SaveLabel | None:
        """The label of a saved tensor that a variable holds, found by its memory.

        Args:
            tensor: As it came home: a part of it, or what was computed from it, has no label.
            newest: How many requests are looked through; those on disk are not.
        """
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
            return None
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        for held in islice(self._all(), newest):
            if isinstance(held.tensors, FileTensors):
                continue
            for save in held.saves.values():
                for label, handle in zip(save.labels, save.handles, strict=True):
                    if handle < 0 or label.kind != "tensor" or (label.shape, label.dtype) != (shape, dtype):
                        continue
                    there = held.tensors.reader()(handle)
                    if there.data_ptr() == tensor.data_ptr() and there.stride() == tensor.stride():
                        return label
        return None

    def summary(self, label: SaveLabel | SaveKey, check: Callable[[], object] = lambda: None) -> Summary:
        """The statistics of one saved tensor, computed when first asked for.

        Args:
            label: Of the tensor.
            check: Called between the pieces that are read; what it raises ends that.

        Raises:
            SaveNotFound, SavesError: As `slice`.
        """
        key = key_of(label)
        with self._shelf.lock:
            known = self._shelf.summaries.get(key.request_id, {}).get(key)
        if known is not None:
            return known
        held, computed = self._ask(key.request_id, lambda held: (held, summarize(held.leaf(key), check)))
        with self._shelf.lock:
            if self._shelf.requests.get(key.request_id) is held:
                self._shelf.summaries.setdefault(key.request_id, {})[key] = computed
        return computed

    def held(self, labels: Iterable[SaveLabel | SaveKey] | None = None) -> list[Held]:
        """What `files.write` writes, oldest request first."""
        if labels is None:
            return list(self._all())[::-1]
        listed = [key_of(label) for label in labels]
        wanted = dict.fromkeys(key.request_id for key in listed)
        return selected({held.request_id: held for held in self._all(wanted)}, listed)

    def write(
        self,
        path: str | os.PathLike[str],
        requests: str | SaveLabel | SaveKey | Iterable[str | SaveLabel | SaveKey] | None = None,
    ) -> Path:
        """Write saves to ``path`` (``x`` or ``x.safetensors``), and their labels to ``x.json``.

        Files of those names are replaced, whole or not at all. Any safetensors reader opens the first,
        `nnsight_lab.read` both, and ``%saves`` of another kernel finds them.

        Args:
            path: Its directory is made where it is not there.
            requests: Ids of requests, or labels of saves; everything where it is None.

        Returns:
            The safetensors file.

        Raises:
            SaveNotFound: A request or a save is not here, or nothing is.
            SavesError: The file is where other saves of this store are read from.
            CannotTravel: They hold more plain numbers than a label file takes.
            OSError: The disk is full, or it may not be written; nothing is left behind.
        """
        held = self.held() if requests is None else self._chosen(requests)
        if not held:
            raise SaveNotFound("There is nothing to write: no saves are kept.")
        target = files.pair(path)[0]
        self._refuse_loss(target, held)
        written = files.write_held(target, held).absolute()
        self._follow(written)
        note(written)
        return written

    @property
    def budget_bytes(self) -> int:
        """What its tensors may take in memory; may be set, and holds from the next request on."""
        return self._shelf.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int | str) -> None:
        self._shelf.budget_bytes = size_of(budget_bytes, name="budget_bytes")

    @property
    def max_requests(self) -> int:
        """How many requests it keeps; may be set, and holds from the next call on. 0 keeps that call only."""
        return self._shelf.max_requests

    @max_requests.setter
    def max_requests(self, max_requests: int) -> None:
        if type(max_requests) is not int or max_requests < 0:
            raise CellUsageError(f"max_requests={max_requests!r} is not a number of requests: 0 or more.")
        self._shelf.max_requests = max_requests

    @property
    def disk_bytes(self) -> int | None:
        """What its own files may take; None for half of what is free. May be set; 0 never writes any."""
        return self._shelf.spill.cap_bytes

    @disk_bytes.setter
    def disk_bytes(self, disk_bytes: int | str | None) -> None:
        known = None if disk_bytes is None else size_of(disk_bytes, name="disk_bytes")
        self._shelf.spill.cap_bytes = known

    @property
    def bytes_in_memory(self) -> int:
        """What its tensors take in memory."""
        with self._shelf.lock:
            return self._shelf.memory_bytes

    @property
    def bytes_on_disk(self) -> int:
        """What the files that it wrote take."""
        with self._shelf.lock:
            return self._shelf.spill.nbytes

    def ids(self) -> list[str]:
        """The ids of its requests, newest first; what vLLM calls ``output.request_id``."""
        with self._shelf.lock:
            return list(reversed(self._shelf.requests))

    @property
    def changes(self) -> int:
        """Goes up whenever a request comes, goes, is marked, or loses a save; cheap to ask."""
        return self._shelf.changes

    def stamps(self) -> list[tuple[str, int]]:
        """The ids of its requests, newest first, each with a number that changes when its labels do."""
        with self._shelf.lock:
            return [(name, self._shelf.stamps[name]) for name in reversed(self._shelf.requests)]

    def is_kept(self, request_id: str) -> bool:
        """Whether `keep` marked that request."""
        return request_id in self._shelf.kept

    def __len__(self) -> int:
        return len(self._shelf.requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._shelf.requests

    def __iter__(self) -> Iterator[StoredRequest]:
        """The requests, newest first."""
        return (self._described(held) for held in self._all())

    def __repr__(self) -> str:
        with self._shelf.lock:
            dropped = dict(self._shelf.dropped)
        lost = "".join(
            f", dropped {count:,} request{'s' if count > 1 else ''}: {why}" for why, count in dropped.items()
        )
        return (
            f"<SavesStore: {len(self):,} requests, {shown_bytes(self.bytes_in_memory)} in memory (of "
            f"{shown_bytes(self.budget_bytes)}), {shown_bytes(self.bytes_on_disk)} on disk{lost}>"
        )

    def _repr_html_(self) -> str:
        rows, more = self.rows()
        return as_html(repr(self).strip("<>"), rows, more)

    def rows(self, most: int = ROWS, *, requests: Collection[str] | None = None) -> tuple[list[Row], str]:
        """The newest saved values as rows of a table, and what is not among them, in words.

        Args:
            most: So many rows.
            requests: Only of these.
        """
        rows: list[Row] = []
        values = seen = 0
        names = [name for name in self.ids() if requests is None or name in requests]
        for held in self._all(names):
            seen += 1
            found = rows_of((save.labels for save in held.saves.values()), most - len(rows))
            rows += found
            values += len(held.saves) - len(found)
            if len(rows) >= most:
                break
        left = max(len(names) - seen, 0)
        parts = [f"{values:,} more" if values else "", f"{left:,} more requests" if left else ""]
        return rows, " and ".join(part for part in parts if part)

    # -- inside --------------------------------------------------------------------------------

    def _all(self, names: Iterable[str] | None = None) -> Iterator[Held]:
        """Requests by name, those that are here; all of them, newest first, where ``names`` is None."""
        for name in self.ids() if names is None else names:
            try:
                held = self._shelf.taken_apart(name)
            except SavesError:  # it was dropped, and the repr says why
                continue
            if held is not None:
                yield held

    def _chosen(self, which: str | SaveLabel | SaveKey | Iterable[str | SaveLabel | SaveKey]) -> list[Held]:
        keys: list[SaveLabel | SaveKey] = []
        for one in (which,) if isinstance(which, (str, SaveLabel, SaveKey)) else which:
            if isinstance(one, str):
                keys += [SaveKey(one, *slot) for slot in self._held(one).saves]
            else:
                keys.append(one)
        return self.held(keys)

    def _refuse_loss(self, target: Path, writing: Sequence[Held]) -> None:
        """See that what is read from the file at ``target`` is in what will replace it."""
        slots = {(held.request_id, slot) for held in writing for slot in held.saves}
        with self._shelf.lock:
            lost = {
                held.request_id
                for held in self._shelf.requests.values()
                if isinstance(held, Held)
                and _in_file(held, target)
                and any((held.request_id, slot) not in slots for slot in held.saves)
            }
        if lost:
            raise SavesError(
                f"{target.name} holds other saves that this store reads from it ({len(lost)} requests), "
                "and would lose: write to another file."
            )

    def _follow(self, written: Path) -> None:
        """Requests adopted from a file that was just replaced are read from the new one, or are gone."""
        with self._shelf.lock:
            stale = [
                held
                for held in self._shelf.requests.values()
                if isinstance(held, Held) and _in_file(held, written)
            ]
        if not stale:
            return
        fresh = {held.request_id: held for held in files.read(written).held()}
        with self._shelf.lock:
            for held in stale:
                if held.request_id in fresh:
                    self._shelf.replace(held, fresh[held.request_id])
                elif self._shelf.requests.get(held.request_id) is held:
                    self._shelf.forget(held.request_id)

    def _known(self, request_id: str) -> None:
        if request_id not in self._shelf.requests:
            raise SaveNotFound(
                f"Nothing is kept of request {request_id!r}.{nearest(request_id, self._recent())}"
            )

    def _held(self, request_id: str) -> Held:
        held = self._shelf.taken_apart(request_id)
        if held is None:
            with self._shelf.lock:
                self._known(request_id)
            return self._held(request_id)  # it came in between
        return held

    def _recent(self) -> list[str]:
        return list(islice(reversed(self._shelf.requests), 100))

    def _ask(self, request_id: str, question: Callable[[Held], T]) -> T:
        while True:
            held = self._held(request_id)
            with self._shelf.lock:
                tensors = held.tensors
                self._shelf.touch(request_id)
            try:
                return question(held)
            except FileRefused:
                # Meanwhile it was dropped, or went from one file to another: look again.
                with self._shelf.lock:
                    now = self._shelf.requests.get(request_id)
                    if now is held and held.tensors is tensors:
                        raise

    def _described(self, held: Held) -> StoredRequest:
        return StoredRequest(
            request_id=held.request_id,
            labels=tuple(held.labels()),
            nbytes=held.nbytes,
            on_disk=isinstance(held.tensors, FileTensors),
            kept=held.request_id in self._shelf.kept,
        )


def _in_file(item: Item | None, path: Path, *, none: bool = False) -> bool:
    """Whether a request is read from the file at ``path``; ``none`` is said of one that is not there."""
    if item is None:
        return none
    return (
        isinstance(item, Held)
        and isinstance(item.tensors, FileTensors)
        and item.tensors.path.absolute() == path.absolute()
    )


def _over_budget(held: Held, budget_bytes: int, error: Exception) -> OverBudget:
    values = [
        (slot.name, sum(held.sizes[handle] for handle in save.used)) for slot, save in held.saves.items()
    ]
    values.sort(key=lambda pair: -pair[1])
    named = ", ".join(f"{name} ({shown_bytes(nbytes)})" for name, nbytes in values[:_NAMED])
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return OverBudget(
        f"The saves of request {held.request_id!r} take {shown_bytes(held.nbytes)}, more than is left of "
        f"{shown_bytes(budget_bytes)} in memory, and could not go to disk ({error}): {named}{more}. "
        "Drop what is not needed, save less, or raise the budget.",
        asked_bytes=held.nbytes,
        allowed_bytes=budget_bytes,
        values=values,
    )
