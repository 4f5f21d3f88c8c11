"""Errors of a block come home to the user's own lines, whatever stands above them."""
# ruff: noqa: F841  (what a block saves is read on the outputs; odd layout is what is tested)

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from pathlib import Path

import cloudpickle
import pytest

from nnsight_lab.errors import CannotTravel, EditError, NotPicklable, TraceError
from tests.waiting import CAT, GREEDY, TOWER, freed


def line_of(mark):
    """The number of the one line of this file that ends with that comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return number


def helper(value):
    """Fails two calls deep, so that the lines of the helpers are seen."""
    # A comment between, which an unparsed source would lose.
    return deeper(value)  # in the helper


def deeper(value):
    text = """a string
    over several
    lines"""
    return value / 0 + len(text).missing  # in the deeper one


def assert_placed(error, *marks):
    """The error's lines and its traceback's last frames are the marked lines of this file."""
    numbers = [line_of(mark) for mark in marks]
    assert [(line.filename, line.lineno) for line in error.lines] == [(__file__, n) for n in numbers]
    assert [line.text for line in error.lines] == [
        linecache.getline(__file__, n).rstrip("\n") for n in numbers
    ]
    frames = traceback.extract_tb(error.__traceback__)[-len(numbers) :]
    assert [(frame.filename, frame.lineno) for frame in frames] == [(__file__, n) for n in numbers]
    assert f"at line {numbers[-1]} `" in str(error)
    rendered = "\n".join(error._render_traceback_())
    assert f"----> {numbers[-1]:3d} " in rendered


def test_a_trace_that_raises_points_at_its_line(engine):
    model = engine.model
    with (
        pytest.raises(TraceError, match="ZeroDivisionError: division by zero") as raised,
        engine.trace(TOWER, **GREEDY),
    ):
        hidden = model.model.layers[0].output[0]
        1 / 0  # plain
    assert_placed(raised.value, "plain")
    assert raised.value.type_name == "ZeroDivisionError"
    freed(engine)


def test_comments_blank_lines_and_expressions_over_lines_do_not_move_the_line(engine):
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY):
        # A comment first,

        # and another; then an expression over lines.
        hidden = (
            model.model.layers[0]
            # with a comment in it
            .output[0]
        )

        text = """a string
that is not indented
        over several lines, with 'quotes' and a
# that is no comment"""
        # fmt: off
        numbers = [
            1,

            2,
        ]
        if len(numbers) == 2:

            # and one right above it

            raise KeyError(  # here

                text[:8],
            )
        # fmt: on
        never = model.model.layers[1].output[0].save()
    assert_placed(raised.value, "here")
    assert raised.value.type_name == "KeyError"


@pytest.mark.parametrize("by_value", [False, True], ids=["imported by the worker", "sent with the block"])
def test_an_error_in_a_helper_points_at_the_helpers_line(engine, by_value, request):
    module = sys.modules[__name__]
    if by_value:  # as every function of a notebook is
        cloudpickle.register_pickle_by_value(module)
        request.addfinalizer(lambda: cloudpickle.unregister_pickle_by_value(module))
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY):
        hidden = model.model.layers[0].output[0]
        found = helper(hidden)  # calls the helper
    assert_placed(raised.value, "calls the helper", "in the helper", "in the deeper one")
    assert [line.function for line in raised.value.lines[1:]] == ["helper", "deeper"]


def test_an_error_in_a_function_of_the_surrounding_one_points_at_its_line(engine):
    model = engine.model
    least = 100

    def checked(value):
        # The name it closes over travels with it.
        if value.shape[0] < least:
            raise ValueError(f"fewer than {least}")  # in the inner one
        return value

    with pytest.raises(TraceError, match="fewer than 100") as raised, engine.trace(TOWER, **GREEDY):
        hidden = checked(model.model.layers[0].output[0])  # calls the inner one
    assert_placed(raised.value, "calls the inner one", "in the inner one")


def test_an_error_within_a_loop_over_steps_points_at_its_line(engine):
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            rows = model.model.layers[0].output[0].shape[0]
            if rows == 1:
                raise ValueError("a later step")  # in the loop
    assert_placed(raised.value, "in the loop")


def test_an_error_of_an_edit_points_at_the_edits_line(engine):
    model = engine.model
    with engine.edit("bad"):
        # Above the line, a comment.
        hidden = model.model.layers[0].output[0].save()
        hidden.no_such_attribute  # in the edit
    with pytest.raises(EditError, match="no_such_attribute") as raised:
        engine.generate([TOWER, CAT], **GREEDY)
    assert_placed(raised.value, "in the edit")
    assert (raised.value.block, raised.value.failed) == ("bad", 2)
    assert raised.value.outputs[0].saves["hidden"].shape == (16, 128)


