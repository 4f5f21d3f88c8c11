"""What the axes of a saved value are, found out from its label: layers, positions with their tokens, widths.

The hard fact: a tensor of a notebook says nothing of itself, but a saved one lies in an engine's store, and
its label there knows its prompt, its module and its step. An axis is the prompt's positions where it is as
long as the prompt, and has no name where two readings fit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from nnsight_lab.errors import LabError
from nnsight_lab.lens.sequence import Tokens, tokens_of
from nnsight_lab.saves.label import SaveKey, SaveLabel, key_of
from nnsight_lab.saves.store import SavesStore

#: What the lists of decoder layers are called, in the families that vLLM has.
_LAYERS: Final = re.compile(r"(?:^|\.)(?:layers?|h|blocks|block)\[(\d+|\*)\]")
#: More tensors than these are not looked up one by one.
_MOST_LOOKED_UP: Final = 64


class Known(NamedTuple):
    """What is known of a matrix's two sides.

    Attributes:
        dims: The rows' and the columns' name; "" where it is not known.
        rows: What each row is called, where it is known.
        tokens: Of the side ``token_side``.
        token_side: 0 or 1; -1 where there are no tokens.
        note: Where the values were read, in words.
    """

    dims: tuple[str, str] = ("", "")
    rows: Sequence[Any] | None = None
    tokens: Tokens | None = None
    token_side: int = -1
    note: str = ""


NOTHING: Final = Known()


def engines() -> Mapping[str, Any]:
    """The live engines. By name: a plot imports no engine, and needs none."""
    package = sys.modules.get("nnsight_lab")
    found: Mapping[str, Any] = package.engines() if package is not None else {}
    return found


def store_of(label: SaveLabel | SaveKey) -> SavesStore | None:
    """The store that has what a label names, among those of the live engines."""
    for engine in engines().values():
        if key_of(label).request_id in engine.saves:
            store: SavesStore = engine.saves
            return store
    return None


def labels_of(values: Any) -> list[SaveLabel]:
    """The labels of what a plot was given: its own, or those of saved tensors; empty where one has none."""
    listed = [values] if isinstance(values, (SaveLabel, torch.Tensor)) else values
    if not isinstance(listed, (list, tuple)) or not 0 < len(listed) <= _MOST_LOOKED_UP:
        return []
    found = []
    for value in listed:
        label = value if isinstance(value, SaveLabel) else None
        if isinstance(value, torch.Tensor):
            label = next(filter(None, (engine.saves.label_of(value) for engine in engines().values())), None)
        if label is None:
            return []
        found.append(label)
    return found


def known_of(labels: Sequence[SaveLabel], rows: int, columns: int) -> Known:
    """What labels say of a matrix ``[row, column]`` that was made of their values."""
    if not labels:
        return NOTHING
    try:
        model = _Model.of(labels[0])
        if len(labels) == 1:
            return _of_one(labels[0], rows, columns, model)
        return _of_several(labels, rows, columns, model)
    except LabError:  # the engine was stopped meanwhile: a name is not worth a figure
        return NOTHING


class _Model(NamedTuple):
    """What is known of the model that a value was read in."""

    tokenizer: Any
    layers: int | None
    hidden: int | None
    vocabulary: int | None

    @classmethod
    def of(cls, label: SaveLabel) -> _Model:
        engine = engines().get(label.engine)
        if engine is None or getattr(getattr(engine, "config", None), "model", None) != label.model:
            return cls(None, None, None, None)
        config = engine.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes = [getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
        return cls(engine.tokenizer, *sizes)

    def tokens(self, label: SaveLabel) -> Tokens | None:
        if self.tokenizer is None or not label.prompt:
            return None
        return tokens_of(self.tokenizer, label)

    def width(self, size: int) -> str:
        named = {self.hidden: "hidden", self.vocabulary: "token id"}
        return named.get(size, "")


def _of_one(label: SaveLabel, rows: int, columns: int, model: _Model) -> Known:
    tokens = model.tokens(label)
    count = len(tokens) if tokens is not None else -1
    width = model.width(columns)
    note = _read_at(label)
    if rows == 1:
        if columns != count:
            return Known(("", width), note=note)
        return Known(note=note) if width else Known(("", "position"), None, tokens, 1, note)
    if rows == count and columns != count:
        return Known(("position", width), None, tokens, 0, note)
    if columns == count and rows != count and not width:
        return Known(("", "position"), None, tokens, 1, note)
    return Known(("", width), note=note)


def _of_several(labels: Sequence[SaveLabel], rows: int, columns: int, model: _Model) -> Known:
    if rows != len(labels):
        return NOTHING
    width = model.width(columns)
    requests = {label.request_id for label in labels}
    tokens = model.tokens(labels[0]) if len(requests) == 1 else None
    side = 1 if tokens is not None and len(tokens) == columns and not width else -1
    name, names = _rows(labels, len(requests), model)
    places = ("position" if side == 1 else width) if len(requests) == 1 or width else ""
    paths = {label.module_path for label in labels}
    note = _read_at(labels[0]) if len(paths) == 1 else ""
    return Known((name, places), names, tokens if side == 1 else None, side, note)


def _rows(labels: Sequence[SaveLabel], requests: int, model: _Model) -> tuple[str, Sequence[Any] | None]:
    """What the values of several labels are beside each other, and what each is called."""
    if requests == len(labels):
        return "prompt", [label.prompt for label in labels]
    if requests > 1:
        return "", None
    found = [_LAYERS.search(label.module_path) for label in labels]
    numbers = [match[1] if match is not None else "" for match in found]
    if all(number.isdecimal() for number in numbers) and len(set(numbers)) == len(labels):
        return "layer", [int(number) for number in numbers]
    steps = [label.step for label in labels]
    if len(set(steps)) < len(labels) or None in steps:
        return "", None
    if set(numbers) == {"*"}:  # all layers, or some of them: only their number tells
        return ("layer", steps) if len(labels) == model.layers else ("", steps)
    paths = {label.module_path for label in labels}
    one_place = len(paths) == 1 and not any("*" in path or not path for path in paths)
    return ("step" if one_place else "", steps)


def _read_at(label: SaveLabel) -> str:
    return f"read at {label.module_path}" if label.module_path else ""
