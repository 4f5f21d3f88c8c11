"""Steps by themselves: what cannot be said is refused in one line, and JSON says the same as Python."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import EditRefused
from nnsight_lab.steps import Step
from nnsight_lab.steps.check import checked, fitted, stream_sites
from nnsight_lab.steps.form import of_json, to_json
from nnsight_lab.steps.order import ordered
from nnsight_lab.steps.positions import where
from nnsight_lab.steps.rows import basis
from nnsight_lab.wire.codec import WireError, decode, encode

MODULES = {
    "": "Llama",
    "model": "LlamaModel",
    "model.embed_tokens": "Embedding",
    "model.layers": "ModuleList",
    **{
        f"model.layers.{n}{rest}": kind
        for n in range(12)
        for rest, kind in [
            ("", "LlamaDecoderLayer"),
            (".self_attn", "Attention"),
            (".self_attn.o_proj", "Linear"),
            (".mlp", "MLP"),
            (".input_layernorm", "RMSNorm"),
        ]
    },
    "model.norm": "RMSNorm",
    "lm_head": "Head",
}


def nested(depth):
    found = 1.0
    for _ in range(depth):
        found = [found]
    return found


def refused(make, said):
    with pytest.raises(EditRefused, match=said) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: lab.steps.add("a", [1.0], positions="first"),
            "'first' cannot be: positions are 'all', 'last'",
        ),
        (lambda: lab.steps.add("a", [1.0], positions=[]), "0 positions"),
        (lambda: lab.steps.add("a", [1.0], positions=slice(0, 9, 2)), "cannot be"),
        (lambda: lab.steps.add("a", [1.0], positions=True), "cannot be"),
        (lambda: lab.steps.add("a", [1.0], positions="1:x"), "cannot be"),
        (lambda: lab.steps.add("a", [1.0], positions=1.5), "cannot be"),
        (lambda: lab.steps.add("a", [1.0], scale="3"), "scale='3' is not a number"),
        (lambda: lab.steps.add("a", [1.0], scale=float("nan")), "scale=nan is not a finite number"),
        (lambda: lab.steps.add("a", [1.0, float("inf")]), "NaN or infinity"),
        (lambda: lab.steps.add("a", "vector"), "vector= should be a tensor"),
        (lambda: lab.steps.add("a", torch.ones(1, 1, 1)), r"the tensor is \[1, 1, 1\]; \[width\] or"),
        (
            lambda: lab.steps.add("a", torch.ones(2, 3)),
            "a row for each position is for positions of the prompt",
        ),
        (lambda: lab.steps.add("a", [1.0], side="middle"), "neither 'output' nor 'input'"),
        (lambda: lab.steps.add(5, [1.0]), "A site is a module's path"),
        (lambda: lab.steps.add("", [1.0]), "site is a module's path"),
        (lambda: lab.steps.project_out("a", [0.0, 0.0]), "zero everywhere"),
        (lambda: lab.steps.project_out("a", torch.ones(257, 4)), "at most 256 directions, not 257"),
        (lambda: lab.steps.clamp("a"), "clamp needs low=, high=, or both"),
        (lambda: lab.steps.clamp("a", low=2, high=1), "low=2 is above high=1"),
        (lambda: lab.steps.ablate("a", dims=[1, 1]), "each once"),
        (lambda: lab.steps.ablate("a", dims="all"), "dims='all' is not a list"),
        (lambda: lab.steps.ablate("a", dims=[1, 2], mean=[1.0]), "1 values for 2 dims"),
        (lambda: lab.steps.set("a", None), "value= should be a tensor"),
        (lambda: lab.steps.patch("a", [1.0]), r"\[position, width\] is wanted"),
        (lambda: lab.steps.patch("a", [[1.0]], positions="generated"), "patch is for rows of the prompt"),
        (lambda: lab.steps.read("a", "no good"), "read saves under a name"),
        (lambda: lab.steps.read("a", "x'); import os #"), "read saves under a name"),
        (lambda: checked(Step("exec", "a")), "'exec' is not an operation of a step; these are: read, add"),
        (lambda: checked(replace(lab.steps.ablate("a"), number=1.0)), "ablate has no number="),
        (lambda: checked(replace(lab.steps.scale("a", 1), low=1.0)), "scale has no low="),
        (lambda: checked(replace(lab.steps.scale("a", 1), name="x")), "scale has no name"),
        (lambda: checked(replace(lab.steps.set("a", 1), tensor=torch.ones(1))), "one of the two"),
        (lambda: checked(replace(lab.steps.add("a", [1.0]), dims=(1,))), "add has no dims="),
        (lambda: checked(replace(lab.steps.read("a", "x"), tensor=torch.ones(1))), "read has no tensor"),
    ],
)
def test_what_cannot_be_said_is_refused_in_one_line(make, said):
    refused(make, said)


def test_positions_are_rows_of_the_prompt_each_once():
    assert where(("all",)) == (True, (), (), True)
    assert where(("prompt",)).rows(3) is None
    assert where((0, 1, 2)).rows(3) is None
    assert where((-1, 2, "0:1", "last")).rows(3) == [0, 2]
    assert where(("5:9",)).rows(3) == []
    assert where(("-2:",)).rows(5) == [3, 4]
    assert not where(("generated",)).in_prompt
    with pytest.raises(IndexError, match="position -4 is not in the prompt, which has 3 tokens"):
        where((-4,)).rows(3)


def test_steps_run_in_the_order_of_the_model_whatever_order_they_were_given_in():
    sites = [
        ("model.norm", "output"),
        ("model.layers.10", "output"),
        ("model.layers.2", "output"),
        ("model.layers.2.mlp", "output"),
        ("model.layers.2", "input"),
        ("model.layers.2.self_attn", "output"),
        ("model.embed_tokens", "output"),
        ("model.layers.2.self_attn.o_proj", "output"),
    ]
    steps = [Step("ablate", site, side) for site, side in sites]
    found = [step.location for step in ordered(steps, MODULES)]
    assert found[0] == "model.embed_tokens.output"
    assert found[1] == "model.layers.2.input"
    # In a layer the order is the caller's: what is listed first may run second.
    assert found[2] == "model.layers.2.mlp.output"
    assert found[-3:] == ["model.layers.2.output", "model.layers.10.output", "model.norm.output"]
    same = [
        lab.steps.scale("model.norm", 2),
        lab.steps.add("model.norm", [1.0]),
        lab.steps.read("model.norm", "x"),
    ]
    assert [step.op for step in ordered(same, MODULES)] == ["scale", "add", "read"]


def test_decoder_layers_are_what_stands_in_a_list_as_long_as_the_model_has_layers():
    assert stream_sites(MODULES.items(), 12) == {f"model.layers.{n}" for n in range(12)}
    assert stream_sites(MODULES.items(), 11) == frozenset()


def test_json_says_what_python_says():
    vector = torch.randn(8)
    steps = [
        lab.steps.read("model.layers.0", "seen", positions=[0, "generated"]),
        lab.steps.add("model.layers.1", vector, scale=3, positions="last"),
        lab.steps.scale("model.layers.1", 0.5, dims=[1, 2]),
        lab.steps.set("model.layers.1", 2, side="input"),
        lab.steps.set("model.layers.1", vector),
        lab.steps.project_out("model.layers.2", vector),
        lab.steps.ablate("model.layers.2", positions="2:5"),
        lab.steps.clamp("model.layers.2", low=-1),
        lab.steps.patch("model.layers.3", vector[None], positions=-1),
    ]
    told = to_json(steps)
    for one in told:
        if "tensor" in one:
            assert one["tensor"].startswith("float32 [")
            one["tensor"] = "v"
    rows = {"v": vector}
    told[-1]["tensor"] = [vector.tolist()]
    back = of_json(json.loads(json.dumps(told)), rows)
    assert list(map(str, back)) == list(map(str, steps))
    for one, other in zip(back, steps, strict=True):
        if other.tensor is not None:
            torch.testing.assert_close(one.tensor, other.tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, '"steps" should be a list'),
        ([], '"steps" should be a list'),
        ([5], r"steps\[0\]: it is a int"),
        ([{}], r"steps\[0\]: None is not an operation; these are: read"),
        ([{"op": "add", "site": "a", "vector": "v"}], r"add has no 'vector'"),
        ([{"op": "add", "site": "a", "tensor": "w"}], r"no tensor 'w'\. Known: v"),
        ([{"op": "add", "site": "a", "tensor": {}}], "the name of a tensor, or its numbers"),
        ([{"op": "add", "site": "a", "tensor": [[1], [1, 2]]}], "the name of a tensor, or its numbers"),
        ([{"op": "add", "site": "a"}], "add needs a tensor"),
        ([{"op": "add", "site": ["a"], "tensor": "v"}], "site is a module's path"),
        ([{"op": "scale", "site": "a", "factor": "2"}], "factor='2' is not a finite number"),
        ([{"op": "scale", "site": "a", "factor": 10**400}], "is not a finite number"),
        ([{"op": "add", "site": "a", "tensor": [10**400]}], "the name of a tensor, or its numbers"),
        ([{"op": "add", "site": "a", "tensor": nested(900)}], "the name of a tensor, or its numbers"),
        ([{"op": "scale", "site": "a", "factor": True}], "factor=True is not a finite number"),
        ([{"op": "scale", "site": "a", "factor": 1, "dims": "x"}], '"dims" is a list'),
        ([{"op": "read", "site": "a", "name": 3}], "read saves under a name"),
        ([{"op": "read", "site": "a", "name": "x", "side": []}], "neither 'output' nor 'input'"),
        ([{"op": "read", "site": "a", "name": "x", "positions": {"a": 1}}], "cannot be"),
        ([{"op": ["read"], "site": "a"}], "is not an operation"),
        ([{"op": "ablate", "site": "a"}] * 1025, "at most 1024 steps"),
    ],
)
def test_json_that_says_no_step_is_refused_with_its_place(told, said):
    refused(lambda: of_json(told, {"v": torch.ones(2)}), said)


def test_a_site_is_looked_up_and_never_read_as_anything_else():
    for site in ("model.layers.1; import os", "model.__class__", "model.layers.1.mlp.weight", "interleaver"):
        refused(
            lambda site=site: fitted([lab.steps.ablate(site)], MODULES, layers=12, hidden=8),
            "The model has no module",
        )


def test_steps_travel_as_data_and_what_is_no_step_does_not_arrive():
    step = lab.steps.add("model.layers.1", torch.randn(4).bfloat16(), positions=[1, "2:3", "generated"])
    back = decode(encode(step))
    assert str(back) == str(step)
    assert torch.equal(back.tensor, step.tensor)
    with pytest.raises((WireError, TypeError)):
        decode(encode(replace(step, site=5)))


def test_directions_are_projected_out_whatever_their_length_and_however_many_say_the_same():
    one = torch.tensor([[3.0, 0.0, 0.0], [6.0, 0.0, 0.0], [1.0, 1e-3, 0.0]])
    assert basis(one[0]).shape == (3, 1)
    assert basis(one[:2]).shape == (3, 1)
    assert basis(one).shape == (3, 2)
    torch.testing.assert_close(basis(one).T @ basis(one), torch.eye(2))


def test_a_step_keeps_its_own_copy_of_its_tensor():
    vector = torch.ones(4)
    step = lab.steps.add("a", vector[:2])
    vector.zero_()
    assert step.tensor.tolist() == [1, 1]
    assert step.tensor.untyped_storage().nbytes() == 8
