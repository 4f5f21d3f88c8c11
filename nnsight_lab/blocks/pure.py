"""Which expressions of a block are pure functions of this step's logits and samples.

Known are arithmetic, comparisons, places in tensors, and functions of torch that give a new value of their
arguments alone. Refused is what could write, draw, look at a number, or is unknown; so are values that a
block captured and that are no tensors and no numbers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

import torch
from nnsight.intervention.envoy import Envoy

from nnsight_lab.blocks.stubs import BlockEngine

#: What is read, in the order in which a step has it.
READS: Final = ("logits", "samples")
#: Functions of torch, and methods of tensors, that give a new value of their arguments alone and row by row.
_PURE: Final = frozenset(
    {
        *("abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "bfloat16", "clamp", "clone"),
        *("contiguous", "cpu", "cumsum", "detach", "div", "dot", "double", "eq", "exp", "flatten", "float"),
        *("gather", "ge", "gt", "half", "index_select", "int", "isfinite", "isinf", "isnan", "le", "log"),
        *("log2", "log_softmax", "logsumexp", "long", "lt", "matmul", "max", "maximum", "mean", "min"),
        *("minimum", "mm", "mul", "mv", "ne", "neg", "permute", "pow", "reshape", "rsqrt", "sigmoid"),
        *("softmax", "sqrt", "square", "squeeze", "stack", "std", "sub", "sum", "t", "tanh", "to", "topk"),
        *("transpose", "unsqueeze", "var", "where"),
    }
)
_ATTRIBUTES: Final = frozenset({"T", "mT", "values", "indices", "shape", "ndim", "dtype"})
_DTYPES: Final = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "int32", "bool"})
_KEYWORDS: Final = frozenset({"dim", "keepdim", "dtype", "k", "largest", "sorted", "min", "max", "index"})
#: The largest exponent.
_POWER: Final = 4
_NUMBERS: Final = (bool, int, float, type(None), torch.dtype)


#: In place of the value of a name that is saved: nobody may use it.
SAVED: Final = object()


class Unknown(Exception):
    """Something in a block that is not known to be fit."""


class Expressions:
    """Reads the expressions of one block.

    Args:
        scope: The names that it captured.
    """

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.scope = scope
        #: Lists that the block makes, and the names it binds itself: before it reads anything, and after.
        self.lists: set[str] = set()
        self.before: set[str] = set()
        self.bound: set[str] = set()
        #: What it reads, in its order.
        self.reads: list[str] = []

    def pure(self, node: ast.expr) -> ast.expr:
        """The expression, its reads replaced by names; refused unless it is one of the known kinds."""
        read = self._read_of(node)
        if read is not None:
            if self.reads and READS.index(read) < READS.index(self.reads[-1]):
                raise Unknown  # the next step's, in the middle of this one
            self.reads.append(read)
            return ast.copy_location(ast.Name(argument(read), ast.Load()), node)
        if isinstance(node, ast.Constant) and (isinstance(node.value, _NUMBERS) or node.value is ...):
            return node
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return ast.copy_location(ast.UnaryOp(node.op, self.pure(node.operand)), node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if isinstance(node.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot):
                raise Unknown
            left = self.pure(node.left)
            return ast.copy_location(ast.Compare(left, node.ops, [self.pure(node.comparators[0])]), node)
        if isinstance(node, ast.Subscript):
            value = self.pure(node.value)
            return ast.copy_location(ast.Subscript(value, self._argument(node.slice), ast.Load()), node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise Unknown

    def _argument(self, node: ast.expr) -> ast.expr:
        """What may stand in brackets: also several values, and a slice."""
        if isinstance(node, ast.Tuple | ast.List):
            kind = type(node)
            return ast.copy_location(kind([self._argument(one) for one in node.elts], ast.Load()), node)
        if isinstance(node, ast.Slice):
            parts = [None if one is None else self.pure(one) for one in (node.lower, node.upper, node.step)]
            return ast.copy_location(ast.Slice(*parts), node)
        return self.pure(node)

    def _operation(self, node: ast.BinOp) -> ast.expr:
        """An operation that takes no time where it is one of numbers: nobody could break it off here."""
        for side in (node.left, node.right):
            if isinstance(side, ast.Name) and isinstance(self.scope.get(side.id), list | tuple):
                raise Unknown
        power = node.right.value if isinstance(node.right, ast.Constant) else None
        if isinstance(node.op, ast.LShift) or (
            isinstance(node.op, ast.Pow) and not (isinstance(power, int | float) and abs(power) <= _POWER)
        ):
            raise Unknown
        left = self.pure(node.left)
        return ast.copy_location(ast.BinOp(left, node.op, self.pure(node.right)), node)

    def _read_of(self, node: ast.expr) -> str | None:
        """Which of `READS` it reads, as ``model.logits`` or ``engine.model.logits``."""
        if not isinstance(node, ast.Attribute) or node.attr not in READS:
            return None
        of = node.value
        if isinstance(of, ast.Attribute) and of.attr == "model" and isinstance(of.value, ast.Name):
            engine = self.scope.get(of.value.id)
            return node.attr if isinstance(engine, BlockEngine) and engine.model.path == "model" else None
        model = self.scope.get(of.id) if isinstance(of, ast.Name) else None
        return node.attr if isinstance(model, Envoy) and model.path == "model" else None

    def _name(self, node: ast.Name) -> ast.expr:
        if node.id in self.bound or (node.id in self.before and node.id not in self.lists):
            return node
        value = self.scope.get(node.id, SAVED)
        plain = isinstance(value, _NUMBERS) or (type(value) is torch.Tensor and not value.requires_grad)
        places = type(value) in (list, tuple) and all(type(one) is int for one in value)
        if not plain and not places:
            raise Unknown
        return node

    def _attribute(self, node: ast.Attribute) -> ast.expr:
        if self._is_torch(node.value) and node.attr in _DTYPES:
            return node
        if node.attr not in _ATTRIBUTES:
            raise Unknown
        return ast.copy_location(ast.Attribute(self.pure(node.value), node.attr, ast.Load()), node)

    def _called(self, node: ast.Call) -> ast.expr:
        function = node.func
        if not isinstance(function, ast.Attribute) or function.attr not in _PURE:
            raise Unknown
        if any(word.arg not in _KEYWORDS for word in node.keywords):
            raise Unknown
        of = function.value if self._is_torch(function.value) else self.pure(function.value)
        args = [self._argument(one) for one in node.args]
        words = [ast.keyword(word.arg, self._argument(word.value)) for word in node.keywords]
        called = ast.copy_location(ast.Attribute(of, function.attr, ast.Load()), function)
        return ast.copy_location(ast.Call(called, args, words), node)

    def _is_torch(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and self.scope.get(node.id) is torch


def argument(read: str) -> str:
    """What the value of a read is called in the function."""
    return f"__{read}__"
