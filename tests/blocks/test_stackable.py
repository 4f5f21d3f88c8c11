"""Which blocks may run once for many requests, read off their text; whatever is not certain is refused."""

from __future__ import annotations

import pytest
import torch

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.stackable import stackable
from nnsight_lab.blocks.stubs import BlockEngine, block_tracer
from tests.worker.without_engine import Tiny


@pytest.fixture(scope="module")
def model():
    from nnsight.modeling.vllm.vllm import VLLM

    return VLLM(Tiny())


def read(model, source, **names):
    import nnsight

    scope = {"engine": BlockEngine(model), "model": model, "tracer": block_tracer(model), "torch": torch}
    scope |= {"nnsight": nnsight, "vector": torch.ones(5), "places": [1, 2], "words": {}, "f": len}
    return stackable(Block(source, "cell", 1, {}, {**scope, **names}))


LOOP = "best = [].save()\nfor _ in tracer.all():\n    best.append({})\n"
FIT = [
    "engine.model.logits[0].max()",
    "model.logits",
    "model.logits[0, 3]",
    "model.logits[:, places].float().softmax(dim=-1)",
    "model.logits[0].topk(k=2, dim=-1, largest=True).values",
    "model.logits[..., None, 1:3].T",
    "torch.logsumexp(model.logits[0].to(torch.float32), -1)",
    "(model.logits[0][:5] @ vector) / 2 - -1.5",
    "model.logits[0] > 0.5",
    "model.samples",
    "model.logits[0].mean() * model.samples[0]",
    "torch.stack([model.logits[0].min(), model.logits[0].max()])",
    "(model.logits[0] ** 2).sum()",
    "model.logits[[0], [1]]",
]
UNFIT = [
    "model.logits * 10 ** 10 ** 10",
    "model.logits * (1 << 10 ** 10)",
    "model.logits[0] @ ([1] * 10 ** 9)",
    "model.logits[:, places * 10]",
    "[model.logits]",
    "1",
    "model.logits.max().item()",
    "float(model.logits.max())",
    "max(model.logits[0])",
    "f(model.logits)",
    "words.get(model.logits)",
    "(lambda: model.logits)()",
    "[one.max() for one in model.logits]",
    "model.logits if 1 else 2",
    "model.logits and 1",
    "not model.logits",
    "0 < model.logits < 1",
    "model.logits is None",
    "(x := model.logits)",
    "model.logits.add_(1)",
    "model.logits.zero_()",
    "torch.add(model.logits, 1, out=vector)",
    "torch.rand(3) + model.logits[0, 0]",
    "model.logits[0].multinomial(1)",
    "torch.nn.functional.dropout(model.logits)",
    "model.logits[0].tolist()",
    "model.logits.numpy()",
    "model.logits.save()",
    "(model.samples, model.logits)",
    "model.samples[0] + model.logits[0, 0]",
    "model.logits.__class__",
    "model.logits.data",
    "model.logits.grad_fn",
    "model.layer.output",
    "engine.tokenizer(model.logits)",
    "tracer.result",
    "model.logits[words]",
    "best",
    "model.logits[len(best)]",
    "_ + model.logits[0, 0]",
    "unknown + model.logits[0, 0]",
    'torch.einsum("ij->j", model.logits)',
    "model.logits.max(*[0])",
    'f"{model.logits}"',
]


@pytest.mark.parametrize("value", FIT)
def test_a_pure_reading_may_run_for_many(model, value):
    found = read(model, LOOP.format(value))
    if "samples" in value or "logits" in value:
        assert found is not None
        assert found.loops
        assert found.names == {"best": True}


@pytest.mark.parametrize("value", UNFIT)
def test_whatever_else_may_not(model, value):
    assert read(model, LOOP.format(value)) is None


