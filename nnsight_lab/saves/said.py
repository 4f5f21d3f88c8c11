"""What some requests saved, in one line: names, shapes and sizes.

The newest of the requests speaks for all: the requests of one cell ran the same block, and reading the labels
of thousands would make a cell wait. Names come from whoever wrote the block, so what cannot be seen of one is
spelled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.saves.table import as_html
from nnsight_lab.wire.keys import TRACE_BLOCK
from nnsight_lab.wire.sizes import shown_bytes

#: Names in a line, and how much of each.
NAMES: Final = 12
_NAME_CHARS: Final = 40
_ROWS: Final = 8


class Named(NamedTuple):
    """What was saved under one name.

    Attributes:
        name: The name.
        block: Whose block saved it.
        title: Both, to be shown.
        about: Type, shape and size, in a few words.
    """

    name: str
    block: str
    title: str
    about: str


class Said(NamedTuple):
    """What requests saved.

    Attributes:
        named: The first names, a trace's own before those of edits.
        more: What is not among them, in words.
    """

    named: tuple[Named, ...]
    more: str

    def line(self) -> str:
        """As in ``"Saved: hidden bfloat16 [9, 576] 10.37 kB"``."""
        parts = [f"{one.title} {one.about}" for one in self.named]
        return f"Saved: {'; '.join([*parts, self.more] if self.more else parts)}"


def said_of(store: SavesStore, requests: Sequence[str]) -> Said:
    """What requests of one call saved; nothing is loaded."""
    saves: dict[tuple[str, str], list[SaveLabel]] = {}
    for request in requests:
        for label in store.labels(request, sequence=0):
            saves.setdefault((label.block, label.name), []).append(label)
        if saves:
            break
    order = sorted(saves, key=lambda slot: slot[0] != TRACE_BLOCK)
    named = tuple(
        Named(name, block, _title(block, name), _about(saves[block, name])) for block, name in order
    )
    rest = len(named) - NAMES
    parts = [f"{rest:,} more {'name' if rest == 1 else 'names'}"] if rest > 0 else []
    if len(requests) > 1:
        parts.append(f"of each of {len(requests):,} requests")
    return Said(named[:NAMES], ", ".join(parts))


def table_of(store: SavesStore, requests: Sequence[str]) -> str:
    """The same as a small table of html, for where no widget runs."""
    rows, more = store.rows(_ROWS, requests=frozenset(requests))
    return as_html("Saved", rows, more)


def _title(block: str, name: str) -> str:
    return _visible(name) if block == TRACE_BLOCK else f"{_visible(block)}: {_visible(name)}"


def _visible(name: str) -> str:
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in name[: _NAME_CHARS + 1])
    return text if len(text) <= _NAME_CHARS else f"{text[: _NAME_CHARS - 1]}…"


def _about(labels: Sequence[SaveLabel]) -> str:
    tensors = [label for label in labels if label.kind in ("tensor", "array")]
    if not tensors:
        return labels[0].dtype
    shapes = {label.shape for label in tensors}
    dtypes = sorted({label.dtype for label in tensors})
    one = f"[{', '.join(map(str, tensors[0].shape))}]" if tensors[0].shape else "0-d"
    shape = one if len(shapes) == 1 else "several shapes"
    times = f" × {len(tensors):,}" if len(tensors) > 1 else ""
    return f"{', '.join(dtypes)} {shape}{times} {shown_bytes(sum(label.bytes for label in tensors))}"
