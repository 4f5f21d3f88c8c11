from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import PlotRefused
from nnsight_lab.lens.palette import contrast
from nnsight_lab.plots import compare, heatmap, lines, logit_lens, sweep
from nnsight_lab.plots.figure import MAX_BYTES
from nnsight_lab.plots.theme import ink
from tests.plots.fakes import fake_lens

TOKENS = ["<b>", " cat", "$x$", " cat", "\n", "a\u202eb"]


def words(figure: go.Figure) -> str:
    """The title and all notes, as they are read."""
    title = figure.layout.title
    return f"{title.text} {title.subtitle.text or ''}".replace("<br>", " ")


def size(figure: go.Figure) -> int:
    assert isinstance(figure, go.Figure)
    assert not isinstance(figure, go.FigureWidget if hasattr(go, "FigureWidget") else ())
    return max(len(json.dumps(figure._repr_mimebundle_())), len(figure.to_json()))


def test_the_namespace_is_there_and_its_figures_are_plain_figures() -> None:
    assert lab.plot.heatmap is heatmap
    assert "plot" in dir(lab)
    with pytest.raises(AttributeError, match="plots_"):
        lab.plots_  # type: ignore[attr-defined]
    for name in ("heatmap", "lines", "logit_lens", "compare", "sweep"):
        assert callable(getattr(lab.plot, name))


def test_a_heatmap_names_its_axes_and_hovers_with_exact_values() -> None:
    values = torch.randn(4, 6).to(torch.bfloat16)
    figure = heatmap(values, dims=("layer", "position"), tokens=TOKENS, token_ids=range(10, 16), title="<i>t")
    trace = figure.data[0]
    assert np.array_equal(np.asarray(trace.z), values.float().numpy())
    assert list(trace.x)[:2] == ["0  &lt;b&gt;  id 10", "1  ·cat  id 11"]
    assert len(set(trace.x)) == 6  # equal tokens keep places of their own
    assert trace.x[2] == "2  &#36;x&#36;  id 12"  # no formula
    assert trace.x[5] == "5  a\\u202eb  id 15"
    assert figure.layout.xaxis.ticktext == ("&lt;b&gt;", "·cat", "&#36;x&#36;", "·cat", "⏎", "a\\u202eb")
    assert "%{z:.9~g}" in trace.hovertemplate
    assert figure.layout.yaxis.title.text == "layer"
    assert figure.layout.xaxis.title.text == "position (token)"
    assert figure.layout.yaxis.range == (-0.5, 3.5)  # layers go upward
    assert words(figure) == "&lt;i&gt;t bfloat16 [4, 6]"
    assert trace.zmin == -trace.zmax


def test_ticks_stand_beside_their_places_so_that_the_hover_keeps_the_names() -> None:
    figure = heatmap(torch.zeros(2, 4_000), tokens=["a"] * 4_000)
    values = np.asarray(figure.layout.xaxis.tickvals, dtype=float)
    assert len(values) <= 64
    # plotly takes a ten-thousandth of the range for the same place
    assert (np.abs(values - np.rint(values)) > 4_000 / 10_000).all()


def test_tokens_are_put_on_the_side_that_they_fit() -> None:
    figure = heatmap(torch.zeros(6, 3), tokens=TOKENS)
    assert len(figure.data[0].y) == 6
    assert figure.layout.yaxis.title.text == "position (token)"
    with pytest.raises(PlotRefused, match="6 tokens fit neither side"):
        heatmap(torch.zeros(5, 3), tokens=TOKENS)


def test_gaps_are_marked_counted_and_said() -> None:
    values = torch.ones(3, 3)
    values[0, 0], values[1, 1], values[2, 2] = torch.nan, torch.inf, -torch.inf
    figure = heatmap(values, tokens=["a", "b", "c"])
    assert "1 NaN and 2 infinite, shown as gaps" in words(figure)
    heat, marks = figure.data
    assert int(np.isnan(np.asarray(heat.z)).sum()) == 3
    assert [text.rpartition("<br>")[2] for text in marks.text] == ["<b>NaN</b>", "<b>+inf</b>", "<b>−inf</b>"]
    assert list(marks.x) == list(heat.x)


