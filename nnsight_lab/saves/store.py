"""The saves of many requests, kept within a budget of memory and asked for by label.

A research kernel runs for days and saves gigabytes an hour. So what is put here costs no copy and no
statistics; what does not fit in memory goes to files whole requests at a time, the least recently used
first, and is mapped back when it is asked for; what is dropped is gone. The budget counts the bytes of
tensors that the store holds: a tensor that a notebook variable holds as well is freed when both let go.
Its tensors are those that were put: changing one in place changes the store's, and its summary may be older.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from nnsight_lab.errors import CannotTravel, FileRefused, OverBudget, SaveNotFound, nearest
from nnsight_lab.saves.budget import default_budget_bytes
from nnsight_lab.saves.held import Blocks, Held, Slot, hold
from nnsight_lab.saves.label import SaveKey, SaveLabel, key_of
from nnsight_lab.saves.label_file import common_tree
from nnsight_lab.saves.lazy import take
from nnsight_lab.saves.mapped import FileTensors
from nnsight_lab.saves.request import Saves
from nnsight_lab.saves.saved_file import SavedFile, selected
from nnsight_lab.saves.shelf import Shelf
from nnsight_lab.saves.spill import Spill
from nnsight_lab.saves.summary import Summary, summarize
from nnsight_lab.saves.table import as_html, rows_of, shown

#: So that a kernel that runs for days stays flat.
MAX_REQUESTS = 10_000
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
        max_requests: Past that many the oldest is dropped, from disk too, unless it was marked by `keep`.
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
            self._shelf.enter(held)
        try:
            self._shelf.make_room()
        except (OSError, CannotTravel) as error:
            with self._shelf.lock:
                if self._shelf.requests.get(request_id) is held:
                    self._shelf.forget(request_id)
            raise _over_budget(held, self.budget_bytes, error) from error
        return self._described(held)

    def adopt(self, file: SavedFile) -> list[StoredRequest]:
        """Take in what `files.read` or `files.find` found; its file is never deleted here."""
        found = file.held()
        with self._shelf.lock:
            for held in found:
                self._shelf.enter(held)
        return [self._described(held) for held in found]

    def keep(self, request_id: str, on: bool = True) -> None:
        """Never spill that request nor drop it by age; or do so again (``on=False``).

        Raises:
            SaveNotFound: There is no such request.
        """
        with self._shelf.lock:
            self._find(request_id)
            if on:
                self._shelf.kept.add(request_id)
            else:
                self._shelf.kept.discard(request_id)

    def drop(self, what: str | SaveLabel | SaveKey | Iterable[SaveLabel | SaveKey]) -> None:
        """Let go of a request, or of the saved values that labels name, in memory and on disk.

        A label inside a nested value names the whole value. Labels of what is gone already are ignored.

        Raises:
            SaveNotFound: There is no such request.
        """
        if isinstance(what, str):
            with self._shelf.lock:
                self._find(what)
                self._shelf.forget(what)
            return
        slots: dict[str, set[Slot]] = {}
        for label in (what,) if isinstance(what, (SaveLabel, SaveKey)) else what:
            key = key_of(label)
            slots.setdefault(key.request_id, set()).add(Slot(*key[1:4]))
        for request_id, gone in slots.items():
            self._shelf.drop_slots(request_id, gone)

    def clear(self) -> None:
        """Let go of everything, marked or not, with the files this store wrote."""
        with self._shelf.lock:
            for request_id in list(self._shelf.requests):
                self._shelf.forget(request_id)

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
        with self._shelf.lock:
            if request_id is None:
                found = list(reversed(self._shelf.requests.values()))
            else:
                found = [self._shelf.requests[request_id]] if request_id in self._shelf.requests else []
        return [
            label
            for held in found
            for slot, save in held.saves.items()
            if (block is None or slot.block == block)
            and (name is None or slot.name == name)
            and (sequence is None or slot.sequence == sequence)
            for label in save.labels
            if step is None or label.step == step
        ]

    def get(self, request_id: str, name: str, block: str | None = None, sequence: int = 0) -> Any:
        """A saved value, nested as it was saved; from disk its tensors are mapped, and read when touched.

        Raises:
            SaveNotFound: There is none of that name.
            AmbiguousSave: Two blocks have one, and ``block`` was not said.
        """
        return self._ask(request_id, lambda held: held.value(held.slot(name, block, sequence)))

    def saves(self, request_id: str, sequence: int = 0) -> Saves:
        """All values of one sequence of a request, as its output had them."""
        return self._ask(request_id, lambda held: held.values(sequence))

    def slice(self, label: SaveLabel | SaveKey, index: Any) -> torch.Tensor:
        """``tensor[index]`` of one saved tensor, in memory of its own; on disk only those rows are read.

        Raises:
            SaveNotFound: It is not here.
            SavesError: What is there is no tensor.
        """
        key = key_of(label)
        return self._ask(key.request_id, lambda held: take(held.leaf(key), index))

    def summary(self, label: SaveLabel | SaveKey) -> Summary:
        """The statistics of one saved tensor, computed when first asked for.

        Raises:
            SaveNotFound, SavesError: As `slice`.
        """
        key = key_of(label)
        with self._shelf.lock:
            known = self._shelf.summaries.get(key.request_id, {}).get(key)
        if known is not None:
            return known
        held, computed = self._ask(key.request_id, lambda held: (held, summarize(held.leaf(key))))
        with self._shelf.lock:
            if self._shelf.requests.get(key.request_id) is held:
                self._shelf.summaries.setdefault(key.request_id, {})[key] = computed
        return computed

    def held(self, labels: Iterable[SaveLabel | SaveKey] | None = None) -> list[Held]:
        """What `files.write` writes, oldest request first."""
        with self._shelf.lock:
            return selected(dict(self._shelf.requests), labels)

    @property
    def budget_bytes(self) -> int:
        """What its tensors may take in memory."""
        return self._shelf.budget_bytes

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

    def __len__(self) -> int:
        return len(self._shelf.requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._shelf.requests

    def __iter__(self) -> Iterator[StoredRequest]:
        """The requests, newest first."""
        with self._shelf.lock:
            found = list(reversed(self._shelf.requests.values()))
        return (self._described(held) for held in found)

    def __repr__(self) -> str:
        return (
            f"<SavesStore: {len(self):,} requests, {shown(self.bytes_in_memory)} in memory (of "
            f"{shown(self.budget_bytes)}), {shown(self.bytes_on_disk)} on disk>"
        )

    def _repr_html_(self) -> str:
        with self._shelf.lock:
            found = list(reversed(self._shelf.requests.values()))
        rows = rows_of(save.labels for held in found for save in held.saves.values())
        count = sum(len(held.saves) for held in found)
        return as_html(repr(self).strip("<>"), rows, count - len(rows))

    # -- inside --------------------------------------------------------------------------------

    def _find(self, request_id: str) -> Held:
        held = self._shelf.requests.get(request_id)
        if held is None:
            raise SaveNotFound(
                f"Nothing is kept of request {request_id!r}.{nearest(request_id, self._recent())}"
            )
        return held

    def _recent(self) -> list[str]:
        return list(islice(reversed(self._shelf.requests), 100))

    def _ask(self, request_id: str, question: Callable[[Held], T]) -> T:
        while True:
            with self._shelf.lock:
                held = self._find(request_id)
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


def _over_budget(held: Held, budget_bytes: int, error: Exception) -> OverBudget:
    values = [
        (slot.name, sum(held.sizes[handle] for handle in save.used)) for slot, save in held.saves.items()
    ]
    values.sort(key=lambda pair: -pair[1])
    named = ", ".join(f"{name} ({shown(nbytes)})" for name, nbytes in values[:_NAMED])
    more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
    return OverBudget(
        f"The saves of request {held.request_id!r} take {shown(held.nbytes)}, more than is left of "
        f"{shown(budget_bytes)} in memory, and could not go to disk ({error}): {named}{more}. "
        "Drop what is not needed, save less, or raise the budget.",
        asked_bytes=held.nbytes,
        allowed_bytes=budget_bytes,
        values=values,
    )
