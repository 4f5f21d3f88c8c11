"""What came home can be read as tensors, text, a table, and a page."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from nnsight_lab.errors import LensRefused
from nnsight_lab.lens import Attention, LogitLens
from nnsight_lab.lens.grid import MAX_COLUMNS

TEXTS = {0: " a", 1: "<b>", 2: "\n", 3: "d" * 20, 4: ""}


def lens(positions=3, **changes):
    layers, top_k = 2, 2
    ids = torch.arange(layers * positions * top_k).reshape(layers, positions, top_k) % 5
    values = {
        "layers": (1, 3),
        "positions": tuple(range(positions)),
        "token_ids": tuple(i % 5 for i in range(positions)),
        "tokens": tuple(TEXTS[i % 5] for i in range(positions)),
        "top_ids": ids,
        "top_probabilities": torch.tensor([0.75, 0.25]).expand(layers, positions, top_k),
        "entropy": torch.full((layers, positions), 0.5),
        "final_ids": torch.arange(positions) % 5,
        "final_ranks": torch.zeros(layers, positions, dtype=torch.int64),
        "final_probabilities": torch.full((layers, positions), 0.75),
        "target_id": 3,
        "target_ranks": torch.full((layers, positions), 7),
        "target_probabilities": torch.full((layers, positions), 0.125),
        "texts": TEXTS,
    }
    return LogitLens(**{**values, **changes})


def test_ids_are_there_as_text():
    found = lens()
    assert found.top_tokens[0][0] == [" a", "<b>"]
    assert found.final_tokens == [" a", "<b>", "\n"]
    assert found.target == "d" * 20
    assert repr(found) == "<LogitLens 2 layers x 3 positions, top 2, at the end '\\n'>"
    with pytest.raises(FrozenInstanceError):
        found.layers = ()


def test_what_is_not_known_is_not_made_up():
    found = lens(final_ids=None, final_ranks=None, final_probabilities=None, target_id=None)
    assert found.final_tokens == []
    assert found.target is None
    assert repr(found) == "<LogitLens 2 layers x 3 positions, top 2>"


def test_a_table_has_a_row_for_each_place(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    table = lens().to_pandas()
    assert {len(column) for column in table.values()} == {2 * 3 * 2}
    assert table["layer"][:7] == [1, 1, 1, 1, 1, 1, 3]
    assert table["position"][:5] == [0, 0, 1, 1, 2]
    assert table["place"][:3] == [0, 1, 0]
    assert table["token"][:2] == [" a", "<b>"]
    assert table["prompt_token"][2] == "<b>"
    assert table["target_rank"] == [7] * 12
    assert "target_rank" not in lens(target_ranks=None).to_pandas()


def test_a_page_escapes_tokens_and_puts_the_last_layer_on_top():
    page = lens()._repr_html_()
    assert "<b>" not in page
    assert page.index("layer 3") < page.index("layer 1")
    assert "&lt;b&gt;" in page
    assert "75.0%" in page
    assert "var(--jp-" in page
    assert "of 3 positions" not in page


def test_a_page_of_a_long_prompt_shows_its_end():
    page = lens(positions=MAX_COLUMNS + 9)._repr_html_()
    assert f"the last {MAX_COLUMNS} of {MAX_COLUMNS + 9} positions" in page
    assert page.count('scope="col"') == MAX_COLUMNS


def test_a_pattern_is_found_by_the_models_own_numbers():
    patterns = torch.arange(2 * 2 * 3 * 3, dtype=torch.float32).reshape(2, 2, 3, 3)
    found = Attention(patterns, (4, 2), (0, 5), (0, 1, 2), (7, 8, 9), ("x", "y", "z"))
    assert torch.equal(found.pattern(2, 5), patterns[1, 1])
    assert repr(found) == "<Attention [layer, head, query, key] 2 x 2 x 3 x 3>"
    with pytest.raises(LensRefused, match=r"Layer 3 is not here; there are 4, 2\."):
        found.pattern(3, 0)
    with pytest.raises(LensRefused, match=r"Head 1 is not here; there are 0, 5\."):
        found.pattern(4, 1)


def test_a_page_of_many_layers_shows_some_and_says_so():
    deep = lens(
        layers=tuple(range(90)),
        top_ids=torch.zeros(90, 3, 2, dtype=torch.int64),
        top_probabilities=torch.full((90, 3, 2), 0.5),
        entropy=torch.zeros(90, 3),
    )
    page = deep._repr_html_()
    assert "1 of 3 layers of 90" in page
    assert page.count('scope="row"') == 30
    assert "layer 89" in page


def test_tokens_in_a_page_are_shown_as_everywhere_else():
    texts = {**TEXTS, 0: "\u200b\x1b", 2: "e\u0301\t"}
    page = lens(texts=texts, tokens=(" a b", "\u200b", "x"))._repr_html_()
    for shown in ("·a·b", "\\u200b\\x1b", "⇥"):
        assert shown in page
    assert "\u200b" not in page


def test_a_table_without_pandas_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LensRefused, match="not installed: pip install pandas"):
        lens().to_pandas()


def test_attention_is_drawn_in_a_page_with_what_is_left_out():
    patterns = torch.rand(3, 12, 200, 200).tril()
    found = Attention(
        patterns, (0, 4, 7), tuple(range(12)), tuple(range(200)), tuple(range(200)), ("<b>",) * 200
    )
    page = found._repr_html_()
    assert page.count("<img") == 8
    assert "Attention of layer 7" in page
    assert "8 of 12 heads are drawn" in page
    assert "Of 3 layers one is drawn" in page
    assert "200 queries x 200 keys" in page
    assert "<b>" not in page
    assert len(page) < 200_000
