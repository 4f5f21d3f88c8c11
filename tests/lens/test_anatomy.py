"""Layers, norms and attentions are found by what they are, and refused by that too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nnsight_lab.errors import LensRefused
from nnsight_lab.lens.anatomy import anatomy, attention_form


def stack(layers, **beside):
    module = nn.Module()
    module.layers = nn.ModuleList(layers)
    for name, value in beside.items():
        setattr(module, name, value)
    return module


def model(**children):
    module = nn.Module()
    for name, value in children.items():
        setattr(module, name, value)
    return module


def identities(count):
    return [nn.Identity() for _ in range(count)]


def test_the_layers_are_the_list_with_a_final_norm_beside_it():
    tree = model(model=stack(identities(3), norm=nn.LayerNorm(4)), other=nn.ModuleList(identities(3)))
    assert anatomy(tree, 3) == ("model.layers", "model.norm")
    assert anatomy(stack(identities(2), ln_f=nn.LayerNorm(4)), 2) == ("layers", "ln_f")


def test_a_vision_tower_of_the_same_height_is_not_the_model():
    tower = stack(identities(3), norm=nn.LayerNorm(4))
    tree = model(visual=tower, language_model=model(model=stack(identities(3), norm=nn.LayerNorm(4))))
    assert anatomy(tree, 3) == ("language_model.model.layers", "language_model.model.norm")


@pytest.mark.parametrize(
    ("tree", "seen"),
    [
        (model(model=stack(identities(3))), "found none"),
        (model(model=stack(identities(2), norm=nn.LayerNorm(4))), "found none"),
        (model(model=stack(identities(3), norm=nn.LayerNorm(4), project_out=nn.Identity())), "found none"),
        (
            model(a=stack(identities(3), norm=nn.LayerNorm(4)), b=stack(identities(3), norm=nn.LayerNorm(4))),
            "found a.layers or b.layers",
        ),
    ],
)
def test_anything_else_is_refused_by_what_was_found(tree, seen):
    with pytest.raises(
        LensRefused, match=f"one list of 3 decoder layers with a final norm beside it, {seen}"
    ):
        anatomy(tree, 3)


class Attention(nn.Module):
    """As vLLM's, as far as it is looked at."""

    def __init__(self, impl=None, **other):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = 4, 2, 8
        self.sliding_window = None
        self.impl = SimpleNamespace(**{"scale": 0.5, "alibi_slopes": None, "sinks": None, **(impl or {})})
        for name, value in other.items():
            setattr(self, name, value)


class ChunkedLocalAttention(Attention):
    pass


class MLAAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_size, self.kv_lora_rank, self.impl = 8, 4, SimpleNamespace(scale=1.0)


def layer(attention):
    return model(self_attn=model(attn=attention), mlp=nn.Identity())


def test_an_attentions_form_is_read_off_its_module():
    sinks = torch.ones(4)
    form = attention_form(
        layer(
            Attention({"logits_soft_cap": 30.0, "sinks": sinks, "sliding_window": (4, 0)}, sliding_window=5)
        )
    )
    assert form[:7] == ("self_attn.attn", 4, 2, 8, 0.5, 5, 30.0)
    assert form.sinks is sinks


@pytest.mark.parametrize(
    ("stored", "window"), [((4, 0), 5), ((-1, -1), None), (-1, None), (5, 5), (None, None)]
)
def test_a_window_is_read_as_kernels_store_it(stored, window):
    attention = Attention({"sliding_window": stored})
    del attention.sliding_window
    assert attention_form(layer(attention)).window == window


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (MLAAttention(), "compressed keys (MLA)"),
        (Attention({"alibi_slopes": torch.ones(4)}), "bias by distance (ALiBi)"),
        (Attention({"scale": None}), "scale is not known"),
        (Attention(attn_type="encoder_only"), "not a decoder's own (encoder_only)"),
        (Attention(kv_sharing_target_layer_name="layers.2"), "keys from another layer (layers.2)"),
        (ChunkedLocalAttention(attention_chunk_size=4), "sees keys by a rule of its own"),
        (ChunkedLocalAttention(), "of a kind that is not known here"),
        (nn.Identity(), "no attention over queries and keys (its parts: Identity, Module)"),
        (model(a=Attention(), b=Attention()), "2 attentions"),
    ],
)
def test_an_attention_that_is_more_than_queries_and_keys_is_refused(attention, why):
    with pytest.raises(LensRefused) as refused:
        attention_form(layer(attention))
    assert why in str(refused.value)
