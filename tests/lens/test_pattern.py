"""A pattern is the softmax of masked scores, however it is cut to fit."""

from __future__ import annotations

import pytest
import torch

from nnsight_lab.lens import pattern as module
from nnsight_lab.lens.pattern import attention_pattern

TOKENS, HEADS, KV_HEADS, DIM = 9, 6, 2, 8


def plain(query, key, *, scale, window=None, soft_cap=0.0, sinks=None):
    """One query and head at a time, in float64."""
    tokens, heads, _ = query.shape
    found = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for h in range(heads):
        for q in range(tokens):
            first = 0 if window is None else max(0, q - window + 1)
            keys = key[first : q + 1, h * key.shape[1] // heads].double()
            scores = keys @ query[q, h].double() * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            extra = scores if sinks is None else torch.cat([scores, sinks[h : h + 1].double()])
            found[h, q, first : q + 1] = (scores - extra.logsumexp(0)).exp()
    return found


@pytest.fixture
def drawn():
    draw = torch.Generator().manual_seed(4)
    return (
        torch.randn(TOKENS, HEADS, DIM, generator=draw),
        torch.randn(TOKENS, KV_HEADS, DIM, generator=draw),
        torch.randn(HEADS, generator=draw),
    )


@pytest.mark.parametrize("chunk_bytes", [1, 4 * TOKENS * 4, 1 << 20])
@pytest.mark.parametrize("form", ["plain", "window", "soft_cap", "sinks"])
def test_every_form_is_the_plain_one_however_it_is_cut(drawn, monkeypatch, form, chunk_bytes):
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
    query, key, sinks = drawn
    options = {"plain": {}, "window": {"window": 3}, "soft_cap": {"soft_cap": 0.5}, "sinks": {"sinks": sinks}}
    expected = plain(query, key, scale=0.3, **options[form])
    found = attention_pattern(query, key, scale=0.3, **options[form])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    some = attention_pattern(
        query, key, scale=0.3, heads=[5, 0], queries=[8, 2], dtype=torch.float16, **options[form]
    )
    assert some.dtype == torch.float16
    torch.testing.assert_close(some.double(), expected[[5, 0]][:, [8, 2]], rtol=1e-3, atol=1e-3)


def test_rows_sum_to_one_and_nobody_sees_what_comes_later(drawn):
    query, key, _ = drawn
    found = attention_pattern(query, key)
    torch.testing.assert_close(found.sum(-1), torch.ones(HEADS, TOKENS))
    assert found.triu(1).abs().max() == 0
    torch.testing.assert_close(found, attention_pattern(query, key, scale=DIM**-0.5))
