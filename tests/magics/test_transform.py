from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import CellUsageError
from nnsight_lab.magics.scanner import split_lines
from nnsight_lab.magics.transform import sketch, transform


def python(cell: str, *, use_async: bool = False) -> str:
    return "".join(transform(split_lines(cell), use_async=use_async))


def refusal(cell: str) -> str:
    with pytest.raises(CellUsageError) as caught:
        python(cell)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("first_line", "statement"),
    [
        ('%%trace "a", max_tokens=8', 'with __lab__.trace("a", max_tokens=8) as tracer:'),
        ("%%trace", "with __lab__.trace() as tracer:"),
        ("%%trace   prompts , n=2  ", "with __lab__.trace(prompts , n=2) as tracer:"),
        ('%%trace "a" # note', 'with __lab__.trace("a") as tracer:  # note'),
        ("%%trace # note", "with __lab__.trace() as tracer:  # note"),
        ('%%trace "a # b", *more, **opts', 'with __lab__.trace("a # b", *more, **opts) as tracer:'),
        ("%%edit probe", 'with __lab__.edit("probe") as (tracer, edit):'),
        ("%%edit probe-2.1", 'with __lab__.edit("probe-2.1") as (tracer, edit):'),
        ("%%edit probe, engine='b'", "with __lab__.edit(\"probe\", engine='b') as (tracer, edit):"),
        ("%%edit probe engine='b'", "with __lab__.edit(\"probe\", engine='b') as (tracer, edit):"),
        ('%%edit "probe"', 'with __lab__.edit("probe") as (tracer, edit):'),
        ('%%edit name="x"', 'with __lab__.edit(name="x") as (tracer, edit):'),
        ('%%edit name = "x"', 'with __lab__.edit(name = "x") as (tracer, edit):'),
        ('%%edit f"layer{n}"', 'with __lab__.edit(f"layer{n}") as (tracer, edit):'),
    ],
)
def test_the_first_line_becomes_a_with_statement(first_line: str, statement: str) -> None:
    assert python(f"{first_line}\nx = 1\n") == f"{statement}\n    x = 1\n"


@pytest.mark.parametrize("kind", ["trace 'a'", "edit probe"])
def test_an_async_engine_gets_async_with_on_the_same_lines(kind: str) -> None:
    cell = f"%%{kind}\nx = 1\n"
    assert python(cell, use_async=True) == "async " + python(cell)


@pytest.mark.parametrize(
    "head",
    [
        '%%trace ["a (", # a comment with a bracket (\n   "b"], n=3\n',
        '%%trace "a", \\\n  n=3\n',
        '%%trace """two\nlines""", n=3\n',
        '%%trace "a",\\\n\\\n  n=3 # end\n',
        '%%trace (\n\n  "a"\n)\n',
    ],
)
def test_a_first_line_over_several_lines_leaves_the_body_on_its_lines(head: str) -> None:
    cell = head + "found_me = 1\n"
    node = ast.parse(python(cell)).body[0]
    assert isinstance(node, ast.With)
    assert node.body[0].lineno == cell.splitlines().index("found_me = 1") + 1
    call = node.items[0].context_expr
    expected = ast.parse(f"f({head.removeprefix('%%trace')})", mode="eval").body if "# " not in head else None
    if expected is not None:
        assert isinstance(call, ast.Call)
        assert isinstance(expected, ast.Call)
        assert ast.dump(ast.Tuple(call.args)) == ast.dump(ast.Tuple(expected.args))


def test_strings_over_several_lines_are_never_indented() -> None:
    cell = textwrap.dedent('''\
        %%edit probe
        a = """one
          two
        three"""
        if a:
            b = f"""{a
            }
        four"""
        c = 'five\\
        six'
        d = [1,
        2]
        ''')
    got = python(cell)
    assert "\n  two\nthree" in got
    assert "\n    }\nfour" in got
    assert "\nsix" in got
    assert "\n    2]" in got


@pytest.mark.parametrize(
    "line",
    [
        "!echo it's",
        '!echo """',
        "%time x",
        "files = !ls 'a",
        "?len",
        "len?",
        "x = a?",
        "y = $b",
        "!ls \\\n  -l",
    ],
)
def test_shell_lines_and_line_magics_do_not_hide_strings_below_them(line: str) -> None:
    got = python(f'%%edit probe\n{line}\na = """\nb"""\n')
    assert got.endswith('    a = """\nb"""\n')


def test_tabs_blank_lines_and_comments_stay() -> None:
    cell = "%%edit probe\nif x:\n\ty = 1\n\n  # odd\n\tz = 2 # end\n"
    assert python(cell).splitlines()[1:] == [
        "    if x:",
        "    \ty = 1",
        "",
        "      # odd",
        "    \tz = 2 # end",
    ]


