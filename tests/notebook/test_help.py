"""Completion and Shift+Tab in cells that run inside the model, in real kernels with a real model's tree."""

from __future__ import annotations

import statistics
import time

import pytest

from tests.notebook.kernels import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)

LAYER = "model.model.layers[3]"
#: What a person does not notice, on a machine that does other things as well.
LIMIT_MS = 150


def test_a_path_is_completed_with_what_each_module_gives(kernel: Kernel) -> None:
    found = kernel.details(f"%%trace 'a'\nx = {LAYER}.|")
    about = {name.removeprefix("."): said for name, said in found.items()}
    assert list(about)[:5] == [
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "output",
    ]
    assert about["self_attn"] == "LlamaAttention → [tokens, 576] bfloat16"
    assert about["input_layernorm"] == "RMSNorm → (normed, residual) [tokens, 576] bfloat16 each"
    assert about["output"] == "(hidden, residual) [tokens, 576] bfloat16 each"
    assert about["input"] == "[tokens] int64"


def test_shift_tab_says_what_a_fused_layer_gives(kernel: Kernel) -> None:
    said = kernel.inspect(f"%%trace 'a', max_tokens=(\nx = {LAYER}.out|put[0].save()")
    assert f"{LAYER}: LlamaDecoderLayer, one of 30" in said
    assert "Output   (hidden, residual) [tokens, 576] bfloat16 each" in said
    assert f"stream = lab.residual({LAYER}.output).save()" in said
    assert "Input    positions [tokens] int64" in said


@newest
def test_what_shift_tab_says_is_what_is_saved(kernel: Kernel) -> None:
    """The examples of tooltips, run."""
    paths = [f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.input_layernorm", f"{LAYER}.mlp.act_fn", LAYER]
    for path in paths:
        said = kernel.inspect(f"%%trace 'a'\n{path}|").splitlines()
        (example,) = [line.split(None, 1)[1] for line in said if line.startswith("Example")]
        name = example.split(" = ")[0]
        cell = f"%%trace 'One two', max_tokens=1\n{example}\n"
        of = kernel.inspect(f"{cell}{name}|").splitlines()[0]
        saved = kernel.good(cell).texts[-1]
        tokens = kernel.value("len(tracer.output.prompt_token_ids)")
        shape, dtype = of.removeprefix(f"{name}: ").rsplit(" ", 1)
        assert f"{name} {dtype} {shape.replace('tokens', str(tokens))}" in saved, (of, saved)


@newest
def test_names_of_the_cell_are_explained(kernel: Kernel) -> None:
    body = f"%%trace 'a'\nlayer = {LAYER}\nhidden = layer.mlp.output.save()\n"
    assert "mlp: LlamaMLP" in kernel.inspect(body + "layer.ml|p")
    said = kernel.inspect(body + "hid|den")
    assert said.startswith("hidden: [tokens, 576] bfloat16\n")
    assert f"{LAYER}.mlp.output, in this cell" in said
    assert "inside the forward passes" in kernel.inspect("%%trace 'a'\ntrac|er")
    assert "tracer.stop" in kernel.complete("%%trace 'a'\ntracer.|")
    assert "tracer.outputs" in kernel.complete("%%trace 'a'\ntracer.|")
    assert "An installed edit." in kernel.inspect("%%edit p\ned|it")
    assert "none of its own" in kernel.inspect("%%edit p\nmodel.lm_head|")
    assert kernel.inspect("%%edit p\nmodel.logits|").startswith("model.logits: [1, 49152] bfloat16")


@newest
def test_other_names_are_still_ipythons(kernel: Kernel) -> None:
    kernel.good("number = 3")
    assert "Type:        int" in kernel.inspect("numb|er")
    assert "Type:        int" in kernel.inspect("%%trace 'a'\nx = numb|er")
    assert kernel.inspect("%%trace 'a'\nx = unheard_|of") == ""


@newest
def test_help_comes_before_it_is_noticed(kernel: Kernel) -> None:
    took_ms: dict[str, list[float]] = {}
    for cell in (f"%%trace 'a'\n{LAYER}.|", f"%%trace 'a'\n{LAYER}.mlp.output.|", "%%trace 'a'\ntracer.|"):
        for _ in range(9):
            began_s = time.perf_counter()
            assert kernel.complete(cell)
            took_ms.setdefault(cell, []).append(1e3 * (time.perf_counter() - began_s))
            kernel.inspect(cell.replace(".|", "|"))
    print({cell: round(statistics.median(each), 1) for cell, each in took_ms.items()})
    assert max(statistics.median(each) for each in took_ms.values()) < LIMIT_MS
