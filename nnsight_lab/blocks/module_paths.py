"""Where in the model a saved value was read, from the text of its block.

``hidden = model.model.layers[3].output[0].save()`` says it: ``model.layers[3].output[0]``. Nothing is run.
A name carries the reads of what was assigned or appended to it; an index that is not written out is ``[*]``,
and so is one in which two reads differ. A value made of reads at different modules has no path, and a text
that is not understood has none at all.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_READS: Final = frozenset({"input", "inputs", "output"})
_LONGEST: Final = 200_000
_GROWING: Final = frozenset({"add", "append", "extend", "insert", "setdefault", "update"})


class Step(NamedTuple):
    """One piece of a path: ``.name``, or ``[index]``."""

    text: str
    is_index: bool


Chain = tuple[Step, ...]


def roots_of(*scopes: Mapping[str, Any], engines: type | None = None) -> tuple[tuple[str, str], ...]:
    """The names that are modules of the model, each with its path in it: "" for the whole model.

    Args:
        *scopes: Names and values that a block reads; nnsight's envoys among them are modules.
        engines: The class of which a value's ``model`` is the whole model.
    """
    found: dict[str, str] = {}
    for scope in scopes:
        for name, value in scope.items():
            path = _path_of(value)
            if path is not None:
                found[name] = path
            elif engines is not None and isinstance(value, engines):
                found[f"{name}.model"] = ""
    return tuple(sorted(found.items()))


def _path_of(value: Any) -> str | None:
    if not any(base.__name__ == "Envoy" for base in type(value).__mro__):
        return None
    path = vars(value).get("path")
    return path.partition(".")[2] if isinstance(path, str) else None


@functools.lru_cache(maxsize=256)
def module_paths(source: str, roots: tuple[tuple[str, str], ...] | None = None) -> Mapping[str, str]:
    """By saved name, the module location its value was read at; those not known are left out.

    Args:
        source: A block's text.
        roots: What `roots_of` found; None where nothing is known of the names, and the first name of a path
            is taken to be the model's.
    """
    if len(source) > _LONGEST:
        return {}
    try:
        reader = _Reader(None if roots is None else dict(roots))
        for statement in ast.parse(source).body:
            reader.visit(statement)
        return {name: path for name, chains in reader.reads.items() if (path := _merged(chains))}
    except Exception:  # a label's field is not worth a request
        return {}


class _Reader(ast.NodeVisitor):
    """Reads statements in their order, and what each name stands for."""

    def __init__(self, roots: Mapping[str, str] | None) -> None:
        self._roots = roots
        #: What was read, by name.
        self.reads: dict[str, list[Chain]] = {}
        #: Names that are modules, or what lies at them.
        self._aliases: dict[str, Chain] = {}
        #: Names that are bound in the block to something else.
        self._others: set[str] = set()

    # -- statements ----------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._grow(node.target, [node.value])

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._each(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._assign(item.optional_vars, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _GROWING:
            self._grow(function.value, [*node.args, *(keyword.value for keyword in node.keywords)])
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """What a function reads depends on its arguments."""

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """As a function."""

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[ast.expr] = [value] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                parts = value.elts
            for one, part in zip(target.elts, parts, strict=True):
                self._assign(one, part)
            return
        if isinstance(target, ast.Starred):
            self._assign(target.value, value)
            return
        if not isinstance(target, ast.Name):
            self._grow(target, [value])
            return
        chain = self._chain(_unsaved(value))
        reads = list(self._reads(value))
        self._forget(target.id)
        if chain is not None:
            self._aliases[target.id] = chain
        if reads:
            self.reads[target.id] = reads

    def _forget(self, name: str) -> None:
        self._aliases.pop(name, None)
        self.reads.pop(name, None)
        self._others.add(name)

    def _grow(self, target: ast.expr, values: Sequence[ast.expr]) -> None:
        chain = self._chain(target)
        if chain is not None and _is_read(chain):  # written into the model
            return
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name) and target.id not in self._aliases:
            self.reads.setdefault(target.id, []).extend(r for value in values for r in self._reads(value))

    def _each(self, target: ast.expr, iterable: ast.expr) -> None:
        """Bind what a loop runs over: a module of a list of them, where it is that."""
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.args:
            if iterable.func.id == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                self._each(target.elts[1], iterable.args[0])
                return
            if iterable.func.id == "zip" and isinstance(target, ast.Tuple):
                for one, part in zip(target.elts, iterable.args, strict=False):
                    self._each(one, part)
                return
        chain = None
        if isinstance(iterable, ast.Subscript) and isinstance(iterable.slice, ast.Slice):
            chain = self._chain(iterable.value)
        chain = chain or self._chain(iterable)
        for name in (n for n in ast.walk(target) if isinstance(n, ast.Name)):
            self._forget(name.id)
        if chain is not None and isinstance(target, ast.Name):
            self._aliases[target.id] = (*chain, Step("*", True))

    # -- expressions ---------------------------------------------------------------------------

    def _reads(self, node: ast.AST) -> Iterator[Chain]:
        """Every read in an expression; what a name stands for is its own."""
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            kept = dict(self._aliases), dict(self.reads), set(self._others)
            for generator in node.generators:
                self._each(generator.target, generator.iter)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            yield from [read for part in parts for read in self._reads(part)]
            self._aliases, self.reads, self._others = kept
            return
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Name):
            chain = self._chain(node)
            if chain is not None and _is_read(chain):
                yield chain
                return
        if isinstance(node, ast.Name):
            yield from self.reads.get(node.id, ())
            return
        if isinstance(node, ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            yield from self._reads(child)

    def _chain(self, node: ast.AST) -> Chain | None:
        """A chain of attributes and indices that begins at a module; None for anything else."""
        steps: list[Step] = []
        name = ""
        while not name:
            if isinstance(node, ast.Attribute):
                steps.append(Step(f".{node.attr}", False))
                node = node.value
            elif isinstance(node, ast.Subscript):
                steps.append(Step(_index(node.slice), True))
                node = node.value
            elif isinstance(node, ast.Name):
                name = node.id
            else:
                return None
        steps.reverse()
        chain = self._start(name, steps)
        return None if chain is None else _cut(chain)

    def _start(self, name: str, steps: Sequence[Step]) -> Chain | None:
        if name in self._aliases:
            return (*self._aliases[name], *steps)
        if name in self._others or name in self.reads:
            return None
        if self._roots is None:
            return tuple(steps) if steps else None
        if name in self._roots:
            return (*_parsed(self._roots[name]), *steps)
        if steps and f"{name}{steps[0].text}" in self._roots:
            return (*_parsed(self._roots[f"{name}{steps[0].text}"]), *steps[1:])
        return None


def _unsaved(node: ast.expr) -> ast.expr:
    """``x`` of ``x.save()``."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.value if isinstance(called, ast.Attribute) and called.attr == "save" else node


