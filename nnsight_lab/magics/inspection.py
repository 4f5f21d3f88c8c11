"""Shift+Tab in a cell of ours, and on a path of the model's tree in any cell.

IPython looks a name up in the notebook's variables, and is told only the name: not `tracer` of a cell that
never ran, not `layers[3]`, as it stops at subscripts. So the kernel's own answer to an inspect request is
asked second: what can be said from the cell's text, the tree without weights and the docstrings is said
here. Nothing of the user's runs, and no engine is asked. A kernel answers between cells; while one runs,
the tooltip comes when it has ended.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nnsight_lab.magics import stubs
from nnsight_lab.magics.describe import form_of, tooltip, words
from nnsight_lab.magics.envoys import PATH, STEP, Bound, Reached, bindings, reach, replaced
from nnsight_lab.magics.reading import BOUND_NAMES, interpreter_of
from nnsight_lab.magics.transform import INDENT, BodyPosition, body_position

_PATHS = re.compile(PATH)

Answer = Callable[..., Any]


class Inspection:
    """Answers a kernel's inspect requests; in a shell without a kernel it does nothing."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)

    def load(self) -> None:
        """Puts itself before the kernel's own answer."""
        if self._kernel is None:
            return
        own: Answer = self._kernel.do_inspect

        def do_inspect(code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
            try:
                text = self.text(code, cursor_pos)
            except Exception:  # jedi raises on some half-written text; the kernel still has its own answer
                text = None
            if text is None:
                answer = own(code, cursor_pos, *args, **kwargs)
                text = self.fallback(code, cursor_pos) if _found_nothing(answer) else None
                if text is None:
                    return answer
            return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

        self._kernel.do_inspect = do_inspect

    def unload(self) -> None:
        """The kernel answers by itself again."""
        if self._kernel is not None:
            vars(self._kernel).pop("do_inspect", None)

    def text(self, code: str, cursor: int) -> str | None:
        """What is said about the place of the cursor; None where it is IPython's to say.

        Args:
            code: The cell.
            cursor: How many characters are before it.
        """
        lines, line, column = _place(code, cursor)
        body = body_position(lines)
        typed = _path_at(lines[line] if line < len(lines) else "", column)
        if not typed:
            return None
        in_body = body is not None and line >= body.line
        known = bindings(lines[:line]) if in_body else {}
        about = self._about_path(typed, known)
        if about is not None or body is None or not in_body:
            return about
        first = re.split(r"[.\[]", typed, maxsplit=1)[0]
        if first in self._shell.user_ns and first not in BOUND_NAMES:
            return None
        return self._about_name(lines, line, column, body)

    def fallback(self, code: str, cursor: int) -> str | None:
        """What is said where nobody knew anything: on a first line, how to write it."""
        lines, line, _ = _place(code, cursor)
        body = body_position(lines)
        if body is None or line >= body.line:
            return None
        return inspect.getdoc(stubs.trace if body.kind == "trace" else stubs.edit)

    def _about_path(self, typed: str, known: dict[str, Bound]) -> str | None:
        whole = replaced(typed, known)
        bound = known.get(typed)
        if bound is not None:
            whole = bound.path
        reached = reach(whole, self._shell.user_ns)
        if reached is None:
            return None
        if bound is None:
            # As it was typed, not as what it stands for: the example then fits into the cell.
            return tooltip(reached, _to_envoy(typed, reached))
        said = f"lab.residual({bound.path})" if bound.summed else bound.path
        if not reached.rest:
            return tooltip(reached, typed, note=f"{typed} = {said}, in this cell\n")
        form = form_of(reached)
        if bound.summed and isinstance(form, tuple):
            form = form[0]
        of = words(form) if form is not ... else "of a shape that is not known before it has run"
        return tooltip(
            Reached(reached.root, reached.envoy, ""),
            _to_envoy(bound.path, reached),
            note=f"{typed}: {of}\n{'':8} = {said}, in this cell\n",
        )

    def _about_name(self, lines: list[str], line: int, column: int, body: BodyPosition) -> str | None:
        """A name that the header or the body binds, as jedi sees it."""
        text = lines[line]
        while column > 0 and (column >= len(text) or not (text[column].isalnum() or text[column] == "_")):
            column -= 1
        reader = interpreter_of(lines, body, self._shell.user_ns)
        place = (line + 1, column + len(INDENT))
        said = next((name for name in reader.help(*place) if name.type != "keyword"), None)
        if said is None:
            return None
        if said.type in ("function", "class", "module"):
            return str(said.docstring()).strip() or None
        kinds = reader.infer(*place)
        kind = kinds[0].name if kinds else "of a type that is known when it has run"
        about = kinds[0].docstring(raw=True) if kinds and said.name in BOUND_NAMES else ""
        return f"{said.name}: {kind}, bound by this cell\n\n{about}".strip()


def _found_nothing(answer: Any) -> bool:
    return isinstance(answer, dict) and not answer.get("found")


def _place(code: str, cursor: int) -> tuple[list[str], int, int]:
    """The cell's lines, and the line and column of the cursor."""
    before = code[:cursor]
    line = before.count("\n")
    return code.splitlines(keepends=True), line, cursor - (before.rfind("\n") + 1)


def _path_at(text: str, column: int) -> str:
    """The path that the cursor stands in or behind, up to the name or subscript that it stands in."""
    if column and text[column - 1 : column] in ("(", ")"):
        # In the brackets of a call it is the callee that is asked about.
        column = text.rfind("(", 0, column)
    for found in _PATHS.finditer(text):
        if found.start() <= column <= found.end():
            path = found[0]
            end = found.start() + len(re.split(r"[.\[]", path, maxsplit=1)[0])
            for step in STEP.finditer(path, end - found.start()):
                if end >= column:
                    break
                end = found.start() + step.end()
            return path[: end - found.start()]
    return ""


def _to_envoy(typed: str, reached: Reached) -> str:
    return typed[: len(typed) - len(reached.rest)] if reached.rest else typed
