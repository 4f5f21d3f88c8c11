"""A block read without running it: which names it would save, how many values, and about how many bytes.

The hard fact is that a block is the user's own code, and a page asks about it at every pause in typing. So
nothing of it is run, and no engine is asked: statements are followed over values that are only described (a
place in the model's tree, an array of such a shape, a list of these), and what cannot be described is one
value of unknown size. Loops run as often as their range says, within a bound on all work; the steps of a
generation are followed twice, the prompt's and any later one, and the second is counted as often as it runs.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnsight_lab.panel.described import Anatomy, Array, Place, Plain, Several, Unknown, Value, described

#: Statements and expressions that are followed, in all; some 30 ms.
_MOST = 20_000
_LARGE = 10**9


class TooMuch(Exception):
    """More would have to be followed than a page may wait for."""


class _Parked(Exception):
    """The block waits for a step that never comes: what is below is not run."""


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


@dataclass
class Counted:
    """What is saved.

    Attributes:
        saves: How many values.
        nbytes: Their bytes; None where one of them is of unknown size.
        at_most: Whether a condition may leave some out.
        at_least: Whether a loop of unknown length may add some.
        grows: Whether more is saved the longer a request generates.
    """

    saves: int = 0
    nbytes: int | None = 0
    at_most: bool = False
    at_least: bool = False
    grows: bool = False

    def add(self, other: Counted, times: int = 1) -> None:
        """Count another request, or several alike."""
        self.saves += other.saves * times
        known = self.nbytes is not None and other.nbytes is not None
        self.nbytes = (self.nbytes or 0) + (other.nbytes or 0) * times if known else None
        self.at_most |= other.at_most
        self.at_least |= other.at_least
        self.grows |= other.grows


@dataclass
class Work:
    """How much was followed so far, over all readers of one question."""

    left: int = _MOST

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooMuch


@dataclass
class Request:
    """What a block runs in.

    Attributes:
        tokens: Of the prompt.
        steps: Tokens that may be generated.
    """

    tokens: int
    steps: int


Invoked = Callable[[ast.Call, "Reader"], Request | None]


@dataclass
class Reader:
    """Follows one block for one request.

    Attributes:
        anatomy: The model's.
        namespace: The notebook's, which is only read.
        request: What it runs in; of a trace without a prompt, the blocks below `invoke` have their own.
        invoked: The request of a `tracer.invoke(…)`.
    """

    anatomy: Anatomy
    namespace: Mapping[str, Any]
    request: Request
    work: Work = field(default_factory=Work)
    invoked: Invoked | None = None
    scope: dict[str, Value] = field(default_factory=dict)
    counted: Counted = field(default_factory=Counted)
    below: list[Counted] = field(default_factory=list)
    _saved: list[Value] = field(default_factory=list)
    _times: int = 1
    _tokens: int = 0

    def read(self, body: Sequence[ast.stmt]) -> Counted:
        """What the block would save."""
        self._tokens = self.request.tokens
        with contextlib.suppress(_Parked, _Break, _Continue):
            self._block(body)
        for value in self.scope.values():
            if any(value is saved for saved in self._saved):
                saves, nbytes = leaves(value)
                self.counted.add(Counted(saves, nbytes))
        if self.below:  # each is a request of its own, and takes along what was saved above
            total = Counted()
            for one in self.below:
                total.add(one)
            return total
        return self.counted

    # -- statements ----------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        self.work.spend()
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value)
                for target in targets:
                    self._assign(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value))
            case ast.AugAssign():
                self._augment(node)
            case ast.Expr(value=value):
                self.value(value)
            case ast.For():
                self._for(node)
            case ast.While(body=body):
                self.counted.at_least = True
                self._loop(body)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.If(test=test, body=body, orelse=orelse):
                found = self.value(test)
                if isinstance(found, Plain):
                    self._block(body if found.value else orelse)
                else:
                    self.counted.at_most = True
                    for branch in (body, orelse):
                        self._loop(branch)
            case ast.Try(body=body, finalbody=finalbody):
                self._block([*body, *finalbody])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.scope[name] = Unknown()
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue
            case _:
                pass

    def _loop(self, body: Sequence[ast.stmt]) -> bool:
        """Once around; whether it goes on."""
        try:
            self._block(body)
        except _Break:
            return False
        except _Continue:
            pass
        return True

    def _for(self, node: ast.For) -> None:
        steps = self._steps_of(node.iter)
        if steps is not None:
            self._each_step(steps, node.body, node.target)
            return
        items = self._iterated(self.value(node.iter))
        if items is None:
            self.counted.at_least = True
            items = [Unknown()]
        for item in items:
            self._assign(node.target, item)
            if not self._loop(node.body):
                break

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        first = node.items[0]
        steps = self._steps_of(first.context_expr)
        if steps is not None:
            self._each_step(steps, node.body, first.optional_vars)
            return
        called = first.context_expr
        if _is_tracers(called, "invoke") and self.invoked is not None and isinstance(called, ast.Call):
            request = self.invoked(called, self)
            inner = self._inner(request or self.request)
            self.below.append(inner.read(node.body))
            return
        for item in node.items:
            self.value(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, Unknown())
        self._block(node.body)

    def _inner(self, request: Request) -> Reader:
        """A reader with this one's names, whose lists are copies: each request has its own."""
        inner = Reader(self.anatomy, self.namespace, request, self.work)
        for name, value in self.scope.items():
            inner.scope[name] = value.copy() if isinstance(value, Several) else value
            if any(value is saved for saved in self._saved):
                inner._saved.append(inner.scope[name])
        return inner

    # -- the steps of a generation ---------------------------------------------------------------

    def _steps_of(self, node: ast.expr) -> tuple[list[int], bool] | None:
        """Which steps a `tracer.iter[…]` or `tracer.all()` runs in, and whether it waits for one more."""
        total = self.request.steps
        if _is_tracers(node, "all") or (isinstance(node, ast.Attribute) and _is_tracers(node, "iter")):
            return list(range(total)), True
        if not (isinstance(node, ast.Subscript) and _is_tracers(node.value, "iter")):
            return None
        asked = node.slice
        if isinstance(asked, ast.Slice):
            start, stop = self._whole(asked.lower, 0), self._whole(asked.upper, None)
            if start is None or start < 0 or (asked.upper is not None and stop is None):
                return list(range(total)), True
            end = total if stop is None else min(stop, total)
            return list(range(start, end)), stop is None or stop > total
        found = self.value(asked)
        wanted = _python(found)
        wanted = [wanted] if isinstance(wanted, int) else wanted
        if not isinstance(wanted, list) or not all(isinstance(step, int) for step in wanted):
            return list(range(total)), True
        return [step for step in wanted if step < total], any(step >= total for step in wanted)

    def _whole(self, node: ast.expr | None, without: int | None) -> int | None:
        if node is None:
            return without
        found = self.value(node)
        return found.value if isinstance(found, Plain) and isinstance(found.value, int) else None

    def _each_step(
        self, asked: tuple[list[int], bool], body: Sequence[ast.stmt], target: ast.expr | None
    ) -> None:
        steps, parked = asked
        before = self._tokens
        later = [step for step in steps if step > 0]
        passes = [(step, 1) for step in steps if step == 0]
        if later:
            passes.append((later[0], len(later)))
        for step, times in passes:
            self._tokens = self.request.tokens if step == 0 else 1
            self._times *= times
            if target is not None:
                self._assign(target, Plain(step) if times == 1 else Unknown())
            try:
                goes_on = self._loop(body)
            finally:
                self._times //= times
            self.counted.grows |= times > 1
            if not goes_on:
                break
        self._tokens = before
        if parked:
            raise _Parked

    # -- names ---------------------------------------------------------------------------------

    def _assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self.scope[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                items = self._iterated(value) or []
                for place, part in enumerate(parts):
                    self._assign(part, items[place] if place < len(items) else Unknown())
            case ast.Subscript(value=container, slice=key):
                held, at = self.value(container), self.value(key)
                if isinstance(held, Several):
                    held.put(at.value if isinstance(at, Plain) else None, value, self._times)
            case ast.Starred(value=inner):
                self._assign(inner, Unknown())
            case _:
                pass  # an attribute of the model: an edit, which saves nothing

    def _augment(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        if not isinstance(node.target, ast.Name):
            return
        known = self._name(node.target.id)
        if isinstance(known, Several):
            for item in self._iterated(value) or [Unknown()]:
                known.put(None, item, self._times)
        else:
            self.scope[node.target.id] = _computed(node.op, known, value)

    def _name(self, name: str) -> Value:
        if name not in self.scope:
            if name not in self.namespace:
                return Unknown()
            # Kept: what a block appends to a list of the notebook's goes into its own copy of it.
            self.scope[name] = described(self.namespace[name])
        return self.scope[name]

    # -- expressions ---------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        """What an expression describes."""
        self.work.spend()
        match node:
            case ast.Constant(value=value):
                return Plain(value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=container, slice=key):
                return self._item(self.value(container), key)
            case ast.Call():
                return self._call(node)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return Several([(self.value(part), 1) for part in parts], born=self._times)
            case ast.Dict(keys=keys, values=values):
                held = Several(born=self._times)
                for written, item in zip(keys, values, strict=True):
                    named = self.value(written) if written is not None else Unknown()
                    held.put(named.value if isinstance(named, Plain) else None, self.value(item), self._times)
                return held
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                held = Several(born=self._times)
                self._comprehend(node, 0, held)
                return held
            case ast.BinOp(left=left, op=op, right=right):
                return _computed(op, self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=operand):
                found = self.value(operand)
                if isinstance(found, Plain) and isinstance(found.value, int | float):
                    if isinstance(op, ast.USub):
                        return Plain(-found.value)
                    return Plain(not found.value) if isinstance(op, ast.Not) else found
                return found.alike() if isinstance(found, Array) else Unknown()
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _compared(op, self.value(left), self.value(right))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                found = self.value(test)
                if isinstance(found, Plain):
                    return self.value(body if found.value else orelse)
                return self.value(body)
            case ast.JoinedStr(values=parts):
                texts = [self.value(part) for part in parts]
                if all(isinstance(text, Plain) for text in texts):
                    return Plain("".join(str(text.value) for text in texts if isinstance(text, Plain)))
                return Unknown()
            case ast.FormattedValue(value=value, format_spec=None):
                return self.value(value)
            case ast.NamedExpr(target=target, value=value):
                found = self.value(value)
                self._assign(target, found)
                return found
            case ast.Await(value=value) | ast.Starred(value=value):
                return self.value(value)
            case _:
                return Unknown()

    def _attribute(self, node: ast.Attribute) -> Value:
        owner = self.value(node.value)
        if isinstance(owner, Place):
            return self.anatomy.attribute(owner, node.attr, self._tokens)
        if isinstance(owner, Array) and node.attr in ("T", "mT"):
            return Array(owner.shape[::-1], owner.itemsize)
        if isinstance(owner, Array) and node.attr == "shape":
            return Several([(Plain(size), 1) for size in owner.shape])
        return Unknown()

    def _item(self, owner: Value, key: ast.expr) -> Value:
        if isinstance(owner, Array):
            return owner.taken([self._index(part) for part in _parts(key)])
        found = self._index(key)
        if isinstance(owner, Place) and isinstance(found, int | slice):
            return owner.child(found)
        if isinstance(owner, Several):
            return owner.get(found)
        if isinstance(owner, Plain) and isinstance(owner.value, list | tuple | str | range):
            try:
                return described(owner.value[found])
            except (TypeError, IndexError):
                return Unknown()
        return Unknown()

    def _index(self, key: ast.expr) -> Any:
        """A whole number, a slice, a text or an ellipsis; else what is not known."""
        if isinstance(key, ast.Slice):
            ends = [None if end is None else self.value(end) for end in (key.lower, key.upper, key.step)]
            if all(end is None or isinstance(end, Plain) for end in ends):
                return slice(*(end.value if isinstance(end, Plain) else None for end in ends))
            return Unknown()
        found = self.value(key)
        return _python(found) if isinstance(found, Plain | Several) else found

    def _comprehend(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, at: int, held: Several
    ) -> None:
        if at == len(node.generators):
            element = node.value if isinstance(node, ast.DictComp) else node.elt
            held.put(None, self.value(element), self._times)
            return
        generator = node.generators[at]
        items = self._iterated(self.value(generator.iter))
        if items is None:
            self.counted.at_least = True
            items = [Unknown()]
        for item in items:
            self._assign(generator.target, item)
            tests = [self.value(test) for test in generator.ifs]
            if any(isinstance(test, Plain) and not test.value for test in tests):
                continue
            if not all(isinstance(test, Plain) for test in tests):
                self.counted.at_most = True
            self._comprehend(node, at + 1, held)

    def _iterated(self, value: Value) -> list[Value] | None:
        """What a loop goes through; None where that is not known."""
        if isinstance(value, Several):
            return value.listed(self.work.left)
        if isinstance(value, Place):
            return value.children()
        if isinstance(value, Plain) and isinstance(value.value, range | str):
            if len(value.value) > self.work.left:
                raise TooMuch
            return [Plain(item) for item in value.value]
        if isinstance(value, Array) and value.shape and value.shape[0] <= self.work.left:
            return [value.taken([0]) for _ in range(value.shape[0])]
        return None

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        called = node.func
        arguments = [self.value(argument) for argument in node.args]
        keywords = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if isinstance(called, ast.Attribute):
            if name == "save":
                of_module = isinstance(called.value, ast.Name) and called.value.id == "nnsight"
                found = arguments[0] if of_module and arguments else self.value(called.value)
                self._saved.append(found)
                return found
            owner = self.value(called.value)
            if isinstance(owner, Several):
                return self._of_list(owner, name, arguments)
            if isinstance(owner, Array):
                return owner.method(name, arguments, keywords)
            if isinstance(owner, Place):
                return Unknown()
        if name == "save" and arguments:
            self._saved.append(arguments[0])
            return arguments[0]
        return self._function(name, arguments, keywords)

    def _of_list(self, owner: Several, name: str, arguments: Sequence[Value]) -> Value:
        if name in ("append", "add", "appendleft") and arguments:
            owner.put(None, arguments[-1], self._times)
        elif name == "insert" and len(arguments) == 2:
            owner.put(None, arguments[1], self._times)
        elif name in ("extend", "update") and arguments:
            for item in self._iterated(arguments[0]) or [Unknown()]:
                owner.put(None, item, self._times)
        elif name == "clear":
            owner.items.clear()
        elif name in ("values", "copy"):
            return owner
        return Unknown()

    def _function(self, name: str, arguments: Sequence[Value], keywords: Mapping[Any, Value]) -> Value:
        first = arguments[0] if arguments else None
        if name == "residual" and first is not None:
            stream = first.get(0) if isinstance(first, Several) else first
            return stream.alike() if isinstance(stream, Array) else Unknown()
        if name == "range" and arguments:
            numbers = [argument.value for argument in arguments if isinstance(argument, Plain)]
            if len(numbers) == len(arguments) and all(isinstance(number, int) for number in numbers):
                return Plain(range(*numbers)) if all(numbers[2:]) else Unknown()
            return Unknown()
        if name in ("list", "tuple", "set", "dict", "defaultdict", "deque", "sorted", "reversed") and (
            first is None or name != "defaultdict"
        ):
            items = [] if first is None else self._iterated(first)
            return Unknown() if items is None else Several([(item, 1) for item in items], born=self._times)
        if name == "defaultdict":
            return Several(born=self._times)
        if name == "len" and first is not None:
            items = self._iterated(first)
            return Unknown() if items is None else Plain(len(items))
        if name in ("enumerate", "zip") and arguments:
            lists = [self._iterated(argument) for argument in arguments[: None if name == "zip" else 1]]
            known = [found for found in lists if found is not None]
            if len(known) < len(lists):
                return Unknown()
            if name == "enumerate":
                known.insert(0, [Plain(at) for at in range(len(known[0]))])
            return Several([(Several([(part, 1) for part in row]), 1) for row in zip(*known, strict=False)])
        if name in ("stack", "cat", "concat") and isinstance(first, Several):
            return _joined(first, name, keywords.get("dim", arguments[1] if len(arguments) > 1 else Plain(0)))
        if isinstance(first, Array):  # torch.softmax(x, -1) as x.softmax(-1)
            return first.method(name, arguments[1:], keywords)
        return Unknown()


def leaves(value: Value) -> tuple[int, int | None]:
    """How many values come home under a name, and their bytes."""
    if isinstance(value, Array):
        return 1, value.nbytes
    if isinstance(value, Several) and value.has_arrays():
        saves, nbytes = 0, 0
        known = True
        for item, times in value.items:
            count, size = leaves(item)
            saves += count * times
            known = known and size is not None
            nbytes += (size or 0) * times
        return saves, nbytes if known else None
    return 1, 0 if isinstance(value, Plain | Several) else None


def _joined(parts: Several, name: str, dim: Value) -> Value:
    found = [(item, times) for item, times in parts.items if isinstance(item, Array)]
    if not found or len(found) < len(parts.items) or not isinstance(dim, Plain):
        return Unknown()
    first = found[0][0]
    if name == "stack":
        return Array((sum(times for _, times in found), *first.shape), first.itemsize)
    if not isinstance(dim.value, int) or not -len(first.shape) <= dim.value < len(first.shape):
        return Unknown()
    at = dim.value % len(first.shape)
    size = sum(item.shape[at] * times for item, times in found if len(item.shape) > at)
    return Array((*first.shape[:at], size, *first.shape[at + 1 :]), first.itemsize)


def _computed(op: ast.operator, left: Value, right: Value) -> Value:
    if isinstance(left, Array) or isinstance(right, Array):
        arrays = [value for value in (left, right) if isinstance(value, Array)]
        if isinstance(op, ast.MatMult):
            if len(arrays) == 2 and len(arrays[0].shape) >= 2 and len(arrays[1].shape) == 2:
                return Array((*arrays[0].shape[:-1], arrays[1].shape[1]), arrays[0].itemsize)
            return Unknown()
        if len(arrays) < 2 and not isinstance(left if left is not arrays[0] else right, Plain):
            return Unknown()
        return max(arrays, key=lambda array: (len(array.shape), math.prod(array.shape))).alike()
    if not (isinstance(left, Plain) and isinstance(right, Plain)):
        return Unknown()
    a, b = left.value, right.value
    if isinstance(a, str) and isinstance(b, str) and isinstance(op, ast.Add):
        return Plain(a + b)
    if not (isinstance(a, int) and isinstance(b, int) and abs(a) < _LARGE and abs(b) < _LARGE):
        return Unknown()
    match op:
        case ast.Add():
            return Plain(a + b)
        case ast.Sub():
            return Plain(a - b)
        case ast.Mult():
            return Plain(a * b)
        case ast.FloorDiv() if b:
            return Plain(a // b)
        case ast.Mod() if b:
            return Plain(a % b)
    return Unknown()


def _compared(op: ast.cmpop, left: Value, right: Value) -> Value:
    a, b = _python(left), _python(right)
    if isinstance(a, Value) or isinstance(b, Value):
        return Unknown()
    try:
        match op:
            case ast.Eq():
                return Plain(a == b)
            case ast.NotEq():
                return Plain(a != b)
            case ast.Lt():
                return Plain(a < b)
            case ast.LtE():
                return Plain(a <= b)
            case ast.Gt():
                return Plain(a > b)
            case ast.GtE():
                return Plain(a >= b)
            case ast.In():
                return Plain(a in b)
            case ast.NotIn():
                return Plain(a not in b)
            case ast.Is():
                return Plain(a is b)
            case ast.IsNot():
                return Plain(a is not b)
    except TypeError:
        pass
    return Unknown()


def _python(value: Value) -> Any:
    """A plain value, or a list of plain values; else the description."""
    if isinstance(value, Plain):
        return value.value
    if isinstance(value, Several) and all(isinstance(item, Plain) for item, _ in value.items):
        return [item.value for item, times in value.items for _ in range(times) if isinstance(item, Plain)]
    return value


def _parts(key: ast.expr) -> Sequence[ast.expr]:
    return key.elts if isinstance(key, ast.Tuple) else [key]


def _is_tracers(node: ast.expr, name: str) -> bool:
    """Whether it is `tracer.NAME` or `tracer.NAME(…)`, whatever the tracer is called."""
    if isinstance(node, ast.Call):
        node = node.func
    if not (isinstance(node, ast.Attribute) and node.attr == name):
        return False
    return isinstance(node.value, ast.Name) and node.value.id in ("tracer", "tr", "t")
