"""Paths in the model's tree, as they are typed: ``model.model.layers[3].mlp.output[0]``, finished or not.

jedi does not look behind a subscript, and a model is full of them. A path of names and subscripts over
envoys is followed for real: nothing is called, and no value of a forward pass is asked for. Names that
the cell itself binds to a path (``layer = model.model.layers[3]``, ``for layer in model.model.layers:``)
are read off its lines, so that they work in a cell that does not parse yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_NAME = r"[A-Za-z_]\w*"
_SUBSCRIPT = r"\[[^\[\]]*\]"
#: A name, and steps that follow it.
PATH = rf"{_NAME}(?:\.{_NAME}|{_SUBSCRIPT})*"
_BEFORE_DOT = re.compile(rf"(?P<path>{PATH})\.\w*$")
STEP = re.compile(rf"\.(?P<name>{_NAME})|\[(?P<index>[^\[\]]*)\]")
_BOUND = re.compile(
    rf"\s*(?P<name>{_NAME})\s*=\s*(?:(?P<sum>lab\.residual)\()?(?P<path>{PATH})\)?(?:\(\)|\.save\(\))?\s*(?:#.*)?$"
)
_LOOP = re.compile(
    rf"\s*for\s+(?:{_NAME}\s*,\s*)?(?P<name>{_NAME})\s+in\s+(?:enumerate\()?(?P<path>{PATH})\)?\s*:"
)


class Bound(NamedTuple):
    """A name that a line of the cell binds to a path.

    Attributes:
        path: The path, names in it already replaced by theirs.
        summed: Whether it is `lab.residual` of it.
        line: Which line does it.
    """

    path: str
    summed: bool
    line: int


class Reached(NamedTuple):
    """How far a path leads into the tree.

    Attributes:
        root: What the first name is.
        envoy: The last envoy on the way.
        rest: What is left of the path: ``".output[0]"``.
    """

    root: Any
    envoy: Any
    rest: str


def before_dot(typed: str) -> str | None:
    """The path that ends at the last dot of ``typed``."""
    found = _BEFORE_DOT.search(typed)
    return None if found is None else found["path"]


def bindings(lines: Iterable[str]) -> dict[str, Bound]:
    """The names that lines bind to paths; the last binding of a name counts."""
    known: dict[str, Bound] = {}
    for number, line in enumerate(lines):
        found = _LOOP.match(line) or _BOUND.match(line)
        if found is None:
            continue
        path, summed = replaced(found["path"], known), False
        if found.re is _LOOP:
            path += "[:]"
        else:
            summed = found["sum"] is not None
        if path.endswith(".save"):
            path = path.removesuffix(".save")
        known[found["name"]] = Bound(path, summed, number)
    return known


def replaced(path: str, known: Mapping[str, Bound]) -> str:
    """The path with its first name replaced by what the cell binds it to."""
    first = re.match(_NAME, path)
    if first is None or first[0] not in known or known[first[0]].summed:
        return path
    return known[first[0]].path + path[first.end() :]


def reach(path: str, namespace: Mapping[str, Any]) -> Reached | None:
    """Follow a path through the tree.

    Args:
        path: As `PATH`. A subscript that is not a number stands for any element: the last is taken, as the
            first layer is often unlike the others.
        namespace: Where its first name is looked up.

    Returns:
        How far it leads; None where it is no path of a tree, or leads past its end.
    """
    first = re.match(_NAME, path)
    root: Any = namespace.get(first[0]) if first else None
    if first is None or not is_envoy(root):
        return None
    value: Any = root
    end = first.end()
    for step in STEP.finditer(path, end):
        try:
            if step["name"]:
                # A child of the tree only: `.output` would ask for a value outside of any block.
                if step["name"] not in children(value):
                    break
                value = getattr(value, step["name"])
            else:
                value = value[int(step["index"]) if re.fullmatch(r"\s*-?\d+\s*", step["index"]) else -1]
        except Exception:  # an index past the end, a tree of another kind
            return None
        if not is_envoy(value):
            return None
        end = step.end()
    return Reached(root, value, path[end:])


def children(envoy: Any) -> list[str]:
    """The submodules that are reached by name."""
    return [name for name in getattr(module_of(envoy), "_modules", {}) if not name.isdigit()]


def own_names(envoy: Any) -> list[str]:
    """What an envoy has besides submodules."""
    return [name for name in dir(envoy) if not name.startswith("_")]


def module_of(envoy: Any) -> Any:
    """The module behind an envoy; without weights, in this process."""
    return envoy.__dict__.get("_module")


def is_envoy(value: Any) -> bool:
    """Whether it is one of nnsight's, by name: importing its class loads torch."""
    return any(kind.__name__ == "Envoy" for kind in type(value).__mro__)


def root_of(envoy: Any) -> Any:
    """The whole tree's envoy."""
    return _own_property(envoy, "root") or envoy


def parent_of(envoy: Any) -> Any:
    """The envoy above; None for the root."""
    return _own_property(envoy, "parent")


def _own_property(envoy: Any, name: str) -> Any:
    # By the class: on the instance the name could be a submodule's.
    own = getattr(type(envoy), name, None)
    return own.__get__(envoy) if isinstance(own, property) else None
