"""The scores of a growing strip: what the engine says of each token, and what a block saved for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nnsight_lab.engine.feed import Seen
from nnsight_lab.errors import RequestRefused
from nnsight_lab.plots.token_strip import MAX_ROWS, TokenStrip, token_strip
from nnsight_lab.runs.rows import Rows, rows_of

#: What the engine knows of a token, and what it is called.
OWN: Final = {"logprob": "log probability", "probability": "probability", "rank": "rank"}
#: More than a page shows at once, and no more than can be built anew twenty times a second.
_MOST_TOKENS: Final = 20_000


class Scored(NamedTuple):
    """A strip, and what could not be put into it."""

    strip: TokenStrip
    notes: tuple[str, ...]


def score_names(score: Any) -> tuple[str, ...]:
    """What a caller wants tokens to be coloured by.

    Args:
        score: True for the log probability, a name, or several.

    Raises:
        RequestRefused: It is none of these.
    """
    if score is True or score is None:
        return ("logprob",)
    names = [score] if isinstance(score, str) else score
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) and n for n in names):
        raise RequestRefused(
            f"{score!r} is no score: write 'logprob', 'probability', 'rank', the name of a list that a block "
            "saves, or a list of these."
        )
    return tuple(dict.fromkeys(names))


def wants_logprobs(score: Any) -> bool:
    """Whether a score needs the log probability of each token.

    Raises:
        RequestRefused: It is none.
    """
    return not OWN.keys().isdisjoint(score_names(score))


def scored(names: Sequence[str], seen: Seen, texts: Sequence[str], title: str) -> Scored | None:
    """The strip of what was seen; None before there is a token."""
    ids = [*seen.prompt_ids, *seen.token_ids][:_MOST_TOKENS]
    if not ids:
        return None
    rows: dict[str, npt.NDArray[np.float64]] = {}
    notes: list[str] = []
    by_name = {one.name: one for one in seen.watched}
    for name in names:
        if name in OWN:
            rows[OWN[name]] = _placed(_own(name, seen), len(seen.prompt_ids), len(ids))
            continue
        found = rows_of(by_name[name].items, len(seen.prompt_ids)) if name in by_name else None
        if isinstance(found, Rows) and found.values.dim() == 2 and found.values.shape[1] > MAX_ROWS:
            found = f"it has {found.values.shape[1]:,} numbers a token, and a strip at most {MAX_ROWS} rows"
        if isinstance(found, Rows):
            values = found.values.double().numpy()
            columns = values[:, None] if values.ndim == 1 else values
            for number in range(columns.shape[1]):
                row = name if values.ndim == 1 else f"{name}[{number}]"
                rows[row] = _placed(columns[:, number], found.first, len(ids))
        elif found is not None:
            notes.append(f"{name} is no score: {found}.")
    if not rows:
        rows[names[0]] = np.full(len(ids), math.nan)
    single = len(rows) == 1
    scores = np.stack(list(rows.values()))
    strip = token_strip(
        list(texts)[: len(ids)],
        scores[0] if single else scores,
        token_ids=ids,
        rows=None if single else list(rows)[:MAX_ROWS],
        score_name=next(iter(rows)) if single else "score",
        title=title,
        # Generation begins at the prompt's end: a still of a long prompt should show that.
        start=0,
    )
    return Scored(strip, tuple(notes))


def _own(name: str, seen: Seen) -> npt.NDArray[np.float64]:
    values = np.array(seen.ranks if name == "rank" else seen.logprobs, dtype=np.float64)
    return np.exp(values) if name == "probability" else values


def _placed(values: npt.NDArray[np.float64], first: int, count: int) -> npt.NDArray[np.float64]:
    """Values at their positions; NaN where there is none."""
    row = np.full(count, math.nan)
    end = min(first + len(values), count)
    row[first:end] = values[: max(end - first, 0)]
    return row
