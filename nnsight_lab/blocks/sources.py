"""Which text a block is taken from when its file was changed while the process runs.

nnsight reads a file once and keeps each block it parsed, by file and line, for good. So a module that
was edited and reloaded (``importlib.reload``, ``%autoreload``) ran its *old* blocks, silently. Reading
anew each time would be as wrong: a file that was saved and not reloaded still runs its old code. The
code that is running decides: the new text is taken once it compiles to that very code.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import CodeType, FrameType

from nnsight.tracing.globals import BLOCKS, SOURCES


def keep_current(frame: FrameType) -> None:
    """Forget what nnsight read of the frame's file where the frame runs the file's newer text."""
    filename = frame.f_code.co_filename
    known = SOURCES.get(filename)
    if known is None:
        return
    linecache.checkcache(filename)
    text = "".join(linecache.getlines(filename))
    if not text or text == known or not _compiles_to(text, frame.f_code):
        return
    del SOURCES[filename]
    for key in [key for key in BLOCKS if key[0] == filename]:
        del BLOCKS[key]


def _compiles_to(text: str, code: CodeType) -> bool:
    try:
        whole = compile(text, code.co_filename, "exec", dont_inherit=True)
    except SyntaxError:  # it is being edited
        return False
    return any(found == code for found in _within(whole))


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
