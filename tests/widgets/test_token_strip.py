"""The kernel's side of a token strip, over a mock comm, and of positions that views share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import CellUsageError, WidgetError
from nnsight_lab.plots.token_strip import TokenStrip as StillStrip
from nnsight_lab.plots.token_strip import token_strip as still_of
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import base, kinds
from nnsight_lab.widgets.base import STATIC
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.sequences import sequence_key
from nnsight_lab.widgets.token_strip import State, TokenStrip
from tests.widgets.comms import MockComm, Page, mock_comms

#: Markup, an emoji of several characters, control characters, right-to-left text, a lone surrogate, nothing.
NASTY = (
    "<img src=x onerror=boom()>",
    " 👩‍👧",
    "\x1b[31m",
    "\u202eevil",
    "שלום",
    "\udce2",
    "",
    "a·b",
    "\n\n",
    "\x00",
)

pytestmark = pytest.mark.skipif(
    not (STATIC / "token_strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Closes widgets at the end."""
    made: list[Any] = []

    def note(widget: Any) -> Any:
        made.append(widget)
        return widget

    yield note
    for widget in made:
        widget.close()


def scores_of(content: dict[str, Any], buffers: list[bytes]) -> Any:
    return np.frombuffer(buffers[0], dtype=np.float64).reshape(content["rows"], -1)


def test_a_page_gets_the_tokens_it_asks_for_exactly(keep: Callable[[Any], Any]) -> None:
    strip = keep(lab.token_strip(["a", " b", "\n"], [0.1, -2.5, float("nan")], token_ids=[5, 6, 7]))
    ((content, buffers),) = Page(strip).ask(kinds.TOKENS, first=0, last=99)
    assert content["tokens"] == [[5, "a", 0, 0], [6, "·b", 0, 0], [7, "⏎", 0, 1]]
    assert content["count"] == 3
    np.testing.assert_array_equal(scores_of(content, buffers), [[0.1, -2.5, np.nan]])


def test_what_cannot_be_seen_is_spelled_out_and_nothing_is_markup(keep: Callable[[Any], Any]) -> None:
    strip = keep(lab.token_strip(NASTY, range(len(NASTY))))
    ((content, _),) = Page(strip).ask(kinds.TOKENS, first=0, last=99)
    seen = [token[1] for token in content["tokens"]]
    assert seen[0] == "<img·src=x·onerror=boom()>"  # a text, that the page puts in as a text
    assert seen[2] == "\\x1b[31m"
    assert seen[3] == "\\u202eevil"
    assert seen[5] == "<0xE2>"
    assert seen[8] == "⏎⏎"
    assert seen[9] == "\\x00"
    assert content["tokens"][7][2] == "a·b"  # said with its own dot, which is no space
    assert "<img" not in strip.fallback()
    json.dumps(strip.get_state()).encode()


def test_the_state_is_bounded_and_the_fallback_is_the_strip_without_scripts(
    keep: Callable[[Any], Any],
) -> None:
    strip = keep(lab.token_strip([" täken"] * 5_000, torch.randn(8, 5_000), token_ids=range(5_000)))
    assert len(json.dumps(strip.get_state(["kept", "names", "colours", "heading", "state"]))) <= 40_000
    state = strip.get_state()
    # The module itself is code, as every widget has.
    assert (
        len(json.dumps({k: v for k, v in state.items() if k not in ("_esm", "_css")}, default=str)) <= 50_000
    )
    data, _ = strip._repr_mimebundle_()
    assert data["text/html"] == strip.fallback()
    assert data["text/html"].startswith('<div><div class="lab-strip')
    assert "<script" not in data["text/html"]
    assert data["text/plain"].startswith("<TokenStrip: 5,000 tokens, 8 rows")


def test_one_message_holds_a_bounded_number_of_tokens(keep: Callable[[Any], Any]) -> None:
    strip = keep(lab.token_strip(["a"] * 9_000, np.zeros((64, 9_000))))
    ((content, buffers),) = Page(strip).ask(kinds.TOKENS, first=500, last=9_000)
    assert content["first"] == 500
    assert 0 < len(content["tokens"]) <= 1_000
    assert len(buffers[0]) <= 2**19


