import nbformat
import pytest

from nnsight_lab.cli import demo
from nnsight_lab.cli.main import main
from nnsight_lab.errors import PlainError

pytestmark = pytest.mark.notebook


@pytest.fixture
def notebook(tmp_path):
    """Writes a notebook of these code cells; returns its path."""

    def write(*sources):
        book = nbformat.v4.new_notebook()
        book.cells = [nbformat.v4.new_markdown_cell("# A title"), *map(nbformat.v4.new_code_cell, sources)]
        path = tmp_path / "some.ipynb"
        nbformat.write(book, path)
        return path

    return write


def test_what_cells_print_and_end_with_is_shown_and_the_last_line_is_ok(notebook, capsys):
    path = notebook("print('from a cell')", "import sys; print('a log line', file=sys.stderr)", "6 * 7")
    assert demo.run(path, make_model=False) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == "[1/3] print('from a cell')"
    assert lines[1] == "from a cell"
    assert "42" in lines
    assert "a log line" not in lines
    assert lines[-1] == "demo: ok"


def test_a_display_that_is_updated_in_place_is_shown_as_it_began_and_ended(notebook, capsys):
    path = notebook(
        "class Said:\n"
        "    def __init__(self, text): self.text = text\n"
        "    def __repr__(self): return self.text\n"
        "handle = display(Said('starting'), display_id=True)\n"
        "for n in range(3): handle.update(Said(f'phase {n}'))\n"
        "handle.update(Said('ready'))"
    )
    assert demo.run(path, make_model=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("starting") + 1] == "ready"


def test_a_cell_that_fails_is_one_line_and_1_and_later_cells_do_not_run(notebook, capsys):
    path = notebook("print('before')", "raise ValueError('first line\\nsecond line')", "print('after')")
    assert demo.run(path, make_model=False) == 1
    said = capsys.readouterr()
    assert said.err.strip().endswith("ValueError: first line")
    assert len(said.err.strip().splitlines()) == 1
    assert "after" not in said.out.replace("[3/3] print('after')", "")
    assert "demo: ok" not in said.out


def test_a_kernel_that_dies_is_told_plainly(notebook, capsys):
    path = notebook("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert demo.run(path, make_model=False) == 1
    assert "the kernel died" in capsys.readouterr().err


def test_a_notebook_that_is_not_there_is_refused_before_anything_starts(tmp_path, capsys):
    with pytest.raises(PlainError, match="no notebook at"):
        demo.run(tmp_path / "none.ipynb")
    assert main(["demo", str(tmp_path / "none.ipynb")]) == 1
    assert capsys.readouterr().err.startswith("nnsight-lab: there is no notebook at")
