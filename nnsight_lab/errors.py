"""Every error of the package, in one tree.

A message says what happened, what was seen, and what to do next, in one line where it can. The
hard fact behind this file: a notebook user reads the *last* line of an error and little else, so
errors that are the user's to mend render as that line alone (`PlainError`), and errors of a block
render as the block's own source line (`BlockError`). Nothing here imports anything heavy: an error
must be raisable before torch, nnsight or vLLM can be imported.

```
LabError
  PlainError                      shown as one line in a notebook, no traceback
    CellUsageError                the first line of a magic is wrong
    EngineError
      EngineNotStarted            no engine of that name
      EngineStartFailed           the start ended early; carries the root cause and the log's path
      EngineMismatch              a live engine has another configuration
      SleepRefused                the engine cannot sleep, or not just now
      EngineDied                  a process of the engine ended; carries the root cause
      ServerError                 a shared engine's server refused, or cannot be reached
    ServeRefused                  `nnsight-lab serve` cannot run like that
    ModelNotFound                 neither a local model nor a known id, or no weights in it
    RequestRefused                a prompt or sampling setting that the engine does not take
    UnknownEdit                   no edit of that name; names the nearest
    EditRefused                   a block or name that cannot be installed
    LensRefused                   a logit lens or attention pattern that would not be right here
    NotPicklable                  a name in the block cannot be sent to the worker
    Interrupted                   the stop button; also a KeyboardInterrupt
    PlotRefused                   values that cannot be drawn, or not in that way
    WidgetError                   a view that cannot be shown
    BenchRefused                  a benchmark that cannot run like that
    UpstreamChanged               a private name of nnsight or vLLM is no longer what it was
  BlockError                      raised inside the worker by a block; shown on the cell's own line
    TraceError                    ... by the block of a trace
    EditError                     ... by the block of an edit
  SavesError
    CannotTravel                  a saved object has no form outside the worker
    AmbiguousSave                 two blocks saved that name; also a KeyError
    SaveNotFound                  nothing was saved under that name; also a KeyError
    FileRefused                   a file of saves is damaged, cut off, or not one
    OverBudget                    saved values do not fit where they are kept; names them and their bytes
```
"""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the closest of ``known``, or all of them when they are few.

    Returns:
        A sentence with a leading space, or an empty string when nothing helps.
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    if names and len(names) <= 8:
        return " Known: " + ", ".join(names) + "."
    return ""


class LabError(Exception):
    """The root of every error this package raises on purpose."""


class PlainError(LabError):
    """An error whose message is all there is to say: IPython shows that line alone."""

    #: Set to see full tracebacks of these errors too, while developing the package itself.
    show_traceback = False
    #: What the line begins with; the class's name where it is empty.
    shown_as = ""

    def _render_traceback_(self, *_: Any, **__: Any) -> list[str]:
        if self.show_traceback:
            import traceback  # only here: a plain line needs none

            return traceback.format_exception(self)
        return [f"\x1b[31m{self.shown_as or type(self).__name__}\x1b[0m: {self}"]


class CellUsageError(PlainError):
    """The first line of a magic is wrong; the message carries the correct form."""


class EngineError(PlainError):
    """Something about an engine rather than about a block."""


class EngineNotStarted(EngineError):
    """No engine of that name is alive in this process."""


