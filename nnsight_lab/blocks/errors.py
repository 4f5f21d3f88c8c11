"""An exception of a block, as plain data in the worker and as the user's own line at home.

The worker knows the exception and its frames; the kernel knows the source. Between them travels a
`WorkerError`: type name, message, frames by file and line. At home each frame is looked up in the
kernel's linecache, and the error is raised with a traceback whose last frames *are* those lines,
so that IPython, pytest and plain Python all point at them (the technique is Jinja's,
pallets/jinja src/jinja2/debug.py).
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from nnsight.intervention.interleaver import EarlyStopException, OutOfOrderError

from nnsight_lab.blocks.block import BLOCK_MARK
from nnsight_lab.errors import BlockError, EditError, SourceLine, TraceError
from nnsight_lab.wire.messages import Frame, WorkerError

#: ``[helper:12] /tmp/cell.py``: how nnsight names a function it rebuilt from source.
_REBUILT = re.compile(r"^\[[^\]]*:\d+\] (?P<path>.+)$")
_LONGEST = 2000
_BLOCK = re.compile(r"^<block [0-9a-f]+> (?P<path>.+)$")
#: Where code lives that is not the user's: Python, what is installed, and this package.
_INSTALLED = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)


def capture(
    exception: BaseException,
    requested: Sequence[tuple[str, int]] = (),
    order: Iterable[str] = (),
) -> WorkerError:
    """Reduce a block's exception to plain data.

    Args:
        exception: As raised by the worker greenlet.
        requested: Locations the block asked for so far, each with the line that asked; the one that it
            asked for too late is the last, also where it had asked for it before.
        order: Locations in the order the model reached them, for an out-of-order read.
    """
    traceback = getattr(exception, "__intervention_tb__", None) or exception.__traceback__
    exception = getattr(exception, "original", exception)
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _users(code.co_filename):
            frames.append(Frame(code.co_filename, traceback.tb_lineno, code.co_name, ""))
        traceback = traceback.tb_next
    early = isinstance(exception, EarlyStopException)
    disordered = isinstance(exception, OutOfOrderError)
    asked = {location for location, _ in requested}
    return WorkerError(
        type_name=type(exception).__name__,
        message=_said(exception),
        frames=tuple(frames),
        control_flow=early,
        requested=tuple(requested) if disordered else (),
        order=tuple(location for location in order if location in asked) if disordered else (),
    )


def _users(filename: str) -> bool:
    """Whether a frame is in a block, in a function that came with it, or in a module of the user's own."""
    if filename.startswith(BLOCK_MARK) or _REBUILT.match(filename):
        return True
    return os.path.isabs(filename) and not filename.startswith(_INSTALLED)


def _said(exception: BaseException) -> str:
    """An exception's text; what it says may be anything, also a failure of its own."""
    try:
        text = str(exception)
    except Exception as error:
        return f"(its text cannot be had: {type(error).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text)} characters)"


def home(filename: str) -> str:
    """The user's file name behind the one the worker compiled under."""
    match = _BLOCK.match(filename) or _REBUILT.match(filename)
    return home(match["path"]) if match else filename


def source_lines(error: WorkerError) -> tuple[SourceLine, ...]:
    """The frames of ``error`` in the user's own files, outermost first."""
    lines = []
    for frame in error.frames:
        filename = home(frame.filename)
        text = linecache.getline(filename, frame.lineno).rstrip("\n")
        lines.append(SourceLine(filename, frame.lineno, text, frame.function))
    return tuple(lines)


def block_error(
    error: WorkerError,
    *,
    block: str,
    failed: int = 1,
    total: int = 1,
    outputs: Sequence[Any] = (),
) -> BlockError:
    """The error to raise at home, carrying the user's lines in its traceback."""
    kind = TraceError if block == "trace" else EditError
    lines = source_lines(error)
    raised = kind(
        error.type_name,
        _explained(error),
        lines=lines,
        block=block,
        failed=failed,
        total=total,
        outputs=outputs,
    )
    return raised.with_traceback(_traceback(lines))


def _explained(error: WorkerError) -> str:
    """The message, with the order that works where reads were out of order."""
    if error.type_name != "OutOfOrderError":
        return error.message
    asked = dict(reversed(error.requested))
    late, at = error.requested[-1] if error.requested else ("", 0)
    if late in error.order and at > asked[late]:
        return (
            f"{_shown(late)} was read again in line {at}, after the model had already passed it: keep what "
            f"line {asked[late]} read in a variable and use that."
        )
    if late and late in error.order:
        ranked = sorted(asked, key=lambda location: _rank(location, error.order))
        steps = ", ".join(f"{_shown(location)} (line {asked[location]})" for location in ranked)
        return (
            f"{_shown(late)} was read after the model had already passed it. A block reads values in "
            f"the order the model computes them; the order that works: {steps}."
        )
    if late:
        return (
            f"{_shown(late)} was never reached: the model did not run that module for this request "
            "(for values of later tokens, loop with `for step in tracer.iter[...]`)."
        )
    return error.message


def _rank(location: str, order: Sequence[str]) -> int:
    # What the step had not reached yet comes last: logits, samples, the result.
    return order.index(location) if location in order else len(order)


def _shown(location: str) -> str:
    """``model.model.layers.3.output`` as a user wrote it."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", location)


def _traceback(lines: Sequence[SourceLine]) -> TracebackType | None:
    """A traceback whose frames are ``lines``: raised from code compiled at those very lines."""
    top: TracebackType | None = None
    for line in reversed(lines):
        code = compile("\n" * (line.lineno - 1) + "raise __error__", line.filename, "exec")
        code = code.replace(co_name=line.function)
        try:
            # Names of its own only, so that a debugger shows nothing of ours in the frame.
            exec(code, {"__error__": _Placed(), "__name__": "__block__"})
        except _Placed as placed:
            frame = placed.__traceback__.tb_next if placed.__traceback__ else None
            if frame is not None:
                top = TracebackType(top, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return top


class _Placed(Exception):
    """Raised only to have a frame at a chosen line."""
