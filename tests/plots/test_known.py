"""A saved value's axes are named by its label, where that is certain, and by nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import PlotRefused, RequestRefused
from nnsight_lab.lens.sequence import Tokens, tokens_of
from nnsight_lab.plots import compare, heatmap, lines
from nnsight_lab.plots.token_strip import token_strip
from nnsight_lab.saves.store import SavesStore
from tests import models
from tests.plots.fakes import fake_lens

PROMPT = "a cat"  # five tokens: the tests' tokenizer has one for each byte
HIDDEN, LAYERS, VOCABULARY = 7, 4, 258


class LiveEngine:
    """What a plot asks of an engine: its store, its tokenizer and its model's sizes; nothing runs on it."""

    def __init__(self, model: str = "demo") -> None:
        self.saves = SavesStore(budget_bytes=10**7)
        self.tokenizer = models.tokenizer()
        self.config = SimpleNamespace(model=model)
        self.model = SimpleNamespace(
            config=SimpleNamespace(
                num_hidden_layers=LAYERS,
                hidden_size=HIDDEN,
                vocab_size=VOCABULARY,
                get_text_config=self._text,
            )
        )

    def _text(self) -> Any:
        return self.model.config

    def put(self, request: str, prompt: str = PROMPT, model: str = "demo", **values: tuple[Any, str]) -> None:
        """Keep values under their names, each with the module it was read at."""
        common = {"engine": "main", "model": model, "prompt": prompt}
        paths = {("trace", name): path for name, (_, path) in values.items()}
        saved = {"trace": {name: value for name, (value, _) in values.items()}}
        self.saves.put(request, [saved], common, module_paths=paths)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LiveEngine:
    engine = LiveEngine()
    monkeypatch.setitem(vars(lab), "engines", lambda: {"main": engine})
    monkeypatch.setitem(vars(lab), "get_engine", lambda name=None: engine)
    return engine


def sides(figure: go.Figure) -> tuple[str, str]:
    return figure.layout.yaxis.title.text, figure.layout.xaxis.title.text


def test_a_stream_has_positions_with_their_tokens_and_its_width(engine: LiveEngine) -> None:
    stream = torch.randn(5, HIDDEN).to(torch.bfloat16)
    engine.put("r", stream=(stream, "model.layers[2].output"))
    (label,) = engine.saves.labels("r")
    for given in (label, stream):  # by label, and as it came home
        figure = heatmap(given)
        assert sides(figure) == ("position (token)", "hidden")
        assert figure.layout.yaxis.ticktext == ("a", "·", "c", "a", "t")
        assert figure.data[0].y[2].startswith("2  c  id ")
        assert figure.layout.title.text == "stream"
        assert figure.layout.title.subtitle.text.startswith("bfloat16 [5, 7]; read at model.layers[2].output")


def test_what_was_computed_of_a_saved_value_has_no_label(engine: LiveEngine) -> None:
    stream = torch.randn(5, HIDDEN)
    engine.put("r", stream=(stream, "model.layers[2].output"))
    for other in (stream.clone(), stream[:], stream[1:], stream.T, stream + 1, stream.double()):
        named = sides(heatmap(other))
        assert named == (("position (token)", "hidden") if other.equal(stream) and _same(other, stream) else
                         ("row", "column"))  # fmt: skip


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((5,), ("row", "position (token)")),
        ((HIDDEN,), ("row", "hidden")),
        ((3, 5), ("row", "position (token)")),
        ((5, 3), ("position (token)", "column")),
        ((5, VOCABULARY), ("position (token)", "token id")),
        ((1, VOCABULARY), ("row", "token id")),
        ((3, HIDDEN), ("row", "hidden")),
        ((5, 5), ("row", "column")),  # which of the two?
        ((3, 2), ("row", "column")),
    ],
)
def test_an_axis_is_named_by_its_length_where_one_reading_fits(
    engine: LiveEngine, shape: tuple[int, ...], named: tuple[str, str]
) -> None:
    engine.put("r", value=(torch.randn(shape), ""))
    assert sides(heatmap(engine.saves.labels("r")[0])) == named


def test_a_prompt_as_long_as_the_stream_is_wide_names_only_what_is_sure(engine: LiveEngine) -> None:
    engine.put("r", prompt="x" * HIDDEN, value=(torch.randn(HIDDEN), ""), square=(torch.randn(7, 7), ""))
    assert sides(heatmap(engine.saves.labels("r", name="value")[0])) == ("row", "column")
    assert sides(heatmap(engine.saves.labels("r", name="square")[0])) == ("row", "hidden")


def test_a_list_over_all_layers_goes_upward_by_layer(engine: LiveEngine) -> None:
    ends = [torch.randn(HIDDEN) for _ in range(LAYERS)]
    engine.put("r", ends=(ends, "model.layers[*].output"), some=(ends[:3], "model.layers[*].output"))
    figure = heatmap(engine.saves.labels("r", name="ends"))
    assert sides(figure) == ("layer", "hidden")
    assert figure.layout.yaxis.range == (-0.5, 3.5)
    assert sides(heatmap(ends)) == ("layer", "hidden")
    # Which three of the four layers, the label does not say.
    assert sides(heatmap(engine.saves.labels("r", name="some"))) == ("row", "hidden")


