from __future__ import annotations

import ast
import json
import linecache
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_lab.errors import PlainError
from nnsight_lab.magics.calls import engine_calls
from nnsight_lab.magics.commands import read_engine
from nnsight_lab.magics.export import export_notebook, script
from tests.magics import fakes

ROOT = Path(__file__).parents[2]


def code(*sources: str) -> list[dict[str, Any]]:
    return [{"cell_type": "code", "source": source} for source in sources]


def body(*sources: str) -> str:
    """The script's part below the guard, dedented."""
    text = script(code(*sources))
    ast.parse(text)
    below = text.split('if __name__ == "__main__":\n', 1)[1]
    return "\n".join(line.removeprefix("    ") for line in below.splitlines())


NOTEBOOK = [
    "%load_ext nnsight_lab\n",
    "%engine start demo max_model_len=128\n",
    "n = 3\ndef double(x):\n    return n * x\n",
    '%%edit probe\n# a comment\nh = """a\n  b"""\n',
    "%%time\n%%trace ['a', # first\n  'b'], max_tokens=n, show=False, edits=['probe']\n"
    "y = save([double(2), '''x\n z'''])\n",
    "%edits off probe\n%edits\n%matplotlib inline\n",
    "if n:\n    %time total = sum(y[:1])\n    !true\nprint(n, total, y[1])\n",
    "%%bash\nls '\n",
    "%%trace 'c', max_tokens=1\n# nothing inside\n",
    "print('<<', [edit.on for edit in engine.edits], '>>')\n",
]


