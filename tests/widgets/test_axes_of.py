"""Axes are named where the prompt's tokens say what they are, and numbered else."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.widgets.axes_of import Axes, axes_of
from nnsight_lab.widgets.prompt_tokens import PromptTokens

TOKENS = ("a", " b", "c")
LAYER = "model.layers[5].output"


@pytest.mark.parametrize(
    ("shape", "fields", "tokens", "axes"),
    [
        ((3, 8), {"module_path": LAYER}, TOKENS, Axes(("token", "hidden"), TOKENS)),
        ((3, 8), {}, TOKENS, Axes(("token", "column"), TOKENS)),
        ((12, 3), {}, TOKENS, Axes(("token",), None, TOKENS)),
        ((3,), {}, TOKENS, Axes(("token",), None, TOKENS)),
        ((4,), {}, TOKENS, Axes()),
        ((2, 3, 3), {}, TOKENS, Axes(("head", "query", "key"), TOKENS, TOKENS)),
        ((5, 2, 3, 3), {}, TOKENS, Axes(("layer", "head", "query", "key"), TOKENS, TOKENS)),
        ((2, 4, 4), {"name": "patterns"}, None, Axes(("head", "query", "key"))),
        ((2, 4, 4), {"name": "weights"}, None, Axes()),
        ((3, 3), {}, TOKENS, Axes(("query", "key"), TOKENS, TOKENS)),
        ((3, 8), {"module_path": LAYER}, None, Axes()),
        ((), {}, TOKENS, Axes()),
        ((0, 0, 0), {}, (), Axes()),
    ],
)
def test_only_what_is_certain_is_named(shape: Any, fields: Any, tokens: Any, axes: Axes) -> None:
    assert axes_of(SaveLabel(shape=shape, kind="tensor", **fields), tokens) == axes


class Engine:
    """As much of an engine as is asked."""

    name = "main"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


def test_tokens_are_those_of_the_engine_that_ran_it_and_keep_it_not_alive() -> None:
    from tests.models import tokenizer

    engine = Engine(tokenizer())
    tokens = PromptTokens(engine)
    assert tokens(SaveLabel(engine="main", prompt="a <b>")) == ("a", " ", "<", "b", ">")
    assert tokens(SaveLabel(engine="other", prompt="a")) is None
    assert tokens(SaveLabel(engine="main", prompt="")) is None
    broken = Engine(None)
    assert PromptTokens(broken)(SaveLabel(engine="main", prompt="a")) is None
    del engine
    assert tokens(SaveLabel(engine="main", prompt="a")) is None