def _is_read(chain: Chain) -> bool:
    return any(not step.is_index and step.text[1:] in _READS for step in chain)


def _cut(chain: Chain) -> Chain:
    """A chain up to its read and what it takes of it: ``.output[0].shape`` is a read of ``.output[0]``."""
    for number, step in enumerate(chain):
        if not step.is_index and step.text[1:] in _READS:
            end = number + 1
            while end < len(chain) and chain[end].is_index:
                end += 1
            return chain[:end]
    return chain


def _index(node: ast.expr) -> str:
    """An index as it is written; ``*`` where it has names in it."""
    if any(isinstance(part, ast.Name | ast.Call | ast.NamedExpr) for part in ast.walk(node)):
        return "*"
    text = ast.unparse(node)
    return text[1:-1] if isinstance(node, ast.Tuple) and text.startswith("(") else text


def _parsed(path: str) -> Chain:
    """The steps of an envoy's path: ``model.layers.3``."""
    return tuple(
        Step(part, True) if part.isdigit() else Step(f".{part}", False) for part in path.split(".") if part
    )


def _merged(chains: Sequence[Chain]) -> str:
    """One path for all, with ``[*]`` where indices differ; "" where more than indices does."""
    if not chains:
        return ""
    first = chains[0]
    steps = list(first)
    for other in chains[1:]:
        if len(other) != len(first):
            return ""
        for number, (mine, theirs) in enumerate(zip(steps, other, strict=True)):
            if mine == theirs:
                continue
            if not (mine.is_index and theirs.is_index):
                return ""
            steps[number] = Step("*", True)
    return "".join(f"[{step.text}]" if step.is_index else step.text for step in steps).removeprefix(".")