def test_a_body_of_comments_is_padded_below_its_last_line() -> None:
    assert python("%%trace 'a'\n# one\n") == "with __lab__.trace('a') as tracer:\n    # one\n    pass\n"


def test_comments_may_stand_above_the_first_line() -> None:
    assert python("# why\n\n%%edit probe\nx\n").startswith('# why\n\nwith __lab__.edit("probe")')


def test_time_and_capture_above_become_items_of_the_same_with() -> None:
    got = python("%%time\n%%capture out --no-stderr\n%%trace 'a'\nx = 1\n").splitlines()
    assert got == [
        "with (__lab__.timed(),",
        "      __lab__.captured(stderr=False) as out,",
        "      __lab__.trace('a') as tracer):",
        "    x = 1",
    ]


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "x = 1\n",
        "%%time\nx\n",
        "%%writefile f\n%%trace 'a'\nx\n",
        "%%tracer\nx\n",
        's = """\n%%trace\n"""\n',
    ],
)
def test_other_cells_are_left_alone(cell: str) -> None:
    lines = split_lines(cell)
    assert transform(lines, use_async=False) == lines


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("%%trace The Eiffel Tower\nx\n", '%%trace "The Eiffel Tower", max_tokens=8'),
        ('%%trace "a" max_tokens=8\nx\n', "parted by commas"),
        ('%%trace "a\nx\n', "cannot read its arguments"),
        ('%%trace ["a",\nx = 1\n', "never closed"),
        ('%%trace "a") as t, open("f"\nx\n', "cannot read its arguments"),
        ("%%trace 'a'\n", "has no body"),
        ("%%trace 'a'\n\n  \n", "has no body"),
        ("%%edit\nx\n", "needs one name"),
        ("%%edit a, 'b'\nx\n", "needs one name"),
        ("%%trace 'a'\n# c\ntry:\n  x\nexcept E: pass\n", "`pass` on the line above"),
        ("%%timeit\n%%trace 'a'\nx\n", "Put %%trace first"),
        ("%%time -x\n%%trace 'a'\nx\n", "takes no arguments"),
        ("%%capture a b\n%%trace 'a'\nx\n", "%%capture out"),
        ("x = 1\n%%trace 'a'\ny\n", "on line 2 must be the first line"),
    ],
)
def test_a_wrong_cell_is_one_line_with_the_cure(cell: str, said: str) -> None:
    assert said in refusal(cell)


@pytest.mark.parametrize(
    "body", ["def f(:\n  x\n", "((\n", '"""\nx\n', "  x\n y\n", "}\n", "x = '\n", "\x00\n"]
)
def test_broken_python_in_the_body_is_left_for_python_to_report(body: str) -> None:
    assert python(f"%%trace 'a'\n{body}").count("\n") == body.count("\n") + 1


@given(
    st.text(alphabet="%trace edit\"'()[]{}\\\n# \tx=1,:!?f\r\x0c\u2028"), st.sampled_from(["trace", "edit"])
)
@settings(max_examples=300, deadline=None)
def test_no_text_whatever_breaks_the_transform(text: str, kind: str) -> None:
    lines = split_lines(f"%%{kind} {text}")
    for use_async in (False, True):
        try:
            once = transform(list(lines), use_async=use_async)
        except CellUsageError as error:
            said = str(error)
            assert "\n" not in said
            continue
        assert transform(list(once), use_async=use_async) == once
        assert len("".join(once).split("\n")) - len("".join(lines).split("\n")) in (0, 1, 2)
    sketch(list(lines))
    assert sketch(list(lines), opening="if 1:") is not None


def stdlib_files() -> list[Path]:
    """Files of the standard library whose text could be the body of a block."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::4]
    tests = Path(sysconfig.get_path("stdlib"), "test")
    found += [tests / name for name in ("test_fstring.py", "test_string_literals.py", "test_grammar.py")]
    return [path for path in found if path.exists() and can_be_a_body(path.read_text("utf-8"))]


def can_be_a_body(source: str) -> bool:
    body = ast.parse(source).body
    return bool(body) and not isinstance(body[0], ast.Try) and "from __future__" not in source


@pytest.mark.parametrize("path", stdlib_files(), ids=lambda path: path.stem)
def test_the_bodys_tree_is_the_same_after_the_transform(path: Path) -> None:
    source = "".join(linecache.getlines(str(path)))
    before = ast.parse(source)
    after = ast.parse(python("%%trace 'a'\n" + source)).body[0]
    assert isinstance(after, ast.With)
    assert ast.dump(ast.Module(after.body, [])) == ast.dump(before)
    numbers = [node.lineno + 1 for node in ast.walk(before) if isinstance(node, ast.stmt)]
    assert numbers == [
        node.lineno for node in ast.walk(ast.Module(after.body, [])) if isinstance(node, ast.stmt)
    ]


def test_the_standard_library_gives_enough_bodies() -> None:
    assert len(stdlib_files()) > 30, sys.version
