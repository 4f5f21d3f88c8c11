"""What an OpenAI request saved, as a safetensors file that is written while it is read.

The saves lie where the workers left them. The file's header is made, and then each tensor is sent from there,
so a file of gigabytes costs the server a header; of ``rows`` nothing but those rows is touched.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from nnsight_lab.saves.held import Spec
from nnsight_lab.saves.layout import lay_out
from nnsight_lab.server.limits import Refused, not_found
from nnsight_lab.server.parking import CHUNK_BYTES
from nnsight_lab.wire.messages import BlockSaves, RequestSaves
from nnsight_lab.wire.tensors import NAMES, memory_of


class KeptFile(NamedTuple):
    """A file that is not there yet.

    Attributes:
        chunks: Its bytes.
        nbytes: How many.
    """

    chunks: Iterator[memoryview | bytes]
    nbytes: int


class KeptSaves:
    """The saves of one request, by the names an OpenAI client reads.

    Args:
        saves: As they were collected.

    Attributes:
        tensors: By ``block/name`` (a list's by ``block/name/1``; another answer's by ``block#1/name``).
        words: The rest as text, and errors.
    """

    def __init__(self, saves: RequestSaves) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.words: dict[str, str] = {}
        for sequence in saves.sequences:
            for block in sequence.blocks:
                start = f"{block.block}" if sequence.index == 0 else f"{block.block}#{sequence.index}"
                self._add(start, block)
        if saves.error is not None:
            self.words["error"] = f"{saves.error.type_name}: {saves.error.message}"

    def file(self, name: str | None = None, rows: str | None = None) -> KeptFile:
        """All of it, one value, or rows of it.

        Args:
            name: One value's; all of them where it is None.
            rows: Of its first dimension, as ``0:4``.

        Raises:
            Refused: There is no such value, or those are no rows of it.
        """
        tensors, words = self.tensors, self.words
        if name is not None:
            if name not in tensors and name not in words:
                raise not_found(f"save {name!r}")
            tensors = {name: tensors[name]} if name in tensors else {}
            words = {name: words[name]} if name in words else {}
        if rows is not None:
            wanted = _rows(rows)
            tensors = {key: _cut(value, wanted, rows) for key, value in tensors.items()}
        specs = {key: Spec(NAMES[value.dtype], tuple(value.shape)) for key, value in tensors.items()}
        layout = lay_out(specs, secrets.token_hex(8), words)
        return KeptFile(_bytes(layout.header, [tensors[key] for key in layout.order]), layout.nbytes)

    def _add(self, start: str, block: BlockSaves) -> None:
        if block.error is not None:
            self.words[f"{start}/error"] = f"{block.error.type_name}: {block.error.message}"
        todo: list[tuple[str, Any]] = [(f"{start}/{name}", value) for name, value in block.values.items()]
        while todo:
            key, value = todo.pop(0)
            if isinstance(value, torch.Tensor):
                self.tensors[key] = value
            elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
                todo = [(f"{key}/{place}", item) for place, item in enumerate(value)] + todo
            elif isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values()):
                todo = [(f"{key}/{name}", item) for name, item in value.items()] + todo
            else:
                self.words[key] = repr(value)


def _bytes(header: bytes, tensors: list[torch.Tensor]) -> Iterator[memoryview | bytes]:
    yield header
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        raw = memory_of(tensor).reshape(-1).view(np.uint8).data
        yield from (raw[at : at + CHUNK_BYTES] for at in range(0, raw.nbytes, CHUNK_BYTES))


def _rows(rows: str) -> slice:
    start, colon, stop = rows.partition(":")
    try:
        if colon:
            return slice(int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        pass
    raise Refused(400, f"rows={rows[:80]!r} is not a range of rows, such as 0:4.")


def _cut(value: torch.Tensor, rows: slice, said: str) -> torch.Tensor:
    if not value.dim():
        raise Refused(
            400, f"rows={said[:80]!r} was asked of a single number, which has none: name one value."
        )
    return value[rows]
