"""Where a store's saves go when its memory is full: one pair of files per request.

Files in a directory that was named outlive the process, and `find` finds them. Without one they go to a
directory of the store's own, gone with it: under ``/var/tmp``, since ``/tmp`` is memory on many machines.
Its name has the process in it, so that what a killed kernel left there is found and removed by the next.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Final

from nnsight_lab.saves.files import TENSORS, read, remove, write_held
from nnsight_lab.saves.held import Held
from nnsight_lab.saves.mapped import FileTensors

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST = 80
_PREFIX: Final = "nnsight_lab.saves."
_MOST_BYTES: Final = 64 * 2**30


class Spill:
    """A directory of spilled requests.

    Args:
        directory: Made when the first request comes; None for a temporary one.

    Attributes:
        nbytes: What its files take.
        doomed: Files that were let go of and are still there.
        cap_bytes: What its files may take at most, where somebody said so.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._lasting = directory is not None
        self._most_bytes: int | None = None
        self._sizes: dict[Path, int] = {}
        self.nbytes = 0
        self.cap_bytes: int | None = None
        self.doomed: list[Path] = []

    def write(self, held: Held) -> tuple[FileTensors, int]:
        """Write a request's files: its tensors there, and what the files take.

        Raises:
            OSError: The disk is full, or it may not be written; nothing is left behind.
            CannotTravel: It holds more plain numbers than a label file takes.
        """
        safe = _UNSAFE.sub("_", held.request_id).strip(".")[:_LONGEST] or "request"
        path = self._folder() / f"{safe}-{secrets.token_hex(4)}{TENSORS}"
        write_held(path, [held], lasting=self._lasting)
        file = read(path)
        tensors = file.held()[0].tensors
        assert isinstance(tensors, FileTensors)
        return tensors, file.nbytes

    def lacks(self, nbytes: int) -> bool:
        """Whether that much more is too much: in a directory of its own, half of what was free there."""
        self._folder()
        limits = [limit for limit in (self._most_bytes, self.cap_bytes) if limit is not None]
        return bool(limits) and self.nbytes + nbytes > min(limits)

    def enter(self, path: Path, nbytes: int) -> None:
        """Take a file that was written as one of its own."""
        self._sizes[path] = nbytes
        self.nbytes += nbytes

    def owns(self, path: Path) -> bool:
        """Whether a file was entered here and not removed since."""
        return path in self._sizes

    def remove(self, path: Path, *, later: bool = False) -> None:
        """Delete a request's files, at once or with the next `unlink`; one that is not ours stays."""
        nbytes = self._sizes.pop(path, None)
        if nbytes is None:
            return
        self.nbytes -= nbytes
        if later:
            self.doomed.append(path)
        else:
            remove(path)

    def unlink(self) -> None:
        """Delete what was let go of."""
        while self.doomed:
            try:
                remove(self.doomed.pop())
            except IndexError:  # another thread took the last one
                return

    def _folder(self) -> Path:
        if self._directory is None:
            folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}.", dir=_roomy()))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._most_bytes = min(shutil.disk_usage(folder).free // 2, _MOST_BYTES)
            self._directory = folder
        return self._directory


def _roomy() -> Path | None:
    roomy = Path("/var/tmp")
    return roomy if os.access(roomy, os.W_OK) else None


def sweep_spills(where: Path | None = None) -> list[Path]:
    """Remove the temporary directories of this user's processes that are gone; returns what was removed."""
    removed = []
    for folder in (where or _roomy() or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition(".")[0]
        try:
            status = folder.lstat()
        except OSError:
            continue
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if mine and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
