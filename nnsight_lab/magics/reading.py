"""A cell of ours as jedi reads it: for completion, and for what Shift+Tab says about a name.

The header is stood in for by a `for` over an instance, since jedi does not see through a `with` whose
object comes from a live engine. jedi would run properties of the user's objects to see what they give;
here it may not.
"""

from __future__ import annotations

import dis
import inspect
import threading
import typing
from collections.abc import Mapping
from typing import Any

import jedi  # type: ignore[import-untyped]

from nnsight_lab.magics.contract import lab
from nnsight_lab.magics.shapes import EditShape, TracerShape
from nnsight_lab.magics.transform import BodyPosition, sketch

#: What the two headers bind.
BOUND_NAMES = ("tracer", "edit")
# jedi reads the switch when it is built, and it is one for the whole process.
_building = threading.Lock()


def interpreter_of(lines: list[str], body: BodyPosition, namespace: Mapping[str, Any]) -> Any:
    """The interpreter of a cell; columns of its body are `transform.INDENT` to the right.

    Args:
        lines: The cell's.
        body: Where its body begins.
        namespace: The user's.
    """
    opening = "for tracer in [__lab_tracer__()]:"
    if body.kind == "edit":
        opening = "for tracer, edit in [(__lab_tracer__(), __lab_edit__())]:"
    text = "".join(sketch(lines, opening=opening))
    shapes = {f"__lab_{name}__": bound_class(name) for name in BOUND_NAMES}
    with _building:
        before = jedi.settings.allow_unsafe_interpreter_executions
        jedi.settings.allow_unsafe_interpreter_executions = False
        try:
            return jedi.Interpreter(text, [namespace, shapes])
        finally:
            jedi.settings.allow_unsafe_interpreter_executions = before


def bound_class(name: str) -> type:
    """The class of what a header binds: the live engine's own tracer, or what stands for it."""
    return EditShape if name == "edit" else _result_class("trace", TracerShape)


def members_of(kind: type) -> list[tuple[str, str]]:
    """Public names of a class's instances, each with its sort.

    jedi knows them too, but reads all of nnsight's tracing for it, which takes from 0.3 to 1 s.
    """
    found = {name: "function" if callable(getattr(kind, name, None)) else "property" for name in dir(kind)}
    for above in kind.__mro__:
        begin = vars(above).get("__init__")
        stored = dis.get_instructions(begin) if inspect.isfunction(begin) else ()
        found |= {step.argval: "attribute" for step in stored if step.opname == "STORE_ATTR"}
        found |= dict.fromkeys(vars(above).get("__annotations__", {}), "attribute")
    return sorted((name, sort) for name, sort in found.items() if not name.startswith("_"))


def _result_class(method: str, fallback: type) -> type:
    """The class that a live engine's method says it returns, for jedi to look into."""
    try:
        package = lab()
        if not package.engines():
            return fallback
        hints = typing.get_type_hints(getattr(type(package.get_engine()), method))
    except Exception:  # hints that cannot be resolved say nothing
        return fallback
    found = hints.get("return")
    return found if isinstance(found, type) and found is not object else fallback
