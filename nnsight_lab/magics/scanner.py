"""Where logical lines begin and end in a cell, and which physical lines start inside a string.

A cell is re-indented, and the one thing that must not be is the inside of a multi-line string: its spaces
are data. The hard fact behind this file: a cell is not quite Python. It may hold `!echo it's` or
`%timeit`, whose quotes mean nothing to Python and would send one tokenizer run astray for the rest of the
cell. So every logical line gets a tokenizer of its own, and lines that are IPython's are stepped over.
Broken Python is never refused here: the line is taken as it stands, and Python reports it.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

#: What no Python logical line can begin with, and an IPython line does.
_ESCAPES = ("!", "%", "?", "/", ",", ";")
#: `files = !ls` and `t = %timeit -o f()`.
_ASSIGNED_ESCAPE = re.compile(r"\s*[\w.,\s\[\]]+=\s*(?:!|%(?=\w))")
#: Tokens that open and close a string in parts: f-strings from 3.12, t-strings from 3.14.
_OPENERS = frozenset(("FSTRING_START", "TSTRING_START"))
_CLOSERS = frozenset(("FSTRING_END", "TSTRING_END"))


@dataclass(frozen=True)
class LogicalLine:
    """One statement line as Python counts them, over one or more physical lines.

    Attributes:
        first: Index of its first physical line.
        last: Index of its last physical line, inclusive.
        kind: ``"blank"`` for a blank or comment line, ``"escape"`` for an IPython line, else ``"code"``.
        in_string: Indices of the physical lines that start inside a string.
    """

    first: int
    last: int
    kind: Literal["blank", "escape", "code"]
    in_string: frozenset[int] = frozenset()


def split_lines(text: str) -> list[str]:
    r"""``text`` in lines with their ends, split at ``\n`` alone.

    ``str.splitlines`` also splits at form feeds and ``\u2028``, which may stand inside a string.
    """
    return io.StringIO(text).readlines()


def is_blank(line: str) -> bool:
    """Whether Python sees nothing on this line: it is empty or a comment."""
    stripped = line.strip()
    return not stripped or stripped.startswith("#")


def is_escape(line: str) -> bool:
    """Whether IPython rather than Python reads this line (`!ls`, `%time f()`, `files = !ls`)."""
    return line.lstrip().startswith(_ESCAPES) or _ASSIGNED_ESCAPE.match(line) is not None


def logical_lines(lines: Sequence[str]) -> Iterator[LogicalLine]:
    """Every logical line of a cell, in order, covering every physical line once."""
    at = 0
    while at < len(lines):
        line = _logical_line(lines, at)
        yield line
        at = line.last + 1


def lines_in_strings(lines: Sequence[str]) -> frozenset[int]:
    """Indices of the physical lines that start inside a string and so must stay as they are."""
    found: set[int] = set()
    for line in logical_lines(lines):
        found |= line.in_string
    return frozenset(found)


def _logical_line(lines: Sequence[str], first: int) -> LogicalLine:
    if is_blank(lines[first]):
        return LogicalLine(first, first, "blank")
    if is_escape(lines[first]):
        last = first
        while lines[last].rstrip("\r\n").endswith("\\") and last + 1 < len(lines):
            last += 1
        return LogicalLine(first, last, "escape")
    in_string: set[int] = set()
    opened: list[int] = []
    readline = (lines[index] for index in range(first, len(lines))).__next__
    try:
        for token in tokenize.generate_tokens(readline):
            name = tokenize.tok_name[token.type]
            start = token.start[0]
            if name in _OPENERS:
                opened.append(start)
                continue
            if name in _CLOSERS:
                start = opened.pop() if opened else start
            elif name == "NEWLINE":
                return LogicalLine(first, first + start - 1, "code", frozenset(in_string))
            elif name != "STRING":
                continue
            in_string.update(range(first + start, first + token.end[0]))
    except (tokenize.TokenError, SyntaxError, ValueError) as error:  # ValueError: 3.12, odd line ends
        if not _never_closed(error):
            return LogicalLine(first, first, "code")
    return LogicalLine(first, len(lines) - 1, "code", frozenset(in_string))


def _never_closed(error: Exception) -> bool:
    """Whether a bracket or string ran to the end of the cell, as the tokenizers of 3.11 and 3.12 say it."""
    return "EOF" in str(error) or "triple-quoted" in str(error)
