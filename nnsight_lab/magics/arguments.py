"""The words of a line magic: `demo dtype=bfloat16 hf_overrides={"a": 1} --restart`.

Values are Python literals, else strings, so that nobody has to quote `org/model`. Each is kept as Python
*source*: a magic evaluates it in the user's namespace, an exported script writes it down, and both mean the
same. `$name` and `{expression}` are the user's variables, as in IPython's own magics (which would expand
them before we see the line, and so would eat the braces of a dict: our magics switch that off).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnsight_lab.errors import CellUsageError, nearest

_OPTION = re.compile(r"([A-Za-z_]\w*)=(?!=)(.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z]")
_VARIABLE = re.compile(r"\$([A-Za-z_][\w.]*)")
_PLACES = re.compile(r"\$([A-Za-z_]\w*)|\{([^{}]*)\}")
#: What people coming from a shell or from JSON write; as a string, `false` would be true.
_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Arguments:
    """A line magic's words.

    Attributes:
        words: Those without a name, as they were written.
        options: `name=value` ones, each value as Python source.
        flags: `--flag` ones, with their dashes.
    """

    words: tuple[str, ...]
    options: Mapping[str, str]
    flags: frozenset[str]


def read_arguments(line: str, *, form: str, flags: Sequence[str] = ()) -> Arguments:
    """Reads a line magic's words.

    Args:
        line: Everything behind the magic's name.
        form: The correct form, shown by errors.
        flags: The `--flags` it takes.

    Raises:
        CellUsageError: A bracket or quote is not closed, a flag is unknown, or an option is given twice.
    """
    words: list[str] = []
    options: dict[str, str] = {}
    seen: set[str] = set()
    for word in split_words(line, form=form):
        option = _OPTION.fullmatch(word)
        if word in flags:
            seen.add(word)
        elif option:
            if option[1] in options:
                raise CellUsageError(f"{option[1]}= is given twice. Write: {form}")
            options[option[1]] = expression(option[2])
        elif _FLAG.match(word):
            name = word.lstrip("-").split("=")[0].replace("-", "_")
            hint = nearest(word, flags)
            if "Did you mean" not in hint:
                hint = f" Options are written name=value, as in {name}=…"
            raise CellUsageError(f"Unknown flag {word!r}.{hint} Write: {form}")
        else:
            words.append(word)
    return Arguments(tuple(words), options, frozenset(seen))


def split_words(line: str, *, form: str = "") -> list[str]:
    """Splits at spaces outside quotes and brackets, up to a comment, and drops commas behind words."""
    words: list[str] = []
    word, quote, open_brackets = "", "", ""
    escaped = False
    for char in line:
        if quote:
            word += char
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char.isspace() and not open_brackets:
            words.append(word)
            word = ""
        elif char == "#" and not word:
            break
        else:
            word += char
            if char in "\"'":
                quote = char
            elif char in _CLOSING:
                open_brackets += char
            elif open_brackets and char == _CLOSING[open_brackets[-1]]:
                open_brackets = open_brackets[:-1]
    words.append(word)
    if quote or open_brackets:
        raise CellUsageError(f"A quote or bracket is never closed in {line.strip()!r}. Write: {form}")
    return [kept for kept in (word.rstrip(",") for word in words) if kept]


def is_text(source: str) -> bool:
    """Whether an option's source is a text that stands in the line, and not one of the user's variables."""
    try:
        return isinstance(ast.literal_eval(source), str)
    except (ValueError, SyntaxError):
        return False


def expression(word: str) -> str:
    """A word as Python source."""
    variable = _VARIABLE.fullmatch(word)
    if variable:
        return variable[1]
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()]
    if _is_literal(word):
        return word
    if word.startswith("{") and word.endswith("}") and _is_expression(word[1:-1]):
        return word[1:-1].strip()
    return repr(word)


def text_expression(word: str) -> str:
    """A word that is a name, as Python source: `3` is the name "3", `$name` a variable."""
    source = expression(word)
    if source == repr(word):
        source = _filled(word)
    if not _is_literal(source) or isinstance(ast.literal_eval(source), str):
        return source
    return repr(word)


def _filled(word: str) -> str:
    """A text with variables in it, as in `$folder/run` and `{folder}/run-{number}`, as Python source."""
    parts = _PLACES.split(word)
    filled = []
    for text, variable, braces in zip(parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True):
        filled.append(text.replace("{", "{{").replace("}", "}}"))
        inside = variable or braces or ""
        if variable or _is_expression(inside):
            filled.append(f"{{{inside.strip()}}}")
        elif braces is not None:
            filled.append(f"{{{{{braces}}}}}")
    source = f"f{''.join(filled)!r}"
    return source if _PLACES.search(word) and _is_expression(source) else repr(word)


def evaluate(source: str, namespace: dict[str, Any]) -> Any:
    """The value of Python source made here, in the user's namespace.

    Raises:
        CellUsageError: A variable in it is not defined, or the expression fails.
    """
    try:
        return eval(source, namespace)
    except Exception as error:
        raise CellUsageError(f"{source!r} cannot be read: {type(error).__name__}: {error}") from None


def _is_literal(word: str) -> bool:
    try:
        ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_expression(word: str) -> bool:
    try:
        ast.parse(word.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True
