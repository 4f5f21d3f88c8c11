"""``nnsight-lab freeze``: a notebook to hand on, in which every output shows without a kernel."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from nnsight_lab.cli.frozen import Frozen, frozen
from nnsight_lab.errors import PlainError
from nnsight_lab.wire.sizes import shown_bytes


def add_parser(sub: Any) -> None:
    parser: argparse.ArgumentParser = sub.add_parser(
        "freeze",
        help="replace a notebook's widgets by their tables and pictures",
        description="Write a notebook whose outputs show everywhere, without a kernel and without scripts: "
        "a widget's output keeps its table or picture alone, and the widgets' saved state goes. All else "
        "stays byte for byte.",
    )
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="an .ipynb file")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-o", "--out", type=Path, metavar="OUT", help="where to write (default: beside it, .frozen.ipynb)"
    )
    where.add_argument("--in-place", action="store_true", help="write over NOTEBOOK")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    source: Path = arguments.notebook
    target = _target(source, arguments.out, in_place=arguments.in_place)
    before, found = freeze(source, target)
    outputs = f"{found.replaced} widget output{'' if found.replaced == 1 else 's'} replaced"
    lost = f", {found.lost} had nothing to show and say so" if found.lost else ""
    states = f", the state of {found.states} widget models dropped" if found.states else ""
    after = len(found.text.encode("utf-8"))
    print(f"{target}: {outputs}{lost}{states} ({shown_bytes(before)} before, {shown_bytes(after)} now)")
    return 0


def freeze(source: Path, target: Path) -> tuple[int, Frozen]:
    """Write a notebook without widgets.

    Args:
        source: An ``.ipynb`` file.
        target: Where to; may be ``source``. It appears whole or not at all, and keeps its permissions.

    Returns:
        How many bytes the notebook had, and what was done.

    Raises:
        PlainError: It cannot be read, is no notebook, or cannot be written.
    """
    try:
        data = source.read_bytes()
        found = frozen(data.decode("utf-8"))
    except OSError as error:
        raise PlainError(f"{source} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlainError(f"{source} is not a notebook: it is not UTF-8 text") from None
    except PlainError as error:
        raise PlainError(f"{source} cannot be frozen: {error}") from None
    try:
        _write(target.resolve(), found.text.encode("utf-8"))
    except OSError as error:
        raise PlainError(f"{target} cannot be written: {error.strerror or error}") from None
    return len(data), found


def _target(source: Path, out: Path | None, *, in_place: bool) -> Path:
    if source.is_dir():
        raise PlainError(f"{source} is a directory: name a notebook in it")
    if in_place:
        return source
    if out is None:
        return source.with_name(f"{source.stem}.frozen.ipynb")
    if out.is_dir():
        out = out / source.name
    if out.exists() and source.exists() and out.samefile(source):
        raise PlainError(f"{out} is the notebook itself: say --in-place to write over it")
    return out


def _write(target: Path, data: bytes) -> None:
    there = target.exists()
    if there and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied")  # a rename would not ask
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, target.stat().st_mode & 0o7777 if there else 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
