"""Numbers and shapes as people read them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from nnsight_lab.lens.tokens import shortened, visible

_SPECIAL: Final = {"nan": "NaN", "inf": "+inf", "-inf": "−inf"}


def shown_line(text: str, limit: int) -> str:
    """The beginning of a text, on one line, in characters that can be seen; spaces stay spaces."""
    begun = text[: 2 * limit]
    parts = (visible(part).replace("·", " ") for part in begun.split("·"))
    found = shortened("·".join(parts), limit)
    return found if len(begun) == len(text) or found.endswith("…") else f"{found}…"


def exact(value: torch.Tensor) -> str:
    """A single value so that it can be told from every other of its dtype; ``value`` is 0-d."""
    item: Any = value.item()
    if value.dtype in (torch.float32, torch.float16):
        # The shortest decimals that are this number; `item` would show those of a double.
        number = np.float32(item) if value.dtype is torch.float32 else np.float16(item)
        text = str(number)
    elif isinstance(item, complex):
        return str(item)
    else:
        text = f"{item:,}" if isinstance(item, int) and not isinstance(item, bool) else repr(item)
    return _SPECIAL.get(text, text)


def short(value: float | None) -> str:
    """A number with four digits."""
    if value is None:
        return "none"
    text = f"{value:.4g}"
    return _SPECIAL.get(text, text)


def shape_words(shape: tuple[int, ...]) -> str:
    """As in ``"50,000 × 4,096"``."""
    return " × ".join(f"{size:,}" for size in shape) or "one number"


def index_text(index: tuple[int | slice, ...]) -> str:
    """An index as it is written: ``"[3, 0:20, 5]"``; empty for a number."""
    if not index:
        return ""
    parts = [f"{one.start}:{one.stop}" if isinstance(one, slice) else str(one) for one in index]
    return f"[{', '.join(parts)}]"


def counted(nan: int, posinf: int, neginf: int) -> str:
    """As in ``"3 NaN, 1 +inf"``; empty where there is none."""
    pairs = ((nan, "NaN"), (posinf, "+inf"), (neginf, "−inf"))
    return ", ".join(f"{count:,} {name}" for count, name in pairs if count)
