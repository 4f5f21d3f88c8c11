"""An exception of the worker, raised at home on the user's own lines."""

from __future__ import annotations

import linecache
import traceback

import pytest

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.blocks.errors import block_error, capture, home, source_lines
from nnsight_lab.errors import EditError, TraceError
from nnsight_lab.wire.codec import decode, encode
from nnsight_lab.wire.messages import Frame, WorkerError

CELL = "<a cell>"
SOURCE = "with lab.trace('x'):\n    # above\n    value = helper(1)\n\ndef helper(x):\n    return x / 0\n"


@pytest.fixture(autouse=True)
def cell():
    linecache.cache[CELL] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL)
    yield
    del linecache.cache[CELL]


def worker_error(**changes):
    frames = (
        Frame(f"<block 0123456789ab> {CELL}", 3, "<module>"),
        Frame(f"[helper:5] {CELL}", 6, "helper"),
    )
    return WorkerError("ZeroDivisionError", "division by zero", frames, **changes)


def test_a_file_name_of_the_worker_leads_back_to_the_users():
    assert home("<block 0123456789ab> /tmp/cell.py") == "/tmp/cell.py"
    assert home("[helper:12] /tmp/cell.py") == "/tmp/cell.py"
    assert home("[helper:12] <block 0123456789ab> /tmp/cell.py") == "/tmp/cell.py"
    assert home("/somewhere/else.py") == "/somewhere/else.py"


def test_the_traceback_of_a_block_error_is_the_users_lines():
    error = block_error(worker_error(), block="trace")
    assert isinstance(error, TraceError)
    with pytest.raises(TraceError) as raised:
        raise error
    frames = traceback.extract_tb(raised.value.__traceback__)[-2:]
    assert [(f.filename, f.lineno, f.name, f.line) for f in frames] == [
        (CELL, 3, "<module>", "value = helper(1)"),
        (CELL, 6, "helper", "return x / 0"),
    ]
    shown = "".join(traceback.format_exception(raised.value))
    assert f'File "{CELL}", line 6, in helper\n    return x / 0' in shown


def test_the_message_names_type_block_line_and_count():
    error = block_error(worker_error(), block="probe", failed=3, total=64, outputs=[1, 2])
    assert isinstance(error, EditError)
    assert str(error) == (
        "ZeroDivisionError: division by zero [in the edit 'probe''s block at line 6 `return x / 0`] "
        "(3 of 64 requests failed; `error.outputs` has all)"
    )
    assert error.outputs == [1, 2]
    assert [line.lineno for line in source_lines(worker_error())] == [3, 6]


def test_a_notebook_shows_the_lines_around_and_an_arrow():
    rendered = "\n".join(block_error(worker_error(), block="trace")._render_traceback_())
    assert "---->   3     value = helper(1)" in rendered
    assert "---->   6     return x / 0" in rendered
    assert "        2     # above" in rendered
    assert rendered.endswith(str(block_error(worker_error(), block="trace")))


def test_an_error_without_lines_has_a_message_still():
    error = block_error(WorkerError("KeyError", "'x'"), block="trace")
    assert str(error) == "KeyError: 'x' [in the trace's block]"
    assert error.__traceback__ is None


def test_an_exception_is_captured_with_the_users_frames_alone():
    block = compile(
        "\n\ndef f():\n    import json\n    json.loads('no')\nf()\n", f"<block 00> {CELL}", "exec"
    )
    with pytest.raises(ValueError) as raised:
        exec(block, {})
    found = capture(raised.value)
    assert (found.type_name, found.control_flow) == ("JSONDecodeError", False)
    # This test's own frame is a user's file; json's are not.
    assert [(f.filename, f.lineno, f.function) for f in found.frames][1:] == [
        (f"<block 00> {CELL}", 6, "<module>"),
        (f"<block 00> {CELL}", 5, "f"),
    ]
    assert found.frames[0].filename == __file__
    assert decode(encode(found)) == found


def test_a_read_out_of_order_is_told_with_the_order_that_works():
    order = tuple(f"model.model.layers.{index}.output" for index in range(4))
    error = WorkerError(
        "OutOfOrderError",
        "upstream's words",
        requested=((order[3], 5), (order[1], 6)),
        order=(order[1], order[3]),
    )
    said = str(block_error(error, block="trace"))
    assert "model.model.layers[1].output was read after the model had already passed it" in said
    works = "model.model.layers[1].output (line 6), model.model.layers[3].output (line 5)"
    assert f"the order that works: {works}" in said


def test_a_value_that_was_read_again_too_late_is_told_to_be_kept():
    order = tuple(f"model.model.layers.{index}.output" for index in range(4))
    error = WorkerError(
        "OutOfOrderError",
        "upstream's words",
        requested=((order[1], 5), (order[3], 6), (order[1], 8)),
        order=(order[1], order[3]),
    )
    said = str(block_error(error, block="trace"))
    assert "model.model.layers[1].output was read again in line 8, after the model had already passed" in said
    assert "keep what line 5 read" in said


def test_a_location_that_was_never_reached_says_so():
    error = WorkerError("OutOfOrderError", "upstream's words", requested=(("model.logits.i1", 5),), order=())
    assert "model.logits.i1 was never reached" in str(block_error(error, block="trace"))