def test_values_of_layers_that_are_written_out_are_called_by_their_numbers(engine: LiveEngine) -> None:
    engine.put(
        "r",
        early=(torch.randn(5), "model.layers[1].output"),
        late=(torch.randn(5), "transformer.h[3].output"),
    )
    figure = lines(engine.saves.labels("r"))
    assert [trace.name for trace in figure.data] == ["layer 1", "layer 3"]
    assert figure.layout.xaxis.title.text == "position (token)"


def test_a_list_over_steps_is_called_so_and_one_of_unknown_reads_is_not(engine: LiveEngine) -> None:
    steps = [torch.randn(1, HIDDEN) for _ in range(3)]
    engine.put("r", steps=(steps, "model.layers[2].output"), made=([step * 2 for step in steps], ""))
    assert sides(heatmap(engine.saves.labels("r", name="steps"))) == ("step", "hidden")
    assert sides(heatmap(engine.saves.labels("r", name="made"))) == ("row", "hidden")


def test_values_of_several_requests_are_called_by_their_prompts(engine: LiveEngine) -> None:
    for request, prompt in (("one", "a cat"), ("two", "a dog")):
        engine.put(request, prompt=prompt, end=(torch.randn(HIDDEN), "model.layers[2].output"))
    figure = lines(engine.saves.labels(name="end"))
    assert [trace.name for trace in figure.data] == ["a dog", "a cat"]
    assert sides(heatmap(engine.saves.labels(name="end"))) == ("prompt", "hidden")


def test_what_is_said_counts_more_than_what_a_label_says(engine: LiveEngine) -> None:
    stream = torch.randn(5, HIDDEN)
    engine.put("r", stream=(stream, "model.layers[2].output"))
    assert sides(heatmap(stream, dims=("token", "width"))) == ("token (token)", "width")
    figure = heatmap(stream, tokens=list("vwxyz"))
    assert figure.layout.yaxis.ticktext == ("v", "w", "x", "y", "z")
    assert heatmap(stream, title="mine").layout.title.text == "mine"


def test_a_comparison_is_named_too(engine: LiveEngine) -> None:
    one, other = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    engine.put("r", one=(one, "model.layers[2].output"), other=(other, "model.layers[2].output"))
    figure = compare(one, other)
    assert sides(figure) == ("position (token)", "hidden")
    assert "read at model.layers[2].output" in figure.layout.title.subtitle.text.replace("<br>", " ")


def test_a_comparison_of_two_prompts_has_the_tokens_of_neither(engine: LiveEngine) -> None:
    one, other = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    engine.put("r", prompt="a cat", stream=(one, "model.layers[2].output"))
    engine.put("s", prompt="a dog", stream=(other, "model.layers[2].output"))
    assert sides(compare(one, other)) == ("position", "hidden")


def test_long_names_of_a_comparison_lie_over_nothing() -> None:
    names = ("the Eiffel Tower", "the Colosseum")
    figure = compare(torch.ones(5, HIDDEN), torch.zeros(5, HIDDEN), names=names)
    # A panel is 100 pixels wide: what is longer than a word stands along the colours, or in the notes.
    assert figure.data[0].colorbar.title.side == "right"
    assert (figure.layout.xaxis2.title.text, figure.layout.xaxis3.title.text) == ("cosine", "norm ratio")
    said = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "norm ratio: |the Colosseum| / |the Eiffel Tower|" in said


def test_the_tokens_of_another_model_are_not_taken_for_this_ones(engine: LiveEngine) -> None:
    engine.put("r", model="another", stream=(torch.randn(5, HIDDEN), "model.layers[2].output"))
    assert sides(heatmap(engine.saves.labels("r")[0])) == ("row", "column")


def test_the_label_of_a_tensor_is_found_by_its_memory(engine: LiveEngine) -> None:
    store = engine.saves
    stream, twin = torch.randn(5, HIDDEN), torch.zeros(0, HIDDEN)
    engine.put("r", stream=(stream, ""), steps=([stream * 2, stream * 3], ""), empty=(twin, ""))
    assert store.label_of(stream) == store.labels("r", name="stream")[0]
    step = store.get("r", "steps")[1]
    found = store.label_of(step)
    assert found is not None
    assert (found.name, found.path) == ("steps", "[1]")
    for other in (stream.clone(), twin, stream.view(torch.int32), stream[1:], torch.empty(5, device="meta")):
        assert store.label_of(other) is None
    store.spill()
    assert store.label_of(stream) is None


# -- tokens ------------------------------------------------------------------------------------


