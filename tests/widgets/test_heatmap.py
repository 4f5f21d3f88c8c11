"""The kernel's side of a heatmap, over a mock comm: tiny state, answers by id, nothing left when closed."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import math
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.errors import CellUsageError, SavesError, WidgetError
from nnsight_lab.saves.store import SavesStore
from nnsight_lab.widgets import base, kinds, spans
from nnsight_lab.widgets.base import STATIC, Answer, LabWidget, answers, long
from nnsight_lab.widgets.heatmap import Heatmap
from nnsight_lab.widgets.jobs import Jobs
from tests.waiting import until
from tests.widgets.comms import MockComm, Page, mock_comms

ROOT = Path(__file__).parents[2]
SEEN = {"leads": [], "how": "mean", "scale": "auto", "clip": "robust"}

pytestmark = pytest.mark.skipif(
    not (STATIC / "heatmap.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def show() -> Iterator[Callable[..., Heatmap]]:
    """Makes heatmaps, and closes them."""
    made: list[Heatmap] = []

    def make(*args: Any, **kwargs: Any) -> Heatmap:
        made.append(Heatmap(*args, **kwargs))
        return made[-1]

    yield make
    for heatmap in made:
        heatmap.close()


def tiles(
    page: Page, level: tuple[int, int], places: list[list[int]], **more: Any
) -> dict[tuple[int, int], Any]:
    """The codes ``[row, column]`` of tiles by place."""
    found = {}
    for content, buffers in page.ask(kinds.TILES, **{**SEEN, "level": level, "tiles": places, **more}):
        for (row, column, height, width), buffer in zip(content.get("tiles", []), buffers, strict=False):
            found[row, column] = np.frombuffer(buffer, dtype=np.uint8).reshape(height, width)
    return found


def test_the_state_is_tiny_however_large_the_tensor(show: Callable[..., Heatmap]) -> None:
    heatmap = show(torch.randn(3, 2000, 1000), rows=[f"token {n}" for n in range(2000)])
    heatmap._repr_mimebundle_()
    state = heatmap.get_state()
    told = {name: value for name, value in state.items() if name not in ("_esm", "_css")}
    assert len(json.dumps(told)) <= 50_000
    assert state["shape"] == [3, 2000, 1000]
    assert heatmap.poster.startswith("data:image/png;base64,")


def test_a_module_is_small() -> None:
    for path in STATIC.glob("*.js"):
        assert len(gzip.compress(path.read_bytes())) <= 60_000, path.name


def test_the_two_sides_speak_the_same_words() -> None:
    text = (ROOT / "labextension/src/widgets/kinds.ts").read_text()
    mirrored = dict(re.findall(r"export const (\w+) = '(\w+)'", text))
    assert mirrored == {name: value for name, value in vars(kinds).items() if name.isupper()}
    palette = (ROOT / "labextension/src/widgets/palette.ts").read_text()
    for name in ("TOP", "CODE_NAN", "CODE_POSINF", "CODE_NEGINF"):
        assert f"export const {name} = {getattr(spans, name)};" in palette


def test_tiles_are_bytes_and_only_what_was_asked(show: Callable[..., Heatmap]) -> None:
    heatmap = show(torch.arange(600 * 300, dtype=torch.float32).reshape(600, 300))
    page = Page(heatmap)
    found = tiles(page, (0, 0), [[0, 0], [2, 1]])
    assert {place: codes.shape for place, codes in found.items()} == {(0, 0): (256, 256), (2, 1): (88, 44)}
    assert found[0, 0][0, 0] == 0
    assert found[2, 1][-1, -1] == spans.TOP


def test_special_values_are_drawn_apart_and_counted(show: Callable[..., Heatmap]) -> None:
    tensor = torch.randn(40, 40)
    tensor[1, 2], tensor[3, 4], tensor[5, 6], tensor[7, 7] = math.nan, math.inf, -math.inf, math.nan
    page = Page(show(tensor))
    codes = tiles(page, (0, 0), [[0, 0]])[0, 0]
    assert (codes[1, 2], codes[3, 4], codes[5, 6]) == (spans.CODE_NAN, spans.CODE_POSINF, spans.CODE_NEGINF)
    assert (codes > spans.TOP).sum() == 4
    answers_ = page.ask(kinds.TILES, **SEEN, level=(0, 0), tiles=[], count=True)
    assert answers_[0][0]["special"] == [2, 1, 1, 1.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.full((20, 30), math.nan),
        torch.randn(20, 30) > 0,
        torch.arange(600).reshape(20, 30),
        torch.full((20, 30), complex(3, 4)),
        torch.randn(20, 30).to(torch.float8_e4m3fn),
        torch.randn(20, 30).to(torch.bfloat16),
        torch.randn(2, 3, 20, 30, dtype=torch.float64),
        torch.zeros(1, 1),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_every_kind_of_tensor_has_its_picture(tensor: torch.Tensor, show: Callable[..., Heatmap]) -> None:
    heatmap = show(tensor)
    page = Page(heatmap)
    leads = [0] * len(tensor.shape[:-2])
    codes = tiles(page, (0, 0), [[0, 0]], leads=leads)[0, 0]
    assert codes.shape == tuple((1, 1, *tensor.shape)[-2:])
    text = page.one(kinds.VALUE, leads=leads, row=0, column=0)["text"]
    value = tensor.reshape(-1)[0].item()
    if isinstance(value, float) and math.isnan(value):
        assert (codes == spans.CODE_NAN).all()
        assert text == "NaN"
    else:
        assert (
            type(value)(text) == pytest.approx(value, rel=1e-6)
            if not isinstance(value, bool)
            else text == str(value)
        )
    data, _ = heatmap._repr_mimebundle_()  # type: ignore[misc]
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert str(tensor.dtype).removeprefix("torch.") in data["text/html"]


def test_the_fallback_reads_without_a_widget(show: Callable[..., Heatmap]) -> None:
    small = show([[1, 2], [3, 4]], rows=["a", "<b>"], name="w")
    assert "<td" in small.fallback()
    assert "&lt;b&gt;" in small.fallback()
    large = show(torch.randn(3000, 2000), name="h").fallback()
    assert "data:image/png" in large
    assert "A sample: 1 of" in large
    middle = show(torch.randn(300, 700)).fallback()
    assert "Shown 1 of 8 values: mean of 2 × 4" in middle
    assert "empty" in show(torch.zeros(0, 5)).fallback()
    assert "data:image/png" in show(torch.randn(5000)).fallback()
    assert len(large) < 90_000


def test_a_line_has_its_mean_and_its_ends(show: Callable[..., Heatmap]) -> None:
    line = torch.sin(torch.arange(100_000) / 500.0)
    line[777] = math.nan
    page = Page(show(line))
    (content, buffers), _ = page.ask(kinds.LINE, level=6, first=0, last=2000)
    assert content["line"] == [0, 1563]
    low, high, mean = (np.frombuffer(buffer, dtype=np.float64) for buffer in buffers[:3])
    assert (low <= mean).all()
    assert (mean <= high).all()
    block = line[64 * 100 : 64 * 101]
    np.testing.assert_allclose(mean[100], block.mean().item(), rtol=1e-5)
    flags = np.frombuffer(buffers[3], dtype=np.uint8)
    assert np.nonzero(flags)[0].tolist() == [777 // 64]


def test_values_are_exact_and_blocks_say_what_they_hold(show: Callable[..., Heatmap]) -> None:
    tensor = torch.zeros(64, 64, dtype=torch.float32)
    tensor[5, 6] = 0.1
    tensor[8, 8] = math.nan
    page = Page(show(tensor, axes=["token", "hidden"]))
    assert page.one(kinds.VALUE, leads=[], row=5, column=6) | {kinds.ANSWER: 0} == {
        kinds.ANSWER: 0,
        kinds.LAST: True,
        "text": "0.1",
        "where": "token 5, hidden 6",
    }
    block = page.one(kinds.VALUE, leads=[], level=[2, 3], row=1, column=0)
    assert block["text"] == "mean 0.003125, from 0 to 0.1"
    assert block["where"] == "token 4 to 7, hidden 0 to 7"
    assert (
        page.one(kinds.VALUE, leads=[], level=[2, 2], row=2, column=2)["text"] == "mean 0, from 0 to 0, 1 NaN"
    )


def test_the_detail_has_neighbours_and_an_expression(show: Callable[..., Heatmap]) -> None:
    tensor = torch.arange(2 * 10 * 10, dtype=torch.int64).reshape(2, 10, 10)
    heatmap = show(tensor, name="hidden", rows=[" Paris"] * 10)
    assert heatmap.picked is None
    page = Page(heatmap)
    detail = page.one(kinds.DETAIL, leads=[1], row=0, column=9)
    assert detail["expression"] == "hidden[1, 0, 9]"
    assert tensor[heatmap.picked] == 109
    assert detail["near"][detail["at"][0]][detail["at"][1]] == "109"
    assert detail["rows"][0] == "0 ' Paris'"
    far = page.one(kinds.DETAIL, leads=[1], level=[1, 1], row=2, column=1)
    assert far["expression"] == "hidden[1, 4:6, 2:4]"
    assert eval(far["expression"], {"hidden": tensor}).shape == (2, 2)


def test_labels_stay_in_the_kernel_until_they_are_read(show: Callable[..., Heatmap]) -> None:
    heatmap = show(torch.zeros(100_000, 2), rows=range(100_000))
    assert heatmap.labelled == [True, False]
    answer = Page(heatmap).one(kinds.LABELS, axis=0, first=99_990, last=200_000)
    assert answer["labels"] == [str(n) for n in range(99_990, 100_000)]


def test_a_saved_value_is_drawn_by_its_label(show: Callable[..., Heatmap]) -> None:
    store = SavesStore()
    store.put("r", [{"trace": {"h": [torch.ones(3, 3), torch.eye(3)]}}])
    heatmap = show(store, store.labels(step=1)[0])
    page = Page(heatmap)
    assert heatmap.name == "h[1]"
    assert page.one(kinds.VALUE, leads=[], row=1, column=1)["text"] == "1.0"
    store.drop("r")
    assert "Nothing is kept" in page.one(kinds.VALUE, leads=[], row=1, column=1)[kinds.ERROR]


def test_a_wrong_question_is_answered_with_what_is_wrong(
    show: Callable[..., Heatmap], caplog: pytest.LogCaptureFixture
) -> None:
    page = Page(show(torch.zeros(3, 3)))
    with caplog.at_level(logging.WARNING, "nnsight_lab.widgets"):
        assert "outside" in page.one(kinds.VALUE, leads=[], row=9, column=0)[kinds.ERROR]
        assert "KeyError" in page.one(kinds.VALUE, leads=[])[kinds.ERROR]
        assert "does not know" in page.one("nonsense")[kinds.ERROR]
        assert "IndexError" in page.one(kinds.TILES, **SEEN, level=(0, 0), tiles=[[9, 9]])[kinds.ERROR]
        page.tell(kinds.FAILED, error="TypeError in the browser")
        page.comm.handle_msg(
            {"content": {"data": {"method": "custom", "content": "nonsense"}}, "buffers": []}
        )
    assert "TypeError in the browser" in caplog.text
    assert "Traceback" in caplog.text


def test_mistakes_are_refused_where_they_are_made() -> None:
    for arguments in (
        {"how": "mode"},
        {"scale": "lin"},
        {"clip": "all"},
        {"clip": (2, 1)},
        {"clip": (0, 1), "scale": "log"},
        {"rows": ["a"]},
        {"axes": ["a", "b", "c"]},
    ):
        with pytest.raises(CellUsageError):
            Heatmap(torch.zeros(3, 3), **arguments)
    with pytest.raises(SavesError):
        Heatmap("text")
    with pytest.raises(CellUsageError, match="Did you mean 'height'"):
        Sized(heigth=3)


class Sized(LabWidget):
    """Has a trait."""

    module = "heatmap"
    height = base.traitlets.Int()


def test_nothing_is_left_when_it_is_closed() -> None:
    tensor = torch.randn(2000, 2000)
    heatmap = Heatmap(tensor)
    page = Page(heatmap)
    page.tell(kinds.HERE)
    tiles(page, (3, 3), [[0, 0]])
    assert heatmap._tiles.cached_bytes > 0
    page.tell(kinds.GONE)
    assert heatmap._tiles.cached_bytes == 0
    page.tell(kinds.HERE)
    gone = weakref.ref(heatmap.source._held)  # type: ignore[union-attr]
    del tensor
    assert gone() is not None
    jobs = heatmap._jobs
    heatmap.close()
    heatmap.close()
    until(lambda: not jobs.alive, 5, "its thread")
    assert gone() is None
    assert heatmap.source is None
    assert "closed" in heatmap._repr_mimebundle_()[0]["text/plain"] if heatmap._repr_mimebundle_ else True
    sent = len(page.comm.sent)
    heatmap._heard({kinds.KIND: kinds.VALUE, kinds.ASK: "x"}, [])
    assert len(page.comm.sent) == sent
    layout_free = weakref.ref(heatmap)
    del heatmap, page
    gc.collect()
    assert layout_free() is None


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_tensor_that_only_a_closed_view_would_hold_is_let_go(
    show: Callable[..., Heatmap], kind: str
) -> None:
    mine = torch.randn(50, 50) if kind == "tensor" else np.random.default_rng(0).random((50, 50))
    first = str(mine[0, 0].item())
    heatmap = show(mine)
    page = Page(heatmap)

    def value() -> Any:
        return page.one(kinds.VALUE, leads=[], row=0, column=0)

    page.tell(kinds.HERE)
    page.tell(kinds.GONE)
    assert float(value()["text"]) == pytest.approx(float(first))
    page.tell(kinds.HERE)
    del mine
    assert float(value()["text"]) == pytest.approx(float(first))
    page.tell(kinds.GONE)
    assert "Run the cell" in value()[kinds.ERROR]
    page.tell(kinds.HERE)
    assert "Run the cell" in value()[kinds.ERROR]


def test_numbers_in_lists_stay(show: Callable[..., Heatmap]) -> None:
    page = Page(show([[1.5, 2.0]]))
    page.tell(kinds.HERE)
    page.tell(kinds.GONE)
    assert page.one(kinds.VALUE, leads=[], row=0, column=0)["text"] == "1.5"


class Slow(LabWidget):
    """Answers when it is let."""

    module = "heatmap"

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.seen: list[int] = []
        super().__init__()

    @answers("slow")
    @long
    def slow(self, question: Any, stopped: Callable[[], bool]) -> Iterator[Answer]:
        for part in range(3):
            self.let.acquire(timeout=10)
            self.seen.append(question["number"])
            yield Answer({"part": part})

    @answers("large")
    def large(self, question: Any) -> Answer:
        return Answer({}, (bytes(3 * 2**20),))


def test_a_newer_question_takes_the_place_of_the_older() -> None:
    widget = Slow()
    page, other = Page(widget), Page(widget)
    first = page.begin("slow", number=1)
    second = page.begin("slow", number=2)
    third = page.begin("slow", number=3)
    elsewhere = other.begin("slow", number=4)
    widget.let.release(20)
    assert page.finish(second) == [({kinds.ANSWER: second, kinds.LAST: True, kinds.DROPPED: True}, [])]
    assert page.finish(first)[-1][0].get(kinds.DROPPED) is True
    assert [content.get("part") for content, _ in page.finish(third)] == [0, 1, 2, None]
    assert len(other.finish(elsewhere)) == 4
    assert widget.seen.count(1) <= 1
    assert "too large" in page.one("large")[kinds.ERROR]
    widget.close()
    until(lambda: not widget._jobs.alive, 5, "its thread")


def test_a_thread_with_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnsight_lab.widgets.jobs._IDLE_S", 0.05)
    jobs = Jobs("test jobs")
    done: list[str] = []
    jobs.submit("a", lambda stopped: done.append("work"), lambda: done.append("dropped"))
    until(lambda: not jobs.alive, 5, "the end of the thread")
    jobs.submit("a", lambda stopped: done.append("again"), lambda: done.append("dropped"))
    until(lambda: done == ["work", "again"], 5)
    jobs.close()
    jobs.submit("a", lambda stopped: done.append("late"), lambda: done.append("dropped"))
    assert done == ["work", "again", "dropped"]
    until(lambda: not jobs.alive, 5, "the end of the thread")


def test_what_was_not_built_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(base, "STATIC", tmp_path)
    base._static.cache_clear()
    with pytest.raises(WidgetError, match=r"setup\.sh widgets"):
        Heatmap(torch.zeros(2, 2))
    base._static.cache_clear()


def test_a_tensor_is_not_touched_by_looking_at_it(show: Callable[..., Heatmap]) -> None:
    tensor = torch.randn(300, 300)
    before = tensor.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = Page(show(tensor))
        tiles(page, (1, 1), [[0, 0]])
    assert torch.equal(tensor, before)
