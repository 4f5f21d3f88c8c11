"""A sequence of tokens: their texts, with their ids beside them.

The hard fact: a token's text does not say which token it is (two may look alike), and a list of texts loses
the ids. So the two stay together, and whatever shows tokens takes them as one thing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nnsight_lab.errors import RequestRefused
from nnsight_lab.lens.tokens import token_texts
from nnsight_lab.saves.label import SaveLabel


class Tokens(tuple[str, ...]):
    """The texts of tokens, leading spaces kept.

    Attributes:
        ids: The id of each.
    """

    ids: tuple[int, ...]

    def __new__(cls, texts: Iterable[str], ids: Iterable[int]) -> Tokens:
        made = super().__new__(cls, texts)
        made.ids = tuple(map(int, ids))
        if len(made) != len(made.ids):
            raise ValueError(f"{len(made)} texts and {len(made.ids)} ids")
        return made

    def __getnewargs__(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(self), self.ids

    def __repr__(self) -> str:
        return f"Tokens({list(self)!r})"


def tokens_of(tokenizer: Any, what: Any) -> Tokens:
    """The tokens of a text, of ids, of a prompt that ran, or of what was generated.

    Args:
        tokenizer: The model's.
        what: Text, as a prompt is tokenized; token ids; a request's output or a trace (its prompt); a
            completion (``output.outputs[0]``: what was generated); the label of a saved value (its prompt);
            or what a lens or `lab.attention` found.

    Raises:
        RequestRefused: It is none of those.
    """
    ids = _ids(tokenizer, what)
    return Tokens(token_texts(tokenizer, ids), ids)


def _ids(tokenizer: Any, what: Any) -> list[int]:
    if isinstance(what, Tokens):
        return list(what.ids)
    if isinstance(what, str):
        return [int(each) for each in tokenizer(what).input_ids]
    if isinstance(what, SaveLabel):
        return _ids(tokenizer, what.prompt)
    found = what
    if hasattr(what, "prompts") and hasattr(what, "outputs"):  # a trace
        if not what.outputs:
            raise RequestRefused("The trace has no tokens: it has not ended, or it failed.")
        found = what.outputs[0]
    for name in ("prompt_token_ids", "token_ids"):
        ids = getattr(found, name, None)
        if ids is not None:
            return _numbers(ids, what)
    return _numbers(what, what)


def _numbers(ids: Any, what: Any) -> list[int]:
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    try:
        if isinstance(listed, bytes):
            raise TypeError
        numbers = list(listed)
        if any(isinstance(each, (str, bool)) or int(each) != each for each in numbers):
            raise TypeError
    except (TypeError, ValueError):
        raise RequestRefused(
            f"{type(what).__name__} has no tokens: give a text, token ids, a trace, an output "
            "(output.outputs[0] for what was generated), or a label."
        ) from None
    return [int(each) for each in numbers]
