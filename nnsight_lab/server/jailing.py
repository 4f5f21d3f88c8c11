"""What the workers' jail needs before they start: whose they become, and where their saves go."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from nnsight_lab.errors import ServeRefused
from nnsight_lab.saves.slab_files import sweep

_USER = "nobody"
_BASE = Path("/var/tmp")


class Jailer(NamedTuple):
    """Whose the workers become.

    Attributes:
        uid: None where they stay this user's.
        why: Then the reason, as a clause.
    """

    uid: int | None = None
    why: str = "it was not asked for"


def jailer(user: str | None) -> Jailer:
    """Whose the workers become.

    Args:
        user: A user's name, where one was given; else nobody, where that can be.

    Raises:
        ServeRefused: The user that was given cannot be theirs.
    """
    if os.getuid() != 0:
        if user is not None:
            raise ServeRefused("--jail-user is for servers that root starts: workers of others stay theirs.")
        return Jailer(None, "the server is not root's")
    try:
        entry = pwd.getpwnam(user or _USER)
    except KeyError:
        if user is None:
            return Jailer(None, f"there is no user {_USER}")
        raise ServeRefused(f"--jail-user: there is no user {user!r}.") from None
    if entry.pw_uid == 0:
        raise ServeRefused("--jail-user: root would be no jail.")
    hidden = next((one for one in _code() if not _reached(one, entry.pw_uid, entry.pw_gid)), None)
    if hidden is None:
        return Jailer(entry.pw_uid, "")
    why = f"{entry.pw_name} cannot read {hidden}, where modules are imported from"
    if user is not None:
        raise ServeRefused(f"--jail-user: {why}.")
    return Jailer(None, why)


def _code() -> list[Path]:
    """Where modules are imported from."""
    return [path for entry in sys.path if entry and (path := Path(entry)).exists()]


def _reached(path: Path, uid: int, gid: int) -> bool:
    """Whether a user may go to a place and read it."""
    path = path.resolve()
    for one in (path, *path.parents):
        found = one.stat()
        read, walk = stat.S_IROTH, stat.S_IXOTH
        if found.st_uid == uid:
            read, walk = stat.S_IRUSR, stat.S_IXUSR
        elif found.st_gid == gid:
            read, walk = stat.S_IRGRP, stat.S_IXGRP
        need = read if one == path else walk
        if one == path and stat.S_ISDIR(found.st_mode):
            need |= walk
        if found.st_mode & need != need:
            return False
    return True


def spill_folder(uid: int | None) -> Path | None:
    """Where workers of another user put saves past their memory; None where they stay this user's.

    What is left there of servers that are gone is removed.
    """
    if uid is None:
        return None
    folder = _BASE / f"nnsight-lab-{uid}"
    try:
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, -1)
    except FileExistsError:
        found = folder.lstat()  # in a folder of everybody's: it may be anybody's, or lead elsewhere
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
            return None
    except OSError:
        return None
    sweep([folder])
    return folder