def test_an_error_of_one_invoke_points_at_its_line_and_the_others_are_whole(engine):
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(**GREEDY) as tracer:
        with tracer.invoke(TOWER):
            one = model.model.layers[0].output[0].save()
        with tracer.invoke(CAT):
            two = model.model.layers[0].output[0].save()
            raise ValueError("the second one")  # in the invoke
    assert_placed(raised.value, "in the invoke")
    assert (raised.value.failed, raised.value.total) == (1, 2)
    assert one.shape == (16, 128)
    assert two.shape == (4, 128)


def test_a_name_that_is_not_there_points_at_its_line(engine):
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
        no_such_name  # noqa: F821  # unknown
    assert_placed(raised.value, "unknown")
    assert raised.value.type_name == "NameError"
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY):
        hidden = model.model.layers[99].output[0].save()  # no such layer
    assert_placed(raised.value, "no such layer")


def test_reading_out_of_order_is_an_error_that_says_the_order(engine):
    model = engine.model
    with pytest.raises(TraceError, match="the order that works") as raised, engine.trace(TOWER, **GREEDY):
        late = model.model.layers[2].output[0].save()
        early = model.model.layers[0].output[0].save()  # too late
    error = raised.value
    assert error.type_name == "OutOfOrderError"
    assert_placed(error, "too late")
    number = line_of("too late")
    assert (
        f"the order that works: model.model.layers[0].output (line {number}), "
        f"model.model.layers[2].output (line {number - 1})"
    ) in str(error)
    assert late.shape == (16, 128)


def test_of_several_reads_out_of_order_the_one_that_waited_is_named(engine):
    model = engine.model
    with pytest.raises(TraceError, match="the order that works") as raised, engine.trace(TOWER, **GREEDY):
        third = model.model.layers[3].output[0].save()
        second = model.model.layers[2].output[0].save()  # the first that is too late
        first = model.model.layers[1].output[0].save()
    assert_placed(raised.value, "the first that is too late")
    assert "model.model.layers[2].output was read after" in str(raised.value)


def test_a_value_that_is_read_again_too_late_is_named_with_both_lines(engine):
    model = engine.model
    with pytest.raises(TraceError) as raised, engine.trace(TOWER, **GREEDY):
        first = model.model.layers[1].output[0].save()
        second = model.model.layers[2].output[0].save()
        again = model.model.layers[1].output[0].save()  # a second time
    assert_placed(raised.value, "a second time")
    number = line_of("a second time")
    said = f"model.model.layers[1].output was read again in line {number}"
    assert said in str(raised.value)
    assert f"keep what line {number - 2} read" in str(raised.value)


def test_reading_out_of_order_in_an_edit_is_an_error_too(engine):
    model = engine.model
    with engine.edit("muddled"):
        late = model.model.layers[2].output[0].save()
        early = model.model.layers[0].output[0].save()  # too late in an edit
    with pytest.raises(EditError, match="the order that works") as raised:
        engine.generate(TOWER, **GREEDY)
    assert_placed(raised.value, "too late in an edit")
    assert sorted(raised.value.outputs[0].saves) == ["late"]
    (output,) = engine.generate(TOWER, errors="keep", **GREEDY)
    assert output.error.startswith("OutOfOrderError: ")
    freed(engine)


def test_a_value_that_cannot_travel_is_named_and_its_siblings_are_whole(engine):
    model = engine.model
    said = r"CannotTravel: function is a function: code does not travel"
    with pytest.raises(TraceError, match=said) as raised, engine.trace(TOWER, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
        function = (lambda value: value).save()
        after = model.model.layers[1].output[0].save()
    assert hidden.shape == after.shape == (16, 128)
    assert sorted(raised.value.outputs[0].saves) == ["after", "hidden"]
    freed(engine)


def test_a_value_of_an_edit_that_cannot_travel_leaves_other_requests_and_edits_whole(engine):
    model = engine.model
    with engine.edit("picky"):
        hidden = model.model.layers[0].output[0].save()
        if hidden.shape[0] == 4:
            function = (lambda value: value).save()
    with engine.edit("calm"):
        other = model.model.layers[1].output[0].save()
    first, second = engine.generate([TOWER, CAT], errors="keep", **GREEDY)
    assert first.error is None
    assert sorted(first.saves) == sorted(second.saves) == ["hidden", "other"]
    assert second.error.startswith("CannotTravel: function is a function: code does not travel")
    assert issubclass(CannotTravel, Exception)


def test_a_name_that_cannot_be_sent_is_named_before_anything_is(engine):
    model = engine.model
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match=r"reads 'lock', a _thread\.lock"), engine.trace(TOWER, **GREEDY):
        hidden = model.model.layers[0].output[0].save()
        lock.acquire()
    with pytest.raises(NotPicklable, match="'lock'"), engine.edit("bad"):
        hidden = model.model.layers[0].output[0].save()
        lock.acquire()
    assert "bad" not in engine.edits
    assert engine._driver.unfinished() == 0


def test_a_block_that_imports_what_is_not_there_says_so(engine):
    said = "ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(TraceError, match=said) as raised, engine.trace(TOWER, **GREEDY):
        import no_such_module  # not there

        found = no_such_module.value
    assert_placed(raised.value, "not there")
