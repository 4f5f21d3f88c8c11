"""The code that makes a save again is Python that says what the label says."""

from __future__ import annotations

import ast

from nnsight_lab.saves.label import SaveLabel
from nnsight_lab.saves.recipe import recipe_of

BLOCK = 'text = """one\n    two\nthree"""\nhidden = model.layers[3].output[0].save()'


def test_a_trace_is_written_with_its_prompt_sampling_and_edits() -> None:
    label = SaveLabel(
        request_id="r",
        name="hidden",
        prompt="a 'quoted'\nprompt <b>",
        sampling={"max_tokens": 2, "temperature": 0},
        edits=(("probe", 3, "norm = hidden.norm().save()\nx = 1"),),
        block_source=BLOCK,
    )
    code = recipe_of(label)
    edit, trace = ast.parse(code).body
    assert isinstance(edit, ast.With)
    assert isinstance(trace, ast.With)
    assert ast.unparse(edit.items[0]) == "lab.edit('probe')"
    assert ast.unparse(edit.body) == "norm = hidden.norm().save()\nx = 1"  # type: ignore[arg-type]
    call = trace.items[0].context_expr
    assert isinstance(call, ast.Call)
    assert ast.literal_eval(call.args[0]) == label.prompt
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert options == {"max_tokens": 2, "temperature": 0, "edits": ["probe"]}
    assert [ast.dump(line) for line in trace.body] == [ast.dump(line) for line in ast.parse(BLOCK).body]


def test_what_an_edit_saved_is_read_from_its_output() -> None:
    edits = (("probe", 1, "norm = 1"),)
    label = SaveLabel(
        block="probe", name="norm", prompt="p", edits=edits, block_source="norm = 1", sequence=1
    )
    code = recipe_of(label)
    assert code.splitlines()[-2:] == [
        "[output] = lab.generate('p', edits=['probe'])",
        "norm = output.outputs[1].saves.edit('probe')['norm']",
    ]
    assert "lab.trace('p', edits=['probe']) as tracer:\n    y = 2" in recipe_of(label, "y = 2")


def test_what_no_block_made_has_none() -> None:
    assert recipe_of(SaveLabel(name="x", prompt="p")) == ""
