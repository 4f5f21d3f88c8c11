"""The first line of a `%%trace` or `%%edit` cell: where it is, how far it goes, and its Python form.

Arguments are Python call syntax, so variables, f-strings and completion come for free, and the Python form
is the header itself between `with __lab__.trace(` and `) as tracer:`. The hard fact behind this file: a
header may take several lines (an open bracket, a backslash, a triple-quoted prompt), and joining them
would move the body. They are left where they are; only their two ends are written.

A header that cannot be read is one plain line with the correct form, raised as `CellUsageError`.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nnsight_lab.errors import CellUsageError
from nnsight_lab.magics.scanner import is_blank, lines_in_strings, split_lines

Kind = Literal["trace", "edit"]

#: One correct first line of each kind, shown by every error about it.
FORMS: dict[Kind, str] = {
    "trace": '%%trace "The Eiffel Tower is in", max_tokens=8, temperature=0',
    "edit": "%%edit probe",
}
#: What the `with` of each kind binds.
TARGETS: dict[Kind, str] = {"trace": "tracer", "edit": "(tracer, edit)"}

_MARK = re.compile(r"%%(trace|edit)(?=\s|$)")
_OTHER_CELL_MAGIC = re.compile(r"%%(\w+)[ \t]*(.*)")
#: Cell magics that run the cell's text themselves, where no block's source can be found.
_RUNS_TEXT_ITSELF = frozenset(("timeit", "prun", "debug", "mprun", "lprun", "memit", "scalene", "px"))
#: An edit's name without quotes; `name = …` is a keyword, not a name.
_BARE_NAME = re.compile(r"([A-Za-z0-9_][\w.-]*)(?=[\s,#]|$)(?!\s*=[^=])")
_CAPTURE_FLAGS = {"--no-stdout": "stdout", "--no-stderr": "stderr", "--no-display": "display"}


class UnclosedHeader(CellUsageError):
    """A bracket or string of the first line is never closed: the cell may still be being typed."""


@dataclass(frozen=True)
class Wrapper:
    """A `%%time` or `%%capture` line above the header.

    Attributes:
        index: The physical line it stands on.
        source: The item of the `with` statement that stands for it.
    """

    index: int
    source: str


@dataclass(frozen=True)
class Place:
    """Where a cell's header is.

    Attributes:
        kind: Which of the two forms.
        index: The physical line of `%%trace` or `%%edit`.
        wrappers: The lines above it that wrap the block.
    """

    kind: Kind
    index: int
    wrappers: tuple[Wrapper, ...] = ()


@dataclass(frozen=True)
class Header:
    """A header in its Python form.

    Attributes:
        kind: Which of the two forms.
        first: The physical line it starts on.
        last: The physical line it ends on, inclusive.
        arguments: The arguments as Python source, a bare edit name already quoted.
        comment: What follows the arguments on the last line (a comment, or spaces), without its newline.
    """

    kind: Kind
    first: int
    last: int
    arguments: str
    comment: str = ""


def find(lines: Sequence[str]) -> Place | None:
    """Finds the header: the first line that is neither blank, a comment, `%%time` nor `%%capture`.

    Returns:
        Where it is; `None` when the cell is not one of ours.

    Raises:
        CellUsageError: The header is there, but stands where it cannot work.
    """
    wrappers: list[Wrapper] = []
    for index, line in enumerate(lines):
        if is_blank(line):
            continue
        mark = _MARK.match(line)
        if mark:
            kind: Kind = "trace" if mark[1] == "trace" else "edit"
            return Place(kind, index, tuple(wrappers))
        other = _OTHER_CELL_MAGIC.match(line)
        if not other:
            if not wrappers:
                _refuse_stray(lines, index)
            return None
        below = _mark_below(lines, index)
        name, rest = other[1], other[2].strip()
        if name == "time":
            if below and rest:
                raise CellUsageError(f"%%time above %%{below[1]} takes no arguments; got {rest!r}.")
            wrappers.append(Wrapper(index, "__lab__.timed()"))
        elif name == "capture":
            wrappers.append(Wrapper(index, _capture(rest) if below else ""))
        elif below and name in _RUNS_TEXT_ITSELF:
            raise CellUsageError(
                f"%%{name} runs the cell's text by itself, where a block's source cannot be found. "
                f"Put %%{below[1]} first; %%time and %%capture may stand above it."
            )
        else:
            return None
    return None


def read(lines: Sequence[str], place: Place) -> Header:
    """Reads the header at ``place``.

    Raises:
        CellUsageError: It is not Python call syntax, is never closed, or an edit has no name.
    """
    kind = place.kind
    source = [_start_of_arguments(lines[place.index], kind), *lines[place.index + 1 :]]
    if is_blank(source[0]):
        header = Header(kind, place.index, place.index, "", source[0].rstrip("\r\n"))
    else:
        header = _tokenized(source, place)
    _check(header)
    return header


def python_lines(place: Place, header: Header, lines: Sequence[str], *, use_async: bool) -> list[str]:
    """Every line up to the body as Python; as many as there were.

    `%%time` and `%%capture` become items of the same `with`, in parentheses so that comments may stand
    between. A `with` of their own around it would do in Python, but nnsight (0.8) takes an indented block's
    indentation off the insides of its multi-line strings too.

    Args:
        place: Where the header is.
        header: As read.
        lines: The cell.
        use_async: Whether to write `async with`.
    """
    start = f"{'async ' if use_async else ''}with "
    end = "):" if place.wrappers else ":"
    out = list(lines[: place.index])
    for number, wrapper in enumerate(place.wrappers):
        out[wrapper.index] = f"{start + '(' if not number else '      '}{wrapper.source},\n"
    text = f"__lab__.{header.kind}({header.arguments}) as {TARGETS[header.kind]}{end}"
    last = lines[header.last]
    comment = f"  {header.comment.strip()}" if header.comment.strip() else ""
    ending = last[len(last.rstrip("\r\n")) :] or "\n"
    return out + split_lines(f"{'      ' if place.wrappers else start}{text}{comment}{ending}")


def _mark_below(lines: Sequence[str], index: int) -> re.Match[str] | None:
    """The header below a line, if only blanks, comments and other cell magics are between."""
    for line in lines[index + 1 :]:
        mark = _MARK.match(line)
        if mark or not (is_blank(line) or _OTHER_CELL_MAGIC.match(line)):
            return mark
    return None


def _start_of_arguments(line: str, kind: Kind) -> str:
    """The first line's arguments, a bare edit name quoted and parted from what follows by a comma."""
    mark = _MARK.match(line)
    rest = line[mark.end() if mark else 0 :].lstrip(" \t")
    name = _BARE_NAME.match(rest) if kind == "edit" else None
    if not name:
        return rest
    after = rest[name.end() :]
    apart = "" if is_blank(after) or after.lstrip().startswith(",") else ","
    return f'"{name[1]}"{apart}{after}'


