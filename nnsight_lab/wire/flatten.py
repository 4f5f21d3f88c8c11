"""From a value to a tree of JSON, its tensors handed to whoever keeps them.

None, bools, ints up to 64 bits, finite floats, strings and lists are themselves in the tree; everything
else is an object of one member:

```
@ n               the n-th container or tensor finished so far, again
i hex             a larger int                 f hex    a float that is not finite, with its payload
s hex             a str with lone surrogates   c [re, im]            complex
b hex, B handle   bytes, short and long        t [...]  tuple        e [...] set      E [...] frozenset
d {key: ...}      dict with string keys        m [[key, ...], ...]   any other dict
r [a, b, c]       range                        S [a, b, c]           slice
z [...]           torch.Size                   y name   torch.dtype  v text   torch.device
T handle          tensor                       n [dtype, hex]        numpy scalar
L [handle, n]     list of n tensors, whose handles are in a row from this one
N [handle, dtype, shape]                       numpy array; the handle's tensor is its bytes
C [name, {...}]   a registered class           R [name, is_tuple, {...}]          a record
```

Containers, tensors, arrays and bytes are numbered as they are finished, so a reference points back at
something whole and no cycle can be written. Inside keys and sets only a set's own tensors are numbered:
a reader hashes what it finds there, and references could make that a walk without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nnsight_lab.errors import CannotTravel
from nnsight_lab.wire.branches import BUILDS, build_for
from nnsight_lab.wire.leaves import LEAVES, Node, key, numpy_scalar, plainer
from nnsight_lab.wire.limits import MAX_DEPTH
from nnsight_lab.wire.refusals import Stuck
from nnsight_lab.wire.runs import alike

#: What ``put`` gives for a tensor and ``get`` takes back: an int, or an object that JSON can say.
Handle: TypeAlias = int | dict[str, Any]
Put: TypeAlias = Callable[[torch.Tensor], Handle]
#: The same of several tensors of one kind, whose handles are ints in a row: the first.
PutRun: TypeAlias = Callable[[Sequence[torch.Tensor]], int]

_IN_PROGRESS: Final = -1


def flatten(value: object, put: Put, *, name: str = "value", put_run: PutRun | None = None) -> Node:
    """Turn a value into a tree of JSON.

    Args:
        value: What travels. The same list, dict, tensor, ... under two names stays one object.
        put: Keeps a tensor and returns its handle. It gets every tensor object once, of any shape,
            strides and device, without gradient; a numpy array as its bytes ``[byte]``, uint8. Two
            tensors that view one storage are two calls.
        name: What the value is called in an error's path.
        put_run: Keeps the tensors of a list of small ones of one kind; without it they are put one by one.

    Raises:
        CannotTravel: Something in it has no form outside this process; names where, what, and a cure.
    """
    return _walk(Flattener(put, put_run), value, name)


def size_of(value: object, *, name: str = "value") -> int:
    """The bytes of all tensors, arrays and long bytes that would travel. Copies nothing.

    Raises:
        CannotTravel: As `flatten` would.
    """
    measurer = _Measurer()
    _walk(measurer, value, name)
    return measurer.total_bytes


def _walk(flattener: Flattener, value: object, name: str) -> Node:
    try:
        return flattener.node(value, 0)
    except Stuck as stuck:
        raise CannotTravel(name + "".join(reversed(stuck.parts)) + stuck.why) from None
    except RecursionError:
        raise CannotTravel(f"{name} is nested too deeply to travel. Save the tensors inside it.") from None


class Flattener:
    """One walk over one value: what was seen, and where tensors go."""

    def __init__(self, put: Put, put_run: PutRun | None = None) -> None:
        self._put = put
        self._put_run = put_run
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is only a name while its object lives
        self._count = 0

    def store(self, nbytes: int, make: Callable[[], torch.Tensor]) -> Node:
        """Hand a tensor over; made late, so that measuring can do without it."""
        return self._put(make())

    def node(self, value: object, depth: int) -> Node:
        """The form of any value."""
        leaf = LEAVES.get(type(value))
        if leaf is not None:
            return leaf(value)
        build = BUILDS.get(type(value))
        if build is None:
            value = plainer(value)
            leaf = LEAVES.get(type(value))
            if leaf is not None:
                return leaf(value)
            if isinstance(value, np.generic):
                return numpy_scalar(value)
            build = build_for(value)
        identity = id(value)
        known = self._numbers.get(identity)
        if known is not None:
            if known == _IN_PROGRESS:
                raise Stuck(" contains itself, and only trees travel. Save it without the way back.")
            return {"@": known}
        if depth > MAX_DEPTH:
            raise Stuck(f" lies {MAX_DEPTH} containers deep, the most there may be. Save it flatter.")
        self._numbers[identity] = _IN_PROGRESS
        self._alive.append(value)
        node = build(self, value, depth + 1)
        self._numbers[identity] = self._count
        self._count += 1
        return node

    def run(self, values: Sequence[torch.Tensor]) -> Node:
        """The form of a list of small tensors of one kind; None where it has to be taken one by one."""
        if self._put_run is None or not alike(values):
            return None
        identities = set(map(id, values))
        if len(identities) != len(values) or not identities.isdisjoint(self._numbers):
            return None
        for value in values:
            self._numbers[id(value)] = self._count
            self._count += 1
        self._alive += values
        return {"L": [self._put_run(values), len(values)]}

    def items(self, values: Iterable[object], depth: int) -> list[Node]:
        """The forms of a sequence's items."""
        nodes: list[Node] = []
        try:
            for value in values:
                nodes.append(self.node(value, depth))  # noqa: PERF401  # the path reads its length
        except Stuck as stuck:
            stuck.parts.append(f"[{len(nodes)}]")
            raise
        return nodes

    def members(self, values: Iterable[object], depth: int) -> list[Node]:
        """The forms of a set's members."""
        try:
            return [
                self.node(value, depth) if isinstance(value, torch.Tensor) else key(value, depth)
                for value in values
            ]
        except Stuck as stuck:
            stuck.parts.append(" (in the set)")
            raise

    def named(self, values: Mapping[str, object], depth: int, path: Callable[[str], str]) -> dict[str, Node]:
        """The forms of values with string names."""
        nodes: dict[str, Node] = {}
        name = ""
        try:
            for name, value in dict.items(values) if isinstance(values, dict) else values.items():
                nodes[name] = self.node(value, depth)
        except Stuck as stuck:
            stuck.parts.append(path(name))
            raise
        return nodes

    def pairs(self, values: dict[object, object], depth: int) -> list[Node]:
        """The forms of a dict whose keys are not all plain strings."""
        pairs: list[Node] = []
        name: object = None
        in_key = True
        try:
            for name, value in dict.items(values):
                in_key = True
                key_node = key(name, depth)
                in_key = False
                pairs.append([key_node, self.node(value, depth)])
        except Stuck as stuck:
            stuck.parts.append(" (a key)" if in_key else f"[{name!r}]")
            raise
        return pairs


class _Measurer(Flattener):
    """The same walk, which only counts."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: 0)
        self.total_bytes = 0

    def store(self, nbytes: int, make: Callable[[], torch.Tensor]) -> Node:
        self.total_bytes += nbytes
        return 0
