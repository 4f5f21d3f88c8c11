"""Completion of a path in the model's tree: ``model.model.layers[3].`` and what stands below it.

jedi does not look behind a subscript, and a model is full of them. A path of names and whole numbers
over envoys is followed for real: nothing is called, and no value of a forward pass is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PATH = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\[-?\d+\])*)\.\w*$")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>-?\d+)\]")


def members(typed: str, namespace: Mapping[str, Any]) -> list[str]:
    """What may follow the last dot of ``typed``: submodules first, then what every envoy has.

    Args:
        typed: The line up to the cursor.
        namespace: Where the path's first name is looked up.

    Returns:
        Names, or nothing where the path does not lead to an envoy.
    """
    found = _PATH.search(typed)
    if found is None:
        return []
    root, steps = re.match(r"(\w+)(.*)", found["path"]).groups()  # type: ignore[union-attr]
    value: Any = namespace.get(root)
    for step in _STEP.finditer(steps):
        if not _is_envoy(value):
            return []
        try:
            if step["name"]:
                # A child of the tree only: `.output` would ask for a value outside of any block.
                value = getattr(value, step["name"]) if step["name"] in _children(value) else None
            else:
                value = value[int(step["index"])]
        except Exception:  # an index past the end, a tree of another kind
            return []
    if not _is_envoy(value):
        return []
    children = _children(value)
    return [*children, *(name for name in dir(value) if not name.startswith("_") and name not in children)]


def _children(envoy: Any) -> list[str]:
    module = envoy.__dict__.get("_module")
    names = getattr(module, "_modules", {}) if module is not None else {}
    return [name for name in names if not name.isdigit()]


def _is_envoy(value: Any) -> bool:
    return any(kind.__name__ == "Envoy" for kind in type(value).__mro__)
