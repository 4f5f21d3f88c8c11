"""The residual stream read in a block is Hugging Face's, by value and by norm.

A cosine would not do: the sum that forgets its second half points nearly the same way.
"""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.parity import hugging_face, hugging_face_outputs, residuals
from tests.waiting import CAT, FOX, GREEDY, TOWER, idle

#: Two float32 implementations sum 128 to 256 products in different orders; over four layers that came to
#: 4e-6 at the most where values reach 20. A wrong stream is off by the size of the stream itself.
CLOSE = {"rtol": 1e-4, "atol": 5e-5}


def compared(engine, layers, path, prompt):
    expected, logits = hugging_face(path, prompt)
    streams = residuals(engine, layers, prompt)
    assert len(streams) == len(expected) == models.LAYERS
    for stream, wanted in zip(streams, expected, strict=True):
        torch.testing.assert_close(stream, wanted, **CLOSE)
        assert stream.norm().item() == pytest.approx(wanted.norm().item(), rel=1e-5)
    model = engine.model
    with engine.trace(prompt, **GREEDY):
        last = model.logits.save()
    torch.testing.assert_close(last[0], logits[-1], **CLOSE)


@pytest.mark.parametrize("prompt", [TOWER, CAT, FOX])
def test_a_fused_models_stream_and_logits_are_hugging_faces(engine, llama_path, prompt):
    compared(engine, engine.model.model.layers, llama_path, prompt)


def test_half_of_a_fused_models_stream_is_not_the_stream(engine, llama_path):
    model = engine.model
    expected, _ = hugging_face(llama_path, TOWER)
    with engine.trace(TOWER, **GREEDY):
        half = model.model.layers[2].output[0].save()
    assert (half - expected[2]).abs().max() > 100 * CLOSE["atol"]
    assert abs(half.norm() / expected[2].norm() - 1) > 0.01


@pytest.mark.parametrize("prompt", [TOWER, CAT, FOX])
def test_an_unfused_models_stream_and_logits_are_hugging_faces(unfused, gpt2_path, prompt):
    compared(unfused, unfused.model.transformer.h, gpt2_path, prompt)


def test_every_location_of_a_fused_layer_is_hugging_faces(engine, llama_path):
    expected = hugging_face_outputs(llama_path, TOWER)
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        # In the order in which the model reaches them, and none of them cloned.
        seen = [].save()
        for layer in model.model.layers:
            normed = layer.input_layernorm.output
            seen.append(
                {
                    "input_layernorm": normed[0] if isinstance(normed, tuple) else normed,
                    "qkv": layer.self_attn.qkv_proj.output[0],
                    "self_attn.o_proj": layer.self_attn.o_proj.output[0],
                    "post_attention_layernorm": layer.post_attention_layernorm.output[0],
                    "gate_up": layer.mlp.gate_up_proj.output[0],
                    "mlp.down_proj": layer.mlp.down_proj.output[0],
                    "mlp": layer.mlp.output,
                }
            )
    for index, layer in enumerate(seen):
        for name, value in layer.items():
            parts = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
            parts["gate_up"] = ("mlp.gate_proj", "mlp.up_proj")
            wanted = [expected[f"model.layers.{index}.{part}"] for part in parts.get(name, (name,))]
            torch.testing.assert_close(value, torch.cat(wanted, dim=-1), **CLOSE, msg=f"{index} {name}")


def test_every_location_of_an_unfused_layer_is_hugging_faces(unfused, gpt2_path):
    expected = hugging_face_outputs(gpt2_path, TOWER)
    model = unfused.model
    with unfused.trace(TOWER, **GREEDY):
        seen = [].save()
        for layer in model.transformer.h:
            seen.append(
                {
                    "ln_1": layer.ln_1.output,
                    "attn.c_attn": layer.attn.c_attn.output[0],
                    "attn.c_proj": layer.attn.c_proj.output[0],
                    "ln_2": layer.ln_2.output,
                    "mlp.c_fc": layer.mlp.c_fc.output[0],
                    "mlp": layer.mlp.output,
                }
            )
    for index, layer in enumerate(seen):
        for name, value in layer.items():
            wanted = expected[f"transformer.h.{index}.{name}"]
            torch.testing.assert_close(value, wanted, **CLOSE, msg=f"{index} {name}")


@pytest.fixture(scope="module")
def unfused(one_engine, gpt2_path, nothing_left_behind):
    engine = one_engine.want(gpt2_path, "async", dtype="float32", max_model_len=models.CONTEXT)
    yield engine
    idle(engine)
