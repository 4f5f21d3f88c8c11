"""What of a prompt a block touches, read off the block: logits and samples for certain, or all of it."""

from __future__ import annotations

import ast
import collections
import itertools
import linecache
import math
import textwrap
from dataclasses import replace

import pytest
import torch
from nnsight.intervention.envoy import Envoy

import nnsight_lab as lab
import nnsight_lab.blocks
from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.blocks.reach import touch_of, touch_of_steps
from nnsight_lab.blocks.stubs import block_tracer
from nnsight_lab.steps.positions import positions_of
from nnsight_lab.wire.touch import Reach, Touch, together

cells = itertools.count()


class Engine:
    """Stands for an engine among a block's names."""

    def __init__(self, model):
        self.model = model


TREE = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 2)))
PART = TREE[0]


def plain(logits):
    return torch.softmax(logits, -1).max() + math.pi


def named(_logits):
    return TREE[0]


def through(logits):
    return named(logits)


def hidden(_logits):
    return globals()


def imports(_logits):
    import gc

    return gc.get_objects()


def closed(value):
    def inner(_logits):
        return value

    return inner


NAMES = {
    "model": TREE,
    "tracer": block_tracer(TREE),
    "engine": Engine(TREE),
    "layer": PART,
    "torch": torch,
    "math": math,
    "lab": lab,
    "plain": plain,
    "named": named,
    "through": through,
    "hidden": hidden,
    "imports": imports,
    "over_tensor": closed(torch.ones(2)),
    "over_model": closed([PART]),
    "vector": torch.ones(3),
    "settings": {"ids": [1, 2, 3], "scale": 0.5, "names": ("a", "b")},
    "held": [PART],
    "thing": object(),
    "Counter": collections.Counter,
    "Engine": Engine,
}


def touched(text):
    text = "with tracer:\n" + textwrap.indent(textwrap.dedent(text), "    ")
    filename = f"<cell {next(cells)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    node = ast.parse(text).body[0]
    return touch_of(Block.capture(node, filename, NAMES, {}), Engine)


@pytest.mark.parametrize(
    "text",
    [
        "first = model.logits.save()",
        "model.logits[:, 3] += 5",
        "model.logits = model.logits * settings['scale']",
        "model.samples[:] = 7",
        "seen = []\nfor step in tracer.iter[1:3]:\n    seen.append(model.logits.argmax(-1))\nseen.save()",
        "for _ in tracer.all():\n    model.logits[..., settings['ids']] = -1e9",
        "output = tracer.result.save()",
        "import torch\nfrom math import log\nx = torch.log_softmax(model.logits, -1) * log(2)",
        "best = plain(model.logits).save()",
        "best = over_tensor(model.logits)",
        "ids = engine.model.logits.argmax()",
        "word = model.tokenizer.decode([3])\nother = engine.tokenizer",
        "counts = Counter(int(i) for i in model.samples)",
        "scores = [torch.dot(vector, vector) for _ in range(3)]",
        "if model.logits.max() > 3:\n    tracer.stop()",
        "def chance(x):\n    return x.exp()\nbest = chance(model.logits)",
        "x = 1",
    ],
)
def test_answers_only(text):
    assert touched(text) == Touch(Reach.ANSWERS)


@pytest.mark.parametrize(
    "text",
    [
        "x = layer.output",
        "x = model[0].output.save()",
        "x = model.layers[3].output",
        "m = model\nx = m.logits",
        "x = getattr(model, 'logits')",
        "x = plain(model)",
        "x = [model.logits, model]",
        "x = model.logits\ny = layer.output",
        "x = named(model.logits)",
        "x = through(model.logits)",
        "x = hidden(model.logits)",
        "x = imports(model.logits)",
        "x = over_model(model.logits)",
        "x = held[0].output",
        "x = engine.edits",
        "e = engine\nx = e.model.logits",
        "x = engine.model.layers",
        "x = thing",
        "x = Engine(model.logits)",
        "x = globals()['model']",
        "x = eval('model')",
        "import gc\nx = gc.get_objects()",
        "from nnsight import session",
        "x = lab.residual(model.logits)",
        "with tracer.cache() as c:\n    pass",
        "tracer.envoy",
        "t = tracer\nx = t.envoy",
        "x = model.logits.__class__.__subclasses__()",
        "x = model.modules()",
        "for model.logits in [1]:\n    x = model",
        "global y\ny = 1",
        "lines = get_ipython().getoutput('ls')",
    ],
)
def test_whatever_is_not_certain_reads_the_prompt(text):
    assert touched(text) == Touch(Reach.PROMPT)


