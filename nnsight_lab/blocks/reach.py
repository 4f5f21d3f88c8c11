"""What of a prompt a block touches, read off the block before it runs.

The hard fact: a token that is served from the prefix cache has no forward pass, so no block sees its row; and
what a block writes into the rows of a prompt is in the keys and values that the cache serves to others. So a
request may share the cache only where its blocks touch no row, and share it with its like where they do the
same to every row whatever its place. Anything that cannot be read for certain is taken to read the prompt:
refused are aliases of the model, functions that name it, objects of unknown classes, and code made at run
time.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.tracer import InterleavingTracer

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.declared import DeclaredBlock
from nnsight_lab.steps.positions import where
from nnsight_lab.steps.step import Step
from nnsight_lab.wire.touch import UNKNOWN, Reach, Touch

#: What may be asked of a model and of a tracer without touching a row.
_OF_MODEL: Final = frozenset({"logits", "samples", "tokenizer"})
_OF_TRACER: Final = frozenset({"result", "iter", "all", "stop"})
_OF_PACKAGES: Final = {"nnsight": frozenset({"save"})}
#: Packages that know nothing of models that run.
_PLAIN: Final = frozenset(
    {
        *("torch", "numpy", "math", "re", "json", "random", "itertools", "functools", "collections"),
        *("statistics", "time", "string", "operator", "builtins", "einops"),
    }
)
#: Ways from a name to anything that there is.
_ANYTHING: Final = frozenset(
    {
        "globals",
        "locals",
        "vars",
        "eval",
        "exec",
        "compile",
        "__import__",
        "open",
        "get_ipython",
        "breakpoint",
    }
)
_SCALARS: Final = (bool, int, float, complex, str, bytes, type(None), slice, range)
_TENSORS: Final = (torch.Tensor, torch.dtype, torch.device, torch.Size, np.ndarray, np.generic, np.dtype)
_DEEP: Final = 4
_MANY: Final = 10_000


def touch_of(block: Block, engines: type | None = None) -> Touch:
    """What a block touches.

    Args:
        block: As it was captured.
        engines: The class of which a value's ``model`` is the whole model.
    """
    if isinstance(block, DeclaredBlock):
        return touch_of_steps(block.asked.get("steps"), block.dumps()) if block.kind == "steps" else UNKNOWN
    try:
        tree = ast.parse(block.source)
    except (SyntaxError, RecursionError):
        return UNKNOWN
    try:
        harmless = Reader({**block.glbls, **block.lcls}, engines).harmless(tree)
        return Touch(Reach.ANSWERS) if harmless else UNKNOWN
    except RecursionError:
        return UNKNOWN


def touch_of_steps(steps: Iterable[Step] | None, payload: bytes) -> Touch:
    """What an edit that is data touches.

    Args:
        steps: Its steps.
        payload: The same as they travel: equal for equal steps.
    """
    alike = steps is not None and all(map(_alike, steps))
    return Touch(Reach.ROWS, sha256(payload).digest()) if alike else UNKNOWN


def _alike(step: Step) -> bool:
    """Whether a step does the same to every row, of the prompt and of what is generated, and reads none."""
    place = where(step.positions)
    one_row = step.tensor is None or step.tensor.ndim == 1 or step.op == "project_out"
    return step.op not in ("read", "patch") and place.everything and place.generated and one_row


class Reader:
    """Reads a block with the names that it captured."""

    def __init__(self, scope: Mapping[str, Any], engines: type | None) -> None:
        self._scope = scope
        self._engines = engines
        self._seen: set[int] = set()

    def harmless(self, tree: ast.AST) -> bool:
        """Whether nothing in it can reach a module."""
        asked = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        return all(self._node(node, asked) for node in ast.walk(tree))

    def _node(self, node: ast.AST, asked: Mapping[int, ast.Attribute]) -> bool:
        if isinstance(node, ast.Attribute):
            return not node.attr.startswith("__")
        if isinstance(node, ast.Import):
            return all(_plain_package(name.name) for name in node.names)
        if isinstance(node, ast.ImportFrom):
            return not node.level and _plain_package(node.module or "")
        if isinstance(node, ast.Name):
            return self._name(node, asked)
        return not isinstance(node, ast.Global | ast.Nonlocal)

    def _name(self, node: ast.Name, asked: Mapping[int, ast.Attribute]) -> bool:
        if node.id in _ANYTHING:
            return False
        if node.id not in self._scope:
            return True  # the block's own, or Python's
        value, of = self._scope[node.id], asked.get(id(node))
        if isinstance(value, Envoy):
            return of is not None and value.path == "model" and of.attr in _OF_MODEL
        if isinstance(value, InterleavingTracer):
            return of is not None and of.attr in _OF_TRACER
        if isinstance(value, ModuleType):
            name = value.__name__.partition(".")[0]
            allowed = _OF_PACKAGES.get(name)
            return name in _PLAIN if allowed is None else of is not None and of.attr in allowed
        if self._engines is not None and isinstance(value, self._engines):
            further = None if of is None else asked.get(id(of))
            if of is None or of.attr != "model":
                return of is not None and of.attr == "tokenizer"
            return further is not None and further.attr in _OF_MODEL
        return self._value(value)

    def _value(self, value: Any, deep: int = 0) -> bool:
        if isinstance(value, _SCALARS) or type(value) in _TENSORS or isinstance(value, _TENSORS):
            return True
        if deep > _DEEP:
            return False
        if type(value) in (list, tuple, set, frozenset):
            return len(value) <= _MANY and all(self._value(one, deep + 1) for one in value)
        if type(value) is dict:
            return len(value) <= _MANY and all(
                self._value(one, deep + 1) for pair in value.items() for one in pair
            )
        if isinstance(value, FunctionType):
            return self._function(value, deep)
        if isinstance(value, type | BuiltinFunctionType):
            return _plain_package(value.__module__ or "") and value.__name__ not in _ANYTHING
        return False

    def _function(self, function: FunctionType, deep: int) -> bool:
        """Whether what a function of the user's names is harmless, too: it is given no model by the block."""
        if _plain_package(function.__module__ or "") and function.__module__ != "builtins":
            return True
        if id(function) in self._seen:
            return True
        self._seen.add(id(function))
        names = set(_names(function.__code__))
        if names & _ANYTHING or any(name.startswith("__") for name in names) or _imports(function.__code__):
            return False
        held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in function.__closure__ or ()]
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] not in _PLAIN:
                    return False
            else:
                held.append(value)
        return all(self._value(value, deep + 1) for value in held)


def _plain_package(name: str) -> bool:
    return name.partition(".")[0] in _PLAIN


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _imports(code: CodeType) -> bool:
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)) or any(
        _imports(const) for const in code.co_consts if isinstance(const, CodeType)
    )