def test_a_large_tensor_is_put_together_and_says_so() -> None:
    figure = heatmap(torch.ones(3_000, 4_000, dtype=torch.bfloat16))
    assert "each cell is the mean of 8 × 8 values" in words(figure)
    assert np.asarray(figure.data[0].z).size <= 250_000
    assert figure.data[0].x[1] == "8 to 15"
    assert "largest of 8 × 8" in words(heatmap(torch.ones(3_000, 4_000), aggregate="max"))
    assert "each cell" not in words(heatmap(torch.ones(500, 500)))
    with pytest.raises(PlotRefused, match="aggregate='median'"):
        heatmap([1], aggregate="median")


def test_a_logarithmic_heatmap_keeps_its_values_and_leaves_gaps_at_zero() -> None:
    figure = heatmap([[1e-3, 1.0, 0.0, -1.0]], scale="log")
    assert list(np.asarray(figure.data[0].z)[0][:2]) == [1e-3, 1.0]
    assert "2 cells at or below zero are gaps" in words(figure)
    assert figure.data[1].marker.colorbar.ticktext == ("0.001", "0.01", "0.1", "1")


@pytest.mark.parametrize(
    "values", [5, True, torch.tensor(2.0), [1, 2], torch.arange(3) == 1, torch.zeros(1, 1, 1)]
)
def test_small_values_are_drawn_too(values: Any) -> None:
    for figure in (heatmap(values), lines(values), compare(values, values)):
        assert size(figure) < 10_000


def test_whole_numbers_hover_whole_and_wide_ones_exactly() -> None:
    assert ":,d" in heatmap(torch.arange(4)).data[0].hovertemplate
    wide = heatmap(torch.tensor([2**40, 1]))
    assert list(np.asarray(wide.data[0].z)[0]) == [2**40, 1]


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_text_is_read_on_the_page_that_a_theme_is_for(theme: str) -> None:
    figure = heatmap([1, 2], theme=theme)
    pages = {"auto": ["#ffffff", "#111111"], "light": ["#ffffff"], "dark": ["#111111"]}[theme]
    # Between two pages no colour reaches 4.5 on both; 4 is far above the 3 that large text needs.
    assert all(contrast(ink(theme), page) >= (4 if theme == "auto" else 4.5) for page in pages)
    assert figure.layout.template.layout.font.color == ink(theme)
    assert figure.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    with pytest.raises(PlotRefused, match=r"theme='drak'.*'dark'"):
        heatmap([1], theme="drak")


@pytest.mark.parametrize(
    "figure",
    [
        lambda: heatmap(torch.randn(500, 500, dtype=torch.float64), scale="diverging"),
        lambda: heatmap(torch.randn(500, 500), tokens=["\u65e5\x00" * 20] * 500, token_ids=range(500)),
        lambda: heatmap(torch.randint(2**40, (500, 500))),
        lambda: heatmap(torch.randn(25, 10_000), tokens=["日本語<&>" * 9] * 10_000, token_ids=range(10_000)),
        lambda: heatmap(torch.randn(10**6), rows=["one"]),
        lambda: heatmap(torch.randn(10_000, 25), rows=["日本語<&>" * 9] * 10_000),
        lambda: lines(torch.randn(25, 10_000, dtype=torch.float64), tokens=["日本語<&>" * 9] * 10_000),
        lambda: lines(torch.randn(64, 10**5)),
        lambda: compare(torch.randn(500, 500), torch.randn(500, 500)),
        lambda: compare(torch.randn(20_000, 40), torch.randn(20_000, 40)),
        lambda: logit_lens(fake_lens(60, 500)),
        lambda: logit_lens(fake_lens(30, 200, top_tokens=[[["日本語<&>" * 9] * 5] * 200] * 30)),
        lambda: sweep(range(3_000), {str(n): torch.randn(3, 3_000) for n in range(5)}),
    ],
    ids=range(13),
)
def test_a_figure_takes_little_of_a_saved_notebook(figure: Any) -> None:
    assert size(figure()) <= MAX_BYTES


