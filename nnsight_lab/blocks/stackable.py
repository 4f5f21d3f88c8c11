"""Which blocks may run once for many requests, read off the block's own text.

A hundred requests that run the same small reading at every token cost a hundred times its Python. Where a
block is nothing but a pure function of this step's logits and samples, it can be run once, on the rows of all
of them. So its text is read, and whatever is not known for certain to be such a function is refused: control
flow, functions of the user's, everything that writes, numbers taken out of tensors, anything carried from one
token to the next, operations that are random or that `torch.vmap` has no rule for.

Two forms are known: straight code that reads the first step, and one loop over ``tracer.all()`` (or
``tracer.iter[:]``) whose turns are independent: each appends to lists that were made before it. The second is
why a request may come, sit steps out and go at any time: what it saved is its own turns' values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from nnsight.intervention.tracer import InterleavingTracer

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.pure import READS, SAVED, Expressions, Unknown, argument


@dataclass(eq=False)
class Stackable:
    """A block as a function of the rows of one request, which may be given those of many.

    Attributes:
        reads: Which of `READS` it is given, in their order.
        body: Of those, the values of `outputs`.
        outputs: The names its values go to, in the order in which they are computed.
        names: All that it saves, in its own order of binding, and whether each is a list.
        loops: Whether it runs at every step, or at the first one only.
        proven: Whether what it gave for many was held against what it gives for one.
        unfit: Whether it was found not to be fit after all.
    """

    reads: tuple[str, ...]
    body: Callable[..., tuple[Any, ...]]
    outputs: tuple[str, ...]
    names: Mapping[str, bool]
    loops: bool
    proven: bool = field(default=False)
    unfit: bool = field(default=False)


def stackable(block: Block) -> Stackable | None:
    """The block as such a function; None where it is none, or nobody can tell."""
    if type(block) is not Block or block.presaved:
        return None
    try:
        return _Reader({**block.glbls, **block.lcls}).read(ast.parse(block.source), block.filename)
    except (Unknown, SyntaxError, RecursionError, ValueError):
        return None


class _Reader(Expressions):
    """One reading of one block."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        super().__init__(scope)
        self._saved: dict[str, bool] = {}
        self._appended: set[str] = set()
        self._outputs: list[str] = []
        self._prelude: list[ast.stmt] = []
        self._body: list[ast.stmt] = []
        #: Whether statements are those of each step.
        self._inside = False

    def read(self, tree: ast.Module, filename: str) -> Stackable:
        """Read it."""
        statements: Sequence[ast.stmt] = tree.body
        while len(statements) == 1 and isinstance(only := statements[0], ast.If):
            if not (isinstance(only.test, ast.Constant) and only.test.value is True) or only.orelse:
                raise Unknown
            statements = only.body  # as `Block` sends what was written
        loops = False
        for statement in statements:
            if loops:
                raise Unknown  # after the loop: run for a request that outlasted it, and for no other
            if isinstance(statement, ast.For):
                loops = True
                self._loop(statement)
            else:
                self._statement(statement)
        if not self.reads or not self._outputs or not self._saved:
            raise Unknown
        if set(self._outputs) - self._saved.keys():
            raise Unknown  # a list that nobody saves
        return Stackable(
            tuple(one for one in READS if one in self.reads),
            self._function(filename),
            tuple(self._outputs),
            dict(self._saved),
            loops,
        )

    # -- statements ----------------------------------------------------------------------------------

    def _loop(self, loop: ast.For) -> None:
        if (
            self.reads
            or loop.orelse
            or not isinstance(loop.target, ast.Name)
            or not self._is_every(loop.iter)
        ):
            raise Unknown
        counter = loop.target.id
        if self._outputs or counter in self.bound | self.before | self.lists:
            raise Unknown
        # Whatever the notebook calls so, in here it is the counter, which differs by request.
        self.scope = {name: value for name, value in self.scope.items() if name != counter}
        self._inside = True
        for statement in loop.body:
            self._statement(statement)
        if not self.reads:
            raise Unknown

    def _is_every(self, node: ast.expr) -> bool:
        """Whether it is ``tracer.all()`` or ``tracer.iter[:]``."""
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            return (
                isinstance(node.func, ast.Attribute)
                and node.func.attr == "all"
                and self._is_tracer(node.func)
            )
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            part = node.slice
            whole = isinstance(part, ast.Slice) and not (part.lower or part.upper or part.step)
            return whole and node.value.attr == "iter" and self._is_tracer(node.value)
        return False

    def _is_tracer(self, node: ast.Attribute) -> bool:
        value = node.value
        return isinstance(value, ast.Name) and isinstance(self.scope.get(value.id), InterleavingTracer)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._call(node.value)
        elif (
            isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        ):
            self._assign(node, node.targets[0].id)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._lists_of(node, node.targets[0])
        elif not isinstance(node, ast.Pass):
            raise Unknown

    def _lists_of(self, node: ast.Assign, names: ast.expr) -> None:
        """``ids, scores = [].save(), [].save()``."""
        values = node.value
        if not isinstance(names, ast.Tuple) or not isinstance(values, ast.Tuple):
            raise Unknown
        if len(names.elts) != len(values.elts):
            raise Unknown
        for name, value in zip(names.elts, values.elts, strict=True):
            if not isinstance(name, ast.Name) or not _is_empty_list(self._saving(value)[1]):
                raise Unknown
            self._assign(ast.copy_location(ast.Assign([name], value), node), name.id)

    def _call(self, call: ast.Call) -> None:
        """``best.append(value)``, or ``best.save()``."""
        name = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(call.func, ast.Attribute) or not isinstance(name, ast.Name) or call.keywords:
            raise Unknown
        if name.id not in self.lists:
            raise Unknown
        if call.func.attr == "save" and not call.args and not self._inside:
            self._saved[name.id] = True
            return
        if call.func.attr != "append" or len(call.args) != 1:
            raise Unknown
        value = call.args[0]
        if isinstance(value, ast.Name):
            if value.id in self._appended:
                raise Unknown  # one object in two places
            self._appended.add(value.id)
        self._output(name.id, self.pure(value), call)

    def _assign(self, node: ast.Assign, name: str) -> None:
        if name in self.scope or name in self.lists | self.before | self.bound or name.startswith("__"):
            raise Unknown  # of several values of one name, which one is meant depends on the step
        saved, value = self._saving(node.value)
        if _is_empty_list(value):
            if self._inside or "list" in self.scope:
                raise Unknown
            self.lists.add(name)
            if saved:
                self._saved[name] = True
            return
        before = len(self.reads)
        pure = self.pure(value)
        if saved:
            # A name that is saved is the value's only one: `b = a.float()` may be `a` itself, saved too.
            if self._inside or not self.reads or isinstance(value, ast.Name):
                raise Unknown
            self._saved[name] = False
            self._output(name, pure, node)
            self.scope = {**self.scope, name: SAVED}
            return
        assigned = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], pure), node)
        if self._inside or self.reads or len(self.reads) > before:
            self.bound.add(name)
            self._body.append(assigned)
        else:
            self.before.add(name)
            self._prelude.append(assigned)

    def _saving(self, node: ast.expr) -> tuple[bool, ast.expr]:
        """What is saved by ``value.save()`` or ``nnsight.save(value)``; else the value itself."""
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr != "save"
        ):
            return False, node
        of = node.func.value
        module = self.scope.get(of.id) if isinstance(of, ast.Name) else None
        if isinstance(module, ModuleType):
            if module.__name__ != "nnsight" or len(node.args) != 1 or node.keywords:
                raise Unknown
            return True, node.args[0]
        if node.args or node.keywords:
            raise Unknown
        return True, of

    def _output(self, name: str, value: ast.expr, where: ast.AST) -> None:
        target = ast.Name(_output(len(self._outputs)), ast.Store())
        assigned: ast.stmt = ast.Assign([target], value)
        self._body.append(ast.copy_location(assigned, where))
        self._outputs.append(name)

    # -- the function --------------------------------------------------------------------------------

    def _function(self, filename: str) -> Callable[..., tuple[Any, ...]]:
        arguments = [ast.arg(argument(one)) for one in READS if one in self.reads]
        found: list[ast.expr] = [ast.Name(_output(at), ast.Load()) for at in range(len(self._outputs))]
        returned = ast.Return(ast.Tuple(found, ast.Load()))
        takes = ast.arguments([], arguments, None, [], [], None, [])
        function = ast.FunctionDef("body", takes, [*self._body, returned], [], None)
        function.type_params = []  # type: ignore[attr-defined,unused-ignore]  # Python 3.12 looks for it
        module = ast.Module([*self._prelude, function], [])
        names: dict[str, Any] = {**self.scope, "__builtins__": {}}
        try:
            exec(compile(ast.fix_missing_locations(module), filename, "exec"), names)
        except Exception:  # what comes before the first read fails: in each request, at its line
            raise Unknown from None
        body: Callable[..., tuple[Any, ...]] = names["body"]
        return body


def _is_empty_list(node: ast.expr) -> bool:
    if isinstance(node, ast.List):
        return not node.elts
    if not isinstance(node, ast.Call) or node.args or node.keywords:
        return False
    return isinstance(node.func, ast.Name) and node.func.id == "list"


def _output(number: int) -> str:
    return f"__output{number}__"
