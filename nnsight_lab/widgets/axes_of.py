"""What the dimensions of a saved tensor are, as far as that is certain.

A save has a shape and a prompt, and nothing says which dimension is what. The prompt's tokens do: a dimension
as long as they are many is theirs. What is not certain keeps its number, since a wrong label is worse than
none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from nnsight_lab.saves.label import SaveLabel

_PATTERN: Final = ("layer", "head", "query", "key")
_IS_PATTERN: Final = re.compile(r"attn|attention|pattern", re.IGNORECASE)
_IS_LAYER: Final = re.compile(r"\blayers?\b|\.h\b|blocks?\b")


class Axes(NamedTuple):
    """How the dimensions are called, and what stands along the last two.

    Attributes:
        axes: Names of the last dimensions; None for their numbers.
        rows: Labels of the rows.
        columns: Labels of the columns.
    """

    axes: tuple[str, ...] | None = None
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None


def axes_of(label: SaveLabel, tokens: Sequence[str] | None) -> Axes:
    """The axes of a saved tensor.

    Args:
        label: What is known of it.
        tokens: Those of its prompt, as texts.
    """
    shape, count = label.shape, len(tokens or ())
    if not shape:
        return Axes()
    square = len(shape) in (3, 4) and shape[-1] == shape[-2]
    if square and (_IS_PATTERN.search(f"{label.name} {label.module_path}") or 1 < count == shape[-1]):
        labels = tokens if count == shape[-1] else None
        return Axes(_PATTERN[-len(shape) :], labels, labels)
    if not count:
        return Axes()
    if len(shape) == 1:
        return Axes(("token",), None, tokens) if shape[0] == count else Axes()
    if shape[-1] == shape[-2] == count:
        return Axes(("query", "key"), tokens, tokens)
    if shape[-2] == count:
        inner = "hidden" if _IS_LAYER.search(label.module_path.replace("[", ".")) else "column"
        return Axes(("token", inner), tokens, None)
    if shape[-1] == count:
        return Axes(("token",), None, tokens)
    return Axes()
