"""The kernel's side of the attention view, over a mock comm: what a page gets are the patterns."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.errors import CellUsageError
from nnsight_lab.lens import Attention
from nnsight_lab.lens.shown import Several
from nnsight_lab.widgets import AttentionView, kinds
from nnsight_lab.widgets.attention import SPANS, THUMB
from nnsight_lab.widgets.base import MAX_BUFFER_BYTES, STATIC
from nnsight_lab.widgets.sequences import sequence_key
from nnsight_lab.widgets.spans import CODE_NAN, TOP, Span, encode
from tests.widgets.comms import MockComm, Page, mock_comms

pytestmark = pytest.mark.skipif(
    not (STATIC / "attention.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)

WORDS = ("The", " Eiffel", "\n", "<b>x</b>", "\u200b", "")


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def show() -> Iterator[Callable[..., AttentionView]]:
    """Makes views, and closes them."""
    made: list[AttentionView] = []

    def make(*args: Any, **kwargs: Any) -> AttentionView:
        made.append(AttentionView(*args, **kwargs))
        return made[-1]

    yield make
    for view in made:
        view.close()


def some(
    layers: int = 3, heads: int = 4, tokens: int = 7, *, queries: tuple[int, ...] | None = None, seed: int = 0
) -> Attention:
    """Patterns whose rows sum to one, causal."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn((layers, heads, tokens, tokens), generator=random) * 3
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    patterns = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    asked = tuple(range(tokens)) if queries is None else queries
    words = tuple(WORDS[at % len(WORDS)] for at in range(tokens))
    return Attention(
        patterns[:, :, list(asked)],
        tuple(range(layers)),
        tuple(range(heads)),
        asked,
        tuple(range(tokens)),
        words,
    )


def test_a_prompt_tells_its_shape_and_whose_position_it_shares(show: Callable[..., AttentionView]) -> None:
    found = some(queries=(6, 2))
    told = Page(show(found)).one(kinds.PROMPT, prompt=0)
    assert told["sizes"] == [3, 4, 2, 7]
    assert told["queries"] == [6, 2]
    assert told["sequence"] == sequence_key(found.token_ids)
    assert Page(show(some())).one(kinds.PROMPT, prompt=0)["queries"] is None


def test_where_a_token_looks_comes_for_every_head_of_its_layer(show: Callable[..., AttentionView]) -> None:
    found = some(queries=(6, 2))
    ((_, buffers),) = Page(show(found)).ask(kinds.CELL, prompt=0, layer=1, query=1)
    rows = torch.from_numpy(np.stack([np.frombuffer(one, np.float32) for one in buffers]))
    assert torch.equal(rows, found.patterns[1, :, 1])


def test_thumbnails_are_the_largest_weights_of_their_blocks(show: Callable[..., AttentionView]) -> None:
    found = some(tokens=200)
    answers = Page(show(found)).ask(kinds.HEADS, prompt=0, layers=[2, 0], scale="sequential")
    parts = [(content, buffers) for content, buffers in answers if "layer" in content]
    assert [content["layer"] for content, _ in parts] == [2, 0]
    content, (buffer,) = parts[0]
    assert content["sizes"] == [THUMB, THUMB]
    codes = np.frombuffer(buffer, np.uint8).reshape(4, THUMB, THUMB)
    assert codes[1, 0, 0] == round(float(found.patterns[2, 1, :5, :5].max()) * TOP)
    assert codes[:, 0, -1].max() == 0, "nothing looks ahead"


def test_a_thumbnail_shows_what_is_no_number(show: Callable[..., AttentionView]) -> None:
    found = some()
    found.patterns[0, 0, 3, 1] = float("nan")
    ((_, (buffer,)), _) = Page(show(found)).ask(kinds.HEADS, prompt=0, layers=[0], scale="log")
    assert np.frombuffer(buffer, np.uint8).reshape(4, 7, 7)[0, 3, 1] == CODE_NAN