class EngineStartFailed(EngineError):
    """The engine's start ended early.

    Attributes:
        cause: The root cause, as found in the log or the exception.
        log_path: Where the whole log is.
    """

    def __init__(self, message: str, *, cause: str = "", log_path: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.log_path = log_path


class EngineMismatch(EngineError):
    """A live engine of that name has another configuration; the message names what differs."""


class SleepRefused(EngineError):
    """The engine cannot be put to sleep, or not just now; the message says why."""


class EngineDied(EngineError):
    """A process of the engine ended while it was needed.

    Attributes:
        cause: The root cause, as found in the log or the exit status.
    """

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class ServerError(EngineError):
    """A shared engine's server refused what was asked, or cannot be reached.

    Attributes:
        status: HTTP's number; 0 where nothing was answered.
        retry_after_s: When to ask again, where the server said so.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ServeRefused(PlainError):
    """`nnsight-lab serve` cannot run like that."""


class ModelNotFound(PlainError):
    """Neither a local model with weights nor an id that can be resolved."""


class RequestRefused(PlainError):
    """A prompt or a sampling setting that the engine does not take."""


class UnknownEdit(PlainError):
    """No edit of that name is installed."""


class EditRefused(PlainError):
    """A block or a name that cannot be installed as an edit, or run as a trace."""


class LensRefused(PlainError):
    """A logit lens or an attention pattern that would not be right on this model; the message says why."""


class NotPicklable(PlainError):
    """A name that the block reads cannot be sent to the worker; the message names it."""


class Interrupted(PlainError, KeyboardInterrupt):
    """The stop button: the caller's requests were aborted, the engine is still loaded."""


class PlotRefused(PlainError):
    """Values that cannot be drawn, or not in that way; the message says how they can."""


class WidgetError(PlainError):
    """A widget's view cannot be shown."""


class BenchRefused(PlainError):
    """A benchmark that cannot run like that, or on this machine."""


class UpstreamChanged(PlainError):
    """A private name of nnsight, vLLM or ipykernel is no longer what it was.

    Attributes:
        name: The dotted name that was expected.
    """

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's own source: where a block's error belongs.

    Attributes:
        filename: As in the frame's code object; a notebook cell has a made-up one.
        lineno: 1-based.
        text: The line itself, without its newline; empty when unknown.
        function: What the frame was running.
    """

    filename: str
    lineno: int
    text: str = ""
    function: str = "<module>"


class BlockError(LabError):
    """A block raised inside the worker.

    Attributes:
        type_name: The original exception's class name.
        detail: The original message.
        lines: The user's own lines of the worker's traceback, outermost first; may be empty.
        block: ``"trace"`` or the edit's name.
        failed: How many requests failed with it.
        total: How many requests were run.
        outputs: Every output of the call, failed or not, so that nothing is lost.
    """

    #: What a file is called in the rendered error, and its lines; the notebook extension answers
    #: "Cell In[4]" with the cell as it was typed.
    locate: ClassVar[Callable[[str], tuple[str, list[str]]]] = staticmethod(
        lambda filename: (f"File {filename}", linecache.getlines(filename))
    )

    def __init__(
        self,
        type_name: str,
        detail: str,
        *,
        lines: Sequence[SourceLine] = (),
        block: str = "trace",
        failed: int = 1,
        total: int = 1,
        outputs: Sequence[Any] = (),
    ) -> None:
        self.type_name = type_name
        self.detail = detail
        self.lines = tuple(lines)
        self.block = block
        self.failed = failed
        self.total = total
        self.outputs = list(outputs)
        super().__init__(self._message())

    def _message(self) -> str:
        where = "trace" if self.block == "trace" else f"edit {self.block!r}"
        counted = ""
        if self.total > 1:
            counted = f" ({self.failed} of {self.total} requests failed; `error.outputs` has all)"
        place = ""
        if self.lines:
            line = self.lines[-1]
            place = f" at line {line.lineno}"
            if line.text.strip():
                place += f" `{line.text.strip()}`"
        return f"{self.type_name}: {self.detail} [in the {where}'s block{place}]{counted}"

    def _render_traceback_(self, *_: Any, **__: Any) -> list[str]:
        """The worker's error on the user's own lines, without the frames between."""
        rendered = []
        for line in self.lines:
            inside = f", in {line.function}" if line.function != "<module>" else ""
            place, lines = type(self).locate(line.filename)
            rendered.append(f"\x1b[32m{place}\x1b[0m, line {line.lineno}{inside}")
            first = max(1, line.lineno - 2)
            for number, text in enumerate(lines[first - 1 : line.lineno + 2], first):
                arrow = "---->" if number == line.lineno else "     "
                rendered.append(f"{arrow} {number:3d} {text.rstrip()}")
            rendered.append("")
        rendered.append(f"\x1b[31m{type(self).__name__}\x1b[0m: {self}")
        return rendered


class TraceError(BlockError):
    """The block of a trace raised."""


class EditError(BlockError):
    """The block of an edit raised."""


class SavesError(LabError):
    """Something about saved values."""


class CannotTravel(SavesError, PlainError):
    """A saved object has no form outside the worker; the message names it and its type."""


class AmbiguousSave(SavesError, KeyError):
    """Two blocks of one request saved that name; read it by block."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0]) if self.args else ""


class SaveNotFound(SavesError, KeyError):
    """Nothing was saved under that name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class FileRefused(SavesError, PlainError):
    """A file of saves that cannot be trusted; the message names the file and what is wrong with it."""


class OverBudget(SavesError, PlainError):
    """Saved values do not fit where they would be kept.

    Attributes:
        asked_bytes: What was to be kept.
        allowed_bytes: What may be.
        values: The values by name, each with its bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        asked_bytes: int = 0,
        allowed_bytes: int = 0,
        values: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.allowed_bytes = allowed_bytes
        self.values = tuple(values)