def test_the_static_strips_interface_is_still_there(keep: Callable[[Any], Any]) -> None:
    strip = keep(lab.token_strip(["a", "b"], {"x": [1, 2], "y": [3, 4]}, token_ids=[7, 8]))
    assert (strip.tokens, strip.token_ids, strip.rows, len(strip)) == (("a", "b"), (7, 8), ("x", "y"), 2)
    assert strip.scores.tolist() == [[1, 2], [3, 4]]
    assert strip._repr_html_().count("<tr>") == 3
    assert "row" not in repr(strip).splitlines()[1]


def test_where_the_widgets_are_not_built_the_strip_is_html(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise WidgetError(f"{name} was not built")

    monkeypatch.setattr(base, "_static", missing)
    strip = lab.token_strip(["a"], [1])
    assert isinstance(strip, StillStrip)


def test_a_position_chosen_on_the_page_is_read_in_a_cell_and_seen_by_observers(
    keep: Callable[[Any], Any],
) -> None:
    strip = keep(lab.token_strip(["a", "b", "c"], [1, 2, 3]))
    seen: list[Any] = []
    strip.observe(lambda change: seen.append(change["new"]), "position")
    Page(strip).one(kinds.CHOOSE, position=1)
    assert strip.position == 1
    Page(strip).one(kinds.CHOOSE, position=None)
    assert strip.position is None
    strip.position = -1
    assert strip.position == 2
    assert seen == [1, None, 2]
    assert strip.comm.sent[-1]["data"]["state"] == {"position": 2}


@pytest.mark.parametrize(("place", "why"), [(3, "position 3 is not one of 0 to 2"), (-4, "position -4")])
def test_a_position_that_is_not_there_is_refused_in_one_line(
    keep: Callable[[Any], Any], place: int, why: str
) -> None:
    strip = keep(lab.token_strip(["a", "b", "c"], [1, 2, 3]))
    with pytest.raises(CellUsageError, match=why):
        strip.position = place
    assert strip.position is None


def test_a_page_that_chooses_what_only_another_view_shows_clears_the_position(
    keep: Callable[[Any], Any],
) -> None:
    strip = keep(lab.token_strip(["a", "b"], [1, 2]))
    strip.position = 1
    Page(strip).one(kinds.CHOOSE, position=40)
    assert strip.position is None


def test_the_sequence_goes_by_its_ids_and_else_by_its_texts(keep: Callable[[Any], Any]) -> None:
    by_ids = keep(lab.token_strip(["a", "b"], [1, 2], token_ids=[1, 2]))
    others = keep(lab.token_strip(["x", "y"], [1, 2], token_ids=[1, 2]))
    by_texts = keep(lab.token_strip(["a", "b"], [1, 2]))
    assert by_ids.sequence == others.sequence == sequence_key([1, 2])
    assert by_texts.sequence == sequence_key([], ["a", "b"]) != by_ids.sequence
    growing = keep(TokenStrip(still_of(["a", "b", "c"], [1, 2, 3], token_ids=[1, 2, 3]), prompt=[1, 2]))
    assert growing.sequence == by_ids.sequence


# -- growing -------------------------------------------------------------------------------------------------


def grew(strip: TokenStrip) -> list[tuple[dict[str, Any], list[bytes]]]:
    return [
        (message["data"]["content"], message["buffers"])
        for message in strip.comm.sent
        if message["data"].get("method") == "custom"
        and message["data"]["content"].get(kinds.KIND) == kinds.GREW
    ]


def test_growth_is_one_message_an_update_with_only_what_is_new(keep: Callable[[Any], Any]) -> None:
    strip = keep(TokenStrip(None, state=State("Waiting", True)))
    span = (0, 10)
    strip.show(still_of(["a", "b"], [1, float("nan")], span=span), State("1", True), prompt=[1])
    before = len(strip.comm.sent)
    strip.show(still_of(["a", "b", "c"], [1, float("nan"), 3], span=span), State("2", True))
    assert len(strip.comm.sent) == before + 1
    content, buffers = grew(strip)[-1]
    assert content["first"] == 2
    assert [token[1] for token in content["tokens"]] == ["c"]
    assert scores_of(content, buffers).tolist() == [[3.0]]
    assert content["traits"] == {"count": 3, "state": State("2", True)._asdict()}
    # A score that came later than its token is sent again.
    strip.show(still_of(["a", "b", "c"], [1, 2, 3], span=span), State("3", True))
    assert grew(strip)[-1][0]["first"] == 1
    # The same again is no message.
    before = len(strip.comm.sent)
    strip.show(still_of(["a", "b", "c"], [1, 2, 3], span=span), State("3", True))
    assert len(strip.comm.sent) == before


def test_when_it_ends_the_state_keeps_the_tokens_for_a_page_without_a_kernel(
    keep: Callable[[Any], Any],
) -> None:
    strip = keep(TokenStrip(None, state=State("Waiting", True)))
    strip.show(still_of(["a", "b"], [1, 2]), State("Interrupted after 1 token.", ended="stopped"), prompt=[1])
    state = strip.get_state()
    assert [token[1] for token in state["kept"]["tokens"]] == ["a", "b"]
    assert state["state"]["running"] is False
    assert "Interrupted after 1 token." in strip.fallback()
    assert "Interrupted after 1 token." in repr(strip)


def test_a_stop_button_that_stops_nothing_says_so(keep: Callable[[Any], Any]) -> None:
    strip = keep(lab.token_strip(["a"], [1]))
    assert "nothing runs here" in Page(strip).one(kinds.STOP)[kinds.ERROR]
    pressed: list[bool] = []
    live = keep(TokenStrip(None, state=State("Waiting", True), stop=lambda: pressed.append(True)))
    Page(live).one(kinds.STOP)
    assert pressed == [True]


# -- heatmaps of sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "places"),
    [
        ((3, 7), {"tokens": "abc"}, [0, None]),
        ((7, 3), {"token_ids": [4, 5, 6]}, [None, 0]),
        ((2, 3, 3), {"token_ids": [4, 5, 6]}, [0, 0]),
        ((3, 3), {"token_ids": [4, 5, 6], "token_axis": "columns"}, [None, 0]),
        ((3,), {"token_ids": [4, 5, 6]}, [None, 0]),
    ],
)
def test_a_heatmap_knows_which_axis_is_the_sequence(
    keep: Callable[[Any], Any], shape: tuple[int, ...], options: dict[str, Any], places: list[Any]
) -> None:
    options = {name: list(value) if name == "tokens" else value for name, value in options.items()}
    heatmap = keep(Heatmap(torch.zeros(shape), **options))
    assert heatmap.places == places
    assert heatmap.sequence == sequence_key(options.get("token_ids", ()), options.get("tokens", ()))
    Page(heatmap).one(kinds.CHOOSE, position=2)
    assert heatmap.position == 2


