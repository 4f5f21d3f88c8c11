"""A notebook as a plain Python script that does the same.

Cells of ours become the `with lab.trace(...)` they stand for, `%engine`, `%edits` and `%saves` lines the
calls they make; every other magic is left as a comment that says so. Two hard facts shape the script. vLLM
starts processes that import the script again, so everything but imports is below
`if __name__ == "__main__":`. And a notebook's names are globals, which nnsight's saves are written into, so
the cells stay at module level there; only a notebook that awaits at top level, which a module cannot, goes
into an `async def main`.

What comes out is always valid Python: a cell that is none is kept as a comment, with the reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnsight_lab.errors import CellUsageError, PlainError
from nnsight_lab.magics import header as headers
from nnsight_lab.magics.calls import edits_calls, engine_calls, saves_calls
from nnsight_lab.magics.commands import read_edits, read_engine, read_saves
from nnsight_lab.magics.header import TARGETS, Header, Place
from nnsight_lab.magics.scanner import LogicalLine, is_blank, logical_lines, split_lines
from nnsight_lab.magics.transform import INDENT, indented, transform

_LOAD_OURS = re.compile(r"%(?:re)?load_ext\s+nnsight_lab\b")
_OURS = re.compile(r"%(engine|edits|saves)(?=\s|$)(.*)", re.DOTALL)
_TIMED_LINE = re.compile(r"%time\s+(.+)", re.DOTALL)
_HELP = re.compile(r"\s*(?:\?.*|[\w.%*]+\?{1,2}|\?{1,2}[\w.%*]+)\s*$")
#: Cell magics whose cell is Python all the same.
_AROUND_PYTHON = re.compile(r"%%(?:time|capture)\b")
_CALLS: dict[str, Callable[[str], list[str]]] = {
    "engine": lambda line: engine_calls(read_engine(line)),
    "edits": lambda line: edits_calls(read_edits(line)),
    "saves": lambda line: saves_calls(read_saves(line)),
}
_AWAITING = (ast.Await, ast.AsyncFor, ast.AsyncWith)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def export_notebook(path: str | Path, out: str | Path | None = None) -> str:
    """Writes a notebook as a Python script.

    Args:
        path: An `.ipynb` file.
        out: Where to write; beside the notebook, as `.py`, if not given.

    Returns:
        The path that was written.

    Raises:
        PlainError: The file is not a notebook.
    """
    source = Path(path)
    try:
        notebook = json.loads(source.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PlainError(f"{source} cannot be read as a notebook: {error}") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise PlainError(f"{source} is not a notebook of format 4: it has no list of cells.")
    target = Path(out) if out is not None else source.with_suffix(".py")
    target.write_text(script(notebook["cells"], source.name), "utf-8")
    return str(target)


def script(cells: Sequence[Mapping[str, Any]], name: str = "a notebook") -> str:
    """The script of a notebook's cells.

    Args:
        cells: As in the notebook's file: each has a `cell_type` and a `source`.
        name: What the script says it was exported from.
    """
    parts = _Parts()
    for cell in cells:
        source = cell.get("source", "")
        text = source if isinstance(source, str) else "".join(source)
        if text.strip():
            parts.add(text if text.endswith("\n") else text + "\n", str(cell.get("cell_type", "code")))
    return parts.script(name)


@dataclass(frozen=True)
class _Part:
    """One cell: its lines, and its tree where it is code."""

    lines: list[str]
    tree: ast.Module | None = None


@dataclass
class _Parts:
    """What a script is put together from."""

    parts: list[_Part] = field(default_factory=list)

    def add(self, text: str, kind: str) -> None:
        """Adds one cell."""
        # A null byte is no Python, not even in a comment; a lone carriage return ends a comment.
        lines = split_lines(text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "␀"))
        if kind != "code":
            self.parts.append(_Part(_commented(lines)))
            return
        try:
            python = _cell(lines)
        except CellUsageError as error:
            self.parts.append(_Part([f"# Left out: {error}\n", *_commented(lines)]))
            return
        tree = _parsed("".join(python))
        if isinstance(tree, SyntaxError):
            why = f"# Left out, since it is not Python (line {tree.lineno}: {tree.msg}).\n"
            self.parts.append(_Part([why, *_commented(lines)]))
            return
        self.parts.append(_Part(python, tree))

    def script(self, name: str) -> str:
        """All of it."""
        trees = [part.tree for part in self.parts if part.tree is not None]
        awaits = any(_awaits(node) for tree in trees for node in _outside_functions(tree))
        displays = any(_calls_display(node) for tree in trees for node in ast.walk(tree))
        future: list[str] = []
        stars: list[str] = []  # which a function cannot have
        body: list[str] = []
        for part in self.parts:
            lines = part.lines
            if part.tree is not None:
                lines = _without(lines, part.tree, lambda node: node.module == "__future__", future)
            if part.tree is not None and awaits:
                lines = _without(lines, part.tree, lambda node: node.names[0].name == "*", stars)
            if any(line.strip() for line in lines):
                body += ([] if not body else ["\n"]) + [line for line in lines if line]
        body = indented(body, INDENT)
        if isinstance(_parsed("".join(["if True:\n", *body])), SyntaxError):
            body.append(f"{INDENT}pass\n")  # comments alone are no block
        title = re.sub(r'["\\\n]', "'", name)
        head = [f'"""{title}, as plain Python."""\n\n', *_section(future)]
        head += _section(["import asyncio\n"] if awaits else [])
        head += _section(
            [
                *(["from IPython.display import display\n"] if displays else []),
                "import nnsight_lab as lab\n",
                *dict.fromkeys(stars),
            ]
        )
        note = "# vLLM starts processes that import this file again; they must not run what is below.\n"
        if not awaits:
            return "".join([*head, note, 'if __name__ == "__main__":\n', *body])
        main = ["\nasync def main() -> None:\n", *body, "\n\n"]
        return "".join([*head, *main, note, 'if __name__ == "__main__":\n', f"{INDENT}asyncio.run(main())\n"])


def _section(imports: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(imports), "\n"] if imports else []


def _without(
    lines: list[str], tree: ast.Module, wanted: Callable[[ast.ImportFrom], bool], moved: list[str]
) -> list[str]:
    """A cell's lines with some imports moved to the top of the script; gone lines are left empty."""
    kept = list(lines)
    for node in tree.body:
        own = range(node.lineno - 1, node.end_lineno or node.lineno)
        alone = sum(other.lineno - 1 in own for other in tree.body) == 1
        if isinstance(node, ast.ImportFrom) and alone and wanted(node):
            moved.append(ast.unparse(node) + "\n")
            for index in own:
                kept[index] = ""
    return kept