def test_functions_that_call_each_other_are_read_once():
    space = {}
    exec("def one(x):\n    return two(x)\ndef two(x):\n    return one(x)", space)
    for function in (space["one"], space["two"]):
        function.__module__ = "mine"
    block = Block(
        "\nif True:\n    x = one(model.logits)\n", "<cell>", 3, {"one": space["one"], "model": TREE}, {}
    )
    assert touch_of(block) == Touch(Reach.ANSWERS)


VECTOR = torch.ones(4)


@pytest.mark.parametrize(
    ("step", "alike"),
    [
        (lab.steps.add("a", VECTOR), True),
        (lab.steps.scale("a", 2), True),
        (lab.steps.set("a", VECTOR), True),
        (lab.steps.set("a", 1.0), True),
        (lab.steps.ablate("a", mean=VECTOR, dims=[0, 1, 2, 3]), True),
        (lab.steps.clamp("a", low=0), True),
        (lab.steps.project_out("a", torch.eye(4)), True),
        (lab.steps.read("a", "seen"), False),
        (lab.steps.patch("a", torch.eye(4)), False),
        (lab.steps.add("a", torch.eye(4), positions="prompt"), False),
    ],
)
def test_steps_that_do_the_same_to_every_row_are_told_from_others(step, alike):
    block = DeclaredBlock.of("steps", {"steps": (step,)})
    assert touch_of(block).reach is (Reach.ROWS if alike else Reach.PROMPT)
    for positions in ("last", "prompt", "generated", 0, -1, "2:5", [0, "generated"]):
        if step.op == "patch" or (step.op == "add" and step.tensor.ndim > 1):
            continue
        placed = replace(step, positions=positions_of(positions))
        assert touch_of_steps([placed], b"") == Touch(Reach.PROMPT), positions
    both = touch_of_steps([step, lab.steps.read("a", "seen")], b"")
    assert both == Touch(Reach.PROMPT)


def test_equal_steps_have_equal_content_and_others_another():
    def content(*steps):
        return touch_of(DeclaredBlock.of("steps", {"steps": steps})).content

    one = content(lab.steps.add("a", VECTOR, scale=2))
    assert one == content(lab.steps.add("a", VECTOR.clone(), scale=2))
    others = [
        content(lab.steps.add("a", VECTOR, scale=3)),
        content(lab.steps.add("b", VECTOR, scale=2)),
        content(lab.steps.add("a", VECTOR * 1.0001, scale=2)),
        content(lab.steps.add("a", VECTOR, scale=2), lab.steps.scale("b", 2)),
        content(lab.steps.scale("b", 2), lab.steps.add("a", VECTOR, scale=2)),
    ]
    assert len({one, *others}) == 6


def test_looks_read_the_prompt():
    assert touch_of(DeclaredBlock.of("lens", {})).reach is Reach.PROMPT


def test_a_word_that_is_none_stands_for_the_prompt():
    assert [Reach.said(one.value) for one in Reach] == list(Reach)
    assert {Reach.said(word) for word in (None, "", "rowss", 5, ["rows"])} == {Reach.PROMPT}


def test_the_blocks_of_a_request_together():
    answers, rows, prompt = Touch(Reach.ANSWERS), Touch(Reach.ROWS, b"x"), Touch(Reach.PROMPT)
    assert together([]) is None
    assert together([answers, answers]) is Reach.ANSWERS
    assert together([rows]) is Reach.ROWS
    assert together([rows, answers]) is Reach.MIXED
    assert together([rows, prompt]) is together([prompt]) is together([answers, prompt]) is Reach.PROMPT