def run_script(text: str, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "exported.py"
    path.write_text(text)
    linecache.checkcache()
    return runpy.run_path(str(path), init_globals={"save": fakes.save}, run_name="__main__")


def state(lab: fakes.Lab) -> tuple[Any, ...]:
    engine = lab.get_engine()
    edits = [(edit.name, edit.version, edit.on, edit.source) for edit in engine.edits]
    return lab.started, engine.calls, edits


def test_a_script_does_what_the_notebook_does(
    run: Any, shell: Any, lab: fakes.Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for cell in NOTEBOOK:
        ran = run(cell.replace("%load_ext nnsight_lab", "pass").replace("%matplotlib inline", "pass"))
        assert ran.error is None or cell.startswith("%%bash")
        printed += [line for line in ran.lines if line.startswith(("3 6 x", "<<"))]
    in_notebook, y = state(lab), shell.user_ns["y"]
    lab.__init__()  # type: ignore[misc]
    names = run_script(script(code(*NOTEBOOK)), tmp_path)
    out = capsys.readouterr().out
    assert state(lab) == in_notebook
    assert names["y"] == y == [6, "x\n z"]
    assert names["model"] is lab.get_engine().model
    assert all(line in out for line in printed)
    assert len(printed) == 2


def test_a_notebook_that_awaits_becomes_an_async_main(lab: fakes.Lab, tmp_path: Path, capsys: Any) -> None:
    cells = [
        "from math import *\nimport asyncio\n",
        "%engine start demo mode=async\n",
        "k = 2\ndef scaled(x):\n    return k * x\n",
        "%%trace 'a', max_tokens=k\ny = save([scaled(floor(2.5))])\n",
        "z = await asyncio.sleep(0, result=y + [k])\nprint('got', z)\n",
    ]
    text = script(code(*cells))
    assert "async def main() -> None:\n" in text
    assert text.index("from math import *") < text.index("async def main")
    run_script(text, tmp_path)
    assert "got [4, 2]" in capsys.readouterr().out
    assert lab.get_engine().calls == [(["a"], {"max_tokens": 2})]


def test_a_script_can_be_imported_again_by_the_processes_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "exported.py"
    path.write_text(
        script(
            code(
                "%load_ext nnsight_lab\nimport multiprocessing",
                "process = multiprocessing.get_context('spawn').Process(target=print, args=('child',))",
                "process.start(); process.join(); print('exit', process.exitcode)",
            )
        )
    )
    ran = subprocess.run(
        [sys.executable, path.name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("child\nexit 0\n", "")


@pytest.mark.parametrize(
    ("line", "calls"),
    [
        (
            '%engine start org/m dtype=float32 n=2 o={"a": 1} x=$y --restart',
            'engine = lab.start("org/m", dtype="float32", n=2, o={"a": 1}, x=y, restart=True)\n'
            "model = engine.model",
        ),
        ("%engine", "print(lab.get_engine().status())"),
        ("%engine status b", 'print(lab.get_engine("b").status())'),
        ("%engine stop", "print(lab.stop())"),
        ("%engine restart b", 'engine = lab.restart("b")\nmodel = engine.model'),
        ("%engine list", "print(*lab.engines())"),
        ("%engine log -n 5", "print(lab.get_engine().log.tail(5))"),
        ("%edits", 'print(*lab.get_engine().edits, sep="\\n")'),
        (
            "%edits on a b-2",
            'lab.get_engine().edits["a"].switch_on()\nlab.get_engine().edits["b-2"].switch_on()',
        ),
        ("%engine sleep", "lab.get_engine().sleep()"),
        ("%engine wake second", 'lab.get_engine("second").wake()'),
        ("%edits default a b-2", 'lab.get_engine().default_edits = ["a", "b-2"]'),
        ("%edits default all", "lab.get_engine().default_edits = None"),
        ("%edits default none engine=b", 'lab.get_engine("b").default_edits = []'),
        ("%edits clear --all engine=b", 'lab.get_engine("b").edits.clear()'),
        ("%saves", "print(lab.saves())"),
        ("%saves write a/b", 'lab.saves().write("a/b")'),
        ("%saves write $path r1 r2 engine=b", 'lab.saves("b").write(path, ["r1", "r2"])'),
        ("%saves read a/b", 'lab.saves().adopt(lab.read("a/b"))'),
        ("%saves keep r1", 'lab.saves().keep("r1")'),
        ("%saves drop all", "lab.saves().clear()"),
        ("%saves files", "# %saves files  (a notebook's; left out)"),
        ("%engine strat", "# %engine strat (left out: %engine has no sub-command 'strat'."),
        ("%matplotlib inline", "# %matplotlib inline  (a notebook's; left out)"),
        ("files = !ls", "# files = !ls  (a notebook's; left out)"),
        ("len?", "# len?  (a notebook's; left out)"),
        ("%time x = f()", "x = f()"),
    ],
)
def test_lines_become_calls_or_comments(line: str, calls: str) -> None:
    assert body(line).startswith(calls)


def test_cell_forms_become_with_blocks() -> None:
    assert body("%%capture out\n%%trace 'a', show=False, n=1 # why\nx = 1\n\n!ls\n") == (
        "# %%capture out  (a notebook's; left out)\n"
        "with lab.trace('a', n=1) as tracer:  # why\n    x = 1\n\n    # !ls  (a notebook's; left out)"
    )
    assert body("%%edit probe\n!ls").endswith(
        "as (tracer, edit):\n    # !ls  (a notebook's; left out)\n    pass"
    )


def test_other_cells_are_kept_as_comments_with_the_reason() -> None:
    assert body("%%bash\nls\n") == "# %%bash  (a notebook's; left out)\n# ls\npass"
    assert body("x = = 1\n").startswith(
        "# Left out, since it is not Python (line 1: invalid syntax).\n# x = = 1"
    )
    assert body("%%trace 'a'\n").startswith("# Left out: %%trace has no body")
    assert body("return 1").startswith("# Left out, since it is not Python")
    assert body("%%time\nx = 1\n") == "# %%time  (a notebook's; left out)\nx = 1"
    assert body() == "pass"


def test_markdown_is_kept_as_comments_and_futures_come_first() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "text"]},
        *code("from __future__ import annotations\nx = 1\n", "display(x)\n"),
    ]
    assert script(cells, 'odd "name".ipynb') == (
        '"""odd \'name\'.ipynb, as plain Python."""\n\nfrom __future__ import annotations\n\n'
        "from IPython.display import display\nimport nnsight_lab as lab\n\n"
        "# vLLM starts processes that import this file again; they must not run what is below.\n"
        'if __name__ == "__main__":\n'
        "    # # Title\n    #\n    # text\n\n    x = 1\n\n    display(x)\n"
    )


def test_strings_keep_their_insides() -> None:
    names: dict[str, Any] = {}
    text = script(code('x = """a\n  b\nc"""\n'))
    exec(compile(text.replace('"__main__"', "__name__"), "<script>", "exec"), names)
    assert names["x"] == "a\n  b\nc"


@given(
    st.lists(
        st.text("%trace edit engine start\"'()[]{}\\\n# \tx=1,:!?fawit\r\x0c\u2028\x00")
        | st.sampled_from(
            ["%%trace 'a'\n", "%%edit p\nx", "await x", "%engine start m", "if x:\n  %edits\n", "x?"]
        ),
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_cells_the_script_is_python(sources: list[str]) -> None:
    ast.parse(script(code(*sources)))


def test_a_notebook_file_is_written_beside_itself_or_where_asked(tmp_path: Path) -> None:
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": code("x = 1"), "nbformat": 4}))
    assert export_notebook(notebook) == str(tmp_path / "a.py")
    assert export_notebook(str(notebook), tmp_path / "b.py") == str(tmp_path / "b.py")
    assert (tmp_path / "a.py").read_text() == (tmp_path / "b.py").read_text()
    for wrong in ("{}", "not json"):
        notebook.write_text(wrong)
        with pytest.raises(PlainError):
            export_notebook(notebook)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("start demo --keep", 'engine = lab.start("demo", keep=True)'),
        ("attach", "engine = lab.attach()"),
        ("attach mine name=here", 'engine = lab.attach("mine", name="here")'),
        ("attach http://host:8000", 'engine = lab.attach("http://host:8000")'),
        ("detach", "lab.detach()"),
        ("detach mine", 'lab.detach("mine")'),
    ],
)
def test_lines_of_engines_that_go_on_are_the_calls_that_do_the_same(line: str, call: str) -> None:
    assert engine_calls(read_engine(line))[0] == call