BLOCKS = {
    "a list made by list()": (
        "x = list().save()\nfor i in tracer.iter[:]:\n    x.append(model.logits)\n",
        True,
    ),
    "a list saved later": ("x = []\nx.save()\nfor i in tracer.all():\n    x.append(model.logits)\n", True),
    "nnsight.save": ("x = nnsight.save(list())\nfor i in tracer.all():\n    x.append(model.logits)\n", True),
    "as it was written": ("if True:\n    x = model.logits[0].max().save()\n", True),
    "the first step": ("x = model.logits[0]\ny = x.max().save()\nz = nnsight.save(x.min())\n", True),
    "values before it": (
        "k = 3\nx = [].save()\nfor i in tracer.all():\n    x.append(model.logits[0, k])\n",
        True,
    ),
    "names within it": (
        "x = [].save()\n"
        "for i in tracer.all():\n    a = model.logits[0]\n    b = a + 1\n    x.append(b.max())\n",
        True,
    ),
    "lists made in one line": (
        "x, y = [].save(), list().save()\n"
        "for i in tracer.all():\n    x.append(model.logits)\n    y.append(model.samples)\n",
        True,
    ),
    "a list that nobody saves": ("x = []\nfor i in tracer.all():\n    x.append(model.logits)\n", False),
    "nothing saved": ("x = model.logits.max()\n", False),
    "a condition": ("if f:\n    x = model.logits.save()\n", False),
    "an else": ("if True:\n    x = model.logits.save()\nelse:\n    pass\n", False),
    "a bounded loop": ("x = [].save()\nfor i in tracer.iter[:3]:\n    x.append(model.logits)\n", False),
    "another loop": ("x = [].save()\nfor i in range(3):\n    x.append(model.logits)\n", False),
    "two loops": (
        "x = [].save()\n"
        "for i in tracer.all():\n    x.append(model.logits)\n"
        "for i in tracer.all():\n    x.append(model.logits)\n",
        False,
    ),
    "after the loop": ("x = [].save()\nfor i in tracer.all():\n    x.append(model.logits)\ny = 1\n", False),
    "a read before the loop": (
        "x = [].save()\na = model.logits\nfor i in tracer.all():\n    x.append(model.logits)\n",
        False,
    ),
    "an else of the loop": (
        "x = [].save()\nfor i in tracer.all():\n    x.append(model.logits)\nelse:\n    pass\n",
        False,
    ),
    "a loop without a read": ("x = [].save()\nfor i in tracer.all():\n    x.append(vector)\n", False),
    "a value of the turn before": (
        "x = [].save()\na = 0\nfor i in tracer.all():\n    x.append(model.logits)\n    a = a + 1\n",
        False,
    ),
    "a name before its value": (
        "x = [].save()\nfor i in tracer.all():\n    x.append(a)\n    a = model.logits\n",
        False,
    ),
    "a save in the loop": (
        "x = [].save()\n"
        "for i in tracer.all():\n    x.append(model.logits)\n    y = model.logits.max().save()\n",
        False,
    ),
    "one value in two lists": (
        "x = [].save()\ny = [].save()\n"
        "for i in tracer.all():\n    a = model.logits\n    x.append(a)\n    y.append(a)\n",
        False,
    ),
    "another name of a saved value": ("x = model.logits.save()\ny = x\n", False),
    "a saved value that is used": ("x = model.logits.save()\ny = x.float().save()\n", False),
    "a captured list": ("for i in tracer.all():\n    places.append(model.logits)\n", False),
    "a write": ("model.logits = vector\n", False),
    "a write in place": ("x = [].save()\nfor i in tracer.all():\n    a = model.logits\n    a += 1\n", False),
    "a part that is written": ("model.logits[0] = 1\nx = model.logits.save()\n", False),
    "a stop": ("x = model.logits.save()\ntracer.stop()\n", False),
    "a print": ("x = model.logits.save()\nprint(1)\n", False),
    "an import": ("import os\nx = model.logits.save()\n", False),
    "a with": ("with f:\n    x = model.logits.save()\n", False),
    "a try": ("try:\n    x = model.logits.save()\nfinally:\n    pass\n", False),
    "two names at once": ("x = y = model.logits.save()\n", False),
    "unpacking": ("x, y = model.logits.max(0)\n", False),
    "no Python": ("x = (\n", False),
    "what comes before fails": ("k = vector @ 1\nx = model.logits.save()\n", False),
    "samples first": (
        "x = [].save()\nfor i in tracer.all():\n    x.append(model.samples)\n    x.append(model.logits)\n",
        False,
    ),
}


@pytest.mark.parametrize(("source", "fit"), BLOCKS.values(), ids=BLOCKS)
def test_the_form_of_a_block_decides(model, source, fit):
    assert (read(model, source) is not None) == fit


def test_names_that_stand_for_other_things_are_not_known(model):
    source = "x = list().save()\nfor i in tracer.all():\n    x.append(engine.model.logits[0].max())\n"
    assert read(model, source) is not None
    assert read(model, source, engine=model.layer) is None
    assert read(model, source, tracer=[1]) is None
    assert read(model, source, list=dict) is None
    gradient = torch.ones(5, requires_grad=True)
    assert read(model, LOOP.format("model.logits @ vector"), vector=gradient) is None
    parameter = torch.nn.Parameter(torch.ones(5))
    assert read(model, LOOP.format("model.logits @ vector"), vector=parameter) is None
    assert read(model, LOOP.format("torch.max(model.logits)"), torch=math_like()) is None


def math_like():
    import math

    return math


def test_what_was_saved_before_the_block_is_not_its_own(model):
    names = {"tracer": block_tracer(model), "model": model}
    block = Block(LOOP.format("model.logits"), "cell", 1, {}, names, frozenset({"best"}))
    assert stackable(block) is None


def test_the_function_is_the_block(model):
    found = read(
        model,
        "k = 2\nx = [].save()\nfor i in tracer.all():\n    x.append(model.logits[0, k] + model.samples)\n",
    )
    assert found is not None
    assert found.reads == ("logits", "samples")
    (value,) = found.body(torch.arange(5).view(1, 5), torch.tensor([[10]]))
    assert value.tolist() == [[12]]
