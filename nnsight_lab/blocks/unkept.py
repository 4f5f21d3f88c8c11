"""Which names of a block look saved and are not: a list whose items were saved, and which was not itself.

The hard fact is nnsight's: what comes home is a *name* whose very object was marked. In
``xs = [layer.output.save() for layer in layers]`` the items are marked and the list is not, so nothing comes
home, and nothing says so. The block's text tells, and nothing is run. Only what is certain is named: a list
that is also read (stacked, measured) may have been meant for that alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_ADDS: Final = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})
_LIST_ADDS: Final = frozenset({"append", "extend", "insert"})
_CONTAINERS: Final = (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
_KINDS: Final = {
    ast.Tuple: "tuple",
    ast.Set: "set",
    ast.SetComp: "set",
    ast.Dict: "dictionary",
    ast.DictComp: "dictionary",
}


def unkept(body: Sequence[ast.stmt], kept: Iterable[str] = ()) -> list[str]:
    """A line for each name of a block that holds saved items and is not saved.

    Args:
        body: The block's statements.
        kept: Names that came home: nothing is said of those.
    """
    reader = _Reader()
    try:
        for statement in body:
            reader.visit(statement)
    except RecursionError:  # an expression of thousands of terms: a hint is not worth a request
        return []
    came_home = {*kept, *reader.saved}
    return [
        f"{name!r} was not kept: its items are saved, the {kind} itself is not. Add the line `{name}.save()` "
        "at the block's end."
        for name, kind in reader.holders.items()
        if name not in came_home and name not in reader.read
    ]


class _Reader(ast.NodeVisitor):
    """Reads a block in its order.

    Attributes:
        holders: Names of containers that got a saved item, and what kind they are.
        saved: Names that are saved.
        read: Names that are read other than to put something into them.
    """

    def __init__(self) -> None:
        self.holders: dict[str, str] = {}
        self.saved: set[str] = set()
        self.read: set[str] = set()
        self._kinds: dict[str, str] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._put(node.target.id, [node.value])
        else:
            self.visit(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        saved = _saved(node)
        if isinstance(saved, ast.Name):
            self.saved.add(saved.id)
            return
        if isinstance(called, ast.Attribute) and called.attr in _ADDS and isinstance(called.value, ast.Name):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            self._put(called.value.id, values, unknown="list" if called.attr in _LIST_ADDS else "")
            for value in values:
                self.visit(value)
            return
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self._put(target.value.id, [value])
            self.visit(target.slice)
        elif isinstance(target, ast.Name):
            self.holders.pop(target.id, None)
            if _saved(value) is not None:
                self.saved.add(target.id)
                return
            self.saved.discard(target.id)
            self._kinds[target.id] = _KINDS.get(type(value), "list") if _is_container(value) else ""
            if isinstance(value, _CONTAINERS) and any(map(self._is_saved, _items(value))):
                self.holders[target.id] = self._kinds[target.id]
        else:
            self.visit(target)

    def _put(self, name: str, values: Sequence[ast.expr], unknown: str = "") -> None:
        kind = self._kinds.get(name, unknown)  # a list of the notebook's own is a copy in the block
        if kind and any(self._is_saved(item) for value in values for item in _flat(value)):
            self.holders.setdefault(name, kind)

    def _is_saved(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.saved
        return _saved(node) is not None


def _saved(node: ast.expr) -> ast.expr | None:
    """``x`` of ``x.save()`` and of ``nnsight.save(x)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "save":
        return None
    if not node.args and not node.keywords:
        return node.func.value
    module = node.func.value
    return node.args[0] if isinstance(module, ast.Name) and module.id == "nnsight" and node.args else None


def _is_container(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, _CONTAINERS) or (
        made and node.func.id in ("list", "dict", "set", "tuple", "defaultdict")  # type: ignore[attr-defined]
    )


def _flat(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, _CONTAINERS):
        yield from _items(node)
    else:
        yield node


def _items(node: ast.expr) -> Iterator[ast.expr]:
    """What a container is written with, however deeply nested."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        parts: Sequence[ast.expr] = node.elts
    elif isinstance(node, ast.Dict):
        parts = node.values
    elif isinstance(node, ast.ListComp | ast.SetComp):
        parts = [node.elt]
    elif isinstance(node, ast.DictComp):
        parts = [node.value]
    else:
        return
    for part in parts:
        yield from _flat(part)
