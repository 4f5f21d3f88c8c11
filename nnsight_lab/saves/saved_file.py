"""The saves in a file, found by name and label and read as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nnsight_lab.errors import SaveNotFound, nearest
from nnsight_lab.saves.asked import asked, only_of
from nnsight_lab.saves.held import Held
from nnsight_lab.saves.label import SaveKey, SaveLabel, key_of
from nnsight_lab.saves.lazy import take
from nnsight_lab.saves.mapped import FileTensors
from nnsight_lab.saves.request import Saves
from nnsight_lab.saves.summary import Summary, summarize


class SavedFile:
    """The saves in a file, read as they are asked for.

    Attributes:
        path: The safetensors file.
        requests: The ids of the requests whose saves are in it.
        labels: Of everything in it.
        nbytes: Of both files.
    """

    def __init__(self, path: Path, requests: Iterable[Held], nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._held = {held.request_id: held for held in requests}
        self.requests = tuple(self._held)
        self.labels: tuple[SaveLabel, ...] = tuple(
            label for held in self._held.values() for label in held.labels()
        )

    def held(self, labels: Iterable[SaveLabel | SaveKey] | None = None) -> list[Held]:
        """Its requests as a store keeps them."""
        return selected(self._held, labels)

    def get(
        self, *which: str, block: str | None = None, sequence: int = 0, request_id: str | None = None
    ) -> Any:
        """A saved value, nested as it was saved; its tensors are mapped.

        ``file.get("hidden")`` where it has one request, ``file.get(request_id, "hidden")`` where it has
        several, as of a store; ``file.get("hidden", request_id=…)`` is the same.

        Raises:
            SaveNotFound: There is none of that name, or several requests and none was said.
            AmbiguousSave: Two blocks have one, and ``block`` was not said.
        """
        request_id, name, block = asked(which, request_id, block)
        held = self._request(request_id)
        return held.value(held.slot(name, block, sequence))

    def __getitem__(self, name: str) -> Any:
        holders = {label.request_id for label in self.labels if label.name == name}
        return self.get(name, request_id=holders.pop() if len(holders) == 1 else None)

    def verify(self) -> None:
        """Read the whole file and compare it with the checksum that was written; seconds for gigabytes.

        Raises:
            FileRefused: It is damaged, gone, or another file.
        """
        for held in self._held.values():
            if isinstance(held.tensors, FileTensors):
                held.tensors.verify()
                return

    def saves(self, request_id: str | None = None, sequence: int = 0) -> Saves:
        """All values of one sequence of a request."""
        return self._request(request_id).values(sequence)

    def slice(self, label: SaveLabel | SaveKey, index: Any) -> torch.Tensor:
        """``tensor[index]`` of one saved tensor; reads those rows only."""
        key = key_of(label)
        return take(self._request(key.request_id).leaf(key), index)

    def summary(self, label: SaveLabel | SaveKey) -> Summary:
        """The statistics of one saved tensor."""
        key = key_of(label)
        return summarize(self._request(key.request_id).leaf(key))

    def _request(self, request_id: str | None) -> Held:
        if request_id is None:
            request_id = only_of(self.requests, self.path.name)
        if request_id not in self._held:
            raise SaveNotFound(
                f"{self.path.name} has no request {request_id!r}.{nearest(request_id, self._held)}"
            )
        return self._held[request_id]

    def __repr__(self) -> str:
        return f"<SavedFile {self.path.name}: {len(self._held)} requests, {len(self.labels)} labels>"


def selected(requests: Mapping[str, Held], labels: Iterable[SaveLabel | SaveKey] | None) -> list[Held]:
    """The requests, or what ``labels`` name of them.

    Raises:
        SaveNotFound: A label's save is not there.
    """
    if labels is None:
        return list(requests.values())
    wanted: dict[str, set[tuple[Any, ...]]] = {}
    for label in labels:
        key = key_of(label)
        held = requests.get(key.request_id)
        slot = key[1:4]
        if held is None or slot not in held.saves:
            raise SaveNotFound(
                f"Nothing is kept as {key.name!r} of {key.block!r}, request {key.request_id!r}."
            )
        wanted.setdefault(key.request_id, set()).add(slot)
    return [
        requests[name].without(slot for slot in requests[name].saves if slot not in slots)
        for name, slots in wanted.items()
    ]