def test_tokens_are_texts_with_their_ids(engine: LiveEngine) -> None:
    tokens = lab.tokens("a cat")
    assert tokens == ("a", " ", "c", "a", "t")
    assert list(tokens.ids) == engine.tokenizer("a cat").input_ids
    assert repr(tokens) == "Tokens(['a', ' ', 'c', 'a', 't'])"
    assert lab.tokens(tokens.ids) == lab.tokens(torch.tensor(tokens.ids)) == lab.tokens(tokens) == tokens
    engine.put("r", stream=(torch.randn(5, HIDDEN), ""))
    assert lab.tokens(engine.saves.labels("r")[0]) == tokens


def test_tokens_of_what_ran_are_those_of_its_prompt_or_of_what_it_made() -> None:
    tokenizer = models.tokenizer()
    prompt, made = tokenizer("ab").input_ids, tokenizer("cd").input_ids
    output = SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=made)])
    trace = SimpleNamespace(prompts=["ab"], outputs=[output])
    assert tokens_of(tokenizer, output) == tokens_of(tokenizer, trace) == ("a", "b")
    assert tokens_of(tokenizer, output.outputs[0]) == ("c", "d")
    with pytest.raises(RequestRefused, match="it has not ended, or it failed"):
        tokens_of(tokenizer, SimpleNamespace(prompts=["ab"], outputs=[]))


@pytest.mark.parametrize("what", [3.5, None, {"a": 1}, ["a", "b"], [1.5], [True], b"ab", object()])
def test_what_has_no_tokens_is_refused_in_one_line(what: Any) -> None:
    with pytest.raises(RequestRefused, match="has no tokens: give a text"):
        tokens_of(models.tokenizer(), what)


def test_a_plot_takes_tokens_from_whatever_has_them() -> None:
    tokens = Tokens(["a", " b"], [7, 8])
    for figure in (heatmap(torch.zeros(3, 2), tokens=tokens), lines(torch.zeros(3, 2), tokens=tokens)):
        assert figure.layout.xaxis.title.text == "position (token)"
        assert figure.layout.xaxis.ticktext == ("a", "·b")
    assert "id 8" in heatmap(torch.zeros(3, 2), tokens=tokens).data[0].x[1]
    assert token_strip(tokens, [1, 2]).token_ids == (7, 8)
    lens = fake_lens(layers=3, positions=4)
    figure = heatmap(lens.entropy, dims=("layer", "position"), tokens=lens)
    assert len(figure.layout.xaxis.ticktext) == 4
    chosen = fake_lens(layers=3, positions=2, tokens=("a", "b", "c", "d"), token_ids=(1, 2, 3, 4))
    figure = heatmap(torch.zeros(3, 2), tokens=fake_lens(positions=2, tokens=("a", "b"), token_ids=(1, 2)))
    assert figure.layout.xaxis.ticktext == ("a", "b")
    assert heatmap(torch.zeros(3, 2), tokens=chosen).layout.xaxis.ticktext == ("a", "b")


def test_queries_and_keys_both_have_the_tokens() -> None:
    attention = SimpleNamespace(
        patterns=torch.zeros(1, 1, 2, 2), tokens=("a", " b"), token_ids=(7, 8), queries=(0, 1)
    )
    figure = heatmap(torch.zeros(2, 2), tokens=attention)
    assert sides(figure) == ("query (token)", "key (token)")
    assert figure.layout.yaxis.ticktext == figure.layout.xaxis.ticktext == ("a", "·b")
    last = SimpleNamespace(**{**vars(attention), "queries": (1,)})
    figure = heatmap(torch.zeros(1, 2), tokens=last)
    assert sides(figure) == ("query", "key (token)")
    assert list(figure.data[0].y) == ["1"]
    assert sides(heatmap(torch.zeros(2, 2), tokens=["a", "b"])) == ("row", "position (token)")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("ab", "one text: lab.tokens"),
        ([7, 8], "lab.tokens\\(ids\\)"),
        (3, "int has no tokens"),
        (fake_lens(positions=2, tokens=(), token_ids=()), "only a stream"),
        (["a"], "1 tokens"),
    ],
)
def test_tokens_that_are_none_are_refused_in_one_line(tokens: Any, said: str) -> None:
    with pytest.raises(PlotRefused, match=said):
        heatmap(torch.zeros(3, 2), tokens=tokens)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (fake_lens(), "lab.plot.logit_lens\\(lens\\)"),
        (SimpleNamespace(patterns=1), "attention.pattern\\(layer, head\\)"),
        ({"hidden": torch.zeros(2)}, "as \\['hidden'\\]"),
        (object(), "label of a saved value"),
    ],
)
def test_what_is_more_than_one_matrix_says_what_to_draw_instead(values: Any, said: str) -> None:
    with pytest.raises(PlotRefused, match=said):
        heatmap(values)


@pytest.mark.parametrize(
    ("given", "said"), [("a text", "this is str"), ([fake_lens()], "a figure shows one")]
)
def test_what_is_no_lens_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(PlotRefused, match=said):
        lab.plot.logit_lens(given)
