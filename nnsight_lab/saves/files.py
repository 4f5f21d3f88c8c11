"""Saves in files: a safetensors file that any library opens, and a JSON file of labels beside it.

``write`` puts both in place whole or not at all: each is written under another name and flushed to the disk
first, the label file comes last, and it knows the other's size and the hash of its header. So a crash leaves
the old pair, or one that `read` refuses, and never labels beside tensors of another write. ``read`` gives the
nested values back, mapped: nothing of a tensor is read before it is touched. A file is refused, with the
reason, before anything is allocated on its word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from nnsight_lab.errors import FileRefused, SavesError
from nnsight_lab.saves.held import Held, hold
from nnsight_lab.saves.label import SaveKey, SaveLabel
from nnsight_lab.saves.label_file import LabelFile, held_in, parsed, tensor_names, written
from nnsight_lab.saves.layout import lay_out, spans_of
from nnsight_lab.saves.mapped import Seal, check_data_once, checked_header, opened
from nnsight_lab.saves.saved_file import SavedFile
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.limits import MAX_HEADER_BYTES, WireError
from nnsight_lab.wire.tensors import memory_of

#: What `read` reads whole to see whether it is damaged: a tenth of a second.
CHECKED_BYTES = 256 * 2**20
TENSORS, LABELS = ".safetensors", ".json"
_UNFINISHED = ".unfinished"


class Holder(Protocol):
    """A store, as a file sees it."""

    def held(self, labels: Iterable[SaveLabel | SaveKey] | None = None) -> list[Held]:
        """The requests to write; all where ``labels`` is None, else what they name of them."""
        ...


class Found(NamedTuple):
    """A pair of files that was found.

    Attributes:
        path: The safetensors file.
        file: What is in it; None where it was refused.
        refused: Why, if it was.
    """

    path: Path
    file: SavedFile | None
    refused: str = ""


def write(
    path: str | os.PathLike[str],
    source: Holder | Mapping[str, Any],
    *,
    labels: Iterable[SaveLabel | SaveKey] | None = None,
    common: Mapping[str, Any] | None = None,
    block: str = TRACE_BLOCK,
    request_id: str = "",
) -> Path:
    """Write saves to ``path`` (``x`` or ``x.safetensors``) and its label file ``x.json``, replacing both.

    Args:
        path: Its directory is made where it is not there.
        source: A store, a file that was read, or values by name.
        labels: Which saves of a store; all where it is None. A part of a nested value brings the whole value.
        common: For values by name: label fields, such as the prompt and the model.
        block: For values by name: what saved them.
        request_id: For values by name: the request they are of.

    Returns:
        The safetensors file.

    Raises:
        CannotTravel: A value has no form outside this process.
        SaveNotFound: A label's save is not there.
        OSError: The disk is full, or it may not be written; nothing is left behind.
    """
    if isinstance(source, Mapping):
        requests = [hold(request_id, [{block: source}], common or {}, {})]
    else:
        requests = source.held(labels)
    return write_held(pair(path)[0], requests)


def write_held(tensors_path: Path, requests: list[Held], *, lasting: bool = True) -> Path:
    """Write requests as a store keeps them; one tensor at a time is copied, and only where it has gaps.

    Args:
        tensors_path: The safetensors file.
        requests: What goes in.
        lasting: Whether the files must outlive a power cut, so that their way to the disk is waited for.
    """
    labels_path = tensors_path.with_suffix(LABELS)
    names = tensor_names(requests)
    specs = {
        mine[handle]: spec
        for held, mine in zip(requests, names, strict=True)
        for handle, spec in held.specs.items()
    }
    layout = lay_out(specs, secrets.token_hex(8))
    places = {
        mine[handle]: (held, handle) for held, mine in zip(requests, names, strict=True) for handle in mine
    }
    readers = {id(held): held.tensors.reader() for held in requests}
    tensors_path.parent.mkdir(parents=True, exist_ok=True)
    with _unfinished(tensors_path) as tensors_now, _unfinished(labels_path) as labels_now:
        crc = 0
        with open(tensors_now, "xb") as file:
            file.write(layout.header)
            for name in layout.order:
                held, handle = places[name]
                memory = memory_of(readers[id(held)](handle))
                if memory.size:
                    raw = memory.reshape(-1).view(np.uint8).data
                    file.write(raw)
                    if lasting:
                        crc = zlib.crc32(raw, crc)
            _flush(file, lasting)
        header_sha256 = hashlib.sha256(layout.header).hexdigest()
        text = written(requests, names, Seal(layout.nbytes, header_sha256, crc if lasting else None))
        with open(labels_now, "xb") as file:
            file.write(text)
            _flush(file, lasting)
        labels_path.unlink(missing_ok=True)
        tensors_now.rename(tensors_path)
        labels_now.rename(labels_path)
    if lasting:
        _flush_directory(tensors_path.parent)
    return tensors_path


def read(path: str | os.PathLike[str]) -> SavedFile:
    """Open a pair of files, by the name of either or their common stem.

    What the tensors hold is compared with its checksum where the file has at most `CHECKED_BYTES`; of a
    larger one that is `SavedFile.verify`, since it reads all of it.

    Raises:
        FileRefused: One is missing, cut off, damaged, or not what it should be; says why.
    """
    tensors_path, labels_path = pair(path)
    where = labels_path
    try:
        with opened(labels_path) as (descriptor, labels_bytes):
            if labels_bytes > MAX_HEADER_BYTES:
                raise FileRefused(f"it has {labels_bytes:,} bytes; {MAX_HEADER_BYTES:,} is the most")
            label_file = parsed(_contents(descriptor, labels_bytes))
        where = tensors_path
        with opened(tensors_path) as (descriptor, size):
            header = checked_header(descriptor, size, label_file.seal)
            if size <= CHECKED_BYTES:
                check_data_once(descriptor, size, label_file.seal)
        spans = spans_of(header, size, label_file.specs)
        where = labels_path
        requests = [held_in(r, tensors_path, label_file.seal, spans) for r in _distinct(label_file)]
    except (SavesError, WireError) as error:
        raise FileRefused(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    return SavedFile(tensors_path, requests, size + labels_bytes)


def find(directory: str | os.PathLike[str]) -> list[Found]:
    """The saves that are in a directory, whoever wrote them there, newest first; those refused too."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    aged: list[tuple[float, Path]] = []
    for path in folder.glob(f"*{TENSORS}"):
        with contextlib.suppress(FileNotFoundError):  # another kernel may let go of it meanwhile
            aged.append((path.stat().st_mtime, path))
    found: list[Found] = []
    for _, path in sorted(aged, reverse=True):
        try:
            found.append(Found(path, read(path)))
        except FileRefused as refusal:
            found.append(Found(path, None, str(refusal)))
    return found


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a pair of files, the label file first; what is mapped of it stays readable."""
    tensors_path, labels_path = pair(path)
    labels_path.unlink(missing_ok=True)
    tensors_path.unlink(missing_ok=True)


def pair(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The two files that a name stands for; ``~`` is the home directory."""
    text = os.path.expanduser(os.fspath(path))
    stem = text.removesuffix(TENSORS).removesuffix(LABELS)
    return Path(stem + TENSORS), Path(stem + LABELS)


def _distinct(label_file: LabelFile) -> list[dict[str, Any]]:
    ids = [str(request.get("request_id")) for request in label_file.requests]
    if len(set(ids)) != len(ids):
        raise FileRefused("it has a request twice")
    return label_file.requests


def _contents(descriptor: int, size: int) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < size:
        part = os.pread(descriptor, size - at, at)
        if not part:
            raise FileRefused("it was cut off while it was read")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Another name beside ``path``, that is gone afterwards."""
    name = path.with_name(f".{path.name[-80:]}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        yield name
    finally:
        name.unlink(missing_ok=True)


def _flush(file: Any, lasting: bool) -> None:
    file.flush()
    if lasting:
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
