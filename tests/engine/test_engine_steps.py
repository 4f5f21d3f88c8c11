"""Edits as data: what a step does is what a block that says the same does, to the last bit."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import pytest
import torch

import nnsight_lab as lab
from nnsight_lab.errors import EditError, EditRefused
from nnsight_lab.steps.rows import basis
from tests.models import HIDDEN
from tests.waiting import CAT, GREEDY, TOWER

torch.manual_seed(3)
VECTOR = torch.randn(HIDDEN) * 4
OTHER = torch.randn(2, HIDDEN)
BASIS = basis(OTHER)
DIMS = [0, 5, 7]

#: Positions, the prompt's rows that they are, and whether generated ones are among them.
POSITIONS = [
    ("all", slice(None), True),
    ("last", [-1], False),
    ("prompt", slice(None), False),
    ("generated", None, True),
    (3, [3], False),
    (-2, [-2], False),
    ([0, 2, 5], [0, 2, 5], False),
    (slice(1, 4), slice(1, 4), False),
    ("12:40", slice(12, 40), False),
    ([-1, "generated"], [-1], True),
]


def on_dims(change):
    def changed(rows):
        rows = rows.clone()
        rows[:, DIMS] = change(rows[:, DIMS])
        return rows

    return changed


#: Each operation, as a step and by hand.
CHANGES = {
    "scale": (lambda at: lab.steps.scale(at, 0.3), lambda rows: rows * 0.3),
    "set": (lambda at: lab.steps.set(at, VECTOR), lambda rows: VECTOR.expand_as(rows)),
    "set a number": (lambda at: lab.steps.set(at, 2), lambda rows: torch.full_like(rows, 2)),
    "project_out": (
        lambda at: lab.steps.project_out(at, OTHER),
        lambda rows: rows - (rows @ BASIS) @ BASIS.T,
    ),
    "ablate": (lambda at: lab.steps.ablate(at), torch.zeros_like),
    "ablate to the mean": (lambda at: lab.steps.ablate(at, mean=VECTOR), lambda rows: VECTOR.expand_as(rows)),
    "ablate dims": (lambda at: lab.steps.ablate(at, dims=DIMS), on_dims(torch.zeros_like)),
    "clamp": (lambda at: lab.steps.clamp(at, low=-1, high=0.5), lambda rows: rows.clamp(-1, 0.5)),
    "clamp dims": (lambda at: lab.steps.clamp(at, high=0, dims=DIMS), on_dims(lambda r: r.clamp(None, 0))),
}


def at_positions(step, positions):
    from dataclasses import replace

    from nnsight_lab.steps.positions import positions_of

    return replace(step, positions=positions_of(positions))


def same(engine, prompt=TOWER):
    """What the edits `told` and `hand` do to one request each."""
    found = []
    for name in ("told", "hand"):
        (output,) = engine.generate(prompt, edits=[name], **GREEDY)
        seen = output.saves["seen"]
        seen = [seen] if isinstance(seen, torch.Tensor) else seen
        found.append((output.outputs[0].token_ids, seen))
    (tokens, told), (others, hand) = found
    assert tokens == others
    assert [one.shape for one in told] == [one.shape for one in hand]
    for one, other in zip(told, hand, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    return hand


@pytest.mark.parametrize("op", CHANGES)
def test_a_step_at_a_layer_does_what_a_block_does_to_its_residual_stream(engine, op):
    model, (make, change) = engine.model, CHANGES[op]
    with engine.trace(TOWER, edits=[], max_tokens=1, temperature=0):
        plain = lab.residual(model.model.layers[2].output).save()
    for positions, places, generated in POSITIONS:
        step = at_positions(make("model.layers.1"), positions)
        engine.edit("told", steps=[step, lab.steps.read("model.layers.2", "seen")])
        with engine.edit("hand") as (tracer, _):
            seen = [].save()
            for number in tracer.all():
                first, second = model.model.layers[1].output
                at = places if number == 0 else slice(None) if generated else None
                if at is not None:
                    rows = first[at] + second[at]
                    first[at] = change(rows)
                    second[at] = 0
                seen.append(lab.residual(model.model.layers[2].output))
        hand = same(engine)
        assert len(hand) == GREEDY["max_tokens"]
        assert torch.equal(hand[0], plain) == (places is None), positions


def test_a_vector_is_added_to_the_stream_as_by_hand(engine):
    model = engine.model
    for positions, places, generated in POSITIONS:
        engine.edit(
            "told",
            steps=[
                lab.steps.add("model.layers.1", VECTOR, scale=3, positions=positions),
                lab.steps.read("model.layers.2", "seen", positions="prompt"),
            ],
        )
        with engine.edit("hand") as (tracer, _):
            for number in tracer.all():
                out = model.model.layers[1].output
                at = places if number == 0 else slice(None) if generated else None
                if at is not None:
                    out[0][at] += 3 * VECTOR
                if number == 0:
                    seen = lab.residual(model.model.layers[2].output).save()
        same(engine)


def test_rows_of_another_run_are_patched_in_at_the_positions_or_taken_from_a_whole_one(engine):
    model = engine.model
    other = "The Empire State"
    with engine.trace(other, max_tokens=1, temperature=0):
        rows = lab.residual(model.model.layers[1].output).save()
    assert rows.shape[0] == len(TOWER)
    for positions, places in [(places, at) for places, at, generated in POSITIONS if not generated]:
        for given in (rows, rows[places]):
            engine.edit(
                "told",
                steps=[
                    lab.steps.patch("model.layers.1", given, positions=positions),
                    lab.steps.read("model.layers.3", "seen", positions="prompt"),
                ],
            )
            with engine.edit("hand") as (tracer, _):
                first, second = model.model.layers[1].output
                first[places] = rows[places]
                second[places] = 0
                seen = lab.residual(model.model.layers[3].output).save()
            same(engine)
    with engine.trace(other, edits=[], max_tokens=1, temperature=0):
        theirs = lab.residual(model.model.layers[3].output).save()
    engine.edit(
        "told",
        steps=[
            lab.steps.patch("model.layers.1", rows),
            lab.steps.read("model.layers.3", "seen", positions="prompt"),
        ],
    )
    (output,) = engine.generate(TOWER, edits=["told"], **GREEDY)
    torch.testing.assert_close(output.saves["seen"], theirs, rtol=1e-5, atol=1e-5)


def test_steps_read_at_every_kind_of_site_what_a_block_reads(engine):
    model = engine.model
    engine.edit(
        "told",
        steps=[  # not in the model's order
            lab.steps.read("model.norm", "normed", positions="last"),
            lab.steps.read("model.layers.2", "stream", side="input", positions="prompt"),
            lab.steps.read("model.layers.0.mlp", "mlp", positions="0:3"),
            lab.steps.read(model.model.embed_tokens, "embedded", positions=[1, 3]),
        ],
    )
    with engine.edit("hand"):
        embedded = model.model.embed_tokens.output[[1, 3]].save()
        mlp = model.model.layers[0].mlp.output[:3].save()
        args = model.model.layers[2].inputs[0]
        stream = (args[1] + args[2]).save()
        normed = model.model.norm.output[0][-1:].save()
    told, hand = (engine.generate(TOWER, edits=[name], **GREEDY)[0].saves for name in ("told", "hand"))
    assert set(told) == set(hand)
    for name in hand:
        torch.testing.assert_close(told[name], hand[name], rtol=0.0, atol=0.0, msg=name)


def test_a_site_that_is_no_layer_is_changed_as_by_hand(engine):
    model = engine.model
    engine.edit(
        "told",
        steps=[
            lab.steps.scale("model.layers.1.mlp", 0.0, positions="all"),
            lab.steps.read("model.layers.1", "seen", positions="prompt"),
            lab.steps.clamp("model.layers.1", low=-1, positions="last"),
        ],
    )
    with engine.edit("hand") as (tracer, _):
        for number in tracer.all():
            model.model.layers[1].mlp.output[:] *= 0.0
            if number == 0:
                first, second = model.model.layers[1].output
                seen = (first + second).save()
                first[-1] = (first[-1] + second[-1]).clamp(-1, None)
                second[-1] = 0
    same(engine)


def test_two_prompts_at_once_get_steps_on_their_own_rows(engine):
    engine.edit(
        "told",
        steps=[
            lab.steps.set("model.layers.1", 0, positions="last"),
            lab.steps.read("model.layers.1", "seen", positions="prompt"),
        ],
    )
    outputs = engine.generate([TOWER, CAT], **GREEDY)
    for prompt, output in zip((TOWER, CAT), outputs, strict=True):
        seen = output.saves["seen"]
        assert seen.shape == (len(prompt), HIDDEN)
        assert (seen == 0).all(-1).tolist() == [False] * (len(prompt) - 1) + [True]


def test_an_edit_of_steps_is_an_edit_like_any_other(engine):
    edit = engine.edit("told", steps=[lab.steps.ablate("model.layers.1")])
    assert (edit.version, edit.on) == (1, True)
    assert edit.source == "lab.steps.ablate('model.layers.1')"
    first = engine.generate(TOWER, **GREEDY)[0].outputs[0].token_ids
    again = engine.edit("told", steps=[lab.steps.scale("model.layers.1", 1)])
    assert again is edit
    assert (edit.version, edit.hits) == (2, 1)
    plain = engine.generate(TOWER, edits=[], **GREEDY)[0].outputs[0].token_ids
    assert engine.generate(TOWER, **GREEDY)[0].outputs[0].token_ids == plain != first
    engine.edit("told", steps=[lab.steps.read("model.layers.1", "seen", positions="prompt")])
    expected = engine.estimate(TOWER, edits=["told"], **GREEDY)
    assert expected.saved_bytes == len(TOWER) * HIDDEN * 4
    edit.clear()
    assert list(engine.edits) == []


def test_what_a_request_cannot_give_is_its_own_error(engine):
    engine.edit("told", steps=[lab.steps.ablate("model.layers.1", positions=[10])])
    with pytest.raises(EditError, match="position 10 is not in the prompt, which has 4 tokens"):
        engine.generate(CAT, **GREEDY)
    assert engine.generate(TOWER, **GREEDY)[0].outputs[0].text is not None
    engine.edit("told", steps=[lab.steps.patch("model.layers.1", torch.zeros(5, HIDDEN))])
    with pytest.raises(EditError, match="5 rows, and not one for each of 4 positions"):
        engine.generate(CAT, **GREEDY)
    engine.edit("told", steps=[lab.steps.add("model.layers.1.mlp", torch.zeros(5))])
    with pytest.raises(EditError, match=r"lab\.steps\.add\('model\.layers\.1\.mlp', tensor\[5\]\): .*128"):
        engine.generate(CAT, **GREEDY)
    assert len(engine.generate([TOWER, CAT], edits=[], **GREEDY)) == 2


def test_steps_that_do_not_fit_the_model_are_refused_before_anything_is_installed(engine):
    for step, said in [
        (
            lab.steps.ablate("model.layers.4"),
            r"no module 'model\.layers\.4'\. Did you mean 'model\.layers\.\d",
        ),
        (lab.steps.ablate("model.layers"), "is a list of modules"),
        (lab.steps.add("model.layers.1", torch.ones(5)), r"is \[5\], and the residual stream has 128"),
        (lab.steps.ablate("model.layers.1", dims=[128]), "no dim 128"),
    ]:
        with pytest.raises(EditRefused, match=said):
            engine.edit("told", steps=[step])
    for steps, said in [([], "a list of steps"), ("read", "a list of steps"), ([1], "steps.0. is a int")]:
        with pytest.raises(EditRefused, match=said):
            engine.edit("told", steps=steps)
    twice = [lab.steps.read(f"model.layers.{n}", "same") for n in (0, 1)]
    with pytest.raises(EditRefused, match="Two steps save under the name 'same'"):
        engine.edit("told", steps=twice)
    assert list(engine.edits) == []


@pytest.mark.asyncio
async def test_steps_are_installed_in_an_async_cell(engine):
    edit = await engine.aedit("told", steps=[lab.steps.read("model.layers.0", "seen", positions="last")])
    (output,) = await engine.agenerate(TOWER, **GREEDY)
    assert output.saves["seen"].shape == (1, HIDDEN)
    await edit.aclear()
