"""Tensors that are in a file: mapped when they are asked for, read when they are touched.

A mapping is private and writable: a notebook may change a tensor that it got, the file never changes. It is
made anew for each question and lives as long as a tensor of it does, and no file stays open meanwhile: a
kernel with thousands of spilled requests would run out of file descriptors. Each time it is looked whether
the file is still the one that was written. What cannot be guarded against is that someone shortens the file
*while* it is mapped: touching what is gone ends the process (SIGBUS), as with every memory map.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from nnsight_lab.errors import FileRefused
from nnsight_lab.saves.held import Get, Spec
from nnsight_lab.saves.layout import LENGTH_BYTES, Span, header_length
from nnsight_lab.wire.codec import Handle
from nnsight_lab.wire.limits import WireError
from nnsight_lab.wire.tensors import DTYPES

#: Python names it from 3.13 on; without it a file larger than the memory cannot be mapped.
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_AT_ONCE: Final = 2**20
_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


#: Files whose data were found sound, as they were then; the oldest are forgotten.
_sound: dict[tuple[object, ...], None] = {}
_REMEMBERED: Final = 4096


@dataclass(frozen=True)
class Seal:
    """By what a written file is known again.

    Attributes:
        nbytes: Its size.
        header_sha256: Of its header; headers differ between any two writes.
        data_crc32: Of everything after the header; None where it was not taken.
    """

    nbytes: int
    header_sha256: str
    data_crc32: int | None = None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and size.

    Raises:
        FileRefused: It is not there, cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # a pipe would wait for its writer
    except OSError as error:
        raise FileRefused(f"it cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FileRefused("it is no regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def checked_header(descriptor: int, size: int, seal: Seal) -> bytes:
    """A file's header without its length, where it is the file that was sealed.

    Raises:
        FileRefused: It is another one, or was cut off.
    """
    if size != seal.nbytes:
        raise FileRefused(f"it has {size:,} bytes, and {seal.nbytes:,} were written")
    prefix = os.pread(descriptor, LENGTH_BYTES, 0)
    length = header_length(prefix, size)
    header = os.pread(descriptor, length, LENGTH_BYTES)
    if hashlib.sha256(prefix + header).hexdigest() != seal.header_sha256:
        raise FileRefused("it is not the file that was written with its label file")
    return header


def check_data(descriptor: int, size: int, seal: Seal) -> None:
    """Read the whole file, and compare what it holds with what was written.

    Raises:
        FileRefused: It differs, or ends while it is read.
    """
    if seal.data_crc32 is None:
        return
    at = LENGTH_BYTES + header_length(os.pread(descriptor, LENGTH_BYTES, 0), size)
    found = 0
    while at < size:
        part = os.pread(descriptor, min(_READ_AT_ONCE, size - at), at)
        if not part:
            raise FileRefused("it was cut off while it was read")
        found = zlib.crc32(part, found)
        at += len(part)
    if found != seal.data_crc32:
        raise FileRefused("it is damaged: its data are not those that were written (their checksums differ)")


def check_data_once(descriptor: int, size: int, seal: Seal) -> None:
    """`check_data`, but not again of a file that was found sound and has not changed since.

    A list of files opens each of them every time it is shown.
    """
    status = os.fstat(descriptor)
    seen = (status.st_dev, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns, seal)
    if seen in _sound:
        return
    check_data(descriptor, size, seal)
    while len(_sound) >= _REMEMBERED:
        _sound.pop(next(iter(_sound)), None)
    _sound[seen] = None


@dataclass(frozen=True)
class FileTensors:
    """The tensors of one request in a file, by handle."""

    path: Path
    seal: Seal
    specs: Mapping[int, Spec]
    spans: Mapping[int, Span]

    def reader(self) -> Get:
        """Tensors over one mapping of the file.

        Raises:
            FileRefused: The file is gone, or another one.
        """
        try:
            with opened(self.path) as (descriptor, size):
                checked_header(descriptor, size, self.seal)
                whole = _mapping(descriptor, size)
        except FileRefused as refusal:
            raise FileRefused(f"{self.path}: {refusal}") from None

        def get(handle: Handle) -> torch.Tensor:
            if type(handle) is not int or handle not in self.spans:
                raise WireError(f"there is no tensor {handle!r:.40} in the file")
            span, spec = self.spans[handle], self.specs[handle]
            piece = whole[span.start : span.stop]
            if spec.is_array:
                return piece
            dtype = DTYPES[spec.dtype]
            return piece.view(dtype).view(spec.shape) if len(piece) else torch.empty(spec.shape, dtype=dtype)

        return get

    def verify(self) -> None:
        """Read the whole file, and see that it holds what was written.

        Raises:
            FileRefused: It does not, or is gone.
        """
        try:
            with opened(self.path) as (descriptor, size):
                checked_header(descriptor, size, self.seal)
                check_data(descriptor, size, self.seal)
        except FileRefused as refusal:
            raise FileRefused(f"{self.path}: {refusal}") from None


class _Mapping:
    """A whole file in memory, private and writable; gone with the last array or tensor over it.

    Python's own `mmap` keeps the file open, torch's `from_file` leaks a descriptor when it fails, as it does
    for a file larger than memory.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, mmap.MAP_PRIVATE | _NORESERVE, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map {size:,} bytes")
        self._unmap = functools.partial(_libc.munmap, address, size)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, False),
        }

    def __del__(self) -> None:
        unmap = getattr(self, "_unmap", None)
        if unmap is not None:
            unmap()


def _mapping(descriptor: int, size: int) -> torch.Tensor:
    """The whole file ``[byte]``, uint8, none of it read."""
    return torch.from_numpy(np.asarray(_Mapping(descriptor, size)))
