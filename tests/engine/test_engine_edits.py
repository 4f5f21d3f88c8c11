"""Edits: registered once, run by every request that asks for them, replaced and cleared."""
# ruff: noqa: F841  (what a block saves is read on the outputs)

from __future__ import annotations

import asyncio

import pytest
import torch

from nnsight_lab.errors import AmbiguousSave, EditError, EditRefused, SaveNotFound, UnknownEdit
from tests.waiting import CAT, FOX, GREEDY, LONG, TOWER, freed, until


def test_an_edit_saves_on_each_requests_own_output(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = model.model.layers[1].output[0].save()
    outputs = engine.generate([TOWER, CAT, FOX], **GREEDY)
    assert [tuple(output.saves["hidden"].shape) for output in outputs] == [(16, 128), (4, 128), (27, 128)]
    for prompt, output in zip([TOWER, CAT, FOX], outputs, strict=True):
        with engine.trace(prompt, edits=[], **GREEDY):
            alone = model.model.layers[1].output[0].save()
        # Batched rows go through other matrix shapes than a lone request's: float32 rounding, no more.
        torch.testing.assert_close(output.saves["hidden"], alone, rtol=1e-4, atol=1e-5)
    assert (edit.version, edit.hits, edit.errors) == (1, 3, 0)


def test_an_awaited_generate_carries_the_edits_saves_too(engine):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[1].output[0].save()
    outputs = asyncio.run(engine.agenerate([TOWER, CAT], **GREEDY))
    assert [tuple(output.saves["hidden"].shape) for output in outputs] == [(16, 128), (4, 128)]


@pytest.mark.asyncio
async def test_async_with_and_plain_with_work_on_every_engine(engine):
    model = engine.model
    async with engine.edit("one") as (tracer, one):
        first = model.model.layers[0].output[0].save()
    with engine.edit("two") as (tracer, two):
        second = model.model.layers[1].output[0].save()
    async with engine.trace(TOWER, **GREEDY) as tracer:
        third = model.model.layers[2].output[0].save()
    assert third.shape == (16, 128)
    with engine.trace(TOWER, **GREEDY) as other:
        third = model.model.layers[2].output[0].save()
    assert third.shape == (16, 128)
    (output,) = await engine.agenerate(TOWER, **GREEDY)
    assert set(output.saves) == {"first", "second"}
    assert [one.hits, two.hits] == [3, 3]
    await one.aclear()
    await engine.edits.aclear()
    assert len(engine.edits) == 0


def test_edits_run_in_the_order_they_were_installed_and_in_the_order_a_request_names(engine):
    model = engine.model
    with engine.trace(TOWER, **GREEDY):
        plain = model.model.layers[1].mlp.output.save()
    with engine.edit("double"):
        model.model.layers[1].mlp.output = model.model.layers[1].mlp.output * 2
    with engine.edit("more"):
        model.model.layers[1].mlp.output = model.model.layers[1].mlp.output + 1
    with engine.edit("read"):
        seen = model.model.layers[1].mlp.output.save()

    def seen_with(names):
        return engine.generate(TOWER, edits=names, **GREEDY)[0].saves["seen"]

    assert [edit.name for edit in engine.edits] == ["double", "more", "read"]
    torch.testing.assert_close(seen_with(None), plain * 2 + 1)
    torch.testing.assert_close(seen_with(["double", "more", "read"]), plain * 2 + 1)
    torch.testing.assert_close(seen_with(["more", "double", "read"]), (plain + 1) * 2)
    torch.testing.assert_close(seen_with(["double", "read", "more"]), plain * 2)
    torch.testing.assert_close(seen_with(["read", "double", "more"]), plain)


def test_a_request_runs_the_edits_it_names_and_no_others(engine):
    model = engine.model
    with engine.edit("one") as (_, one):
        first = model.model.layers[0].output[0].save()
    with engine.edit("two") as (_, two):
        second = model.model.layers[1].output[0].save()
    assert set(engine.generate(CAT, **GREEDY)[0].saves) == {"first", "second"}
    assert set(engine.generate(CAT, edits=["two"], **GREEDY)[0].saves) == {"second"}
    assert set(engine.generate(CAT, edits=[], **GREEDY)[0].saves) == set()
    assert (one.hits, two.hits) == (1, 2)


def test_an_edit_that_is_off_runs_only_for_requests_that_name_it(engine):
    model = engine.model
    with engine.edit("probe") as (_, edit):
        hidden = model.model.layers[0].output[0].save()
    edit.switch_off()
    assert set(engine.generate(CAT, **GREEDY)[0].saves) == set()
    assert set(engine.generate(CAT, edits=["probe"], **GREEDY)[0].saves) == {"hidden"}
    edit.switch_on()
    assert set(engine.generate(CAT, **GREEDY)[0].saves) == {"hidden"}


def test_clearing_an_edit_ends_it_and_clearing_it_twice_is_harmless(engine):
    model = engine.model
    with engine.edit("probe") as (_, edit):
        hidden = model.model.layers[0].output[0].save()
    assert "hidden" in engine.generate(CAT, **GREEDY)[0].saves
    version = edit._current
    edit.clear()
    edit.clear()
    asyncio.run(edit.aclear())
    assert edit.cleared
    assert "probe" not in engine.edits
    (output,) = engine.generate(CAT, **GREEDY)
    assert dict(output.saves) == {}
    with pytest.raises(SaveNotFound):
        output.saves["hidden"]
    assert engine.request_count() == 0
    _gone_from_the_workers(engine, version)


def test_clearing_all_edits_leaves_none(engine):
    model = engine.model
    for name in ("one", "two"):
        with engine.edit(name):
            hidden = model.model.layers[0].output[0].save()
    engine.edits.clear()
    engine.edits.clear()
    assert len(engine.edits) == 0
    assert dict(engine.generate(CAT, **GREEDY)[0].saves) == {}
    assert engine.request_count() == 0


def test_an_edit_follows_generation_by_tracer_all(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        rows = [].save()
        for _ in tracer.all():
            rows.append(model.model.layers[1].output[0].shape[0])
    outputs = engine.generate([TOWER, CAT], max_tokens=5, temperature=0, ignore_eos=True)
    assert [output.saves["rows"] for output in outputs] == [[16, 1, 1, 1, 1], [4, 1, 1, 1, 1]]


def test_every_sequence_of_a_request_has_its_own_saves(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        tokens = [].save()
        for _ in tracer.all():
            tokens.append(model.samples.item())
    settings = {"n": 3, "max_tokens": 40, "temperature": 1.0, "seed": 7, "stop_token_ids": list(range(2, 40))}
    for outputs in (engine.generate(TOWER, **settings), asyncio.run(engine.agenerate(TOWER, **settings))):
        (output,) = outputs
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        lengths = {len(completion.token_ids) for completion in output.outputs}
        assert len(lengths) == 3, "the sequences of this test are to differ in length"
        for completion in output.outputs:
            assert completion.saves["tokens"] == list(completion.token_ids)
        assert output.saves["tokens"] == output.outputs[0].saves["tokens"]
    freed(engine)


def test_rerunning_an_edit_replaces_it(engine):
    model = engine.model
    for factor in (1, 2):
        with engine.edit("probe") as (_, edit):
            mark = torch.tensor(factor).save()
            hidden = model.model.layers[0].output[0].save()
    (output,) = engine.generate(CAT, **GREEDY)
    assert output.saves.blocks == ("probe",)
    assert output.saves["mark"].item() == 2
    assert (edit.version, len(engine.edits), edit.hits) == (2, 1, 1)


def test_requests_in_flight_keep_the_version_they_came_with(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        marks = [].save()
        for _ in tracer.all():
            model.model.layers[0].output
            marks.append("old")
    old = edit._current
    running = iter(engine.stream(TOWER, **LONG))
    next(running)
    with engine.edit("probe") as (tracer, edit):
        marks = [].save()
        for _ in tracer.all():
            model.model.layers[0].output
            marks.append("new")
    (later,) = engine.generate(TOWER, **GREEDY)
    assert engine.request_count() == 1, "the first request was to be still running"
    earlier = list(running)[-1]
    assert later.saves["marks"] == ["new"] * 3
    assert earlier.saves["marks"] == ["old"] * LONG["max_tokens"]
    assert (edit.version, edit.hits) == (2, 2)
    _gone_from_the_workers(engine, old)


def test_a_request_in_flight_keeps_an_edit_that_is_cleared(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = model.model.layers[0].output[0].save()
    version = edit._current
    running = iter(engine.stream(TOWER, **LONG))
    next(running)
    edit.clear()
    assert dict(engine.generate(CAT, **GREEDY)[0].saves) == {}
    assert list(running)[-1].saves["hidden"].shape == (16, 128)
    _gone_from_the_workers(engine, version)


def _gone_from_the_workers(engine, version):
    """The workers hold that version no more: a request made to run it says so."""
    from nnsight_lab.engine.call import Call

    def refused():
        call = Call([engine.request(CAT, GREEDY, (version,))])
        engine.submit(call)
        engine.wait(call)
        return "no longer installed" in (engine.outputs(call)[0].error or "")

    until(refused, 2, "a version that nobody runs was left in the workers")


def test_an_unknown_edit_is_refused_at_the_call_and_the_nearest_is_named(engine):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[0].output[0].save()
    for call in (engine.generate, engine.trace, engine.stream):
        with pytest.raises(UnknownEdit, match=r"'prode'.*Did you mean 'probe'\?"):
            call(CAT, edits=["probe", "prode"], **GREEDY)
    with pytest.raises(UnknownEdit, match="Did you mean 'probe'"):
        asyncio.run(engine.agenerate(CAT, edits=["prob"], **GREEDY))
    with pytest.raises(UnknownEdit, match=r"'zzz'\. Known: probe"):
        engine.edits["zzz"]
    assert engine._driver.unfinished() == 0


@pytest.mark.parametrize("name", [None, "", "1st", "two words", "trace", 7])
def test_a_name_that_cannot_be_an_edits_is_refused(engine, name):
    with pytest.raises(EditRefused):
        engine.edit(name)
    assert len(engine.edits) == 0


def test_naming_edits_by_a_string_or_twice_is_refused(engine):
    model = engine.model
    with engine.edit("probe"):
        hidden = model.model.layers[0].output[0].save()
    with pytest.raises(EditRefused, match=r"edits=\['probe'\]"):
        engine.generate(CAT, edits="probe", **GREEDY)
    with pytest.raises(EditRefused, match="twice"):
        engine.generate(CAT, edits=["probe", "probe"], **GREEDY)


def test_an_edit_with_an_empty_block_is_refused(engine):
    with pytest.raises(EditRefused, match="empty"), engine.edit("nothing"):
        pass
    assert len(engine.edits) == 0


def test_a_failed_edit_leaves_its_siblings_whole_and_is_raised_once_with_a_count(engine):
    model = engine.model
    with engine.edit("picky") as (_, picky):
        hidden = model.model.layers[0].output[0].save()
        if hidden.shape[0] == 4:
            raise ValueError("four tokens are too few")
        after = model.model.layers[1].output[0].save()
    with engine.edit("other") as (_, other):
        calm = model.model.layers[2].output[0].save()
    with pytest.raises(EditError) as raised:
        engine.generate([TOWER, CAT, FOX, CAT], **GREEDY)
    error = raised.value
    assert (error.failed, error.total, error.block) == (2, 4, "picky")
    assert "ValueError: four tokens are too few" in str(error)
    assert "2 of 4 requests failed" in str(error)
    kept = engine.generate([TOWER, CAT, FOX, CAT], errors="keep", **GREEDY)
    for outputs in (error.outputs, kept):
        assert [output.error for output in outputs][::2] == [None, None]
        assert all("four tokens are too few" in output.error for output in outputs[1::2])
        assert [sorted(output.saves) for output in outputs[::2]] == [["after", "calm", "hidden"]] * 2
        # What it saved until then is kept, and the other edit of that request ran to its end.
        assert [sorted(output.saves) for output in outputs[1::2]] == [["calm", "hidden"]] * 2
        assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
    assert (picky.hits, picky.errors, other.errors) == (8, 4, 0)
    assert picky.last_error == "ValueError: four tokens are too few"


@pytest.mark.asyncio
async def test_a_failed_edit_is_raised_from_an_awaited_generate_too(engine):
    model = engine.model
    async with engine.edit("picky"):
        if model.model.layers[0].output[0].shape[0] == 4:
            raise ValueError("four tokens are too few")
    with pytest.raises(EditError) as raised:
        await engine.agenerate([TOWER, CAT], **GREEDY)
    assert (raised.value.failed, raised.value.total, len(raised.value.outputs)) == (1, 2, 2)
    kept = await engine.agenerate([TOWER, CAT], errors="keep", **GREEDY)
    assert [output.error is None for output in kept] == [True, False]


def test_two_edits_that_save_one_name_keep_both(engine):
    model = engine.model
    with engine.edit("low"):
        hidden = model.model.layers[0].output[0].save()
    with engine.edit("high"):
        hidden = model.model.layers[3].output[0].save()
    (output,) = engine.generate(TOWER, **GREEDY)
    with pytest.raises(AmbiguousSave, match=r"saves\.edit\('low'\)\['hidden'\] or saves\.edit\('high'\)"):
        output.saves["hidden"]
    low, high = output.saves.edit("low")["hidden"], output.saves.edit("high")["hidden"]
    assert low.shape == high.shape == (16, 128)
    assert not torch.equal(low, high)


def test_an_edit_and_a_trace_that_save_one_name_keep_both(engine):
    model = engine.model
    with engine.edit("low"):
        hidden = model.model.layers[0].output[0].save()
    with engine.trace(TOWER, **GREEDY) as tracer:
        hidden = model.model.layers[3].output[0].save()
    saves = tracer.output.saves
    with pytest.raises(AmbiguousSave, match=r"saves\.trace\['hidden'\]"):
        saves["hidden"]
    assert torch.equal(saves.trace["hidden"], hidden)
    assert not torch.equal(saves.edit("low")["hidden"], hidden)


def test_an_edit_moves_logits_and_samples(engine):
    model = engine.model
    with engine.edit("forced") as (tracer, edit):
        for _ in tracer.all():
            model.logits[:] = 0
            model.logits[:, 65] = 50
    (output,) = engine.generate(TOWER, **GREEDY)
    assert output.outputs[0].token_ids == [65, 65, 65]
    edit.clear()
    with engine.edit("swapped") as (tracer, edit):
        for _ in tracer.all():
            model.samples = torch.full_like(model.samples, 66)
    (output,) = engine.generate(TOWER, **GREEDY)
    assert output.outputs[0].token_ids == [66, 66, 66]


def test_the_result_inside_an_edit_is_the_finished_request(engine):
    model = engine.model
    with engine.edit("probe") as (tracer, edit):
        hidden = model.model.layers[0].output[0].save()
        result = tracer.result.save()
    outputs = engine.generate([TOWER, CAT], **GREEDY)
    for prompt, output in zip([TOWER, CAT], outputs, strict=True):
        record = output.saves["result"]
        assert record.outputs[0].text == output.outputs[0].text
        assert record.outputs[0].token_ids == tuple(output.outputs[0].token_ids)
        assert record.prompt == prompt
        assert record.finished


def test_requests_that_name_no_edits_run_exactly_the_defaults(engine):
    model = engine.model

    def text(**options):
        return engine.generate(TOWER, **GREEDY, **options)[0].outputs[0].token_ids

    plain = text()
    with engine.edit("mute"):
        model.model.layers[0].output[1][:] = 0
    with engine.edit("flip"):
        model.model.layers[2].output[1][:] *= -3
    mute, flip, both = text(edits=["mute"]), text(edits=["flip"]), text()
    assert len({tuple(ids) for ids in (plain, mute, flip, both)}) >= 3
    assert mute != plain
    engine.default_edits = ["mute"]
    assert text() == mute
    assert text(edits=["flip"]) == flip
    assert text(edits=[]) == plain
    engine.edits["mute"].switch_off()  # another's switch changes nothing of a choice
    assert text() == mute
    with engine.trace(TOWER, **GREEDY) as tracer:
        hidden = model.model.layers[3].output[0].save()
    assert tracer.output.outputs[0].token_ids == mute
    assert [str(one).rpartition(" (")[2] for one in engine.status().edits] == ["default)", "not a default)"]
    engine.default_edits = []
    assert text() == plain
    engine.default_edits = None
    assert text() == flip


def test_a_default_that_is_not_installed_is_said_and_nothing_is_run_without_it(engine):
    model = engine.model
    engine.default_edits = ["later"]
    assert engine.edits.missing() == ["later"]
    for ask in (lambda: engine.generate(TOWER), lambda: engine.trace(TOWER), lambda: engine.stream(TOWER)):
        with pytest.raises(UnknownEdit, match="'later', a default of this notebook, is not installed yet"):
            ask()
    assert engine.generate(TOWER, edits=[], **GREEDY)
    with engine.edit("later"):
        hidden = model.model.layers[1].output[0].save()
    assert list(engine.generate(TOWER, **GREEDY)[0].saves) == ["hidden"]
    for wrong in ("later", ["later", "later"], [3], 5):
        with pytest.raises(EditRefused):
            engine.default_edits = wrong
    assert engine.default_edits == ["later"]
    engine.edits.clear("later")
    assert engine.default_edits == ["later"]
    engine.edits.clear()
    assert engine.default_edits is None
