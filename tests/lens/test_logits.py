"""What is read of logits is what a plain softmax over the whole vocabulary says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnsight_lab as lab
from nnsight_lab.lens import logits as module
from nnsight_lab.lens.logits import likeliest, read_logits, read_stream

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(deadline=None)  # the first call of torch takes its time
@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(2, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_a_reading_is_the_softmaxs(rows, vocabulary, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(rows, vocabulary, generator=draw)).to(dtype)
    before = logits.clone()
    tokens = torch.randint(vocabulary, (rows, 2), generator=draw)
    top_k = min(3, vocabulary)
    found = read_logits(logits, top_k=top_k, tokens=tokens)
    assert torch.equal(logits, before)
    expected = logits.double().softmax(-1)
    torch.testing.assert_close(
        found.probabilities.double(), expected.topk(top_k).values, rtol=1e-5, atol=1e-6
    )
    assert torch.equal(logits.gather(-1, found.ids), logits.topk(top_k).values)
    entropy = torch.special.entr(expected).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-4, atol=1e-5)
    chosen = expected.gather(-1, tokens)
    torch.testing.assert_close(found.chosen.double(), chosen, rtol=1e-5, atol=1e-6)
    likelier = logits[:, None, :] > logits.gather(-1, tokens)[..., None]
    assert torch.equal(found.ranks, likelier.sum(-1))


def test_tokens_that_are_ruled_out_have_no_probability():
    logits = torch.tensor([[1.0, float("-inf"), 1.0]])
    found = read_logits(logits, top_k=3, tokens=torch.tensor([[1]]))
    assert found.probabilities.tolist() == [[0.5, 0.5, 0.0]]
    assert found.entropy.item() == pytest.approx(0.6931472)
    assert found.ranks.tolist() == [[2]]
    assert found.chosen.tolist() == [[0.0]]


def test_without_tokens_there_are_no_ranks():
    found = read_logits(torch.zeros(2, 4), top_k=1)
    assert found.ranks.shape == found.chosen.shape == (2, 0)
    assert found.entropy.tolist() == pytest.approx([1.3862944] * 2)


@pytest.mark.parametrize("top_k", [0, 5])
def test_more_top_tokens_than_the_vocabulary_has_are_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k} of a vocabulary of 4"):
        read_logits(torch.zeros(2, 4), top_k=top_k)


def test_a_stream_is_read_in_pieces_that_fit(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 50 * 7)
    monkeypatch.setattr(module, "_READ_BYTES", 4 * 50 * 3)
    head = torch.randn(50, 8)
    made = []

    def unembed(hidden):
        made.append(hidden.shape[0])
        return hidden @ head.T

    hidden, tokens = torch.randn(23, 8), torch.randint(50, (23, 1))
    found = read_stream(hidden, unembed, top_k=4, tokens=tokens, vocabulary=50)
    assert made == [7, 7, 7, 2]
    whole = read_logits(hidden @ head.T, top_k=4, tokens=tokens)
    for part, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(part, expected)
    assert torch.equal(likeliest(hidden, unembed, 50), whole.ids[:, 0])


def test_the_front_door_leads_to_the_functions():
    assert lab.lens.read_logits is read_logits
    assert lab.lens.attention_pattern.__module__ == "nnsight_lab.lens.pattern"


def test_logits_that_are_no_numbers_rank_nothing_first():
    logits = torch.full((2, 5), float("nan"))
    logits[1] = torch.arange(5.0)
    found = read_logits(logits, top_k=2, tokens=torch.tensor([[3], [3]]))
    assert found.ranks.tolist() == [[-1], [1]]
