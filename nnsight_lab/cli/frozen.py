"""A notebook's text with its widgets replaced by what they left to be read without a kernel.

The hard fact: a widget's output shows as "Error displaying widget: model not found" in a trusted notebook
whose state was not saved, and as nothing at all on a page that cannot reach the widgets' scripts, even where
the output holds a table or a picture as well. And a notebook written anew by another program changes in every
line. So what goes is cut out of the text, and every other byte stays where it was.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from nnsight_lab.errors import PlainError

WIDGET: Final = "application/vnd.jupyter.widget-view+json"
#: What is shown in a widget's place, if an output has it.
_FALLBACKS: Final = ("text/html", "text/markdown", "text/latex", "application/vnd.plotly.v1+json")
_SPACE: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder()


class Frozen(NamedTuple):
    """A frozen notebook.

    Attributes:
        text: The notebook's JSON.
        replaced: How many outputs show their fallback now.
        lost: How many had none, and say so in a line.
        states: How many widget models ``metadata.widgets`` held.
    """

    text: str
    replaced: int
    lost: int
    states: int


class _Member(NamedTuple):
    """A member of an object, or an item of an array: where its key and value are in the text."""

    key: str
    start: int
    value: int
    end: int


class _Cut(NamedTuple):
    start: int
    end: int
    put: str = ""


def frozen(text: str) -> Frozen:
    """A notebook's text without widgets.

    Args:
        text: Of an ``.ipynb`` file, format 4.

    Raises:
        PlainError: It is not a notebook, or would not be one.
    """
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlainError(f"it is not JSON: {error}") from None
    _check(notebook)
    cuts: list[_Cut] = []
    replaced = lost = states = 0
    top = _members(text, _skip(text, 0))
    for member in top:
        if member.key == "metadata" and "widgets" in notebook["metadata"]:
            inner = _members(text, member.value)
            cuts += _without(text, inner, "widgets")
            states = _states(notebook["metadata"]["widgets"])
        if member.key == "cells":
            for cell in _items(text, member.value):
                for output in _outputs(text, cell.value):
                    found = _output(text, output)
                    if found is None:
                        continue
                    cuts += found[0]
                    replaced, lost = replaced + found[1], lost + (not found[1])
    pieces, at = [], 0
    for cut in sorted(cuts):
        pieces += [text[at : cut.start], cut.put]
        at = cut.end
    pieces.append(text[at:])
    changed = "".join(pieces)
    _validate(changed)
    return Frozen(changed, replaced, lost, states)


def _check(notebook: Any) -> None:
    if not isinstance(notebook, dict) or not isinstance(notebook.get("nbformat"), int):
        raise PlainError("it is JSON, and not a notebook: it has no nbformat")
    if notebook["nbformat"] != 4:
        raise PlainError(f"it is a notebook of format {notebook['nbformat']}: convert it to format 4 first")
    if not isinstance(notebook.get("cells"), list) or not isinstance(notebook.get("metadata"), dict):
        raise PlainError("it is not a notebook of format 4: it has no list of cells, or no metadata")


def _validate(text: str) -> None:
    import nbformat  # local: brings jsonschema, which `--help` should not wait for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cells without ids, which stay without
        try:
            nbformat.validate(nbformat.from_dict(json.loads(text)))  # type: ignore[no-untyped-call,unused-ignore]
        except (nbformat.ValidationError, KeyError, TypeError, AttributeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise PlainError(f"it is not a valid notebook: {first}") from None


def _states(widgets: Any) -> int:
    if not isinstance(widgets, dict):
        return 0
    return sum(
        len(kind["state"])
        for kind in widgets.values()
        if isinstance(kind, dict) and isinstance(kind.get("state"), dict)
    )


def _outputs(text: str, cell: int) -> Iterator[_Member]:
    for member in _members(text, cell):
        if member.key == "outputs":
            yield from _items(text, member.value)


def _output(text: str, output: _Member) -> tuple[list[_Cut], bool] | None:
    """What to cut from an output, and whether something is left to show; None where it is no widget."""
    if text[output.value] != "{":
        return None
    data = next((member for member in _members(text, output.value) if member.key == "data"), None)
    if data is None or text[data.value] != "{":
        return None
    members = _members(text, data.value)
    if all(member.key != WIDGET for member in members):
        return None
    if any(_shows(text, member) for member in members):
        return _without(text, members, WIDGET), True
    said = ""
    for member in members:
        if member.key == "text/plain":
            plain = json.loads(text[member.value : member.end])
            said = ("".join(plain) if isinstance(plain, list) else str(plain)).strip().partition("\n")[0]
    line = "A widget was shown here, and left no table or picture to keep" + (f": {said}" if said else ".")
    return [_Cut(data.value, data.end, json.dumps({"text/plain": line}))], False


def _shows(text: str, member: _Member) -> bool:
    if member.key not in _FALLBACKS and not member.key.startswith("image/"):
        return False
    value = json.loads(text[member.value : member.end])
    shown = "".join(map(str, value)) if isinstance(value, list) else value
    return bool(shown.strip() if isinstance(shown, str) else shown)


# -- places in the text ------------------------------------------------------------------------


def _without(text: str, members: list[_Member], key: str) -> list[_Cut]:
    """Cuts that take a member out, with the comma that belongs to it."""
    cuts = []
    kept = [member for member in members if member.key != key]
    if not kept and members:
        first, last = members[0], members[-1]
        start = text.rindex("{", 0, first.start)
        return [_Cut(start + 1, text.index("}", last.end))]
    for number, member in enumerate(members):
        if member.key != key:
            continue
        if any(other.start < member.start for other in kept):
            cuts.append(_Cut(members[number - 1].end, member.end))
        else:
            cuts.append(_Cut(member.start, members[number + 1].start))
    return cuts


def _members(text: str, start: int) -> list[_Member]:
    """The members of the object that begins at ``start``; none of anything else."""
    found: list[_Member] = []
    if text[start] != "{":
        return found
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, after = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, after) + 1)
        end = _DECODER.raw_decode(text, value)[1]
        found.append(_Member(key, at, value, end))
        at = _next(text, end)
    return found


def _items(text: str, start: int) -> Iterator[_Member]:
    """The items of the array that begins at ``start``."""
    if text[start] != "[":
        return
    at = _skip(text, start + 1)
    while text[at] != "]":
        end = _DECODER.raw_decode(text, at)[1]
        yield _Member("", at, at, end)
        at = _next(text, end)


def _next(text: str, end: int) -> int:
    at = _skip(text, end)
    return _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
