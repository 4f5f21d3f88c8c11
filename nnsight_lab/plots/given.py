"""Tokens as a plot was given them: texts, or anything that has texts and ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.sequence import Tokens


def given_tokens(
    tokens: Any, token_ids: Sequence[int] | None
) -> tuple[Sequence[str] | None, Sequence[int] | None]:
    """Texts and ids, each None where it is not known.

    Args:
        tokens: A text for each place, `Tokens`, or what a lens or `lab.attention` found (of a lens the
            tokens at its positions); or None.
        token_ids: The ids, where they are given for themselves.

    Raises:
        PlotRefused: It is one text, or ids.
    """
    if tokens is None:
        return None, token_ids
    if isinstance(tokens, Tokens):
        return tuple(tokens), tokens.ids if token_ids is None else token_ids
    texts, ids = getattr(tokens, "tokens", None), getattr(tokens, "token_ids", None)
    if texts is not None and ids is not None:
        places = getattr(tokens, "positions", range(len(texts)))
        if not len(texts):
            raise PlotRefused("the lens has no tokens: only a stream was given to it")
        return tuple(texts[place] for place in places), tuple(ids[place] for place in places)
    if isinstance(tokens, (str, bytes)):
        raise PlotRefused("tokens is one text: lab.tokens(text) has each token's")
    try:
        listed = list(tokens)
    except TypeError:
        raise PlotRefused(f"{type(tokens).__name__} has no tokens: give texts, or lab.tokens(…)") from None
    if any(not isinstance(each, str) for each in listed):
        raise PlotRefused("tokens are texts, and these are not: lab.tokens(ids) has each id's text")
    return listed, token_ids
