"""Attention patterns, from the queries and keys an attention is given.

vLLM's kernels never form the pattern, so it is computed again: scale, soft cap, causal mask, window, and a
softmax in float32. Queries and keys are taken after the rotary embedding, at the attention's own input, so
no position arithmetic is repeated here.
"""

from __future__ import annotations

import torch

#: One float32 array of scores is at most this large.
_CHUNK_BYTES = 32 << 20


def attention_pattern(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    heads: list[int] | None = None,
    queries: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """How much each query attends to each key of its own prompt.

    Besides the result, about ``3 * _CHUNK_BYTES`` (96 MiB) is alive at once, or three rows of keys.

    Args:
        query: After the rotary embedding ``[token, head, dim]``.
        key: The same ``[token, kv_head, dim]``; each key head serves ``heads // kv_heads`` query heads.
        scale: What scores are multiplied by; ``dim ** -0.5`` when not given.
        window: How many keys a query sees, itself included; None for all before it.
        soft_cap: ``cap * tanh(score / cap)`` is taken of the scores; 0 for none.
        sinks: Scores without a key ``[head]``: what they take is missing from a row's sum.
        heads: Which query heads; all when not given.
        queries: Which tokens to look from; all when not given.
        dtype: Of the result. Everything is computed in float32.

    Returns:
        ``[head, query, key]``; rows sum to 1 (less where there are sinks).
    """
    tokens, count, dim = query.shape
    served = count // key.shape[1]
    scale = dim**-0.5 if scale is None else scale
    chosen = torch.tensor(range(count) if heads is None else heads, device=query.device)
    rows = torch.tensor(range(tokens) if queries is None else queries, device=query.device)
    pattern = torch.empty((len(chosen), len(rows), tokens), dtype=dtype, device=query.device)
    places = torch.arange(tokens, device=query.device)
    per_chunk = max(1, _CHUNK_BYTES // (4 * max(1, tokens)))
    heads_at_once = max(1, per_chunk // max(1, len(rows)))
    for h in range(0, len(chosen), heads_at_once):
        of = chosen[h : h + heads_at_once]
        keys = key[:, of // served].float().permute(1, 2, 0)  # [head, dim, key]
        for r in range(0, len(rows), per_chunk):
            at = rows[r : r + per_chunk]
            asked = query[at][:, of].float().transpose(0, 1)  # [head, query, dim]
            scores = (asked @ keys).mul_(scale)
            if soft_cap:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            distance = at[:, None] - places[None, :]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            scores.masked_fill_(hidden, float("-inf"))
            pattern[h : h + len(of), r : r + len(at)] = _softmax(scores, sinks, of)
    return pattern


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, heads: torch.Tensor) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[heads][:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