def _tokenized(source: Sequence[str], place: Place) -> Header:
    ends, depth = (1, 0), 0
    try:
        for token in tokenize.generate_tokens(iter(source).__next__):
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                break
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
                ends = token.end
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
    except (tokenize.TokenError, SyntaxError, ValueError) as error:
        # The message alone does not tell: from 3.12 on, a bracket too many is an "EOF" as well.
        if depth > 0 or "multi-line string" in str(error) or "triple-quoted" in str(error):
            raise UnclosedHeader(
                f"%%{place.kind}: a bracket or string of its first line is never closed: "
                f"{source[0].strip()!r}. Write it as in: {FORMS[place.kind]}"
            ) from None
        raise _unreadable(place.kind, source[0]) from None
    row, column = ends
    arguments = "".join([*source[: row - 1], source[row - 1][:column]])
    comment = source[row - 1][column:].rstrip("\r\n")
    return Header(place.kind, place.index, place.index + row - 1, arguments, comment)


def _check(header: Header) -> None:
    """Refuses arguments that are not those of one call, and an edit without a name."""
    try:
        call = ast.parse(f"f({header.arguments})", mode="eval").body
    except (SyntaxError, ValueError):
        raise _unreadable(header.kind, header.arguments) from None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise _unreadable(header.kind, header.arguments)
    if header.kind == "trace":
        return
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    keywords = [keyword.arg for keyword in call.keywords]
    named = len(call.args) + keywords.count("name")
    if not starred and None not in keywords and named != 1:
        got = "no name" if not named else f"{named} names"
        raise CellUsageError(
            f"%%edit needs one name, so that it can be switched; got {got}. Write: %%edit probe"
        )


def _unreadable(kind: Kind, arguments: str) -> CellUsageError:
    shown = " ".join(arguments.split())
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    form = FORMS[kind]
    if kind == "trace" and re.fullmatch(r"[^\"'=()\[\]{}]+", shown):
        form = f'%%trace "{shown}", max_tokens=8'
    return CellUsageError(
        f"%%{kind} cannot read its arguments {shown!r}: they are Python, parted by commas. Write: {form}"
    )


def _capture(options: str) -> str:
    """The item of the `with` statement that stands for a `%%capture` line."""
    words = options.split()
    kept = [word for word in words if word not in _CAPTURE_FLAGS]
    if len(kept) > 1 or not all(word.isidentifier() for word in kept):
        raise CellUsageError(f"%%capture cannot read {options!r}. Write: %%capture out --no-stderr")
    switched_off = ", ".join(f"{_CAPTURE_FLAGS[word]}=False" for word in words if word in _CAPTURE_FLAGS)
    return f"__lab__.captured({switched_off}){f' as {kept[0]}' if kept else ''}"


def _refuse_stray(lines: Sequence[str], first: int) -> None:
    """Refuses `%%trace` below other code: IPython would look for a line magic named `%trace`."""
    found = [index for index in range(first + 1, len(lines)) if _MARK.match(lines[index])]
    if not found:
        return
    inside = lines_in_strings(lines)
    for index in found:
        mark = _MARK.match(lines[index])
        if mark and index not in inside:
            form = FORMS["edit"].replace("%%edit probe", 'with lab.edit("probe") as (tracer, edit):')
            if mark[1] == "trace":
                form = 'with lab.trace("The Eiffel Tower is in") as tracer:'
            raise CellUsageError(
                f"%%{mark[1]} on line {index + 1} must be the first line of its cell. "
                f"Move it to a cell of its own, or write: {form}"
            )
