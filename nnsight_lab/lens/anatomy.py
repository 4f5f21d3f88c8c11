"""Where a vLLM model keeps what the lenses need: its decoder layers, its final norm, its attention.

vLLM has some two hundred model files and no common names, but they agree on a shape: the decoder layers
are one ``ModuleList`` as long as the configuration says, and the final norm stands beside it. What does
not have that shape, or an attention whose pattern is more than a softmax of queries and keys, is refused
by what was found: a lens through the wrong norm gives plausible words.

Works on real models and on trees without weights alike, and needs no vLLM: modules are known by their
attributes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nnsight_lab.errors import LensRefused

#: What final norms are called, in vLLM's model files and in those of its Transformers backend.
_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "ln_out")
#: Parts of a path that lead to a tower other than the language model's.
_TOWERS = ("vis", "audio", "encoder", "image", "speech", "mtp", "draft")


class Anatomy(NamedTuple):
    """Paths in a model's module tree.

    Attributes:
        layers: The ``ModuleList`` of decoder layers, ``"model.layers"``.
        norm: The final norm, ``"model.norm"``.
    """

    layers: str
    norm: str


def anatomy(model: torch.nn.Module, count: int) -> Anatomy:
    """Find the decoder layers and the final norm of a language model.

    Args:
        model: The whole model, with or without weights.
        count: How many decoder layers it has.

    Raises:
        LensRefused: When there is not exactly one such place.
    """
    found: list[Anatomy] = []
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) != count:
            continue
        above, _, _ = path.rpartition(".")
        if any(part.startswith(_TOWERS) for part in path.split(".")):
            continue
        parent = model.get_submodule(above)
        norms = [name for name in _NORMS if isinstance(getattr(parent, name, None), torch.nn.Module)]
        if len(norms) != 1 or getattr(parent, "project_out", None) is not None:
            continue
        found.append(Anatomy(path, f"{above}.{norms[0]}" if above else norms[0]))
    if len(found) == 1:
        return found[0]
    seen = " or ".join(place.layers for place in found) or "none"
    raise LensRefused(
        f"{type(model).__name__} cannot be read through a lens: expected one list of {count} decoder layers "
        f"with a final norm beside it, found {seen}."
    )


class AttentionForm(NamedTuple):
    """One attention: everything its pattern depends on besides queries and keys.

    Attributes:
        path: Where it is, below its decoder layer: ``"self_attn.attn"``.
        heads: Query heads.
        kv_heads: Key heads; each serves ``heads // kv_heads`` query heads.
        head_size: Width of a head.
        scale: What scores are multiplied by.
        window: How many keys a query sees, itself included; None for all before it.
        soft_cap: ``cap * tanh(score / cap)`` is taken of the scores; 0 for none.
        sinks: A score of each head that takes part in the softmax and has no key ``[head]``, or None.
    """

    path: str
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None
    soft_cap: float
    sinks: torch.Tensor | None


def attention_form(layer: torch.nn.Module) -> AttentionForm:
    """The attention of a decoder layer.

    Raises:
        LensRefused: When the layer has none, or one whose pattern cannot be computed from its queries
            and keys alone. The message is a clause: "it has ALiBi".
    """
    found = [(path, module) for path, module in layer.named_modules() if hasattr(module, "impl")]
    found = [(path, module) for path, module in found if hasattr(module, "head_size")]
    if len(found) != 1:
        kinds = sorted({type(m).__name__ for _, m in layer.named_children()})
        many = f"{len(found)} attentions" if found else "no attention over queries and keys"
        raise LensRefused(f"it has {many} (its parts: {', '.join(kinds)})")
    path, attention = found[0]
    reason = _beyond(attention)
    if reason:
        raise LensRefused(reason)
    impl: Any = attention.impl
    sinks = getattr(impl, "sinks", None)
    return AttentionForm(
        path,
        int(attention.num_heads),
        int(attention.num_kv_heads),
        int(attention.head_size),
        float(impl.scale),
        _window(attention),
        float(getattr(impl, "logits_soft_cap", None) or 0.0),
        sinks if isinstance(sinks, torch.Tensor) else None,
    )


def _beyond(attention: Any) -> str:
    """Why a pattern would be wrong, or nothing."""
    impl = attention.impl
    if hasattr(attention, "kv_lora_rank") or not hasattr(attention, "num_kv_heads"):
        return f"its attention ({type(attention).__name__}) works on compressed keys (MLA)"
    if not isinstance(getattr(impl, "scale", None), float | int):
        return f"its attention's scale is not known ({type(impl).__name__})"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "its attention adds a bias by distance (ALiBi)"
    if getattr(attention, "attn_type", "decoder") != "decoder":
        return f"its attention is not a decoder's own ({attention.attn_type})"
    if getattr(attention, "kv_sharing_target_layer_name", None):
        return f"it takes its keys from another layer ({attention.kv_sharing_target_layer_name})"
    kind = type(attention).__name__
    if hasattr(attention, "attention_chunk_size") or hasattr(attention, "sink_len"):
        return f"its attention ({kind}) sees keys by a rule of its own"
    if kind != "Attention":  # a subclass that vLLM has since added
        return f"its attention ({kind}) is of a kind that is not known here"
    return ""


def _window(attention: Any) -> int | None:
    """The sliding window in keys; kernels store it as ``(keys before, keys after)`` or -1."""
    if hasattr(attention, "sliding_window"):
        return int(attention.sliding_window) if attention.sliding_window else None
    window = getattr(attention.impl, "sliding_window", None)
    if isinstance(window, tuple | list):
        window = window[0] + 1
    return int(window) if window and window > 0 else None
