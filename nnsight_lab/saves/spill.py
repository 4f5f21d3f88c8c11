"""Where a store's saves go when its memory is full: one pair of files per request.

Files in a directory that was named outlive the process, and `find` finds them. Without one they go to a
directory of the store's own, gone with it: under ``/var/tmp``, since ``/tmp`` is memory on many machines.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from nnsight_lab.saves.files import TENSORS, read, remove, write_held
from nnsight_lab.saves.held import Held
from nnsight_lab.saves.mapped import FileTensors

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 80


class Spill:
    """A directory of spilled requests.

    Args:
        directory: Made when the first request comes; None for a temporary one.

    Attributes:
        nbytes: What its files take.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._sizes: dict[Path, int] = {}
        self.nbytes = 0

    def write(self, held: Held) -> tuple[FileTensors, int]:
        """Write a request's files: its tensors there, and what the files take.

        Raises:
            OSError: The disk is full, or it may not be written; nothing is left behind.
            CannotTravel: It holds more plain numbers than a label file takes.
        """
        safe = _UNSAFE.sub("_", held.request_id).strip(".")[:_LONGEST] or "request"
        path = self._folder() / f"{safe}-{secrets.token_hex(4)}{TENSORS}"
        write_held(path, [held])
        file = read(path)
        tensors = file.held()[0].tensors
        assert isinstance(tensors, FileTensors)
        return tensors, file.nbytes

    def enter(self, path: Path, nbytes: int) -> None:
        """Take a file that was written as one of its own."""
        self._sizes[path] = nbytes
        self.nbytes += nbytes

    def owns(self, path: Path) -> bool:
        """Whether a file was entered here and not removed since."""
        return path in self._sizes

    def remove(self, path: Path) -> None:
        """Delete a request's files; one that is not ours stays."""
        nbytes = self._sizes.pop(path, None)
        if nbytes is not None:
            self.nbytes -= nbytes
            remove(path)

    def _folder(self) -> Path:
        if self._directory is None:
            roomy = Path("/var/tmp")
            where = roomy if os.access(roomy, os.W_OK) else None
            self._directory = Path(tempfile.mkdtemp(prefix="nnsight_lab.saves.", dir=where))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory
