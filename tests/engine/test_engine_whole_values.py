"""What a block reads and edits on two tensor-parallel ranks is what it reads and edits on one, everywhere.

Every module's input and output is read and edited in a trace of its own, on an engine of one rank and on one
of two. A place where two ranks have something else than one must be refused there, and named here: a place
that vLLM adds, and that nobody put together, fails.
"""

from __future__ import annotations

import re

import pytest
import torch

from nnsight_lab.errors import TraceError
from tests import models
from tests.waiting import TOWER

#: Sums in another order, through four layers.
CLOSE = 1e-4
#: Not on a border between heads, ranks or halves of a gated layer.
COLUMNS = 24
#: Of each model: what two ranks refuse, in a layer. Everything else is whole.
REFUSED = {
    "llama_of_one_key_head": set(),
    "qwen3": set(),
    "gpt2": set(),
    "gemma2": set(),
    "mixtral": {"block_sparse_moe.experts.routed_experts.quant_method.output"},
    "qwen2_moe": {"mlp.experts.routed_experts.quant_method.output"},
}
#: And in which an edit must be seen to change what the model says.
CUT = (
    r"(qkv_proj|c_attn)\.output",
    r"(act_fn|act)\.(in|out)put",
    r"\.attn\.(in|out)put",
    r"gate_up_proj\.output",
)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in tensors(part)] if isinstance(value, tuple | list) else []


def places(model):
    """Of every module in the first and the last layer, and outside the layers, the two sides."""
    for envoy in model.modules():
        if not re.search(rf"\.(layers|h)\.[1-{models.LAYERS - 2}](\.|$)", envoy.path):
            yield envoy, "input"
            yield envoy, "output"


def look(engine, envoy, side):
    """What one trace reads there, and the logits after it has edited it; or what it was told."""
    model = engine.model
    try:
        with engine.trace(TOWER, max_tokens=1, temperature=0):
            found = tensors(envoy.output if side == "output" else envoy.inputs)
            read = [one.clone() for one in found].save()
            for one in found:
                if one.is_floating_point():
                    one[..., :COLUMNS] *= 0.5
            logits = model.logits.save()
    except TraceError as error:
        return str(error).splitlines()[0]
    return list(read), logits.clone()


def survey(one_engine, path, **options):
    engine = one_engine.want(path, "sync", dtype="float32", max_model_len=128, **options)
    found = {f"{envoy.path}.{side}": look(engine, envoy, side) for envoy, side in places(engine.model)}
    with engine.trace(TOWER, max_tokens=1, temperature=0):
        plain = engine.model.logits.save()
    return found, plain.clone()


def verdict(one, two):
    """How what two ranks have lies to what one has."""
    if one.shape != two.shape:
        half = two.shape[:-1] == one.shape[:-1] and two.shape[-1] * 2 == one.shape[-1]
        return "half" if half else f"{tuple(two.shape)} for {tuple(one.shape)}"
    if not one.numel():
        return "equal"
    one, two = one.double(), two.double()
    if (one - two).abs().max() <= CLOSE * one.abs().max().clamp(min=1e-3):
        return "equal"
    if torch.allclose(one.sort(-1).values, two.sort(-1).values, rtol=CLOSE, atol=CLOSE):
        return "in another order"
    return "a partial sum, or something else"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kinds")


@pytest.mark.parametrize("kind", REFUSED)
def test_every_value_and_every_edit_is_that_of_one_rank_or_refused(one_engine, folder, kind):
    path = getattr(models, f"tiny_{kind}")(folder / kind)
    alone, plain = survey(one_engine, path)
    ranks, plain_of_ranks = survey(one_engine, path, tensor_parallel_size=2)
    one_engine.stop()
    assert verdict(plain, plain_of_ranks) == "equal"
    assert list(alone) == list(ranks)
    wrong, refused, edited = {}, set(), 0
    for place, wanted in alone.items():
        found = ranks[place]
        if isinstance(found, str) and "PieceOfARank" in found:
            assert place in found
            assert "Whole are: model." in found
            refused.add(place.partition(".0.")[2] or place.partition(f".{models.LAYERS - 1}.")[2])
        elif isinstance(wanted, str) or isinstance(found, str):
            # Neither reaches it: a ModuleList, a head that is called in another way.
            if wanted != found:
                wrong[place] = (wanted, found)
        else:
            seen = [verdict(one, two) for one, two in zip(wanted[0], found[0], strict=True)]
            seen.append(verdict(wanted[1], found[1]))
            if set(seen) != {"equal"}:
                wrong[place] = seen
            if any(re.search(cut, place) for cut in CUT):
                edited += 1
                assert verdict(plain, found[1]) != "equal", place
    assert not wrong
    assert refused == REFUSED[kind]
    assert edited >= 6
