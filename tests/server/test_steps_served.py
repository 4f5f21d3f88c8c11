"""Edits as data on a shared engine: from a kernel, and from whoever has only an HTTP client."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

import nnsight_lab as lab
from nnsight_lab.errors import EditError, EditRefused, RequestRefused
from nnsight_lab.steps.rows import basis
from nnsight_lab.wire.serving import PREFIX, EditAsked
from tests.server.test_served import GREEDY, PARIS, TOWER, text_of
from tests.waiting import until

pytestmark = pytest.mark.engine

HIDDEN = 576
SITE = "model.layers.9"
torch.manual_seed(5)
VECTOR = torch.randn(HIDDEN) * 3
BASIS = basis(VECTOR)

CHANGES = {
    "scale": (lambda **at: lab.steps.scale("model.layers.9", 0.3, **at), lambda rows: rows * 0.3),
    "set": (
        lambda **at: lab.steps.set(SITE, VECTOR, **at),
        lambda rows: VECTOR.to(rows).expand_as(rows),
    ),
    "project_out": (
        lambda **at: lab.steps.project_out("model.layers.9", VECTOR, **at),
        lambda rows: (rows.float() - (rows.float() @ BASIS) @ BASIS.T).to(rows.dtype),
    ),
    "ablate": (lambda **at: lab.steps.ablate("model.layers.9", **at), torch.zeros_like),
    "clamp": (
        lambda **at: lab.steps.clamp(SITE, low=-1, high=1, **at),
        lambda rows: rows.clamp(-1, 1),
    ),
    "patch": (
        lambda **at: lab.steps.patch("model.layers.9", VECTOR.repeat(9, 1), **{"positions": "prompt", **at}),
        lambda rows: VECTOR.to(rows).expand_as(rows),
    ),
    "add": (lambda **at: lab.steps.add("model.layers.9", VECTOR, scale=2, **at), None),
}


@pytest.mark.parametrize("op", CHANGES)
def test_steps_on_a_shared_engine_do_what_a_block_does_to_the_last_bit(attach, op):
    engine = attach()
    model, (make, change) = engine.model, CHANGES[op]
    cases = [("last", [-1], False), ([1, 3], [1, 3], False)]
    if op != "patch":
        cases += [("all", slice(None), True), ("generated", None, True)]
    for positions, places, generated in cases:
        engine.edit(
            "told",
            steps=[make(positions=positions), lab.steps.read("model.layers.10", "seen", positions=["all"])],
        )
        with engine.edit("hand") as (tracer, _):
            seen = [].save()
            for number in tracer.all():
                first, second = model.model.layers[9].output
                at = places if number == 0 else slice(None) if generated else None
                if at is not None and change is None:
                    first[at] += (2 * VECTOR).to(first.dtype)
                elif at is not None:
                    first[at] = change(first[at] + second[at])
                    second[at] = 0
                seen.append(lab.residual(model.model.layers[10].output))
        told, hand = (engine.generate(TOWER, edits=[name], **GREEDY)[0] for name in ("told", "hand"))
        assert told.outputs[0].token_ids == hand.outputs[0].token_ids
        assert len(told.saves["seen"]) == len(hand.saves["seen"]) == 4
        for one, other in zip(told.saves["seen"], hand.saves["seen"], strict=True):
            torch.testing.assert_close(one, other, atol=0.0, rtol=0.0)


def test_steps_are_checked_by_the_kernel_and_again_by_the_server(attach):
    engine = attach()
    with pytest.raises(EditRefused, match=r"no module 'model\.layers\.99'"):
        engine.edit("told", steps=[lab.steps.ablate("model.layers.99")])
    from nnsight_lab.blocks.declared import DeclaredBlock

    def sent(asked, kind="steps"):
        engine._remote._edit(
            EditAsked(
                "one", "told", DeclaredBlock.of(kind, asked).dumps(), engine._remote.lease, declared=True
            )
        )

    with pytest.raises(RequestRefused, match=r"no module 'model\.layers\.99'"):
        sent({"steps": (lab.steps.ablate("model.layers.99"),)})
    with pytest.raises(RequestRefused, match="steps= takes a list of steps"):
        sent({})
    with pytest.raises(RequestRefused, match="told as steps"):
        sent({"layers": "x"}, "lens")
    with pytest.raises(RequestRefused, match="The edit cannot be read"):
        engine._remote._edit(EditAsked("one", "told", b"\x80\x05.", engine._remote.lease, declared=True))
    assert text_of(engine) == PARIS


def test_an_edit_by_plain_http_is_an_edit_like_any_other(attach, server):
    """The example of the README, with httpx for requests."""
    vector = VECTOR.bfloat16()
    told = [
        {"op": "add", "site": "model.layers.9", "tensor": "v", "scale": 20, "positions": "last"},
        {"op": "read", "site": "model.layers.9", "name": "hidden", "positions": "prompt"},
    ]
    body = {"model": "demo", "prompt": TOWER, **GREEDY}
    with server.http("alice") as alice, server.http("bob") as bob:
        made = alice.put(
            f"{PREFIX}/steps/steer",
            content=save({"v": vector}, {"steps": json.dumps(told)}),
            headers={"Content-Type": "application/vnd.safetensors"},
        )
        assert made.status_code == 201, made.text
        assert made.json()["steps"][0]["tensor"] == "bfloat16 [576]"
        (listed,) = alice.get(f"{PREFIX}/edits").json()
        assert (listed["name"], listed["on"], listed["steps"]) == ("steer", True, made.json()["steps"])
        assert bob.get(f"{PREFIX}/edits").json() == []
        assert bob.delete(f"{PREFIX}/steps/steer").status_code == 404
        done = alice.post("/v1/completions", json=body).json()
        assert done["choices"][0]["text"] != PARIS
        assert bob.post("/v1/completions", json=body).json()["choices"][0]["text"] == PARIS
        saved = load(alice.get(f"{PREFIX}/saves/{done['id']}").content)
        assert saved["steer/hidden"].shape == (9, HIDDEN)
        engine = attach()
        plain = engine.edit("plain", steps=[lab.steps.read("model.layers.9", "hidden", positions="prompt")])
        before = engine.generate(TOWER, edits=["plain"], **GREEDY)[0].saves["hidden"]
        moved = saved["steer/hidden"] - before
        assert (moved[:-1] == 0).all()
        assert moved[-1].abs().max() > 10
        plain.clear()
        # The same name again is the same edit, changed; JSON alone does where there is no tensor.
        again = alice.put(
            f"{PREFIX}/steps/steer", json={"steps": [{"op": "scale", "site": "lm_head", "factor": 1}]}
        )
        assert again.status_code == 201, again.text
        assert [one["id"] for one in alice.get(f"{PREFIX}/edits").json()] == [again.json()["id"]]
        assert alice.delete(f"{PREFIX}/steps/steer").status_code == 204
        assert alice.delete(f"{PREFIX}/steps/steer").status_code == 404
        assert alice.post("/v1/completions", json=body).json()["choices"][0]["text"] == PARIS


def test_numbers_may_stand_in_the_json_itself_and_an_edit_ends_by_itself(attach, server):
    attach()  # its teardown looks at the books
    step = {"op": "set", "site": "model.layers.2", "tensor": [0.0] * HIDDEN}
    with server.http("alice") as alice:
        made = alice.put(f"{PREFIX}/steps/short", json={"steps": [step]}, params={"hold_s": 0.5})
        assert made.status_code == 201, made.text
        until(lambda: alice.get(f"{PREFIX}/edits").json() == [], 20)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "The body is neither JSON"),
        (b"[]", 'should be {"steps"'),
        (b'{"steps": [], "x": 1}', 'should be {"steps"'),
        (b"[" * 100_000, "The body is neither JSON"),
        (b'{"steps": [{"op": "exec", "site": "a"}]}', r"steps\[0\]: 'exec' is not an operation"),
        (b'{"steps": [{"op": "ablate", "site": "model.layers.77"}]}', r"no module 'model\.layers\.77'"),
        (b'{"steps": [{"op": "ablate", "site": "model.layers.7", "positions": 1.5}]}', "cannot be"),
        (b'{"steps": [{"op": "scale", "site": "model.layers.7", "factor": NaN}]}', "not a finite number"),
        (
            b'{"steps": [{"op": "add", "site": "model.layers.7", "tensor": [1, 2]}]}',
            r"the tensor is \[2\], and the residual stream has 576",
        ),
    ],
)
def test_a_body_that_says_no_edit_is_refused_in_one_line(server, body, said):
    with server.http("alice") as http:
        answer = http.put(f"{PREFIX}/steps/steer", content=body)
        assert answer.status_code == 400
        text = answer.json()["error"]["message"]
        assert "\n" not in text
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(text)
        assert http.get(f"{PREFIX}/edits").json() == []


def test_files_that_hold_no_edit_are_refused_and_names_that_cannot_be(server):
    headers = {"Content-Type": "application/vnd.safetensors"}
    bad = torch.full((HIDDEN,), float("nan"))
    step = [{"op": "add", "site": "model.layers.7", "tensor": "v"}]
    files = [
        (b"x" * 100, "cannot be read"),
        (save({"v": VECTOR}), "no steps in its metadata"),
        (save({"v": VECTOR}, {"steps": "no"}), "cannot be read"),
        (save({"v": bad}, {"steps": json.dumps(step)}), "NaN or infinity"),
        (save({"w": VECTOR}, {"steps": json.dumps(step)}), "no tensor 'v'"),
        (save({"v": VECTOR.to(torch.int64)}, {"steps": json.dumps(step)}), "the tensor is int64"),
    ]
    with server.http("alice") as http:
        for content, said in files:
            answer = http.put(f"{PREFIX}/steps/steer", content=content, headers=headers)
            assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text
        ok = {"steps": [{"op": "ablate", "site": "model.layers.7"}]}
        for name in ("trace", "a b", "x'); import os #", "é%0A"):
            assert http.put(f"{PREFIX}/steps/{name}", json=ok).status_code in (400, 404)
        for hold in ("-1", "nan", "1e9", "x"):
            assert http.put(f"{PREFIX}/steps/steer", json=ok, params={"hold_s": hold}).status_code in (
                400,
                422,
            )
        assert http.get(f"{PREFIX}/edits").json() == []
    assert server.figures()["leases"] == 0


def test_what_a_prompt_cannot_give_is_that_requests_error(attach):
    engine = attach()
    engine.edit("far", steps=[lab.steps.ablate("model.layers.3", positions=[40])])
    with pytest.raises(EditError, match="position 40 is not in the prompt, which has 9 tokens"):
        engine.generate(TOWER, **GREEDY)
    assert text_of(engine, edits=[]) == PARIS
