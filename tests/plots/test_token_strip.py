from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnsight_lab as lab
from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import contrast
from nnsight_lab.plots.token_strip import _shades, token_strip


class Page(html.parser.HTMLParser):
    """What a strip's HTML has in it; every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def labels(self) -> list[str]:
        return [attributes["aria-label"] for _, attributes in self.elements if "tabindex" in attributes]


def test_each_token_can_be_reached_and_says_what_it_is() -> None:
    strip = lab.token_strip(
        ["<b>", " cat", "\n"], torch.tensor([0.5, -0.25, torch.nan]), token_ids=[7, 42, 9]
    )
    page = Page(strip._repr_html_())
    assert page.labels == [
        "token 0, id 7, '<b>', score 0.5",
        "token 1, id 42, ' cat', score −0.25",
        "token 2, id 9, '⏎', score NaN",
    ]
    tokens = [attributes for _, attributes in page.elements if "tabindex" in attributes]
    assert all(attributes["tabindex"] == "0" for attributes in tokens)
    assert all(attributes["title"] == attributes["aria-label"] for attributes in tokens)
    assert all(attributes["role"] == "listitem" for attributes in tokens)
    assert [text for text in page.texts if text in ("<b>", "·cat", "⏎")] == ["<b>", "·cat", "⏎"]
    assert not {"script", "link", "img", "b"} & {tag for tag, _ in page.elements}
    assert "http" not in strip._repr_html_()


def test_text_is_readable_on_every_shade_of_both_pages() -> None:
    strip = token_strip([str(n) for n in range(100)], torch.linspace(-1, 1, 100))
    styles = [attributes.get("style", "") for _, attributes in Page(strip._repr_html_()).elements]
    pairs = [
        found for style in styles
        if (found := re.search(r"background-color:(#\w{6});color:(#\w{6})", style))
    ]  # fmt: skip
    assert len({found[1] for found in pairs}) == 33
    assert all(contrast(found[1], found[2]) >= 4.5 for found in pairs)
    dark = re.findall(r"background-color:(#\w{6})!important;color:(#\w{6})!important", strip._repr_html_())
    assert len(dark) == 33
    assert all(contrast(background, text) >= 4.5 for background, text in dark)


def test_zero_has_the_middle_shade_of_a_diverging_scale() -> None:
    html_ = token_strip(["a", "b", "c"], [-1.0, 0.0, 3.0])._repr_html_()
    assert f"background-color:{_shades(True, 0)[16]}" in html_
    assert _shades(True, 0)[16] == "#f7f7f7"


def test_rows_are_a_table_with_heads() -> None:
    strip = token_strip(["a", " b"], {"layer 0": [1, 2], "layer <1>": [3, 4]})
    page = Page(strip._repr_html_())
    assert [attributes["scope"] for tag, attributes in page.elements if tag == "th"] == [
        "col",
        "col",
        "row",
        "row",
    ]
    assert page.labels[3] == "layer <1>, token 1, ' b', score 4"
    assert "layer <1>" in page.texts
    assert repr(strip).splitlines()[1:] == ["           a  ·b", "layer 0    1  2", "layer <1>  3  4"]
    named = token_strip(["a", "b"], torch.zeros(2, 2, dtype=torch.bfloat16))
    assert named.rows == ("row 0", "row 1")


def test_ten_thousand_tokens_are_bounded_and_it_says_how_many_are_not_shown() -> None:
    scores = torch.zeros(10_000)
    scores[8_000] = 2.5
    strip = token_strip([" token"] * 10_000, scores)
    page = Page(strip._repr_html_())
    assert len(page.labels) == 1_000
    assert len(strip._repr_html_()) < 500_000
    note = (
        "9,000 of 10,000 tokens are not shown: these are 0 to 999; the "
        "largest score elsewhere is 2.5, at token 8,000"
    )
    assert note in page.texts[-1]
    assert len(repr(strip)) < 2_000
    assert "of 10,000 tokens are not shown" in repr(strip)
    later = token_strip([" token"] * 10_000, scores, start=7_990, max_tokens=20)
    assert Page(later._repr_html_()).labels[10] == "token 8000, ' token', score 2.5"
    rows = token_strip([" token"] * 10_000, torch.zeros(64, 10_000))
    assert len(Page(rows._repr_html_()).labels) <= 4_000


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=6), st.floats(width=32)), min_size=1, max_size=6),
    st.sampled_from(["auto", "sequential", "diverging"]),
)
def test_any_tokens_and_scores_make_a_page(pairs: list[tuple[str, float]], scale: str) -> None:
    strip = token_strip([text for text, _ in pairs], [score for _, score in pairs], scale=scale)
    page = Page(strip._repr_html_())
    assert len(page.labels) == len(pairs)
    assert len(repr(strip).splitlines()) == 3
    strip._repr_html_().encode("utf-8")


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("text", [1]), {}, "one text"),
        (([], []), {}, "no tokens"),
        ((["a"], [1, 2]), {}, r"shape \[2\] do not fit 1 tokens"),
        ((["a"], [1]), {"token_ids": [1, 2]}, "2 token ids"),
        ((["a"], torch.zeros(65, 1)), {}, "65 rows"),
        ((["a"], [[1], [2]]), {"rows": ["x"]}, "1 names"),
        ((["a"], [1]), {"start": 1}, "show none"),
    ],
)
def test_strips_that_do_not_fit_are_refused(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlotRefused, match=said):
        token_strip(*arguments, **options)
