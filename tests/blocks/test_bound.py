"""A name that a block binds before it reads it does not travel; every other one does."""

from __future__ import annotations

import ast
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsight_lab.blocks.bound import bound_first
from tests.blocks.test_block_capture import captured


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a = model.x\nb = a + 1", {"a", "b"}),
        ("a = a + 1", set()),
        ("a += 1", set()),
        ("b = a\na = 1", {"b"}),
        ("a, (b, *c) = model.x\nd: int = b", {"a", "b", "c", "d"}),
        ("a[0] = 1\na.b = 2", set()),
        ("if c:\n    a = 1\nb = a", {"b"}),
        ("for a in b:\n    c = a\nd = c", {"d"}),
        ("def f():\n    return a\na = 1\nb = f()", {"f", "b"}),
        ("a = 1\ndef f():\n    return a", {"a", "f"}),
        ("a = 1\nb = [a for _ in range(3)]\ndel a", {"a", "b"}),
        ("def f():\n    global a\n    a = 1\nf()\na = 2", {"f"}),
        ("with tracer.all():\n    a = 1\na = 2", {"a"}),
        ("a: int\nb = a", {"b"}),
    ],
)
def test_names_bound_first_are_told_from_names_read_first(text: str, found: set[str]) -> None:
    assert bound_first(ast.parse(text).body) == found


NAMES = st.sampled_from("abc")
LINES = st.one_of(
    st.builds("{} = 1".format, NAMES),
    st.builds("{} = {} + 1".format, NAMES, NAMES),
    st.builds("{} += {}".format, NAMES, NAMES),
    st.builds("if {}:\n    {} = 1".format, NAMES, NAMES),
    st.builds("{}, {} = {}, {}".format, NAMES, NAMES, NAMES, NAMES),
)


@given(st.lists(LINES, max_size=6))
def test_a_block_runs_the_same_without_the_names_it_binds_first(lines: list[str]) -> None:
    text = "\n".join(lines)
    whole = {"a": 10, "b": 20, "c": 30}
    without = {name: value for name, value in whole.items() if name not in bound_first(ast.parse(text).body)}
    exec(text, {}, whole)
    exec(text, {}, without)
    assert without == {name: value for name, value in whole.items() if name in without}


def test_the_last_results_of_a_cell_stay_in_the_notebook() -> None:
    text = textwrap.dedent(
        """
        with tracer:
            hidden = model.output
            peak = hidden.max() * factor
        """
    )
    for scope in ("glbls", "lcls"):
        block = captured(text, **{scope: {"hidden": [0] * 999, "factor": 2}})
        assert {**block.glbls, **block.lcls} == {"factor": 2}
