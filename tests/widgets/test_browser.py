"""The kernel's side of the saves browser, over a mock comm: pages and orders are those of a plain list."""

from __future__ import annotations

import gc
import json
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.errors import CellUsageError, SavesError
from nnsight_lab.saves.files import read
from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import STATIC
from nnsight_lab.widgets.browser import MAX_ROWS, SavesBrowser
from nnsight_lab.widgets.comparison import likeness
from nnsight_lab.widgets.saves_index import SORTS, Order, SavesIndex, words_of
from nnsight_lab.widgets.sources import DifferenceSource, TensorSource
from nnsight_lab.widgets.words import shown_line
from tests.waiting import until
from tests.widgets.comms import MockComm, Page, mock_comms

pytestmark = pytest.mark.skipif(
    not (STATIC / "browser.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def show() -> Iterator[Callable[..., SavesBrowser]]:
    """Makes browsers, and closes them."""
    made: list[SavesBrowser] = []

    def make(*args: Any, **kwargs: Any) -> SavesBrowser:
        made.append(SavesBrowser(*args, **kwargs))
        return made[-1]

    yield make
    for browser in made:
        browser.close()


def some_store(requests: int = 5, seed: int = 0) -> SavesStore:
    """Saves of every kind, with prompts that are alike."""
    chosen = random.Random(seed)
    store = SavesStore(max_requests=10_000)
    for number in range(requests):
        values: dict[str, Any] = {
            "hidden": torch.full((chosen.randint(1, 4), 3), float(chosen.randint(-3, 3))),
            "steps": [torch.tensor(float(step)) for step in range(chosen.randint(1, 3))],
            "note": chosen.choice(["short", "a longer text"]),
            "loss": chosen.random(),
        }
        if number % 3 == 0:
            values["array"] = np.arange(4, dtype=np.int32)
        prompt = chosen.choice(["The Eiffel Tower", "the tower of <b>Pisa</b>", "Straße", ""])
        blocks = {"trace": values, "probe": {"hidden": torch.zeros(2)}}
        paths = {("trace", "hidden"): f"model.layers.{number}"}
        store.put(f"r{number}", [blocks], {"prompt": prompt}, module_paths=paths)
    return store


def page_of(page: Page, **question: Any) -> dict[str, Any]:
    """A page, asked until nothing is left to be read."""
    while True:
        answer = page.ask(kinds.PAGE, **{"first": 0, "count": MAX_ROWS, **question})[-2][0]
        if answer["complete"]:
            return answer


def number_of(page: Page, name: str, request: str = "", block: str = "trace") -> int:
    rows = page_of(page)["rows"]
    return int(next(row[0] for row in rows if row[4] == name and request in ("", row[2]) and row[3] == block))


# -- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_order_and_search_are_those_of_a_plain_list(seed: int) -> None:
    chosen = random.Random(seed)
    store = some_store(30, seed)
    index = SavesIndex()
    index.update(store, 60)
    everything = store.labels()
    for words in (
        "",
        "tower",
        "PROBE",
        "hidden float32",
        "tower hidden",
        "nothing at all",
        "strasse",
        "layers.7",
    ):
        for sort in ("", *SORTS):
            descending = chosen.random() < 0.5
            found = [row.label for row in index.ordered(store, Order(sort, descending, words_of(words)))]
            assert found == naive(everything, sort, descending, words), (words, sort, descending)


def naive(labels: list[SaveLabel], sort: str, descending: bool, words: str) -> list[SaveLabel]:
    def text(label: SaveLabel) -> str:
        parts = (label.request_id, label.block, label.name + label.path, label.module_path, label.dtype)
        return "\n".join([label.prompt, *parts]).casefold()

    kept = [label for label in labels if all(word in text(label) for word in words.casefold().split())]
    if not sort:
        return kept[::-1] if descending else kept
    with_key = [label for label in kept if SORTS[sort](label) is not None]
    return [
        *sorted(with_key, key=SORTS[sort], reverse=descending),
        *(label for label in kept if SORTS[sort](label) is None),
    ]


def test_pages_put_together_are_the_whole_and_none_is_large(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(60)
    page = Page(show(store))
    whole = page_of(page, count=1)
    assert whole["total"] == whole["matched"] == len(store.labels())
    rows: list[Any] = []
    while len(rows) < whole["matched"]:
        part = page_of(page, first=len(rows), count=10_000)["rows"]
        assert 0 < len(part) <= MAX_ROWS
        assert len(json.dumps(part)) < 100_000
        rows += part
    assert [row[2] for row in rows] == [label.request_id for label in store.labels()]
    assert len({row[0] for row in rows}) == len(rows)


def test_statistics_are_computed_for_the_rows_that_are_asked_for(show: Callable[..., SavesBrowser]) -> None:
    store = SavesStore()
    values = torch.tensor([1.0, 3.0, math.nan, math.inf])
    store.put("r", [{"trace": {"t": values, "u": torch.zeros(2), "text": "x"}}])
    browser = show(store)
    page = Page(browser)
    t, text = number_of(page, "t"), number_of(page, "text")
    assert store._shelf.summaries == {}
    found = page.ask(kinds.STATISTICS, numbers=[t, text, 10**6])[0][0]["statistics"]
    assert found[str(t)] == ["1", "3", "2", "1", "1 NaN, 1 +inf", "0f..", "its 4 values"]
    assert found[str(text)] == []
    assert found[str(10**6)] == ["dropped"]
    assert [key.name for key in store._shelf.summaries["r"]] == ["t"]


def test_sorting_by_a_statistic_reads_them_all_and_leaves_texts_last(
    show: Callable[..., SavesBrowser],
) -> None:
    store = some_store(12)
    browser = show(store)
    page = Page(browser)
    for sort in ("min", "max", "mean", "std", "special"):
        for descending in (False, True):
            numbers = [row[0] for row in page_of(page, sort=sort, descending=descending)["rows"]]
            rows = [browser._index.row(number) for number in numbers]
            labels = [row.label for row in rows if row is not None]
            tensors = [label for label in labels if label.kind in ("tensor", "array")]
            assert labels[: len(tensors)] == tensors
            if sort != "special":
                keys = [getattr(store.summary(label), sort) for label in tensors]
                assert keys == sorted(keys, reverse=descending)


def test_rows_keep_their_numbers_when_others_come_and_go(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(5)
    page = Page(show(store))
    before = {tuple(row[1:]): row[0] for row in page_of(page)["rows"]}
    number = before[tuple(page_of(page)["rows"][7][1:])]
    store.put("new", [{"trace": {"x": torch.zeros(2), "y": torch.zeros(2)}}])
    after = page_of(page, find=[number])
    assert after["places"] == {str(number): 9}
    assert after["rows"][0][2] == "new"
    assert before.items() <= {tuple(row[1:]): row[0] for row in after["rows"]}.items()
    store.drop("new")
    assert {tuple(row[1:]): row[0] for row in page_of(page)["rows"]} == before


def test_a_request_put_again_is_another(show: Callable[..., SavesBrowser]) -> None:
    store = SavesStore()
    store.put("r", [{"trace": {"x": torch.zeros(2)}}])
    page = Page(show(store))
    number = number_of(page, "x")
    store.put("r", [{"trace": {"x": torch.ones(3)}}])
    (row,) = page_of(page)["rows"]
    assert row[0] != number
    assert row[8] == "3"


def test_a_hundred_thousand_rows_are_paged_sorted_and_searched_quickly(
    show: Callable[..., SavesBrowser],
) -> None:
    store = SavesStore(max_requests=2000)
    tensor = torch.zeros(2)
    for number in range(1000):
        store.put(
            f"r{number}",
            [{"trace": {"x": [tensor + step for step in range(100)]}}],
            {"prompt": f"p {number}"},
        )
    page = Page(show(store))
    started_s = time.perf_counter()
    first = page.ask(kinds.PAGE, first=0, count=100)[0][0]
    assert len(first["rows"]) == 100
    assert time.perf_counter() - started_s < 2  # a tenth of a second and the machine's own business
    assert page_of(page, first=99_950)["matched"] == 100_000
    started_s = time.perf_counter()
    assert page_of(page, sort="step", descending=True)["rows"][0][6] == "99"
    assert page_of(page, words="r7 x[5]")["matched"] > 0
    assert time.perf_counter() - started_s < 5


def test_what_changed_is_said_unasked_and_seldom(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(2)
    browser = show(store)
    page = Page(browser)

    def said() -> int:
        return sum(
            message["data"].get("content", {}).get(kinds.KIND) == kinds.CHANGED
            for message in page.comm.sent
            if message["type"] == "comm_msg"
        )

    page.tell(kinds.HERE)
    until(lambda: browser._watching is not None, 5)
    page_of(page)
    time_s = time.monotonic()
    while not said():
        store.put("again", [{"trace": {"x": torch.zeros(1)}}])
        assert time.monotonic() - time_s < 10
    count, began_s = said(), time.monotonic()
    while time.monotonic() - began_s < 1.2:
        store.put("again", [{"trace": {"x": torch.zeros(1)}}])
    assert said() - count <= 3
    page.tell(kinds.GONE)
    until(lambda: browser._watching is None, 5)


# -- one save ----------------------------------------------------------------------------------------


def test_a_tensor_is_opened_as_a_picture_and_closed_with_the_next(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(1)
    browser = show(store)
    page = Page(browser)
    opened = page.one(kinds.OPEN, number=number_of(page, "hidden"))
    assert opened["expression"] == "engine.saves.get('r0', 'hidden', block='trace')"
    assert eval(opened["expression"].replace("engine.saves", "store"), {"store": store}).dim() == 2
    assert browser.selected is not None
    assert browser.selected.name == "hidden"
    (first,) = browser._pictures[page.view]
    assert opened["pictures"] == [{"title": "", "model": first.model_id}]
    page.one(kinds.OPEN, number=number_of(page, "steps[0]"))
    assert browser.selected.step == 0
    assert first._closed
    page.one(kinds.OPEN, number=None)
    assert browser.selected is None
    assert browser._pictures == {}


def test_a_comparison_that_comes_late_takes_nothing_away(show: Callable[..., SavesBrowser]) -> None:
    browser = show(some_store(2))
    page = Page(browser)
    pair = [number_of(page, "hidden", f"r{n}", "probe") for n in range(2)]
    page.one(kinds.OPEN, number=pair[0], turn=2)
    (picture,) = browser._pictures[page.view]
    assert page.ask(kinds.COMPARE, numbers=pair, turn=1)[0][0]["pictures"] == []
    assert browser._pictures[page.view] == [picture]
    assert not picture._closed
    assert len(page.ask(kinds.COMPARE, numbers=pair, turn=3)[0][0]["pictures"]) == 1
    assert picture._closed


def test_texts_numbers_and_trees_are_opened_as_text(show: Callable[..., SavesBrowser]) -> None:
    store = SavesStore()
    saved = {"text": "a\n<b>\x1b[31m\u202e", "number": 0.5, "tree": {"ids": [1, 2]}, "long": "x" * 30_000}
    store.put("r", [{"trace": {**saved, "mixed": {"t": torch.zeros(1), "n": [1, 2]}}}])
    page = Page(show(store))

    def text(name: str) -> dict[str, Any]:
        number = number_of(page, name)
        assert page.one(kinds.OPEN, number=number)["pictures"] == []
        return page.ask(kinds.TEXT, number=number)[0][0]

    assert text("text")["text"] == "a\n<b>\\x1b[31m\\u202e"
    assert text("number")["text"] == "0.5"
    assert text("tree")["text"] == "{'ids': [1, 2]}"
    assert text("mixed['n']")["text"] == "[1, 2]"
    assert text("long")["more"] == "10,000 more characters"


def test_a_spilled_request_is_opened_and_a_dropped_one_says_so(show: Callable[..., SavesBrowser]) -> None:
    store = SavesStore(budget_bytes=100)
    store.put("old", [{"trace": {"x": torch.arange(20.0).reshape(4, 5)}}])
    store.put("new", [{"trace": {"y": torch.arange(20.0)}}])
    assert next(iter([r for r in store if r.request_id == "old"])).on_disk
    browser = show(store)
    page = Page(browser)
    number = number_of(page, "x")
    page.one(kinds.OPEN, number=number)
    (picture,) = browser._pictures[page.view]
    assert Page(picture).one(kinds.VALUE, leads=[], row=3, column=4)["text"] == "19.0"
    store.drop("old")
    assert browser.selected is None
    page_of(page)
    assert page.one(kinds.OPEN, number=number)[kinds.ERROR] == "it was dropped"


def test_a_save_is_written_kept_and_dropped(show: Callable[..., SavesBrowser], tmp_path: Path) -> None:
    store = some_store(3)
    page = Page(show(store))
    number = number_of(page, "note", "r1")
    assert page.one(kinds.KEEP, number=number, on=True)["kept"] is True
    assert store.is_kept("r1")
    assert page.one(kinds.KEEP, number=number, on=False)["kept"] is False
    (written, _) = page.ask(kinds.WRITE, number=number, path=str(tmp_path / "one"), whole=False)[0]
    assert {label.name for label in read(written["written"]).labels} == {"note"}
    (written, _) = page.ask(kinds.WRITE, number=number, path=str(tmp_path / "all"), whole=True)[0]
    assert {label.request_id for label in read(written["written"]).labels} == {"r1"}
    (refused, _) = page.ask(kinds.WRITE, number=number, path="/proc/nowhere/x", whole=True)[0]
    assert "cannot be written" in refused[kinds.ERROR]
    (refused, _) = page.ask(kinds.WRITE, number=number, path=" ", whole=True)[0]
    assert "say where" in refused[kinds.ERROR]
    page.ask(kinds.DROP, number=number)
    assert store.labels("r1", name="note") == []
    assert store.labels("r1") != []


def test_two_are_compared_row_by_row(show: Callable[..., SavesBrowser]) -> None:
    store = SavesStore()
    one = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    store.put("a", [{"trace": {"x": one, "flat": one[0], "note": "n"}}])
    store.put("b", [{"trace": {"x": 2 * one.flip(1), "wide": torch.zeros(3, 3)}}])
    browser = show(store)
    page = Page(browser)
    pair = [number_of(page, "x", "a"), number_of(page, "x", "b")]
    answer = page.ask(kinds.COMPARE, numbers=pair)[0][0]
    assert [picture["title"] for picture in answer["pictures"]] == [
        "Difference",
        "Cosine per row",
        "Norm ratio per row",
    ]
    assert answer["words"].startswith(
        "largest difference 5; cosine per row from 0 to 0.96, 1 row without; norm ratio"
    )
    difference = browser._pictures[page.view][0]
    assert Page(difference).one(kinds.VALUE, leads=[], row=0, column=0)["text"] == "-5.0"
    expected = "(engine.saves.get('a', 'x') - engine.saves.get('b', 'x'))"
    assert difference.name == expected
    for other, why in (("wide", "shapes must match"), ("flat", "shapes must match"), ("note", "no tensor")):
        refused = page.ask(kinds.COMPARE, numbers=[pair[0], number_of(page, other)])[0][0]
        assert why in refused[kinds.ERROR]


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (0, 3)])
def test_likeness_is_that_of_whole_tensors(shape: tuple[int, ...]) -> None:
    one, other = torch.randn(shape), torch.randn(shape)
    found = likeness(TensorSource(one), TensorSource(other))
    rows = [(t.double().reshape(-1, shape[-1]) if shape else t.double().reshape(1, 1)) for t in (one, other)]
    torch.testing.assert_close(found.cosine, torch.cosine_similarity(*rows))
    torch.testing.assert_close(found.norm_ratio, rows[0].norm(dim=1) / rows[1].norm(dim=1))
    if one.numel():
        assert found.largest == pytest.approx(float((one - other).abs().max()))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(SavesError, match="shapes must match"):
        DifferenceSource(TensorSource(torch.zeros(2)), TensorSource(torch.zeros(3)))


# -- its life ----------------------------------------------------------------------------------------


def test_the_state_is_small_and_has_a_table_to_fall_back_on(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(300)
    browser = show(store)
    assert len(json.dumps(browser.get_state())) <= 50_000
    bundle = browser._repr_mimebundle_()
    assert bundle is not None
    html = bundle[0]["text/html"]
    assert "<table" in html
    assert "<b>Pisa" not in html
    assert len(html) < 20_000


def test_prompts_are_text_whatever_is_in_them() -> None:
    assert shown_line("a b\n<i>·\x00", 50) == "a b⏎<i>·\\x00"
    assert shown_line("x" * 100, 10) == "xxxxxxxxx…"
    assert len(shown_line("\x00" * 100, 10)) == 10
    assert shown_line("שלום עולם", 50).strip("\u2068\u2069") == "שלום עולם"


def test_a_browser_that_nobody_looks_at_keeps_no_store(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(2)
    browser = show(store)
    page = Page(browser)
    page.tell(kinds.HERE)
    number = number_of(page, "hidden")
    page.one(kinds.OPEN, number=number)
    page.tell(kinds.GONE)
    watched = weakref.ref(store)
    del store
    gc.collect()
    assert watched() is None
    assert "store of these saves is gone" in page.one(kinds.OPEN, number=number)[kinds.ERROR]
    assert browser.selected is None
    assert "<div" in browser.fallback()


def test_closing_lets_go_of_everything() -> None:
    store = some_store(2)
    browser = SavesBrowser(store)
    page = Page(browser)
    page.tell(kinds.HERE)
    page.one(kinds.OPEN, number=number_of(page, "hidden"))
    pair = [row[0] for row in page_of(page, words="probe")["rows"]][:2]
    page.ask(kinds.COMPARE, numbers=pair)
    browser.close()
    watched = weakref.ref(store)
    del store
    gc.collect()
    assert watched() is None
    assert browser.selected is None


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(CellUsageError, match="a store of saves can be browsed, and this is list"):
        SavesBrowser([])  # type: ignore[arg-type]


def test_unknown_columns_are_answered_with_an_error(show: Callable[..., SavesBrowser]) -> None:
    page = Page(show(some_store(1)))
    assert "no column" in page.ask(kinds.PAGE, first=0, count=1, sort="nope")[0][0][kinds.ERROR]


def test_browsers_of_one_store_share_its_rows_and_let_go_of_them(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(40)
    first, second = show(store), show(store)
    one, other = Page(first), Page(second)
    one.tell(kinds.HERE)
    other.tell(kinds.HERE)
    rows = page_of(one)["rows"]
    answer = other.ask(kinds.PAGE, first=0, count=MAX_ROWS)[-2][0]
    assert (answer["complete"], answer["rows"]) == (True, rows)  # at once: they were read
    watched = weakref.ref(first._index)
    one.tell(kinds.GONE)
    assert page_of(other)["rows"] == rows
    other.tell(kinds.GONE)
    gc.collect()
    assert watched() is None
    assert not {row[0] for row in rows} & {row[0] for row in page_of(one)["rows"]}


def test_the_first_rows_come_with_the_widget(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(200)
    browser = show(store)
    begun = browser.begun["rows"]
    assert 5 <= len(begun) <= 16
    assert len(json.dumps(browser.begun)) < 8_000
    assert page_of(Page(browser))["rows"][: len(begun)] == begun
    assert show(SavesStore()).begun == {}


def test_a_browser_of_some_requests_shows_and_counts_only_theirs(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(60)
    page = Page(show(store, requests=["r3", "r50", "gone"]))
    found = page_of(page)
    assert {row[2] for row in found["rows"]} == {"r3", "r50"}
    assert [row[2] for row in found["rows"]] == [
        x.request_id for x in store.labels() if x.request_id in ("r3", "r50")
    ]
    assert found["total"] == found["matched"] == len(store.labels("r3")) + len(store.labels("r50"))
    assert page_of(page, words="note")["matched"] == 2
    store.drop("r3")
    assert {row[2] for row in page_of(page)["rows"]} == {"r50"}


def test_what_is_opened_is_a_value_of_the_notebook(show: Callable[..., SavesBrowser]) -> None:
    store = some_store(3)
    browser = show(store)
    page = Page(browser)
    with pytest.raises(SavesError, match="no save is opened"):
        _ = browser.value
    page.one(kinds.OPEN, number=number_of(page, "steps[0]", "r1"))
    assert browser.value.equal(store.get("r1", "steps")[0])
    page.one(kinds.OPEN, number=number_of(page, "note", "r1"))
    assert browser.value == store.get("r1", "note")


def test_large_tensors_are_summed_last_and_give_way(
    show: Callable[..., SavesBrowser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnsight_lab.widgets.browser._LARGE_BYTES", 1000)
    store = SavesStore()
    store.put("r", [{"trace": {"large": torch.ones(100_000), "small": torch.ones(4)}}])
    browser = show(store)
    page = Page(browser)
    numbers = [number_of(page, "large"), number_of(page, "small")]
    assert set(page.ask(kinds.STATISTICS, numbers=numbers)[0][0]["statistics"]) == {str(numbers[1])}
    monkeypatch.setattr(type(browser._jobs), "awaited", property(lambda self: True))
    said = page.ask(kinds.STATISTICS, numbers=numbers[:1])
    assert "Reading the 400 kB of large" in said[0][0]["progress"]
    assert said[1][0]["statistics"] == {}
    monkeypatch.undo()
    found = page.ask(kinds.STATISTICS, numbers=numbers[:1])
    assert found[-2][0]["statistics"][str(numbers[0])][:2] == ["1", "1"]
