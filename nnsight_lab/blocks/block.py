"""A block as it travels: the user's own source text, and the names it reads.

nnsight ships ``ast.unparse(body)``: comments, blank lines and multi-line expressions are gone, so
every line number of a worker's traceback is wrong (research: the error of cell line 8 was reported
as line 5). Here the lines travel as they were written, under an ``if True:`` where the ``with``
stood, padded so that line and column are the cell's own; when the text does not parse to the very
same tree (a cell rewritten behind our back) the unparsed form is sent instead, so what runs is
always what was captured.

Pickle carries code here, from the kernel to its own worker, and never data home. A name that
cannot be pickled is refused by name before anything is sent.
"""

from __future__ import annotations

import ast
import hashlib
import io
import linecache
import pickle
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from nnsight.intervention.serialization import CustomCloudPickler, code_reduce
from nnsight.tracing.tracer import Tracer

from nnsight_lab.blocks.bound import bound_first
from nnsight_lab.blocks.stubs import get_ipython
from nnsight_lab.errors import NotPicklable

#: Marks the file name a block is compiled under in the worker: unique by content, because nnsight
#: caches source by file name and never looks again.
BLOCK_MARK = "<block "


@dataclass
class Block:
    """A captured ``with`` body with the names it reads.

    Attributes:
        source: Text that compiles to the body with the lines it has in ``filename``.
        filename: Where the user wrote it.
        first_line: The line of the body's first statement.
        glbls: The globals it reads.
        lcls: The locals it reads.
        presaved: Names that were marked with ``.save()`` before the block, by the sender.
    """

    source: str
    filename: str
    first_line: int
    glbls: dict[str, Any]
    lcls: dict[str, Any]
    presaved: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def capture(
        cls,
        node: Any,
        filename: str,
        glbls: dict[str, Any],
        lcls: dict[str, Any],
        presaved: frozenset[str] = frozenset(),
    ) -> Block:
        """Take the body of ``node``, a ``with`` statement of ``filename``, with what it reads."""
        source = _written(node, filename) or _unparsed(node)
        _, used_globals, used_locals = code_reduce(source, glbls, lcls)
        for name in bound_first(node.body):
            used_globals.pop(name, None)
            used_locals.pop(name, None)
        for scope in (used_globals, used_locals):
            if "get_ipython" in scope:  # a shell line: the notebook's shell stays in the notebook
                scope["get_ipython"] = get_ipython
        return cls(
            source=source,
            filename=filename,
            first_line=node.body[0].lineno,
            glbls=used_globals,
            lcls=used_locals,
            presaved=frozenset(presaved & used_locals.keys()),
        )

    @classmethod
    def of_source(cls, source: str, **names: Any) -> Block:
        """A block of this package's own: text that nobody wrote in a notebook, and the names it reads.

        What it does stands in functions that the text imports, so code does not travel, and no line
        of it is anybody's.
        """
        return cls(source=source, filename="<nnsight_lab>", first_line=1, glbls={}, lcls=names)

    @property
    def text(self) -> str:
        """The body as the user wrote it, dedented, for people to read."""
        import textwrap  # only for display

        lines = self.source.split("\n")[self.first_line - 1 :]
        return textwrap.dedent("\n".join(lines)).strip("\n")

    def dumps(self) -> bytes:
        """Pickle for the worker.

        Raises:
            NotPicklable: Naming the first name that cannot be sent, and why.
        """
        try:
            return _dumps(self)
        except Exception as error:
            for scope in (self.lcls, self.glbls):
                for name, value in scope.items():
                    try:
                        _dumps(value)
                    except Exception as reason:
                        raise NotPicklable(
                            f"The block reads {name!r}, a {type(value).__module__}."
                            f"{type(value).__qualname__}, which cannot be sent to the worker "
                            f"({type(reason).__name__}: {_first_line(reason)}). Make it inside the "
                            "block, or read what you need of it into a plain value before."
                        ) from None
            raise NotPicklable(
                f"The block cannot be sent to the worker ({type(error).__name__}: {_first_line(error)})."
            ) from None

    def compile(self) -> CodeType:
        """The body's code object, under a file name of its own that `home` can map back."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:12]
        filename = f"{BLOCK_MARK}{digest}> {self.filename}"
        # A block within the block (`with tracer.iter[...]`) is captured from linecache.
        lines = self.source.splitlines(keepends=True)
        linecache.cache[filename] = (len(self.source), None, lines, filename)
        return compile(self.source, filename, "exec")


def _written(node: Any, filename: str) -> str | None:
    """The body's own lines under an ``if True:``, or None where they cannot be used as they are."""
    first, last = node.body[0], node.body[-1]
    lines = str(Tracer.source(filename)).splitlines()
    if first.lineno < 2 or last.end_lineno is None or last.end_lineno > len(lines):
        return None
    body = lines[first.lineno - 1 : last.end_lineno]
    if not body or not body[0][:1].isspace():
        return None
    source = "\n" * (first.lineno - 2) + "if True:\n" + "\n".join(body) + "\n"
    try:
        parsed = ast.parse(source).body[0]
    except SyntaxError:
        return None
    if not isinstance(parsed, ast.If):
        return None
    same = [ast.dump(a) for a in parsed.body] == [ast.dump(b) for b in node.body]
    return source if same else None


def _unparsed(node: Any) -> str:
    offset: str = "\n" * (node.body[0].lineno - 1)
    return offset + ast.unparse(ast.Module(body=node.body, type_ignores=[]))


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    CustomCloudPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
