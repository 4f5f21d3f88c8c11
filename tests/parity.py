"""The same prompt through Hugging Face's own model and through an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import nnsight_lab as lab
from tests.waiting import GREEDY


@cache
def hugging_face(path: Path, prompt: str) -> tuple[list[Any], Any]:
    """Each decoder layer's residual stream ``[token, hidden]``, and the logits ``[token, vocabulary]``.

    The streams by hooks, since the last of ``hidden_states`` is taken after the final norm.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    streams: list[Any] = []

    def hook(_: Any, __: Any, output: Any) -> None:
        streams.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    hooks = [layer.register_forward_hook(hook) for layer in layers]
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    for handle in hooks:
        handle.remove()
    return streams, logits


@cache
def hugging_face_outputs(path: Path, prompt: str) -> dict[str, Any]:
    """Each module's output by its path, ``[token, width]``, of the first tensor where it returns several."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seen: dict[str, Any] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.dim() == 3:
                seen[name] = first[0].clone()

        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in hooks:
        handle.remove()
    return seen


def residuals(engine: Any, layers: Any, prompt: str) -> list[Any]:
    """Each layer's residual stream, read in a block."""
    with engine.trace(prompt, **GREEDY):
        streams = [lab.residual(layer.output) for layer in layers].save()
    return list(streams)


@cache
def hugging_face_lens(path: Path, prompt: str) -> Any:
    """The logit lens by Hugging Face's norm and head, as log-probabilities ``[layer, token, vocabulary]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    cap = getattr(model.config, "final_logit_softcapping", None)
    with torch.no_grad():
        logits = model.lm_head(norm(torch.stack(hugging_face(path, prompt)[0])))
        return torch.log_softmax(torch.tanh(logits / cap) * cap if cap else logits, dim=-1)


@cache
def hugging_face_attention(path: Path, prompt: str) -> Any:
    """The attention patterns of Hugging Face's eager attention ``[layer, head, query, key]``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        return torch.cat(model(ids, use_cache=False, output_attentions=True).attentions)
