"""The logit lens and the attention patterns are Hugging Face's, number by number, in float32."""

from __future__ import annotations

import pytest
import torch

import nnsight_lab as lab
from tests import models
from tests.parity import hugging_face, hugging_face_attention, hugging_face_lens
from tests.waiting import CAT, FOX, GREEDY, TOWER, idle

#: Two float32 implementations that sum in different orders: probabilities came within 3e-7, entropies within
#: 2e-6 nats, patterns within 2e-6.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
#: vLLM's Gemma 2 itself is further from Hugging Face's: its streams by 3e-3 of 10, its logits by 4e-4.
GEMMAS = {"rtol": 1e-2, "atol": 1e-3}
#: A token that is not the likeliest anywhere in particular.
TARGET = "x"


def lens_agrees(engine, path, prompt, close=CLOSE):
    expected = hugging_face_lens(path, prompt)
    found = engine.logit_lens(prompt, target=TARGET, top_k=7)
    layers, tokens, _ = expected.shape
    assert found.layers == tuple(range(layers)) == tuple(range(models.LAYERS))
    assert found.positions == tuple(range(tokens))
    likely = expected.exp()
    torch.testing.assert_close(found.top_probabilities, likely.topk(7, dim=-1).values, **close)
    # By id too: the probability of the very tokens that were named.
    torch.testing.assert_close(found.top_probabilities, likely.gather(-1, found.top_ids), **close)
    torch.testing.assert_close(found.entropy, -(likely * expected).sum(-1), **close)
    assert torch.equal(found.final_ids, expected[-1].argmax(-1))
    assert torch.equal(found.final_ranks[-1], torch.zeros(tokens, dtype=torch.int64))
    final = found.final_ids.expand(layers, tokens)[..., None]
    torch.testing.assert_close(found.final_probabilities, likely.gather(-1, final)[..., 0], **close)
    # Tokens whose logits differ by less than the two implementations do may change places.
    places = 0 if close is CLOSE else 3
    assert (found.final_ranks - rank(expected, found.final_ids)).abs().max() <= places
    target = torch.full((tokens,), found.target_id)
    torch.testing.assert_close(found.target_probabilities, likely[..., found.target_id], **close)
    assert (found.target_ranks - rank(expected, target)).abs().max() <= places


def rank(log_probabilities, ids):
    of_token = log_probabilities.gather(-1, ids.expand(log_probabilities.shape[:2])[..., None])
    return (log_probabilities > of_token).sum(-1)


def stream_agrees(engine, path, prompt, close=CLOSE):
    streams, _ = hugging_face(path, prompt)
    expected = hugging_face_lens(path, prompt).exp()
    for stream in (streams, torch.stack(streams)):
        found = engine.logit_lens(residual=stream, top_k=3)
        torch.testing.assert_close(found.top_probabilities, expected.topk(3, dim=-1).values, **close)
        assert torch.equal(found.final_ids, expected[-1].argmax(-1))
        assert found.tokens == ()
    one = engine.logit_lens(prompt, residual=streams[2], layers=2, top_k=3)
    torch.testing.assert_close(one.top_probabilities[0], expected[2].topk(3, dim=-1).values, **close)
    assert one.layers == (2,)
    assert one.final_ids is None
    assert len(one.tokens) == len(streams[2])


def attention_agrees(engine, path, prompt, close=CLOSE):
    expected = hugging_face_attention(path, prompt)
    found = engine.attention(prompt)
    assert found.patterns.shape == expected.shape
    torch.testing.assert_close(found.patterns, expected, **close)
    some = engine.attention(prompt, layers=[3, 1], heads=[2, 0], queries=[-1], dtype="float16")
    wanted = expected[[3, 1]][:, [2, 0]][:, :, [-1]]
    assert (some.layers, some.heads, some.queries) == ((3, 1), (2, 0), (expected.shape[-1] - 1,))
    # float16 keeps 11 bits.
    torch.testing.assert_close(some.patterns.float(), wanted, rtol=1e-3, atol=max(close["atol"], 5e-4))
    assert torch.equal(some.pattern(1, 2), some.patterns[1, 0])


@pytest.mark.parametrize("prompt", [TOWER, CAT])
def test_a_fused_untied_models_lens_is_hugging_faces(engine, llama_path, prompt):
    lens_agrees(engine, llama_path, prompt)


def test_a_saved_fused_stream_gives_the_same_lens(engine, llama_path):
    stream_agrees(engine, llama_path, TOWER)
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        streams = [lab.residual(layer.output) for layer in model.model.layers].save()
    saved, live = engine.logit_lens(TOWER, residual=streams), engine.logit_lens(TOWER)
    torch.testing.assert_close(saved.top_probabilities, live.top_probabilities, **CLOSE)
    assert torch.equal(saved.final_ranks, live.final_ranks)
    assert saved.tokens == live.tokens


def test_the_last_layers_lens_is_what_the_model_says(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        logits = model.logits.save()
    last = engine.logit_lens(TOWER, layers=-1, positions=-1, top_k=5)
    likely = logits[0].float().softmax(-1).topk(5)
    assert last.top_ids[0, 0].tolist() == likely.indices.tolist()
    torch.testing.assert_close(last.top_probabilities[0, 0], likely.values, **CLOSE)


@pytest.mark.parametrize("prompt", [TOWER, CAT])
def test_a_grouped_models_attention_is_hugging_faces(engine, llama_path, prompt):
    attention_agrees(engine, llama_path, prompt)


@pytest.mark.parametrize("prompt", [TOWER, CAT])
def test_an_unfused_tied_models_lens_and_attention_are_hugging_faces(unfused, gpt2_path, prompt):
    lens_agrees(unfused, gpt2_path, prompt)
    stream_agrees(unfused, gpt2_path, prompt)
    attention_agrees(unfused, gpt2_path, prompt)


@pytest.fixture  # of one test: the next may want another engine, and this one is kept anyway
def unfused(one_engine, gpt2_path, nothing_left_behind):
    engine = one_engine.want(gpt2_path, "async", dtype="float32", max_model_len=models.CONTEXT)
    yield engine
    idle(engine)


def test_soft_caps_and_windows_are_hugging_faces(capped, gemma2_path):
    assert len(FOX) > models.WINDOW
    lens_agrees(capped, gemma2_path, FOX, GEMMAS)
    stream_agrees(capped, gemma2_path, FOX, GEMMAS)
    attention_agrees(capped, gemma2_path, FOX, GEMMAS)
    windowed = capped.attention(FOX, layers=range(models.LAYERS)).patterns
    seen = (windowed > 0).sum(-1).amax(dim=(1, 2))
    assert sorted(set(seen.tolist())) == [models.WINDOW, len(FOX)]


@pytest.fixture  # of one test: the next may want another engine, and this one is kept anyway
def capped(one_engine, gemma2_path, nothing_left_behind):
    engine = one_engine.want(gemma2_path, "sync", dtype="float32", max_model_len=models.CONTEXT)
    yield engine
    idle(engine)
