"""Looking at a model: several prompts, sync and async, beside edits, interrupted, and asked wrongly."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.engine import looking, questions
from nnsight_lab.errors import EngineNotStarted, Interrupted, LensRefused, RequestRefused
from nnsight_lab.lens.anatomy import Anatomy
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.keys import LOOK
from nnsight_lab.worker.looking import _agrees
from tests import models
from tests.waiting import CAT, FOX, GREEDY, TOWER, freed, interrupt, when_running

#: The same arithmetic in a batch of another size.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def same(one, other):
    assert (one.layers, one.positions, one.token_ids) == (other.layers, other.positions, other.token_ids)
    torch.testing.assert_close(one.top_probabilities, other.top_probabilities, **CLOSE)
    torch.testing.assert_close(one.entropy, other.entropy, **CLOSE)
    assert torch.equal(one.final_ids, other.final_ids)


# -- several prompts, both twins ---------------------------------------------------------------------------


def test_a_list_of_prompts_gives_a_list_in_its_order(engine):
    ids = engine.tokenizer(CAT).input_ids
    found = engine.logit_lens([TOWER, ids, FOX], target=["x", 7, "y"])
    assert [lens.token_ids for lens in found] == [
        tuple(engine.tokenizer(prompt).input_ids) for prompt in (TOWER, CAT, FOX)
    ]
    assert [lens.target for lens in found][::2] == ["x", "y"]
    assert found[1].target_id == 7
    for prompt, lens in zip((TOWER, CAT, FOX), found, strict=True):
        same(lens, engine.logit_lens(prompt))
    patterns = engine.attention([TOWER, CAT], layers=2)
    assert [p.patterns.shape for p in patterns] == [(1, 4, 16, 16), (1, 4, 4, 4)]


def test_the_async_twins_give_the_same(engine):
    async def both():
        return await asyncio.gather(engine.alogit_lens(TOWER), lab.alogit_lens([CAT, FOX]))

    one, several = asyncio.run(both())
    same(one, engine.logit_lens(TOWER))
    same(several[1], lab.logit_lens(FOX))
    pattern = asyncio.run(lab.aattention(TOWER, layers=[1]))
    torch.testing.assert_close(pattern.patterns, lab.attention(TOWER, layers=[1]).patterns, **CLOSE)

    async def of_stream():
        return await engine.alogit_lens(residual=torch.randn(3, models.HIDDEN))

    assert asyncio.run(of_stream()).positions == (0, 1, 2)


def test_a_lens_is_drawn_whole_or_in_part(engine):
    for options in ({}, {"positions": [-1, 3], "layers": [0, -1], "top_k": 3}):
        lens = engine.logit_lens(TOWER, **options)
        for colour in ("probability", "entropy", "rank"):
            figure = lab.plot.logit_lens(lens, colour=colour)
            assert len(figure.data) >= 1
    stream = torch.zeros(3, models.HIDDEN)
    lab.plot.logit_lens(engine.logit_lens(residual=stream))


def test_layers_and_positions_come_in_the_callers_order(engine):
    whole = engine.logit_lens(TOWER)
    some = engine.logit_lens(TOWER, layers=[-1, 0], positions=[5, -1, 0], top_k=2)
    assert (some.layers, some.positions) == ((3, 0), (5, 15, 0))
    wanted = whole.top_probabilities[[3, 0]][:, [5, 15, 0]][..., :2]
    torch.testing.assert_close(some.top_probabilities, wanted, **CLOSE)
    # The final token is the last layer's, whether that was asked for or not.
    first = engine.logit_lens(TOWER, layers=0)
    assert torch.equal(first.final_ids, whole.final_ids)
    assert torch.equal(first.final_ranks[0], whole.final_ranks[0])


def test_what_is_too_much_for_one_call_goes_in_several(engine, monkeypatch):
    together = engine.logit_lens([TOWER, CAT, FOX])
    streams = torch.randn(models.LAYERS, 11, models.HIDDEN)
    whole = engine.logit_lens(residual=streams)
    monkeypatch.setattr(looking, "_WAVE_BYTES", 1)
    monkeypatch.setattr(looking, "_MESSAGE_BYTES", 1)
    calls = []
    submit = type(engine).submit
    monkeypatch.setattr(
        type(engine), "submit", lambda self, call: (calls.append(call), submit(self, call))[1]
    )
    for one, other in zip(engine.logit_lens([TOWER, CAT, FOX]), together, strict=True):
        same(one, other)
    assert [len(call.requests) for call in calls] == [1, 1, 1]
    same(engine.logit_lens(residual=streams), whole)


def test_a_streams_layers_are_those_that_were_named(engine):
    streams = torch.randn(2, 5, models.HIDDEN)
    found = engine.logit_lens(residual=streams, layers=[3, 1], positions=[-1, 0], target="x")
    assert (found.layers, found.positions) == ((3, 1), (4, 0))
    for row, layer in enumerate(found.layers):
        alone = engine.logit_lens(residual=streams[row], layers=layer, positions=[4, 0])
        torch.testing.assert_close(found.top_probabilities[row], alone.top_probabilities[0], **CLOSE)
    assert torch.equal(found.final_ids, found.top_ids[0, :, 0])
    assert found.final_ranks[0].tolist() == [0, 0]


def test_a_stream_may_stand_where_a_prompt_does(engine):
    streams = torch.randn(models.LAYERS, 5, models.HIDDEN)
    for given in (streams, list(streams)):
        same(engine.logit_lens(given), engine.logit_lens(residual=streams))
    one, other = engine.logit_lens(streams[1]), engine.logit_lens(residual=streams[1])
    torch.testing.assert_close(one.top_probabilities, other.top_probabilities, **CLOSE)
    assert one.final_ids is None
    ids = torch.tensor(engine.tokenizer(TOWER).input_ids)
    same(engine.logit_lens(ids), engine.logit_lens(TOWER))


def test_a_block_can_read_logits_and_patterns_itself(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        query, key, _ = model.model.layers[1].self_attn.attn.inputs[0]
        pattern = lab.lens.attention_pattern(query.view(-1, 4, 32), key.view(-1, 2, 32)).save()
        ids = lab.lens.read_logits(model.logits, top_k=3).ids.save()
    torch.testing.assert_close(pattern, engine.attention(TOWER, layers=1).patterns[0], **CLOSE)
    assert torch.equal(ids[0], engine.logit_lens(TOWER, top_k=3).top_ids[-1, -1])


# -- beside edits ------------------------------------------------------------------------------------------


def test_a_lens_sees_what_an_edit_does_and_can_leave_it_out(engine):
    plain = engine.logit_lens(TOWER)
    model = engine.model
    with engine.edit("double") as (tracer, edit):
        model.model.layers[1].output[0][:] *= 4
        model.logits[:] = 0
    edited = engine.logit_lens(TOWER)  # logits that an edit changed are no measure of the lens
    same(engine.logit_lens(TOWER, edits=[]), plain)
    torch.testing.assert_close(edited.entropy[0], plain.entropy[0], **CLOSE)
    assert (edited.entropy[1:] - plain.entropy[1:]).abs().max() > 0.01
    assert not torch.allclose(
        engine.attention(TOWER, layers=2).patterns, engine.attention(TOWER, layers=2, edits=[]).patterns
    )


# -- interrupted -------------------------------------------------------------------------------------------


def test_an_interrupt_aborts_the_look_and_keeps_the_engine(engine):
    prompts = [[5 + i % 200] * 900 for i in range(150)]
    running = when_running(engine, interrupt)
    with pytest.raises(Interrupted):
        engine.logit_lens(prompts)
    running()
    freed(engine)
    same(engine.logit_lens(TOWER), engine.logit_lens(TOWER))


def kept(engine):
    """How many looks the worker still keeps something of."""
    return int(decode(engine.rpc(LOOK, encode({"drop": []}))[0])["kept"])


@pytest.mark.parametrize("look", ["logit_lens", "attention"])
def test_an_interrupt_between_two_pieces_gives_the_engine_back_at_once(engine, monkeypatch, look):
    prompt = [5 + i % 200 for i in range(900)]
    getattr(engine, look)(TOWER)  # what is built once is built
    monkeypatch.setattr(looking, "_MESSAGE_BYTES", 1)  # 900 pieces of a millisecond, or 14,400
    shares = []

    def pressed(share):
        shares.append(share)
        if len(shares) == 20:
            interrupt()

    with pytest.raises(Interrupted):
        getattr(engine, look)(prompt, progress=pressed)
    began = time.monotonic()
    engine.generate(CAT, **GREEDY)
    assert time.monotonic() - began < 2
    assert len(shares) < 40
    assert shares == sorted(shares)
    assert 0 < shares[-1] < 0.5
    assert kept(engine) == 0
    freed(engine)


def test_a_look_leaves_nothing_among_the_saves(engine):
    before = list(engine.saves.labels())
    engine.logit_lens([TOWER, CAT])
    engine.attention(TOWER)
    assert list(engine.saves.labels()) == before


def test_nothing_is_kept_of_a_look_that_is_done_or_was_refused(engine, monkeypatch):
    shares = []
    engine.logit_lens([TOWER, CAT], progress=shares.append)
    engine.attention([TOWER, CAT], progress=shares.append)
    assert shares.count(1.0) == 2
    assert kept(engine) == 0
    wrong = Anatomy("model.layers", "model.layers.0.input_layernorm")
    monkeypatch.setattr(questions, "anatomy", lambda model, count: wrong)
    with pytest.raises(LensRefused):
        engine.logit_lens([TOWER, CAT])
    assert kept(engine) == 0


def test_patterns_are_the_same_in_pieces_of_any_size(engine, monkeypatch):
    asked = {"layers": [3, 0, 1], "heads": [2, 0, 3], "queries": [7, 1, 15, 2]}
    whole = engine.attention(TOWER, **asked)
    for most in (4, 4 * 16 * 3, 4 * 16 * 4, 4 * 16 * 4 * 2, 4 * 16 * 4 * 3 * 2):
        monkeypatch.setattr(looking, "_MESSAGE_BYTES", most)
        found = engine.attention(TOWER, **asked)
        torch.testing.assert_close(found.patterns, whole.patterns, **CLOSE)
    every = engine.attention(TOWER)
    torch.testing.assert_close(
        whole.patterns, every.patterns[[3, 0, 1]][:, [2, 0, 3]][:, :, [7, 1, 15, 2]], **CLOSE
    )


def test_the_last_is_named_in_every_way_and_everywhere(engine):
    for last in ("last", -1, [-1], slice(-1, None), 3):
        assert engine.logit_lens(TOWER, layers=last).layers == (3,)
        assert engine.attention(TOWER, layers=last).layers == (3,)
    for last in ("last", -1, [-1], 15):
        assert engine.logit_lens(TOWER, positions=last).positions == (15,)
        assert engine.attention(TOWER, queries=last, layers=0).queries == (15,)


# -- what cannot be right ----------------------------------------------------------------------------------


def test_a_lens_that_does_not_give_the_models_logits_is_refused(engine, monkeypatch):
    wrong = Anatomy("model.layers", "model.layers.0.input_layernorm")
    monkeypatch.setattr(questions, "anatomy", lambda model, count: wrong)
    with pytest.raises(LensRefused, match="the lens does not give the model's own logits on this model"):
        engine.logit_lens(TOWER)
    freed(engine)


def test_two_ways_to_one_value_may_round_differently_and_no_more():
    value = torch.randn(3, 8)
    _agrees(value * (1 + 1e-5), value, torch.float32, "it", "lens")
    _agrees(value * 1.02, value, torch.bfloat16, "it", "lens")
    with pytest.raises(LensRefused, match=r"the lens does not give it on this model \(off by 2% of its"):
        _agrees(value * 1.02, value, torch.float32, "it", "lens")
    with pytest.raises(LensRefused, match=r"\(3, 8\)"):
        _agrees(value, value[:2], torch.float32, "it", "lens")


@pytest.mark.parametrize(
    ("parallel", "look", "why"),
    [
        ({"pipeline_parallel": 2}, "attention", "this engine has pipeline stages"),
        ({"tensor_parallel": 2}, "attention", "spread over tensor-parallel ranks"),
    ],
)
def test_engines_whose_model_is_in_pieces_are_refused(engine, monkeypatch, parallel, look, why):
    found = replace(engine.facts(), **parallel)
    monkeypatch.setattr(engine, "facts", lambda: found)
    with pytest.raises(LensRefused, match=why):
        getattr(engine, look)(TOWER)


HIDDEN = models.HIDDEN


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"layers": 4}, "There is no layer 4: the model has 4 layers."),
        ({"layers": [0, -5]}, "There is no layer -5: the model has 4 layers."),
        ({"layers": []}, "No layer was asked for: the model has 4 layers."),
        ({"layers": [1, -3]}, "A layer was asked for twice: [1, 1]."),
        ({"layers": "first"}, 'layers: \'first\' is neither "all", "last" nor numbers.'),
        ({"layers": True}, "True is not the number of a layer."),
        ({"positions": slice(3, 3)}, "No position was asked for: prompt 0 has 16 tokens."),
        ({"top": 5}, "'top' is not an option of logit_lens. Did you mean 'top_k'?"),
        ({"position": -1}, "'position' is not an option of logit_lens. Did you mean 'positions'?"),
        ({"layers": 1.5}, "1.5 is not the number of a layer."),
        ({"positions": [0, 16]}, "There is no position 16: prompt 0 has 16 tokens."),
        ({"top_k": 0}, "top_k=0 is not between 1 and the vocabulary's 258."),
        ({"top_k": 259}, "top_k=259 is not between 1 and the vocabulary's 258."),
        ({"target": "xyz"}, "target='xyz' is 3 tokens ('x', 'y', 'z'): give one token, or its id."),
        ({"target": 258}, "target=258 is not a token: the vocabulary has 258."),
        ({"target": 2.5}, "target=2.5 is neither a token's text nor its id."),
        ({"target": ["x", "y"]}, "target lists 2 tokens for 1 prompt."),
        (
            {"residual": torch.zeros(16, 5)},
            f"residual has a width of 5; this model's streams are {HIDDEN} wide.",
        ),
        ({"residual": torch.zeros(3, HIDDEN)}, "The prompt has 16 tokens; residual has 3."),
        ({"residual": torch.zeros(5, 16, HIDDEN)}, "residual has 5 layers; the model has 4."),
        ({"residual": torch.zeros(16, HIDDEN), "layers": [0, 1]}, "layers names 2 layers; residual has 1."),
        (
            {"residual": torch.zeros(HIDDEN, dtype=torch.int64)},
            f"residual is ({HIDDEN},) of int64; expected [layer, token, hidden], a list of [token, hidden]",
        ),
        (
            {"residual": [torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN)]},
            "residual is not a stream (stack expects each tensor to be equal size, but got",
        ),
    ],
)
def test_a_question_without_an_answer_is_one_line(engine, asked, line):
    with pytest.raises(RequestRefused) as refused:
        engine.logit_lens(TOWER, **asked)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"heads": 4}, "There is no head 4: the model has 4 heads."),
        ({"queries": 16}, "There is no query 16: prompt 0 has 16 tokens."),
        ({"queries": "none"}, 'queries: \'none\' is neither "all", "last" nor numbers.'),
        ({"head": 0}, "'head' is not an option of attention. Did you mean 'heads'?"),
        ({"dtype": "bfloat16"}, 'dtype=\'bfloat16\' is neither "float32" nor "float16".'),
        (
            {"max_bytes": 16000},
            "These patterns would be 16,384 bytes (4 layers x 4 heads x queries x tokens); max_bytes is",
        ),
    ],
)
def test_a_pattern_that_is_not_there_or_too_large_is_one_line(engine, asked, line):
    with pytest.raises(RequestRefused) as refused:
        engine.attention(TOWER, **asked)
    assert str(refused.value).startswith(line)


def test_prompts_that_are_none_are_refused(engine):
    for prompt in ("", [], [TOWER, ""], {"prompt": ""}):
        with pytest.raises(RequestRefused):
            engine.logit_lens(prompt)
    with pytest.raises(RequestRefused, match=r'There is no prompt: lab\.attention\("…"\)\.'):
        engine.attention()
    with pytest.raises(RequestRefused):
        engine.logit_lens([7] * (models.CONTEXT + 1))
    with pytest.raises(EngineNotStarted):
        lab.logit_lens(TOWER, engine="nobody")
    freed(engine)


def test_a_model_without_patterns_says_why_in_the_place_of_the_view(engine, monkeypatch):
    def refused(layer):
        raise LensRefused("its attention (MLAAttention) works on compressed keys (MLA)")

    monkeypatch.setattr(questions, "attention_form", refused)
    with pytest.raises(LensRefused) as raised:
        engine.attention(TOWER, layers=2)
    (line,) = raised.value._render_traceback_()
    assert line.endswith(
        "Layer 2 has no pattern that would be right: its attention (MLAAttention) works on compressed keys "
        "(MLA)."
    )
