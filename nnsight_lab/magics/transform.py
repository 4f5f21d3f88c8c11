"""A `%%trace` or `%%edit` cell as Python: the header becomes a `with` statement, the body its block.

The hard fact behind this file: the block is found again by file name and line number, and errors are shown
by line number, so every line stays on its line and the insides of strings stay untouched. Both functions
are pure and cheap: IPython calls them two or three times per cell, and once more per keystroke that asks
whether the cell is complete.

`transform` refuses what cannot run. `sketch` refuses nothing: it serves `is_complete` and completion, which
see half-written cells. Neither looks into the body's syntax: Python reports that, on the right line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nnsight_lab.errors import CellUsageError
from nnsight_lab.magics import header as headers
from nnsight_lab.magics.header import Header, UnclosedHeader
from nnsight_lab.magics.scanner import logical_lines, split_lines

INDENT = "    "
_TRY = re.compile(r"\s*try\s*:")


def transform(lines: list[str], *, use_async: bool) -> list[str]:
    """Turns a cell of ours into Python; any other cell comes back as it is.

    Args:
        lines: The cell's lines with their ends.
        use_async: Whether to write `async with`. The number of lines is the same either way.

    Raises:
        CellUsageError: The header cannot be read, or the body cannot be captured.
    """
    if not _may_be_ours(lines):
        return lines
    cell = split_lines("".join(lines))
    place = headers.find(cell)
    if place is None:
        return lines
    header = headers.read(cell, place)
    body = cell[header.last + 1 :]
    first = next((line for line in logical_lines(body) if line.kind != "blank"), None)
    if first is None and not any(line.strip() for line in body):
        raise CellUsageError(
            f"%%{place.kind} has no body: the lines below it run inside the model. "
            "To run it without looking inside, write `pass` there."
        )
    if first is not None and _TRY.match(body[first.first]):
        raise CellUsageError(
            f"The body of %%{place.kind} cannot start with `try:` (nothing can be captured there). "
            "Write `pass` on the line above it."
        )
    python = headers.python_lines(place, header, cell, use_async=use_async)
    return python + _block(cell[header.last + 1 :])


def sketch(lines: list[str], *, use_async: bool = False, opening: str = "") -> list[str]:
    """The same for a cell that is still being written; never raises.

    A header that is not closed yet stays open, so that Python too calls the cell incomplete.

    Args:
        lines: The cell's lines with their ends.
        use_async: As in `transform`.
        opening: A statement to stand for the whole header instead of its `with`, for completion.
    """
    if not _may_be_ours(lines):
        return lines
    cell = split_lines("".join(lines))
    try:
        place = headers.find(cell)
    except CellUsageError:
        return lines
    if place is None:
        return lines
    try:
        header = headers.read(cell, place)
    except CellUsageError as error:
        if isinstance(error, UnclosedHeader) and not opening:
            keyword = "async with" if use_async else "with"
            arguments = "".join(cell[place.index].split(None, 1)[1:])
            return [f"{keyword} __lab__.{place.kind}({arguments}", *cell[place.index + 1 :]]
        header = Header(place.kind, place.index, place.index, "")
    if opening:
        python = ["\n"] * header.last + [opening + "\n"]
    else:
        python = headers.python_lines(place, header, cell, use_async=use_async)
    return python + _block(cell[header.last + 1 :])


@dataclass(frozen=True)
class BodyPosition:
    """Where a cell's body begins.

    Attributes:
        kind: Which of the two forms.
        line: Index of the first line below the header.
    """

    kind: headers.Kind
    line: int


def body_position(lines: list[str]) -> BodyPosition | None:
    """Where the body begins in a cell of ours, also half-written; `None` for other cells."""
    if not _may_be_ours(lines):
        return None
    cell = split_lines("".join(lines))
    try:
        place = headers.find(cell)
    except CellUsageError:
        return None
    if place is None:
        return None
    try:
        last = headers.read(cell, place).last
    except CellUsageError:
        last = place.index
    return BodyPosition(place.kind, last + 1)


def indented(lines: Sequence[str], indent: str) -> list[str]:
    """``lines`` moved right; blank lines, and lines that start inside a string, stay as they are."""
    moved: list[str] = []
    for logical in logical_lines(lines):
        for index in range(logical.first, logical.last + 1):
            line = lines[index]
            keep = index in logical.in_string or not line.strip()
            moved.append(line if keep else indent + _without_form_feed(line))
    return moved


def _without_form_feed(line: str) -> str:
    """The line without a form feed in its indentation, at which Python would count columns anew."""
    start = line[: len(line) - len(line.lstrip())]
    return line[start.rfind("\f") + 1 :]


def _block(body: Sequence[str]) -> list[str]:
    """The body as the block of a `with`; a body of comments alone is padded below its last line."""
    block = indented(body, INDENT)
    if block and not block[-1].endswith("\n"):
        block[-1] += "\n"
    if block and all(line.kind == "blank" for line in logical_lines(block)):
        block.append(f"{INDENT}pass\n")
    return block


def _may_be_ours(lines: Sequence[str]) -> bool:
    """A cheap first look, as most cells are not ours."""
    return any(line.startswith(("%%trace", "%%edit")) for line in lines)
