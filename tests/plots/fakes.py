"""A logit lens's result without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

WORDS = [" cat", " the", "<b>", "\n", "<0xE2>", " Paris", "שלום", "$x$", "a\u200bb", " of"]


@dataclass(frozen=True)
class FakeLens:
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    top_ids: torch.Tensor
    top_probabilities: torch.Tensor
    top_tokens: list[list[list[str]]]
    entropy: torch.Tensor
    final_ranks: torch.Tensor | None


def fake_lens(layers: int = 6, positions: int = 8, k: int = 5, **changed: Any) -> FakeLens:
    generator = torch.Generator().manual_seed(0)
    sure = torch.linspace(0.5, 6, layers)[:, None, None]
    logits = torch.randn(layers, positions, len(WORDS), generator=generator) * sure
    top = logits.softmax(-1).topk(k)
    probabilities = logits.softmax(-1)
    last = probabilities[-1].argmax(-1)
    rank = (probabilities > probabilities.gather(-1, last.expand(layers, -1)[..., None])).sum(-1)
    parts: dict[str, Any] = {
        "layers": tuple(range(layers)),
        "positions": tuple(range(positions)),
        "tokens": tuple(WORDS[n % len(WORDS)] for n in range(positions)),
        "token_ids": tuple(range(100, 100 + positions)),
        "top_ids": top.indices,
        "top_probabilities": top.values.to(torch.bfloat16),
        "top_tokens": [[[WORDS[n] for n in cell] for cell in row] for row in top.indices.tolist()],
        "entropy": -(probabilities * probabilities.log()).sum(-1),
        "final_ranks": rank,
    }
    return FakeLens(**{**parts, **changed})
