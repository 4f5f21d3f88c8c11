"""What a user's mistake looks like in a real notebook: one plain line, or the cell's own line."""

from __future__ import annotations

import pytest

from tests.notebook.kernels import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.engine]

newest = pytest.mark.parametrize("version", ["7.4"], indirect=True)


def one_line(error: str) -> str:
    assert error
    assert "\n" not in error
    return error


def test_an_error_in_a_block_is_shown_once_on_the_cells_own_line(kernel: Kernel) -> None:
    cell = """
%%trace "One", max_tokens=2
# a comment

hidden = (model.model
          .layers[3].output[0])
# another

wrong = hidden.nope()
after = 1
"""
    ran = kernel.run(cell.lstrip())
    (error,) = ran.of("error")
    assert error["ename"] == "TraceError"
    lines = ran.error.splitlines()
    number = kernel.value("len(In) - 2")
    assert lines[0] == f"Cell In[{number}], line 8"
    assert [line for line in lines if line.startswith("---->")] == ["---->   8 wrong = hidden.nope()"]
    assert lines[-1].startswith("TraceError: AttributeError: 'Tensor' object has no attribute 'nope'")
    assert "site-packages" not in ran.error
    assert len(lines) <= 10
    assert kernel.value("engine.alive")


@newest
def test_an_edits_error_says_how_many_requests_failed(kernel: Kernel) -> None:
    edit = """
%%edit picky
# explained

hidden = model.model.layers[3].output[0]
if len(hidden) > 4:
    raise ValueError("too long for me")
"""
    kernel.good(edit.lstrip())
    ran = kernel.run("lab.generate(['One', 'One, two, three, four, five', 'One, two, three'], max_tokens=2)")
    assert "2 of 3 requests failed" in ran.error.splitlines()[-1]
    assert '---->   6     raise ValueError("too long for me")' in ran.error
    assert ran.error.splitlines()[-1].startswith("EditError: ValueError: too long for me")
    assert len(ran.of("error")) == 1
    (table,) = kernel.good("%edits").texts
    assert "2: ValueError: too long for me" in table
    assert kernel.value("[o.error is None for o in lab.generate(['One', 'a b c d e f'], errors='keep')]") == [
        *(True, False)
    ]


@newest
def test_reading_out_of_order_names_the_order_that_works(kernel: Kernel) -> None:
    cell = """
%%trace "One", max_tokens=1
late = model.logits.save()
early = model.model.layers[2].output[0].save()
"""
    ran = kernel.run(cell.lstrip())
    last = ran.error.splitlines()[-1]
    assert "OutOfOrderError" in last
    assert "model.model.layers[2].output (line 3), model.logits (line 2)" in last
    assert "---->   3 early = model.model.layers[2]" in ran.error


@newest
def test_an_unknown_edit_names_the_nearest(kernel: Kernel) -> None:
    kernel.good("%%edit probe\nx = model.logits\n")
    for cell in (
        "lab.generate('One', edits=['prob'])",
        "%edits off prob",
        "%%trace 'One', edits=['prob']\npass\n",
    ):
        assert (
            one_line(kernel.run(cell).error) == "UnknownEdit: No edit is called 'prob'. Did you mean 'probe'?"
        )


@newest
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            "%%trace 'One', max_tokenz=2\npass\n",
            "'max_tokenz' is not a sampling setting. Did you mean 'max_tokens'?",
        ),
        ("%%trace 'One', temperature=-1\npass\n", "temperature"),
        ("%%trace 'One', max_tokens=2\n", "%%trace has no body"),
        ("%%trace 'One'\ntry:\n    x = 1\nfinally:\n    pass\n", "cannot start with `try:`"),
        ("%%trace The Eiffel Tower\npass\n", 'Write: %%trace "The Eiffel Tower", max_tokens=8'),
        ("%%edit\npass\n", "needs one name"),
        ("%engine strt demo", "Did you mean 'start'?"),
        ("%engine start demo max_model_lem=512 name=other", "max_model_len"),
        ("%engine start /no/such/model name=other", "/no/such/model"),
        ("lab.generate([])", "There is no prompt"),
    ],
)
def test_a_mistake_is_one_plain_line_with_what_to_write(kernel: Kernel, cell: str, said: str) -> None:
    ran = kernel.run(cell)
    assert said in one_line(ran.error)
    assert ran.stdout == ""


@newest
def test_a_name_that_cannot_be_sent_is_named(kernel: Kernel) -> None:
    kernel.good("import threading\nlock = threading.Lock()")
    ran = kernel.run("%%trace 'One', max_tokens=1\nprint(lock)\n")
    assert one_line(ran.error).startswith("NotPicklable: The block reads 'lock'")


@newest
def test_a_shell_line_inside_a_block_runs_in_the_worker_and_a_magic_is_refused(kernel: Kernel) -> None:
    kernel.good("%%trace 'One', max_tokens=1\nlines = !echo inside\nlines = lines.save()\n!echo to the log\n")
    assert kernel.value("list(lines)") == ["inside"]
    assert "to the log" in kernel.value("engine.log.text()")
    ran = kernel.run("%%trace 'One', max_tokens=1\nhidden = model.logits.save()\n%pwd\n")
    assert "%pwd cannot run inside the model" in ran.error


@newest
def test_a_prompt_that_is_too_long_is_refused_in_one_line(kernel: Kernel) -> None:
    for cell in (
        "%%trace 'One ' * 3000, max_tokens=1\npass\n",
        "engine.generate('One ' * 3000, max_tokens=1)",
    ):
        error = one_line(kernel.run(cell).error)
        assert error.startswith("RequestRefused: ")
        assert "1024" in error
    assert kernel.value("engine.request_count()") == 0


@newest
def test_without_an_engine_a_cell_says_how_to_start_one(kernel: Kernel) -> None:
    kernel.good("%unload_ext nnsight_lab\n%load_ext nnsight_lab")
    kernel.good(
        "from nnsight_lab.engine.manager import manager\nhidden, manager._engines = manager._engines, {}"
    )
    try:
        for cell in ("%%trace 'One'\npass\n", "%%edit probe\npass\n", "%edits"):
            error = one_line(kernel.run(cell).error)
            assert error.startswith("EngineNotStarted: No engine is running")
            assert "%engine start demo" in error
    finally:
        kernel.good("manager._engines = hidden")
