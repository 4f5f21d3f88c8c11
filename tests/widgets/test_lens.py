"""The kernel's side of the logit lens's view, over a mock comm: what a page gets is what the lens holds."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_lab.errors import CellUsageError
from nnsight_lab.lens import LogitLens
from nnsight_lab.lens.shown import Several, bundle_of
from nnsight_lab.widgets import LensView, kinds
from nnsight_lab.widgets.base import MAX_BUFFER_BYTES, STATIC
from nnsight_lab.widgets.lens import MAX_CELLS, measures
from nnsight_lab.widgets.prompts import MAX_LISTED
from nnsight_lab.widgets.sequences import sequence_key
from tests.widgets.comms import MockComm, Page, mock_comms

pytestmark = pytest.mark.skipif(
    not (STATIC / "lens.js").exists(), reason="the widgets are not built: scripts/setup.sh widgets"
)

#: What a token can be: white space, markup, control and zero-width characters, nothing, and too long.
HOSTILE = (" a", "<b>x</b>", "\n", "\x1b[31m", "\u200b", "", "مرحبا", "<script>alert(1)</script>", "y" * 3000)


@pytest.fixture(autouse=True)
def comms() -> Iterator[type[MockComm]]:
    with mock_comms() as kind:
        yield kind


@pytest.fixture
def show() -> Iterator[Callable[..., LensView]]:
    """Makes views, and closes them."""
    made: list[LensView] = []

    def make(*args: Any, **kwargs: Any) -> LensView:
        made.append(LensView(*args, **kwargs))
        return made[-1]

    yield make
    for view in made:
        view.close()


def some_lens(layers: int = 4, positions: int = 6, *, target: bool = True, seed: int = 0) -> LogitLens:
    """A lens whose every number is another."""
    random = torch.Generator().manual_seed(seed)
    shape = (layers, positions)
    ids = torch.randint(0, len(HOSTILE), (*shape, 3), generator=random)
    shares = torch.rand((*shape, 3), generator=random).sort(-1, descending=True).values / 3
    tokens = tuple(number % len(HOSTILE) for number in range(positions))
    return LogitLens(
        layers=tuple(range(layers)),
        positions=tuple(range(positions)),
        token_ids=tokens,
        tokens=tuple(HOSTILE[token] for token in tokens),
        top_ids=ids,
        top_probabilities=shares,
        entropy=torch.rand(shape, generator=random) * 5,
        final_ids=ids[-1, :, 0],
        final_ranks=torch.randint(0, 900, shape, generator=random),
        final_probabilities=torch.rand(shape, generator=random),
        target_id=2 if target else None,
        target_ranks=torch.randint(0, 900, shape, generator=random) if target else None,
        target_probabilities=torch.rand(shape, generator=random) if target else None,
        texts=dict(enumerate(HOSTILE)),
    )


def cells(page: Page, rows: tuple[int, int], columns: tuple[int, int], prompt: int = 0) -> Any:
    ((content, buffers),) = page.ask(kinds.CELLS, prompt=prompt, rows=rows, columns=columns)
    ids, *numbers = buffers
    return content, np.frombuffer(ids, np.int32), [np.frombuffer(one, np.float32) for one in numbers]


def test_cells_are_those_of_the_lens(show: Callable[..., LensView]) -> None:
    lens = some_lens()
    page = Page(show(lens))
    window = (slice(1, 3), slice(2, 6))
    content, ids, numbers = cells(page, (1, 3), (2, 6))
    assert ids.tolist() == lens.top_ids[..., 0][window].flatten().tolist()
    assert [one.name for one in measures(lens)] == [
        "probability", "entropy", "final_rank", "final_probability", "target_rank", "target_probability"
    ]  # fmt: skip
    for one, found in zip(measures(lens), numbers, strict=True):
        assert found.tolist() == one.values[window].float().flatten().tolist(), one.name
    assert content["places"] == [2, 3, 4, 5]
    assert content["heads"][:2] == ["⏎", "\\x1b[31m"]


def test_a_page_never_gets_a_text_that_cannot_be_seen(show: Callable[..., LensView]) -> None:
    lens = some_lens(6, 30)
    page = Page(show(lens))
    texts = cells(page, (0, 6), (0, 30))[0]["texts"]
    assert texts["0"] == "·a"
    assert texts["4"] == "\\u200b"
    assert all(len(text) <= 30 and text.isprintable() for text in texts.values() if "\u2068" not in text)
    for row in range(6):
        cell = page.one(kinds.CELL, prompt=0, row=row, column=1)
        assert all("\n" not in text and "\x1b" not in text for text, _, _ in cell["top"])
        assert all(len(text) <= 2000 for text, _, _ in cell["top"])
    assert cell["token"] == "<b>x</b>"


def test_one_cell_has_all_that_is_known_of_it(show: Callable[..., LensView]) -> None:
    lens = some_lens()
    cell = Page(show(lens)).one(kinds.CELL, prompt=0, row=1, column=3)
    assert (cell["layer"], cell["position"], cell["token_id"]) == (1, 3, 3)
    assert [token for _, token, _ in cell["top"]] == lens.top_ids[1, 3].tolist()
    assert [share for _, _, share in cell["top"]] == lens.top_probabilities[1, 3].tolist()
    says, target = cell["told"]
    assert (says["id"], says["rank"]) == (int(lens.final_ids[3]), int(lens.final_ranks[1, 3]))
    assert target["text"] == "⏎"
    assert target["probability"] == pytest.approx(float(lens.target_probabilities[1, 3]))


def test_what_a_lens_does_not_have_is_not_offered(show: Callable[..., LensView]) -> None:
    lens = some_lens(target=False)
    bare = LogitLens(
        **{
            **vars(lens),
            "token_ids": (),
            "tokens": (),
            "final_ids": None,
            "final_ranks": None,
            "final_probabilities": None,
        }
    )
    page = Page(show(bare))
    told = page.one(kinds.PROMPT, prompt=0)
    assert [one["name"] for one in told["measures"]] == ["probability", "entropy"]
    assert told["sequence"] == ""
    assert cells(page, (0, 1), (0, 2))[0]["heads"] == ["", ""]
    assert page.one(kinds.CELL, prompt=0, row=0, column=0)["told"] == []
    with pytest.raises(CellUsageError, match="colour='final_rank' is not one of 'probability', 'entropy'"):
        LensView(bare, colour="final_rank")


def test_numbers_that_are_none_are_none(show: Callable[..., LensView]) -> None:
    lens = some_lens()
    lens.entropy[0, 0] = lens.top_probabilities[0, 0, 0] = math.nan
    lens.final_ranks[0, 0] = -1
    page = Page(show(lens))
    cell = page.one(kinds.CELL, prompt=0, row=0, column=0)
    assert cell["entropy"] is None
    assert cell["top"][0][2] is None
    assert cell["told"][0]["rank"] == -1
    json.dumps(page.one(kinds.PROMPT, prompt=0), allow_nan=False)


def test_a_lens_of_a_hundred_layers_and_a_thousand_positions_is_small_on_the_page(
    show: Callable[..., LensView],
) -> None:
    lens = some_lens(100, 1000)
    view = show(Several([lens] * 300))
    state = {name: value for name, value in view.get_state().items() if name not in ("_esm", "_css")}
    assert len(json.dumps(state)) <= 50_000
    page = Page(view)
    content, ids, numbers = cells(page, (0, 32), (64, 128))
    assert len(ids) == 32 * 64
    assert all(len(one.tobytes()) < MAX_BUFFER_BYTES for one in (ids, *numbers))
    assert len(json.dumps(content)) < 20_000
    assert len(view.fallback()) < 1_500_000


def test_the_module_is_small() -> None:
    import gzip

    for name in ("lens.js", "lens.css"):
        assert len(gzip.compress((STATIC / name).read_bytes())) <= 60_000


def test_several_prompts_are_listed_and_each_has_its_own_cells(show: Callable[..., LensView]) -> None:
    lenses = Several([some_lens(seed=1), some_lens(positions=9, seed=2)])
    view = show(lenses)
    assert view.count == 2
    assert view.prompts[0].startswith(" a<b>x</b>⏎")
    page = Page(view)
    told = page.one(kinds.PROMPT, prompt=1)
    assert told["positions"] == 9
    assert told["sequence"] == sequence_key(lenses[1].token_ids)
    assert cells(page, (0, 1), (0, 9), prompt=1)[1].tolist() == lenses[1].top_ids[0, :, 0].tolist()
    assert show([some_lens()] * (MAX_LISTED + 1)).prompts == []


@pytest.mark.parametrize(
    "question",
    [
        (kinds.PROMPT, {"prompt": 1}),
        (kinds.CELLS, {"prompt": 0, "rows": [0, 1], "columns": [6, 9]}),
        (kinds.CELLS, {"prompt": 0, "rows": [2, 1], "columns": [0, 1]}),
        (kinds.CELL, {"prompt": 0, "row": 4, "column": 0}),
        (kinds.CELL, {"prompt": 0, "row": -1, "column": 0}),
    ],
)
def test_a_question_about_what_is_not_there_is_answered_with_one_line(
    show: Callable[..., LensView], question: tuple[str, dict[str, Any]]
) -> None:
    kind, content = question
    error = Page(show(some_lens())).one(kind, **content)[kinds.ERROR]
    assert error
    assert "\n" not in error
    assert "Error:" not in error


def test_a_page_cannot_ask_for_everything_at_once(show: Callable[..., LensView]) -> None:
    page = Page(show(some_lens(100, 1000)))
    assert MAX_CELLS < 100_000
    assert (
        "too many for a page"
        in page.one(kinds.CELLS, prompt=0, rows=[0, 100], columns=[0, 1000])[kinds.ERROR]
    )


def test_something_else_than_a_lens_is_one_line() -> None:
    for given, line in (
        ([], "an empty list has no LogitLens to show"),
        ([some_lens(), 3], "item 1 of the list is int; expected LogitLens, or a list of them"),
        ("text", "item 0 of the list is str"),
        (3, "this is int"),
    ):
        with pytest.raises(CellUsageError, match=line):
            LensView(given)


def test_a_view_that_nobody_looks_at_holds_nothing(show: Callable[..., LensView]) -> None:
    lens = some_lens()
    alive = weakref.ref(lens)
    view = show(lens)
    page = Page(view)
    page.tell(kinds.HERE)
    page.tell(kinds.GONE)
    page.tell(kinds.HERE)  # reopened: somebody has it still
    assert page.one(kinds.CELL, prompt=0, row=0, column=0)["layer"] == 0
    page.tell(kinds.GONE)
    del lens
    gc.collect()
    assert alive() is None
    assert "Run the cell that made it again" in page.one(kinds.CELL, prompt=0, row=0, column=0)[kinds.ERROR]
    assert "LogitLens 4 layers" in view.fallback()


# -- how a result finds its view -----------------------------------------------------------------------------


class _Shell:
    kernel = object()


@pytest.fixture
def in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", _Shell)


def test_in_a_kernel_a_result_shows_its_view_with_the_table_beside_it(in_a_kernel: None) -> None:
    from ipywidgets.widgets import widget as ipywidgets_widget

    for result in (some_lens(), Several([some_lens(), some_lens()])):
        data, _ = result._repr_mimebundle_()
        model = data["application/vnd.jupyter.widget-view+json"]["model_id"]
        assert "<table" in data["text/html"]
        assert "LogitLens 4 layers x 6 positions" in data["text/plain"]
        ipywidgets_widget._instances[model].close()
    assert Several()._repr_mimebundle_() is None


def test_a_view_that_cannot_be_made_leaves_the_table(
    in_a_kernel: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert bundle_of(some_lens(), "nnsight_lab.widgets.nowhere:View") is None
    assert "is shown as a table: its view could not be made" in caplog.text


def test_a_script_loads_no_widgets() -> None:
    code = (
        "import sys, torch; from nnsight_lab.lens.attention import Attention\n"
        "one = Attention(torch.ones(1, 1, 1, 1), (0,), (0,), (0,), (1,), ('a',))\n"
        "assert one._repr_mimebundle_() is None and 'img' in one._repr_html_()\n"
        "print(*(name for name in ('anywidget', 'ipywidgets', 'IPython') if name in sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""
