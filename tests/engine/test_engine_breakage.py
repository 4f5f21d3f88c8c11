"""Ways in which a user breaks things without meaning to: each costs the request, never the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest

from nnsight_lab.errors import EditRefused, RequestRefused, TraceError
from tests.waiting import CAT, GREEDY, TOWER, freed, until


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 1.5},
        {"min_tokens": 1.5},
        {"seed": "x"},
        {"stop_token_ids": ["a"]},
        {"logit_bias": {5: "x"}},
        {"ignore_eos": "no"},
        {"structured_outputs": {"regex": "(("}},
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_before_it_reaches_the_engine(engine, settings):
    with pytest.raises(RequestRefused):
        engine.generate(CAT, **settings)
    assert engine.generate(CAT, **GREEDY)[0].finished


def test_what_was_saved_before_an_edit_of_the_same_place_stays_what_it_was(engine):
    model = engine.model
    mlp, layer = model.model.layers[1].mlp, model.model.layers[1]
    with engine.trace(TOWER, **GREEDY):
        untouched = mlp.output.save()
        logits = model.logits.save()
    with engine.trace(TOWER, **GREEDY):
        before = mlp.output.save()
        mlp.output[:] = 0
        after = mlp.output.save()
        changed = model.logits.save()
    assert before.equal(untouched)
    assert after.abs().sum() == 0
    assert not changed.equal(logits)
    with engine.trace(TOWER, **GREEDY):
        first = layer.output[0].save()
        layer.output[0][:] += 100
        second = layer.output[0].save()
    assert second.allclose(first + 100, atol=1e-3)


def test_an_edit_of_one_read_reaches_the_model_through_views_and_functions(engine):
    model = engine.model
    mlp = model.model.layers[1].mlp
    with engine.trace(TOWER, **GREEDY):
        mlp.output[:] = 0
        zeroed = model.logits.save()
    with engine.trace(TOWER, **GREEDY):
        read = mlp.output
        for row in range(read.shape[0]):
            read[row].mul_(0)
        by_rows = model.logits.save()
    assert by_rows.equal(zeroed)


def test_two_reads_that_undo_each_others_edits_are_an_error(engine):
    model = engine.model
    mlp = model.model.layers[1].mlp
    with pytest.raises(TraceError, match="would undo the other edit"), engine.trace(TOWER, **GREEDY):
        early = mlp.output
        mlp.output[0] = 1
        early[1] = 2
        after = model.logits.save()  # noqa: F841
    assert engine.request_count() == 0


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exception_that_ends_processes_ends_only_its_block(engine, kind):
    model = engine.model
    raised = {
        "SystemExit": SystemExit,
        "KeyboardInterrupt": KeyboardInterrupt,
        "GeneratorExit": GeneratorExit,
    }[kind]
    with pytest.raises(TraceError, match=kind) as error, engine.trace(TOWER, **GREEDY):
        value = model.model.layers[0].output[0].save()  # noqa: F841
        raise raised("on purpose")
    assert error.value.lines[-1].text.strip() == 'raise raised("on purpose")'
    assert engine.generate(CAT, **GREEDY)[0].finished
    freed(engine)


def test_an_exception_whose_text_fails_or_is_endless_comes_home_in_words(engine):
    model = engine.model

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(TraceError, match="its text cannot be had"), engine.trace(TOWER, **GREEDY):
        value = model.model.layers[0].output[0].save()
        raise Mute
    with pytest.raises(TraceError, match=r"yyy … \(100000 characters\)"), engine.trace(TOWER, **GREEDY):
        value = model.model.layers[0].output[0].save()  # noqa: F841
        raise ValueError("y" * 100_000)


def test_what_a_trace_saved_is_freed_with_its_last_name_and_the_store_not_by_the_collector(engine):
    import gc

    model = engine.model
    gc.disable()
    try:
        with engine.trace(TOWER, **GREEDY):
            kept = model.model.layers[0].output[0].save()
        seen = weakref.ref(kept)
        del kept
        engine.saves.clear()
        # The engine's thread ends its turn a moment after the answer is here.
        until(lambda: seen() is None, 5, "something still holds the tensor")
    finally:
        gc.enable()


@pytest.mark.parametrize("names", [5, {"probe"}, iter(["probe"])])
def test_edits_are_chosen_by_a_list(engine, names):
    with pytest.raises(EditRefused, match="takes a list of names"):
        engine.generate(CAT, edits=names, **GREEDY)


@pytest.mark.parametrize("name", ["a\n", "a" * 200, "1a", "", "a b", None, "trace"])
def test_an_edit_needs_a_name_that_can_be_one(engine, name):
    with pytest.raises(EditRefused):
        engine.edit(name)


def test_a_script_without_a_guard_is_told_about_it(llama_path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import nnsight_lab as lab\nengine = lab.start({str(llama_path)!r}, max_model_len=64)\n"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert ran.returncode == 1
    assert 'under `if __name__ == "__main__":`' in ran.stderr
