"""From a tree of JSON back to a value; the tree may have been written by anyone.

Every member is checked before it is used, the classes that can be built are those of `registry`, and
nothing is looked up by a name from the tree except in tables of this room. So reading a tree imports
nothing, calls nothing of a user's, and ends in a value or in `WireError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from nnsight_lab.wire.flatten import Handle
from nnsight_lab.wire.leaf_readers import ATOMS, LEAVES, hexadecimal, items, key, member, numpy_dtype
from nnsight_lab.wire.leaves import Node
from nnsight_lab.wire.limits import MAX_DEPTH, WireError, extent
from nnsight_lab.wire.record import Record
from nnsight_lab.wire.registry import rebuild

Get: TypeAlias = Callable[[Handle], torch.Tensor]
#: The tensors of so many handles in a row, from the first.
GetRun: TypeAlias = Callable[[int, int], Sequence[torch.Tensor]]


def unflatten(node: Node, get: Get, get_run: GetRun | None = None) -> Any:
    """Rebuild what `flatten` took apart.

    Args:
        node: The tree.
        get: The tensor of a handle that ``put`` gave; for an array or bytes a flat CPU tensor ``[byte]``,
            uint8. It is called once per handle in the tree and must itself refuse handles it never gave.
            The value holds these very tensors, and arrays over their memory.
        get_run: What ``put_run`` kept; refuses as ``get`` does.

    Raises:
        WireError: The tree is malformed; nothing of it was kept.
    """
    try:
        return _Unflattener(get, get_run).value(node, 0)
    except RecursionError:
        raise WireError("the message is nested too deeply") from None


class _Unflattener:
    """One reading of one tree: what has been finished, and where tensors come from."""

    def __init__(self, get: Get, get_run: GetRun | None) -> None:
        self._get = get
        self._get_run = get_run
        self._finished: list[object] = []

    def value(self, node: Node, depth: int) -> object:
        """Any value."""
        if type(node) in ATOMS:
            return node
        if depth > MAX_DEPTH + 1:
            raise WireError(f"the message is nested more than {MAX_DEPTH} deep")
        if type(node) is list:
            return self._finish(self._values(node, depth))
        tag, body = member(node)
        leaf = LEAVES.get(tag)
        if leaf is not None:
            return leaf(body)
        if tag == "@":
            return self._again(body)
        build = _BUILDS.get(tag)
        if build is None:
            raise WireError(f"the message has the unknown form {tag!r:.40}")
        return self._finish(build(self, body, depth))

    def _finish(self, value: object) -> object:
        self._finished.append(value)
        return value

    def _again(self, body: Node) -> object:
        if type(body) is not int or not 0 <= body < len(self._finished):
            raise WireError(f"the message refers to {body!r:.40}, which is not before it")
        return self._finished[body]

    def _values(self, body: Node, depth: int) -> list[object]:
        nodes = items(body)
        if len(nodes) > 8 and set(map(type, nodes)) <= ATOMS:
            return list(nodes)
        return [node if type(node) in ATOMS else self.value(node, depth + 1) for node in nodes]

    def _named(self, body: Node, depth: int) -> dict[str, object]:
        if type(body) is not dict:
            raise WireError(f"the message has {body!r:.40} where names belong")
        return {name: self.value(node, depth + 1) for name, node in body.items()}

    def _tensor(self, body: Node) -> torch.Tensor:
        if type(body) is not int and type(body) is not dict:
            raise WireError(f"a tensor's handle is a number or an object, not {body!r:.40}")
        return self._get(body)

    def _bytes(self, body: Node) -> torch.Tensor:
        tensor = self._tensor(body)
        if (
            tensor.dtype != torch.uint8
            or tensor.dim() != 1
            or not tensor.is_cpu
            or not tensor.is_contiguous()
        ):
            raise WireError("the message has another tensor where bytes belong")
        return tensor

    def tuple(self, body: Node, depth: int) -> object:
        return tuple(self._values(body, depth))

    def dict(self, body: Node, depth: int) -> object:
        return self._named(body, depth)

    def pairs(self, body: Node, depth: int) -> object:
        result: dict[object, object] = {}
        for pair in items(body):
            name, node = items(pair, 2)
            found = key(name, depth + 1)
            if found in result:
                raise WireError(f"the message has a dict with the key {found!r:.40} twice")
            result[found] = self.value(node, depth + 1)
        return result

    def _members(self, body: Node, depth: int) -> list[object]:
        members: list[object] = []
        for node in items(body):
            if type(node) is dict and ("T" in node or "@" in node):
                member = self.value(node, depth + 1)
                if not isinstance(member, torch.Tensor):
                    raise WireError("the message refers to a container inside a set")
                members.append(member)
            else:
                members.append(key(node, depth + 1))
        return members

    def set(self, body: Node, depth: int) -> object:
        return set(self._members(body, depth))

    def frozenset(self, body: Node, depth: int) -> object:
        return frozenset(self._members(body, depth))

    def slice(self, body: Node, depth: int) -> object:
        start, stop, step = (self.value(node, depth + 1) for node in items(body, 3))
        return slice(start, stop, step)

    def short_bytes(self, body: Node, depth: int) -> object:
        return hexadecimal(body)

    def long_bytes(self, body: Node, depth: int) -> object:
        return self._bytes(body).numpy().tobytes()

    def tensor(self, body: Node, depth: int) -> object:
        return self._tensor(body)

    def run(self, body: Node, depth: int) -> object:
        first, count = items(body, 2)
        if self._get_run is None or type(first) is not int or type(count) is not int:
            raise WireError("the message has a run of tensors where there can be none")
        tensors = list(self._get_run(first, count))
        self._finished += tensors
        return tensors

    def array(self, body: Node, depth: int) -> object:
        handle, name, shape = items(body, 3)
        dtype = numpy_dtype(name)
        sizes, nbytes = extent(shape, dtype.itemsize)
        flat = self._bytes(handle)
        if flat.numel() != nbytes:
            raise WireError(f"an array of {nbytes} bytes comes with {flat.numel()}")
        return flat.numpy().view(dtype).reshape(sizes)

    def record(self, body: Node, depth: int) -> object:
        name, is_tuple, fields = items(body, 3)
        if type(name) is not str or type(is_tuple) is not bool:
            raise WireError("the message has a record without a name")
        return Record(name, self._named(fields, depth), is_tuple)

    def registered(self, body: Node, depth: int) -> object:
        name, fields = items(body, 2)
        if type(name) is not str:
            raise WireError("the message has an object without a class")
        return rebuild(name, self._named(fields, depth))


_BUILDS: Final[dict[str, Callable[[_Unflattener, Node, int], object]]] = {
    "b": _Unflattener.short_bytes,
    "B": _Unflattener.long_bytes,
    "t": _Unflattener.tuple,
    "e": _Unflattener.set,
    "E": _Unflattener.frozenset,
    "d": _Unflattener.dict,
    "m": _Unflattener.pairs,
    "S": _Unflattener.slice,
    "T": _Unflattener.tensor,
    "L": _Unflattener.run,
    "N": _Unflattener.array,
    "C": _Unflattener.registered,
    "R": _Unflattener.record,
}