def test_arrays_are_packed_rather_than_written_out() -> None:
    packed = json.loads(heatmap(torch.randn(10, 10)).to_json())["data"][0]["z"]
    assert packed["dtype"] == "f4"
    assert packed["shape"] == "10, 10"


def test_lines_are_named_and_count_their_gaps() -> None:
    values = torch.arange(12.0).reshape(2, 6).to(torch.float16)
    values[0, 1] = torch.nan
    figure = lines(values, tokens=TOKENS, rows=["early", "late"], value_name="norm")
    assert [trace.name for trace in figure.data] == ["early", "late"]
    assert figure.data[0].connectgaps is False
    assert "1 NaN, shown as a gap" in words(figure)
    assert figure.layout.xaxis.title.text == "position (token)"
    assert figure.layout.yaxis.title.text == "norm"
    long = lines(torch.ones(3, 200_000))
    assert "each point is the mean of 64 values" in words(long)
    with pytest.raises(PlotRefused, match="65 lines"):
        lines(torch.zeros(65, 3))
    assert "2 at or below zero are gaps" in words(lines([1.0, 0.0, -1.0], log=True))


def test_a_comparison_tells_length_from_direction() -> None:
    a = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = a.clone()
    b[1] *= 2
    b[2] = -a[2]
    b[3] = 0
    figure = compare(a, b, names=("plain", "steered"), dims=("position", "hidden"))
    heat, cosine, ratio = figure.data
    assert np.allclose(np.asarray(heat.z), (b - a).numpy(), rtol=0, atol=0)
    assert np.asarray(cosine.x)[[0, 1, 2]] == pytest.approx([1, 1, -1])
    assert np.isnan(np.asarray(cosine.x)[3])
    assert np.asarray(ratio.x) == pytest.approx([1, 2, 1, 0, 1])
    row, column = np.unravel_index(int((b - a).abs().argmax()), a.shape)
    assert f"largest difference {(b - a).abs().max():.6g} at row {row}, column {column}" in words(figure)
    assert "1 row without a cosine" in words(figure)


def test_a_comparison_of_equal_values_says_so_and_other_shapes_are_refused() -> None:
    a = torch.tensor([[1.0, torch.nan, torch.inf]])
    assert "all values are equal" in words(compare(a, a.clone()))
    assert "all values are equal" in words(compare(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)))
    with pytest.raises(PlotRefused, match=r"a has shape \[2, 3\] and b \[3, 2\]"):
        compare(torch.zeros(2, 3), torch.zeros(3, 2))


def test_a_comparison_of_huge_and_of_tiny_values_has_cosines() -> None:
    for scale in (1e-300, 1e300):
        a = torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale
        figure = compare(a, a * 2)
        assert list(figure.data[1].x) == pytest.approx([1.0])
        assert list(figure.data[2].x) == pytest.approx([2.0])


def test_a_comparison_of_many_rows_finds_the_one_that_differs() -> None:
    a = torch.ones(20_000, 40)
    b = a.clone()
    b[777, :20] = -1
    figure = compare(a, b)
    assert len(figure.data[1].x) == len(np.asarray(figure.data[0].z)) == 5_000 / 2
    assert "each cell is the mean of 8 × 1 values" in words(figure)
    assert "largest difference 2 at row 777, column 0, least cosine 0 at row 777" in words(figure)


def test_integers_that_float64_cannot_tell_apart_are_not_equal() -> None:
    figure = compare(torch.tensor([2**53]), torch.tensor([2**53 + 1]))
    assert "all values are equal" not in words(figure)


def test_a_comparison_reads_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(50, 7, dtype=torch.float64), torch.randn(50, 7, dtype=torch.float64)
    whole = compare(a, b)
    monkeypatch.setattr(sys.modules["nnsight_lab.plots.compare"], "_CHUNK", 30)
    assert compare(a, b).to_json() == whole.to_json()


