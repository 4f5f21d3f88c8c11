"""The line below a cell that says what it saved: small, without a store or a tensor, and one a cell."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import kinds
from nnsight_lab.widgets.base import STATIC
from nnsight_lab.widgets.browser import SavesBrowser
from nnsight_lab.widgets.cell_saves import CellSaves, Strips
from tests.widgets.comms import MockComm, Page, mock_comms

pytestmark = pytest.mark.skipif(
    not (STATIC / "strip.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def strips() -> Iterator[Strips]:
    strips = Strips()
    yield strips
    strips.close()


def stored(requests: int = 3, names: int = 2) -> tuple[SavesStore, list[str]]:
    store = SavesStore()
    ids = [f"r{number}" for number in range(requests)]
    for name in ids:
        trace: dict[str, Any] = {f"h{n}": torch.zeros(4, 8) for n in range(names)}
        trace["steps"] = [torch.zeros(2), torch.zeros(2)]
        store.put(name, [{"probe": {"norm": 1.5}, "trace": trace}], {"prompt": "<b>x</b>"})
    store.put("other", [{"trace": {"mine": torch.zeros(3)}}])
    return store, ids


def test_it_says_names_and_sizes_and_fits_in_a_few_kilobytes(strips: Strips) -> None:
    store, ids = stored()
    strip = CellSaves(store, ids)
    strips.add(strip, "cell")
    assert strip.plain() == (
        "Saved: h0 float32 [4, 8] 128 B; h1 float32 [4, 8] 128 B; steps float32 [2] × 2 16 B; "
        "probe: norm float; of each of 3 requests"
    )
    bundle = strip._repr_mimebundle_()
    assert bundle is not None
    assert bundle[0]["text/plain"] == strip.plain()
    assert bundle[0]["text/html"].count("<tr>") == 9  # a head and eight rows
    assert "mine" not in bundle[0]["text/html"]
    assert "<b>x" not in bundle[0]["text/html"]
    assert len(json.dumps(strip.get_state())) < 10_000


def test_a_name_opens_the_browser_at_its_save_and_closing_leaves_nothing(strips: Strips) -> None:
    store, ids = stored()
    opened: list[SavesBrowser] = []
    strip = CellSaves(store, ids, name="lab.saves()", opened=opened.append)
    strips.add(strip, "cell")
    page = Page(strip)
    page.tell(kinds.HERE)
    before = len(MockComm.open_ones)
    answer = page.one(kinds.OPEN, item=1)
    (browser,) = opened
    assert answer["model"] == browser.model_id
    inside = Page(browser)
    rows = inside.ask(kinds.PAGE, first=0, count=50)[-2][0]
    assert (rows["total"], rows["complete"]) == (15, True)
    assert {row[2] for row in rows["rows"]} == set(ids)
    chosen = next(row for row in rows["rows"] if row[0] == browser.opening)
    assert chosen[2:5] == ["r2", "trace", "h1"]
    assert page.one(kinds.OPEN, item=None)["model"] == browser.model_id  # the same one
    page.one(kinds.CLOSE)
    assert len(MockComm.open_ones) == before
    page.one(kinds.OPEN, item=None)
    page.tell(kinds.GONE)
    assert len(MockComm.open_ones) == before


def test_it_keeps_neither_store_nor_tensors_and_says_what_is_gone(strips: Strips) -> None:
    store, ids = stored()
    strip = CellSaves(store, ids)
    strips.add(strip, "cell")
    page = Page(strip)
    page.tell(kinds.HERE)
    for name in ids:
        store.drop(name)
    assert "dropped: run it again" in page.one(kinds.OPEN, item=None)[kinds.ERROR]
    watched = weakref.ref(store)
    del store
    gc.collect()
    assert watched() is None
    assert "store of these saves is gone" in page.one(kinds.OPEN, item=None)[kinds.ERROR]
    assert "Saved: h0" in strip.fallback()


def test_a_cell_that_runs_again_replaces_its_line(strips: Strips) -> None:
    store, ids = stored()

    def add(cell: str) -> CellSaves:
        strip = CellSaves(store, ids[:1])
        strips.add(strip, cell)
        return strip

    first, other, again = add("cell-1"), add("cell-2"), add("cell-1")
    assert [one._closed for one in (first, other, again)] == [True, False, False]
    assert len(MockComm.open_ones) == 2 * 2  # each with its layout


def test_what_many_names_are_left_out_is_said(strips: Strips) -> None:
    store, ids = stored(1, names=20)
    strip = CellSaves(store, ids)
    strips.add(strip, "cell")
    assert len(strip.names) == 12
    assert strip.words == "10 more names"