def _cell(lines: list[str]) -> list[str]:
    """A code cell as Python, which may still be wrong Python."""
    place = headers.find(lines)
    if place is not None:
        transform(lines, use_async=False)  # for what it refuses
        return _block_cell(lines, place, headers.read(lines, place))
    first = next((index for index, line in enumerate(lines) if not is_blank(line)), 0)
    if lines[first].startswith("%%"):
        magic = _commented([lines[first].rstrip("\n") + "  (a notebook's; left out)\n"])
        if _AROUND_PYTHON.match(lines[first]):
            return [*lines[:first], *magic, *_python(lines[first + 1 :])]
        return [*lines[:first], *magic, *_commented(lines[first + 1 :])]
    return _python(lines)


def _block_cell(lines: Sequence[str], place: Place, header: Header) -> list[str]:
    out = list(lines[: place.index])
    for wrapper in place.wrappers:
        line = lines[wrapper.index].rstrip("\n")
        out[wrapper.index] = f"# {line}  (a notebook's; left out)\n"
    comment = f"  {header.comment.strip()}" if header.comment.strip() else ""
    arguments = _without_show(header.arguments)
    out += split_lines(f"with lab.{header.kind}({arguments}) as {TARGETS[header.kind]}:{comment}\n")
    body = _python(lines[header.last + 1 :])
    if all(is_blank(line) for line in body):
        body.append("pass\n")
    return out + indented(body, INDENT)


def _without_show(arguments: str) -> str:
    """A header's arguments without `show=`, which is the notebook's own."""
    call = ast.parse(f"f({arguments})", mode="eval").body
    if not isinstance(call, ast.Call) or all(keyword.arg != "show" for keyword in call.keywords):
        return arguments
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "show"]
    return ast.unparse(call)[len("f(") : -1]


def _python(lines: Sequence[str]) -> list[str]:
    """Lines of a cell with its magics turned into calls or comments."""
    out: list[str] = []
    for logical in logical_lines(lines):
        text = lines[logical.first : logical.last + 1]
        out += _escape(text) if _is_notebooks(logical, text) else text
    return out


def _is_notebooks(logical: LogicalLine, text: Sequence[str]) -> bool:
    if logical.kind == "escape":
        return True
    return len(text) == 1 and _HELP.match(text[0]) is not None and logical.kind == "code"


def _escape(text: Sequence[str]) -> list[str]:
    """An IPython line as the statements it stands for, or as a comment."""
    line = "".join(text).strip()
    indent = text[0][: len(text[0]) - len(text[0].lstrip())]
    if _LOAD_OURS.match(line):
        return [f"{indent}pass\n"] if indent else []
    ours = _OURS.match(line)
    timed = _TIMED_LINE.match(line)
    if ours:
        try:
            calls = _CALLS[ours[1]](ours[2])
        except CellUsageError as error:
            return _left_out(line, indent, f" (left out: {error})")
        if calls:
            return [f"{indent}{call}\n" for call in calls]
    if timed and not isinstance(_parsed(timed[1]), SyntaxError):
        return [f"{indent}{timed[1]}\n"]
    return _left_out(line, indent, "  (a notebook's; left out)")


def _left_out(line: str, indent: str, why: str) -> list[str]:
    comment = f"# {' '.join(line.splitlines())}{why}\n"
    return [f"{indent}pass  {comment}" if indent else comment]


def _commented(lines: Sequence[str]) -> list[str]:
    """Lines as comments, without the blank ones around them."""
    text = "".join(lines).strip("\n").split("\n")
    return [f"# {line}".rstrip() + "\n" for line in text] if "".join(lines).strip() else []


def _parsed(text: str) -> ast.Module | SyntaxError:
    """The tree of a cell, which may await at top level."""
    try:
        tree = compile(text, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        compile(text, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # `return` outside a function
    except SyntaxError as error:
        return error
    except ValueError as error:  # null bytes
        return SyntaxError(str(error))
    assert isinstance(tree, ast.Module)
    return tree


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield from _outside_functions(child)


def _awaits(node: ast.AST) -> bool:
    return isinstance(node, _AWAITING) or (isinstance(node, ast.comprehension) and bool(node.is_async))


def _calls_display(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "display"