def test_values_that_float32_has_no_size_for_stay_what_they_are() -> None:
    tiny = torch.full((500, 500), 1e-300, dtype=torch.float64)
    for values in (tiny, 1 / tiny):
        figure = heatmap(values)
        assert np.asarray(figure.data[0].z).ravel()[0] == pytest.approx(float(values[0, 0]))
        assert "each cell is the mean of 1 × 2 values" in words(figure)
        assert size(figure) <= MAX_BYTES
    assert "values to 7 digits" in words(heatmap(torch.rand(500, 500, dtype=torch.float64)))


def test_complex_values_are_compared_as_complex() -> None:
    figure = compare(torch.tensor([[1j]]), torch.tensor([[-1j]]))
    assert np.asarray(figure.data[0].z).tolist() == [[2.0]]
    assert list(figure.data[1].x) == [-1.0]


def test_a_sweep_has_the_mean_and_its_band() -> None:
    repeats = np.array([[1.0, 10.0], [3.0, 30.0]])
    figure = sweep([10, 1], {"a": repeats}, log_x=True, x_name="strength", value_name="loss")
    band, line = figure.data
    assert list(line.x) == [1, 10]  # in order
    assert list(line.y) == [20, 2]
    deviation = repeats.std(axis=0, ddof=1)
    assert np.asarray(line.customdata)[1] == pytest.approx([2 - deviation[0], 2 + deviation[0]])
    assert len(band.x) == 4
    assert figure.layout.xaxis.type == "log"
    assert "mean of 2 repeats, band: standard deviation" in words(figure)
    assert figure.layout.xaxis.title.text == "strength"


def test_a_sweep_takes_errors_texts_and_gaps() -> None:
    given = sweep([1, 2], [5.0, 6.0], error=[0.5, 0.25])
    assert np.asarray(given.data[1].customdata).tolist() == [[4.5, 5.5], [5.75, 6.25]]
    assert "band: the error as given" in words(given)
    assert sweep(["low", "high"], [1, 2]).layout.xaxis.type == "category"
    gaps = sweep([1, 2, 3], [[1.0, np.nan, 3.0], [2.0, np.nan, 5.0]])
    assert "2 NaN, shown as gaps" in words(gaps)
    assert len(gaps.data) == 3  # a band on each side of the gap, and the line
    ranged = sweep([1, 2], [[1.0, 4.0], [3.0, np.nan]], band="range")
    assert np.asarray(ranged.data[-1].customdata).tolist() == [[1, 3], [4, 4]]
    assert len(sweep([1, 2], [[1, 2], [3, 4]], band="none").data) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (([1, 2], [1, 2, 3]), {}, r"shape \[3\] for 2 settings"),
        (([1, 2], np.zeros((2, 3))), {}, "pass its .T"),
        (([0, 1], [1, 2]), {"log_x": True}, "settings above zero"),
        (([1, float("nan")], [1, 2]), {}, "NaN or infinite"),
        (([1, 2], [1, 2]), {"band": "ci"}, "band='ci'"),
        (([1, 2], [1, 2]), {"error": [1]}, r"error has shape \[1\]"),
        (([1, 2], {"a": [1, 2]}), {"error": {"b": [1, 2]}}, "does not have: b"),
        ((["a", "a"], [1, 2]), {}, "one name"),
        ((range(20_000), range(20_000)), {}, "draw fewer"),
        (([1], {}), {}, "0 lines"),
    ],
)
def test_sweeps_that_do_not_fit_are_refused(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlotRefused, match=said):
        sweep(*arguments, **options)


