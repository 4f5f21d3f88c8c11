"""What is said of a module's inputs and outputs is what a block is served, on fused and unfused models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import nnsight_lab as lab
from nnsight_lab.engine.dry_run import TOKENS, Form, passed
from tests import models

PROMPT = "Hello there"

LLAMA = [
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    # One module for all layers, and the first to come by.
    "model.layers.0.self_attn.rotary_emb",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.self_attn.attn",
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.self_attn",
    "model.layers.1.post_attention_layernorm",
    "model.layers.1.mlp.gate_up_proj",
    "model.layers.1.mlp.act_fn",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp",
    "model.layers.1",
    "model.layers.3",
    "model.norm",
    "model",
    "logits_processor",
]
GEMMA2 = [
    "model.layers.0.input_layernorm",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn",
    "model.layers.1.post_attention_layernorm",
    "model.layers.1.pre_feedforward_layernorm",
    "model.layers.1.mlp",
    "model.layers.1.post_feedforward_layernorm",
    "model.layers.1",
    "model.norm",
]
GPT2 = [
    "transformer.wte",
    "transformer.wpe",
    "transformer.h.0.mlp.act",
    "transformer.h.0",
    "transformer.h.1.ln_1",
    "transformer.h.1.attn.c_attn",
    "transformer.h.1.attn.attn",
    "transformer.h.1.attn.c_proj",
    "transformer.h.1.attn",
    "transformer.h.1.ln_2",
    "transformer.h.1.mlp.c_fc",
    "transformer.h.1.mlp.c_proj",
    "transformer.h.1.mlp",
    "transformer.h.1",
    "transformer.ln_f",
    "logits_processor",
]


def form(value: Any, tokens: int) -> Any:
    """As `Form`, of a value that was served."""
    if hasattr(value, "dtype"):
        shape = tuple(TOKENS if size == tokens else size for size in value.shape)
        return Form(shape, str(value.dtype).removeprefix("torch."))
    if isinstance(value, tuple | list):
        return tuple(form(part, tokens) for part in value)
    return value


def in_order(modules: list[str]) -> Iterator[tuple[str, str]]:
    """Inputs and outputs as the model comes by: a module's input before its parts."""
    entered = set()
    for name in modules:
        for outer in sorted(modules, key=len):
            # The logits' first input is a module.
            if outer not in entered and f"{name}.".startswith(f"{outer}.") and outer != "logits_processor":
                entered.add(outer)
                yield outer, "input"
        yield name, "output"


@pytest.mark.parametrize(
    ("path", "modules"), [("gpt2_path", GPT2), ("gemma2_path", GEMMA2), ("llama_path", LLAMA)]
)
def test_every_module_gives_what_was_said_of_it(
    one_engine: Any, path: str, modules: list[str], request: pytest.FixtureRequest
) -> None:
    engine = one_engine.want(
        request.getfixturevalue(path), "sync", dtype="float32", max_model_len=models.CONTEXT
    )
    model = engine.model
    tokens = len(engine.tokenizer(PROMPT).input_ids)
    visits = list(in_order(modules))
    with engine.trace(PROMPT, max_tokens=1):
        served = [].save()
        for name, side in visits:
            served.append(getattr(model.get(name), side))
    assert len(visits) == 2 * len(modules) - modules.count("logits_processor")
    for (name, side), value in zip(visits, served, strict=True):
        said = passed(model._module, model._module.get_submodule(name))
        assert said is not None, name
        given = next(iter([*said.args, *said.kwargs.values()]))
        assert form(value, tokens) == (said.output if side == "output" else given), (name, side)


def test_the_tree_stays_as_it_was(one_engine: Any, llama_path: Any) -> None:
    engine = one_engine.want(llama_path, "sync", dtype="float32", max_model_len=models.CONTEXT)
    tree = engine.model._module
    before = {name: set(vars(module)) for name, module in tree.named_modules()}
    forwards = [module.__dict__.get("forward") for module in tree.modules()]
    from nnsight_lab.engine import dry_run

    dry_run._known.pop(tree, None)
    assert passed(tree, tree) is not None
    assert {name: set(vars(module)) for name, module in tree.named_modules()} == before
    assert [module.__dict__.get("forward") for module in tree.modules()] == forwards
    with engine.trace(PROMPT, max_tokens=1):
        stream = lab.residual(engine.model.model.layers[1].output).save()
    assert stream.shape[1] == models.HIDDEN


def test_a_model_that_does_not_run_without_weights_is_not_known() -> None:
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, device="meta")

        def forward(self, ids: Any, positions: Any) -> Any:
            raise RuntimeError("a kernel")

    odd = Odd()
    assert passed(odd, odd.inner) is None
    weighty = nn.Linear(2, 2)
    assert passed(weighty, weighty) is None
