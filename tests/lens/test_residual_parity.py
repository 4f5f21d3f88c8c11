"""The residual stream read in a block is Hugging Face's, by value and by norm.

A cosine would not do: the sum that forgets its second half points nearly the same way.
"""

from __future__ import annotations

import pytest
import torch

from tests import models
from tests.parity import hugging_face, residuals
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


@pytest.fixture(scope="module")
def unfused(one_engine, gpt2_path, nothing_left_behind):
    engine = one_engine.want(gpt2_path, "async", dtype="float32", max_model_len=models.CONTEXT)
    yield engine
    idle(engine)
