"""What a request must answer, by Hugging Face's own model: no cache, no pieces, nobody beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

Change = Callable[[torch.Tensor, int], torch.Tensor]


class Seen(NamedTuple):
    """One forward pass over all tokens.

    Attributes:
        logits: ``[token, vocabulary]``.
        streams: Of each layer, ``[token, hidden]``, after what was changed there.
    """

    logits: torch.Tensor
    streams: list[torch.Tensor]


@cache
def _model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def seen(path: Path, ids: Sequence[int], prompt: int, changes: dict[int, Change] | None = None) -> Seen:
    """Run it.

    Args:
        path: The model's.
        ids: All tokens.
        prompt: How many of them are the prompt's.
        changes: By layer, what becomes of its residual stream.
    """
    model, streams, hooks = _model(path), [], []

    def hook(number: int) -> Any:
        def keep(_: Any, __: Any, output: Any) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            change = (changes or {}).get(number)
            rows = tensor[0] if change is None else change(tensor[0].clone(), prompt)
            streams.append(rows.clone())
            return (rows[None], *output[1:]) if isinstance(output, tuple) else rows[None]

        return keep

    hooks = [layer.register_forward_hook(hook(n)) for n, layer in enumerate(model.model.layers)]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for handle in hooks:
            handle.remove()
    return Seen(logits, streams)