def test_a_logit_lens_shows_tokens_in_its_cells() -> None:
    lens = fake_lens(4, 6)
    figure = logit_lens(lens)
    heat, texts = figure.data
    assert np.asarray(heat.z) == pytest.approx(lens.top_probabilities[:, :, 0].float().numpy())
    assert (heat.zmin, heat.zmax) == (0, 1)
    assert len(texts.text) == 24
    assert "<b>" not in texts.text  # the token of that name is escaped
    best = lens.top_ids[3, 5, 0]
    assert f"id {best}" in heat.hovertext[3][5]
    assert heat.hovertext[3][5].count("<br>") == 6
    assert figure.layout.yaxis.title.text == "layer"
    assert np.asarray(logit_lens(lens, colour="entropy").data[0].z) == pytest.approx(lens.entropy.numpy())
    ranked = logit_lens(lens, colour="rank").data[0]
    assert np.asarray(ranked.z) == pytest.approx(lens.final_ranks.numpy() + 1)


def test_text_in_a_cell_is_read_on_its_colour() -> None:
    figure = logit_lens(fake_lens(8, 10))
    from nnsight_lab.plots.colours import colouring

    colours = colouring(np.asarray(figure.data[0].z), "sequential", span=(0, 1))
    for text, value in zip(figure.data[1].textfont.color, np.asarray(figure.data[0].z).ravel(), strict=True):
        assert contrast(text, colours.of(float(value))) >= 4.5


def test_a_long_logit_lens_shows_its_end_and_says_so() -> None:
    figure = logit_lens(fake_lens(60, 500))
    assert "positions 400 to 499 of 500 are shown" in words(figure)
    assert len(figure.data) == 1
    chosen = logit_lens(fake_lens(6, 500), positions=[3, -1])
    assert "2 of 500 positions are shown" in words(chosen)
    assert chosen.data[0].x[1].startswith("499")
    assert "positions 10 to 19 of 500" in words(logit_lens(fake_lens(6, 500), positions=slice(10, 20)))


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"entropy": torch.zeros(2, 2)}, {}, r"entropy has shape \[2, 2\] for 6 layers and 8 positions"),
        ({"layers": ()}, {}, "no layers"),
        ({"top_ids": torch.zeros(6, 8)}, {}, "top_ids has shape"),
        ({}, {"colour": "logit"}, "colour='logit'"),
        ({}, {"positions": [8]}, "no position 8"),
        ({}, {"positions": slice(8, None)}, "chooses none"),
    ],
)
def test_a_logit_lens_whose_parts_do_not_fit_is_refused(
    changed: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlotRefused, match=said):
        logit_lens(dataclasses.replace(fake_lens(), **changed), **options)


def test_a_list_of_lenses_or_something_else_is_refused_in_one_line() -> None:
    with pytest.raises(
        PlotRefused, match=r"a list of 2 lenses; a figure shows one: lab\.plot\.logit_lens\(lenses"
    ):
        logit_lens([fake_lens(), fake_lens()])
    with pytest.raises(PlotRefused, match="this is str, and a logit lens is what"):
        logit_lens("a prompt")


def test_a_logit_lens_takes_numpy_arrays() -> None:
    lens = fake_lens()
    arrays = {
        name: getattr(lens, name).float().numpy() for name in ("top_ids", "top_probabilities", "entropy")
    }
    assert len(logit_lens(fake_lens(**arrays)).data) == 2


def test_a_lens_of_some_positions_is_drawn_at_those_positions():
    parts = {"tokens": tuple("abcdefgh"), "token_ids": tuple(range(10, 18))}
    lens = dataclasses.replace(fake_lens(4, 3), positions=(2, 5, 7), **parts)
    figure = logit_lens(lens)
    words = json.dumps(figure.to_plotly_json(), default=str, ensure_ascii=False)
    assert all(f"id {token_id}" in words or str(token_id) in words for token_id in (12, 15, 17))
    with pytest.raises(PlotRefused, match="position 7, and a prompt of 4 tokens"):
        logit_lens(dataclasses.replace(lens, tokens=tuple("abcd"), token_ids=tuple(range(4))))


def test_a_lens_of_a_stream_alone_is_drawn_without_tokens_and_has_no_ranks_without_the_last_layer():
    lens = fake_lens(4, 3, tokens=(), token_ids=(), final_ranks=None)
    assert logit_lens(lens).data[0].z is not None
    with pytest.raises(PlotRefused, match="no ranks"):
        logit_lens(lens, colour="rank")