def test_a_heatmaps_tokens_label_its_axis(keep: Callable[[Any], Any]) -> None:
    heatmap = keep(Heatmap(torch.zeros(2, 9), tokens=["a", " b"]))
    assert Page(heatmap).one(kinds.LABELS, axis=0, first=0, last=2)["labels"] == ["a", "·b"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tokens": ["a", "b"]}, "2 tokens do not fit the rows or columns of shape"),
        ({"tokens": "abc"}, "tokens is one text"),
        ({"tokens": ["a"] * 3, "token_ids": [1]}, "1 token ids do not fit 3 tokens"),
        ({"token_ids": [1, 2, 3], "token_axis": "columns"}, "3 tokens do not fit the columns"),
        ({"token_ids": [1, 2, 3], "token_axis": "row"}, "Did you mean 'rows'"),
    ],
)
def test_tokens_that_do_not_fit_a_heatmap_are_refused_in_one_line(options: dict[str, Any], why: str) -> None:
    with pytest.raises(CellUsageError, match=why):
        Heatmap(torch.zeros(3, 7), **options)


def test_a_heatmap_without_tokens_has_no_position(keep: Callable[[Any], Any]) -> None:
    heatmap = keep(Heatmap(torch.zeros(3, 7)))
    with pytest.raises(CellUsageError, match="knows no tokens"):
        heatmap.position = 1


def test_a_saved_value_as_long_as_its_prompt_knows_its_sequence(keep: Callable[[Any], Any]) -> None:
    store = SavesStore()
    values = {"long": torch.zeros(3, 7), "other": torch.zeros(4, 7)}
    store.put("r", [{"trace": values}], common={"prompt": "a b c", "prompt_ids": (4, 5, 6)})
    labels = {label.name: label for label in store.labels()}
    heatmap = keep(Heatmap(store, labels["long"]))
    assert heatmap.places == [0, None]
    assert heatmap.sequence == sequence_key([4, 5, 6])
    assert keep(Heatmap(store, labels["other"])).sequence == ""
