"""A block as it travels: the lines it was written on, the names it reads, and a way back."""

from __future__ import annotations

import ast
import itertools
import linecache
import textwrap
import threading
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnsight.intervention.serialization import loads

import nnsight_lab.blocks  # noqa: F401  (imports anyio whole before nnsight)
from nnsight_lab.blocks.block import Block
from nnsight_lab.errors import NotPicklable

#: nnsight reads a file's source once, so every text is a file of its own, as every cell is.
cells = itertools.count()


def captured(text, glbls=None, lcls=None, presaved=frozenset(), filename=""):
    """The block of the first ``with`` statement of ``text``, as a tracer would capture it."""
    text = textwrap.dedent(text)
    filename = filename or f"<cell {next(cells)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    (node,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.With)][:1]
    return Block.capture(node, filename, glbls or {}, lcls or {}, presaved)


def lines_of(code):
    """The lines on which a code object does something, its constants' too."""
    found = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if hasattr(constant, "co_lines"):
            found |= lines_of(constant)
    return found


def test_the_lines_of_a_block_are_those_it_was_written_on():
    block = captured(
        """
        # line 2

        with tracer:
            # a comment
            one = (
                1 +
                2
            )

            text = '''several
        lines
            of text'''
            two = text
        after = 3
        """
    )
    assert block.first_line == 6
    assert lines_of(block.compile()) - {5} == {6, 7, 11, 14}  # the sum is folded into its first line
    space = {}
    exec(block.compile(), space)
    assert space["one"] == 3
    assert space["two"] == "several\nlines\n    of text"
    assert "after" not in space


def test_the_text_of_a_block_is_what_the_user_wrote():
    block = captured(
        """
        with tracer:
            # first a comment
            one = 1   # and one beside

            if one:
                two = "x"
        """
    )
    assert block.text == 'one = 1   # and one beside\n\nif one:\n    two = "x"'


def test_a_block_of_one_line_beside_its_with_is_taken_too():
    block = captured("\nwith tracer: one = 41 + 1\n")
    space = {}
    exec(block.compile(), space)
    assert space["one"] == 42
    assert lines_of(block.compile()) == {2}


def test_a_block_in_a_function_keeps_its_lines():
    block = captured(
        """
        def outer():
            if True:
                with tracer:
                    one = 1
                    raise_here
        """
    )
    assert [ast.dump(s) for s in ast.parse(block.source).body[0].body] == [
        ast.dump(s) for s in ast.parse("one = 1\nraise_here").body
    ]
    with pytest.raises(NameError) as raised:
        exec(block.compile(), {})
    assert traceback.extract_tb(raised.value.__traceback__)[-1].lineno == 6


def test_a_source_that_changed_since_is_not_used():
    text = "\nwith tracer:\n    one = 1\n    two = 2\n"
    node = ast.parse(text).body[0]
    changed = "\nwith tracer:\n    one = 5\n    two = 2\n"
    linecache.cache["<changed>"] = (len(changed), None, changed.splitlines(keepends=True), "<changed>")
    block = Block.capture(node, "<changed>", {}, {})
    assert "5" not in block.source
    space = {}
    exec(block.compile(), space)
    assert space["one"] == 1
    assert lines_of(block.compile()) == {3, 4}


def test_a_block_carries_the_names_it_reads_and_no_others():
    block = captured(
        """
        with tracer:
            made = read + shared
            thing.attribute
        """,
        glbls={"shared": 1, "unused": 2, "attribute": 3},
        lcls={"read": 4, "thing": 5, "made": 6},
        presaved=frozenset({"read", "unread"}),
    )
    assert block.glbls == {"shared": 1}
    assert block.lcls == {"read": 4, "thing": 5}
    assert block.presaved == {"read"}


def test_a_block_comes_out_of_its_bytes_as_it_went_in():
    block = captured("\nwith tracer:\n    out = scale * 2\n", lcls={"scale": 21})
    again = loads(block.dumps())
    assert again == block
    space = dict(again.lcls)
    exec(again.compile(), space)
    assert space["out"] == 42


def test_a_function_of_the_users_travels_by_its_source():
    by = 3

    def scaled(value):
        return value * by

    block = captured("\nwith tracer:\n    out = scaled(2)\n", lcls={"scaled": scaled})
    again = loads(block.dumps())
    space = dict(again.lcls)
    exec(again.compile(), space)
    assert space["out"] == 6


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (threading.Lock(), r"'bad', a _thread\.lock"),
        ((n for n in range(3)), "'bad', a builtins.generator"),
        ({"deep": [threading.Lock()]}, "'bad', a builtins.dict"),
    ],
)
def test_a_name_that_cannot_be_sent_is_named(value, said):
    block = captured("\nwith tracer:\n    good + len(bad)\n", lcls={"good": 1}, glbls={"bad": value})
    with pytest.raises(NotPicklable, match=f"The block reads {said}.*Make it inside the block") as raised:
        block.dumps()
    assert len(str(raised.value).splitlines()) == 1
    assert raised.value.__cause__ is None


def test_blocks_of_one_place_and_other_text_have_other_file_names():
    first, second = (captured(f"\nwith tracer:\n    one = {n}\n").compile().co_filename for n in (1, 2))
    assert first != second
    assert linecache.getline(first, 3) == "    one = 1\n"
    assert linecache.getline(second, 3) == "    one = 2\n"


#: Statements of a body, each a list of lines; a marked line raises.
STATEMENTS = st.lists(
    st.sampled_from(
        [
            ["a = 1"],
            ["# a comment"],
            [""],
            ["b = [", "    1,", "    # within", "    2,", "]"],
            ["c = '''one", " two", "three'''"],
            ["if True:", "    d = 1", "", "    # deep", "    e = 2"],
            ["def f(x):", '    """A docstring', '    over lines."""', "    return x"],
            ["g = 'a\\", "b'"],
        ]
    ),
    max_size=8,
)


@given(above=STATEMENTS, within=STATEMENTS, depth=st.integers(0, 2))
def test_a_line_that_raises_is_the_line_it_was_written_on_whatever_stands_above(above, within, depth):
    pad = "    " * depth
    lines = [line for statement in above for line in statement]
    lines += ["    " * level + "if True:" for level in range(depth)]
    lines.append(f"{pad}with tracer:")
    # A continued string keeps its own text: it must not be indented.
    for statement in within:
        for index, line in enumerate(statement):
            inside = statement[0].endswith(("'''one", "'a\\")) and index > 0
            lines.append(line if inside or not line else f"{pad}    {line}")
    lines.append(f"{pad}    1 / 0")
    block = captured("\n" + "\n".join(lines) + "\n")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(block.compile(), {})
    assert traceback.extract_tb(raised.value.__traceback__)[-1].lineno == len(lines) + 1
