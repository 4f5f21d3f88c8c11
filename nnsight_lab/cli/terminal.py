"""Plain, readable terminal output: colour only for a person at a terminal who has not declined it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


def colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal and https://no-color.org was not asked for."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` in ``colour``, or as it is where ``stream`` (stdout by default) shows none."""
    if not colours(stream or sys.stdout):
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"
