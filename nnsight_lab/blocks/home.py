"""Which modules a block reaches, where that can be read off it: on which pipeline stage it may live alone.

The hard fact: a stage of a pipeline has its own layers and no others, so a block that reaches two stages runs
on both, and what it is given on one is sent to the other. A block that names modules of one stage needs none
of that. Taken for certain is only what is written out: `model.model.layers[5].output`, an index that is a
number, a module bound before the block. A loop over layers, a module that is called, an alias or a function
that names the model reach whatever there is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import CodeType, ModuleType
from typing import Any, Final

from nnsight.intervention.envoy import Envoy

from nnsight_lab.blocks.block import Block
from nnsight_lab.blocks.reach import Reader
from nnsight_lab.blocks.stubs import BlockEngine

_READS: Final = {"input": "input", "inputs": "input", "output": "output", "skip": "skip"}
_OF_REQUESTS: Final = frozenset({"logits", "samples"})
#: What of this package takes tensors and knows no model.
_PURE: Final = frozenset({"residual", "save"})
#: What gives another number on each stage.
_DRAWS: Final = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
        *("normal", "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "exponential_"),
        *("random_", "geometric_", "cauchy_", "log_normal_", "dropout", "random", "choice", "shuffle"),
    }
)


def places_of(block: Block) -> frozenset[str] | None:
    """The locations that a block can reach; None where they cannot be read off it."""
    try:
        tree = ast.parse(block.source)
        reader = _Places({**block.glbls, **block.lcls}, tree)
        return frozenset(reader.found) if reader.harmless(tree) else None
    except (SyntaxError, RecursionError):
        return None


def draws(code: CodeType) -> str:
    """What a block names that draws random numbers; empty where it names nothing of the kind."""
    return next(iter(sorted(_DRAWS & set(names_of(code)))), "")


def names_of(code: CodeType) -> frozenset[str]:
    """Every name in a block, of its nested functions too."""
    found = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= names_of(const)
    return frozenset(found)


class _Places(Reader):
    """Reads a block, and notes each module that it reads, writes or skips.

    Attributes:
        found: Their locations.
    """

    def __init__(self, scope: Mapping[str, Any], tree: ast.AST) -> None:
        super().__init__(scope, None)
        self.found: set[str] = set()
        self._parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        stored = (ast.Store, ast.Del)
        self._bound = {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, stored)
        }

    def _name(self, node: ast.Name, asked: Mapping[int, ast.Attribute]) -> bool:
        value = self._scope.get(node.id)
        if isinstance(value, Envoy):
            return node.id not in self._bound and self._follow(node, value)
        if isinstance(value, BlockEngine):
            asks = asked.get(id(node))
            if asks is None or node.id in self._bound:
                return False
            return asks.attr == "tokenizer" or (asks.attr == "model" and self._follow(asks, value.model))
        if isinstance(value, ModuleType) and value.__name__ == "nnsight_lab":
            asks = asked.get(id(node))
            return asks is not None and asks.attr in _PURE
        return super()._name(node, asked)

    def _follow(self, node: ast.AST, envoy: Envoy) -> bool:
        """Follow what is written behind a module's name to what is read there."""
        while True:
            parent = self._parents.get(id(node))
            if isinstance(parent, ast.Attribute) and parent.value is node:
                child = vars(envoy).get(parent.attr)
                if isinstance(child, Envoy):
                    envoy, node = child, parent
                    continue
                if parent.attr in _READS:
                    self.found.add(f"{envoy.path}.{_READS[parent.attr]}")
                    return True
                if envoy.path == "model" and parent.attr in _OF_REQUESTS:
                    self.found.add(parent.attr)
                    return True
                return envoy.path == "model" and parent.attr == "tokenizer"
            if isinstance(parent, ast.Subscript) and parent.value is node:
                index = self._index(parent.slice)
                if index is None:
                    return False
                try:
                    envoy, node = envoy[index], parent
                except (IndexError, TypeError, KeyError):
                    return False
                continue
            return False

    def _index(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            value = None if node.id in self._bound else self._scope.get(node.id)
        else:
            try:
                value = ast.literal_eval(node)
            except ValueError:
                return None
        return value if type(value) is int else None


def stage_of(places: frozenset[str] | None, stages: Callable[[str], int | None]) -> int | None:
    """The one stage that these locations are on; None where they are on several, or nobody knows."""
    found = {stages(place) for place in places or ()}
    return found.pop() if len(found) == 1 else None