def test_the_large_picture_is_that_head_of_that_prompt(show: Callable[..., AttentionView]) -> None:
    prompts = [some(seed=1), some(tokens=9, seed=2)]
    page = Page(show(prompts))
    question = {"level": [0, 0], "tiles": [[0, 0]], "how": "max", "scale": "log", "clip": list(SPANS["log"])}
    for number, (layer, head) in ((1, (2, 3)), (0, (0, 1)), (1, (0, 0))):
        answers = page.ask(kinds.TILES, prompt=number, leads=[layer, head], **question)
        pattern = prompts[number].patterns[layer, head].numpy()
        tile = next(buffers[0] for content, buffers in answers if content.get("tiles"))
        expected = encode(pattern, np.zeros(pattern.shape, np.uint8), Span(*SPANS["log"], "log"))
        assert np.array_equal(np.frombuffer(tile, np.uint8).reshape(pattern.shape), expected)
    value = page.one(kinds.VALUE, prompt=1, leads=[2, 3], level=[0, 0], row=8, column=4)
    assert np.float32(value["text"]) == prompts[1].patterns[2, 3, 8, 4].numpy()


def test_both_axes_have_the_prompts_tokens_made_visible(show: Callable[..., AttentionView]) -> None:
    page = Page(show(some(queries=(6, 2))))
    keys = page.one(kinds.LABELS, prompt=0, axis=1, first=0, last=7)["labels"]
    assert keys == ["The", "·Eiffel", "⏎", "<b>x</b>", "\\u200b", "∅", "The"]
    assert page.one(kinds.LABELS, prompt=0, axis=0, first=0, last=2)["labels"] == ["6: The", "2: ⏎"]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (kinds.PROMPT, {"prompt": 1}),
        (kinds.HEADS, {"prompt": 0, "layers": [3], "scale": "log"}),
        (kinds.HEADS, {"prompt": 0, "layers": [0], "scale": "loud"}),
        (kinds.CELL, {"prompt": 0, "layer": 0, "query": 7}),
        (kinds.CELL, {"prompt": 0, "layer": -1, "query": 0}),
    ],
)
def test_a_question_about_what_is_not_there_is_answered_with_one_line(
    show: Callable[..., AttentionView], kind: str, content: dict[str, Any]
) -> None:
    error = Page(show(some())).ask(kind, **content)[-1][0][kinds.ERROR]
    assert error
    assert "\n" not in error
    assert "Error:" not in error


def test_the_state_and_the_module_are_small_and_so_are_messages(show: Callable[..., AttentionView]) -> None:
    view = show(Several([some(40, 32, 200)] * 300))
    state = {name: value for name, value in view.get_state().items() if name not in ("_esm", "_css")}
    assert len(json.dumps(state)) <= 50_000
    assert len(gzip.compress((STATIC / "attention.js").read_bytes())) <= 60_000
    for _, buffers in Page(view).ask(kinds.HEADS, prompt=0, layers=[0, 1, 39], scale="log"):
        assert all(len(buffer) <= MAX_BUFFER_BYTES for buffer in buffers)
    assert "8 of 32 heads are drawn" in view.fallback()
    assert "297 more of the list are not shown" in view.fallback()


def test_a_view_that_nobody_looks_at_holds_nothing(show: Callable[..., AttentionView]) -> None:
    found = some()
    alive = weakref.ref(found.patterns)
    page = Page(view := show(found))
    page.tell(kinds.HERE)
    page.one(kinds.VALUE, prompt=0, leads=[0, 0], level=[0, 0], row=0, column=0)
    page.tell(kinds.GONE)
    page.tell(kinds.HERE)  # reopened: somebody has it still
    assert page.one(kinds.PROMPT, prompt=0)["heads"] == [0, 1, 2, 3]
    page.tell(kinds.GONE)
    del found
    gc.collect()
    assert alive() is None
    assert "Run the cell that made it again" in page.one(kinds.PROMPT, prompt=0)[kinds.ERROR]
    assert view.plain() == "Attention [layer, head, query, key] 3 x 4 x 7 x 7"


def test_something_else_than_attention_is_one_line() -> None:
    with pytest.raises(CellUsageError, match="this is Tensor; expected Attention, or a list of them"):
        AttentionView(torch.ones(2, 2))
