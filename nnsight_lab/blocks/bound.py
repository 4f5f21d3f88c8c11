"""Which names a block binds before it reads them: their values in the notebook are none of its business.

A cell that is run again finds its own last results under the names that it is about to bind. Captured, they
would travel to the worker, gigabytes of them, to be overwritten there unread; and no second run would be of
the same content as the first. Only what certainly comes first counts: plain statements of the block itself,
in their order, not what stands in a loop or under an ``if``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence


def bound_first(body: Sequence[ast.stmt]) -> frozenset[str]:
    """The names that a block's statements bind before anything in it reads them."""
    bound: set[str] = set()
    read: set[str] = set()
    for statement in body:
        read.update(name for name in _read(statement) if name not in bound)
        bound.update(_binds(statement))
    return frozenset(bound - read)


def _read(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names


def _binds(statement: ast.stmt) -> Iterable[str]:
    if isinstance(statement, ast.Assign):
        return [name for target in statement.targets for name in _names(target)]
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return _names(statement.target)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    return []


def _names(target: ast.expr) -> list[str]:
    """Those of an assignment's left side; a subscript or an attribute binds none."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Starred):
        return _names(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return [name for one in target.elts for name in _names(one)]
    return []
