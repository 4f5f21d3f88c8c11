"""What a block works with, described and not computed: places in the model's tree, arrays, lists of these.

Shapes are those of vLLM's modules, which lay tokens flat: ``[token, hidden]``. A decoder layer that adds its
residual in the next layer's norm returns two such arrays. What a module gives is known by its kind; of any
other it is not known, and is not guessed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LIST = 1000
_SAME_SHAPE = frozenset(
    (
        "abs",
        "clamp",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "exp",
        "log",
        "log_softmax",
        "neg",
        "relu",
        "sigmoid",
        "softmax",
        "sqrt",
        "square",
        "tanh",
        "cumsum",
        "masked_fill",
        "masked_fill_",
        "add",
        "sub",
        "mul",
        "div",
        "round",
    )
)
_OF_ANOTHER_WIDTH = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "int": 4, "long": 8, "bool": 1}
_REDUCES = frozenset(
    (
        "mean",
        "sum",
        "amax",
        "amin",
        "max",
        "min",
        "norm",
        "std",
        "var",
        "argmax",
        "argmin",
        "logsumexp",
        "prod",
        "all",
        "any",
    )
)
_WHOLE_NUMBERS = frozenset(("argmax", "argmin"))


class Value:
    """Anything a name may stand for; two of the same kind are two values."""


class Unknown(Value):
    """What cannot be described."""


@dataclass(eq=False)
class Plain(Value):
    """A number, a text, a range: what Python itself knows."""

    value: Any


@dataclass(eq=False)
class Array(Value):
    """A tensor."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return math.prod(self.shape) * self.itemsize

    def alike(self) -> Array:
        """Another one of its shape."""
        return Array(self.shape, self.itemsize)

    def taken(self, keys: Sequence[Any]) -> Value:
        """``x[keys]``."""
        if any(key is Ellipsis for key in keys):
            at = next(place for place, key in enumerate(keys) if key is Ellipsis)
            missing = len(self.shape) - sum(key is not None and key is not Ellipsis for key in keys)
            keys = [*keys[:at], *[slice(None)] * missing, *keys[at + 1 :]]
        shape: list[int] = []
        rest = list(self.shape)
        for key in keys:
            if key is None:
                shape.append(1)
                continue
            if not rest:
                return Unknown()
            size = rest.pop(0)
            if isinstance(key, bool | Value):
                return Unknown()
            if isinstance(key, int):
                continue
            if isinstance(key, slice):
                try:
                    shape.append(len(range(*key.indices(size))))
                except (TypeError, ValueError):
                    return Unknown()
            elif isinstance(key, list | range):
                shape.append(len(key))
            else:
                return Unknown()
        return Array((*shape, *rest), self.itemsize)

    def method(self, name: str, arguments: Sequence[Value], keywords: Mapping[Any, Value]) -> Value:
        """``x.name(…)``, of the methods that say by themselves what comes of them."""
        if name in _SAME_SHAPE:
            return self.alike()
        if name in _OF_ANOTHER_WIDTH:
            return Array(self.shape, _OF_ANOTHER_WIDTH[name])
        if name == "to":
            return self.alike()
        if name in ("item",):
            return Plain(0.0)
        if name in ("tolist",):
            return Unknown()
        if name in _REDUCES:
            return self._reduced(name, arguments, keywords)
        if name == "topk" and arguments and isinstance(arguments[0], Plain) and self.shape:
            shape = (*self.shape[:-1], int(arguments[0].value))
            return Several([(Array(shape, self.itemsize), 1), (Array(shape, 8), 1)])
        if name == "unsqueeze":
            return Array((1, *self.shape), self.itemsize)
        if name == "squeeze":
            return Array(tuple(size for size in self.shape if size != 1), self.itemsize)
        if name in ("t", "transpose", "flatten", "view", "reshape", "permute"):
            return Array((math.prod(self.shape),), self.itemsize)  # its bytes, whatever its shape
        return Unknown()

    def _reduced(self, name: str, arguments: Sequence[Value], keywords: Mapping[Any, Value]) -> Value:
        given = keywords.get("dim", arguments[0] if arguments and name != "norm" else None)
        itemsize = 8 if name in _WHOLE_NUMBERS else self.itemsize
        if given is None:
            return Array((), itemsize)
        if not isinstance(given, Plain) or not isinstance(given.value, int):
            return Unknown()
        at = given.value + len(self.shape) if given.value < 0 else given.value
        if not 0 <= at < len(self.shape):
            return Unknown()
        keep = keywords.get("keepdim")
        kept = (1,) if isinstance(keep, Plain) and keep.value else ()
        found = Array((*self.shape[:at], *kept, *self.shape[at + 1 :]), itemsize)
        if name in ("max", "min"):
            return Several([(found, 1), (Array(found.shape, 8), 1)])
        return found


@dataclass(eq=False)
class Several(Value):
    """A list, a tuple, a dictionary: its items, and how often each is in it.

    Attributes:
        born: How often what made it ran: what is put into it in the same turn is in each of them once.
    """

    items: list[tuple[Value, int]] = field(default_factory=list)
    born: int = 1
    _keys: dict[Any, int] = field(default_factory=dict)

    def put(self, key: Any, value: Value, times: int) -> None:
        """Add an item; one of the same key is replaced."""
        entry = (value, max(1, times // self.born))
        try:
            known = self._keys.get(key) if key is not None else None
        except TypeError:
            known = key = None
        if known is not None:
            self.items[known] = entry
            return
        if key is not None:
            self._keys[key] = len(self.items)
        self.items.append(entry)

    def get(self, key: Any) -> Value:
        """The item at a place or a key."""
        if isinstance(key, slice):
            return Unknown() if self._keys else Several(self.items[key])
        try:
            if key in self._keys:
                return self.items[self._keys[key]][0]
            return self.items[key][0] if isinstance(key, int) else Unknown()
        except (IndexError, TypeError):
            return Unknown()

    def listed(self, most: int) -> list[Value]:
        """Every item, as often as it is there."""
        found: list[Value] = []
        for value, times in self.items:
            found.extend([value] * min(times, max(0, most - len(found))))
        return found

    def has_arrays(self) -> bool:
        """Whether a tensor, or what may be one, is in it."""
        return any(
            value.has_arrays() if isinstance(value, Several) else not isinstance(value, Plain)
            for value, _ in self.items
        )

    def copy(self) -> Several:
        """Another with the same items."""
        return Several(list(self.items), self.born, dict(self._keys))


@dataclass(eq=False)
class Place(Value):
    """A module of the model."""

    envoy: Any

    def child(self, key: int | slice) -> Value:
        """A module of a list of modules."""
        try:
            if isinstance(key, slice):
                return Several([(place, 1) for place in (self.children() or [])[key]])
            return Place(self.envoy[key])
        except Exception:  # an index past the end, a module that is no list
            return Unknown()

    def children(self) -> list[Value] | None:
        """Those of a list of modules; None of any other."""
        names = list(getattr(_module(self.envoy), "_modules", {}))
        if not names or not all(name.isdigit() for name in names):
            return None
        return [self.child(index) for index in range(len(names))]


@dataclass(frozen=True)
class Anatomy:
    """What shapes depend on.

    Attributes:
        hidden: Width of the residual stream.
        vocabulary: Width of the logits.
        itemsize: Bytes of an element in the model's dtype.
        layers: Path of the decoder layers, with the model's name before it; "" where it is not known.
    """

    hidden: int
    vocabulary: int
    itemsize: int
    layers: str = ""

    def attribute(self, place: Place, name: str, tokens: int) -> Value:
        """``module.name`` where a block asks for it."""
        module = _module(place.envoy)
        if name == "output":
            return self._output(place.envoy, module, tokens)
        if name == "input":
            return self._input(module, tokens)
        if name in getattr(module, "_modules", {}):
            return Place(getattr(place.envoy, name))
        if "." not in place.envoy.path:  # the model's own
            if name == "logits":
                return Array((1, self.vocabulary), self.itemsize)
            if name == "samples":
                return Array((1,), 8)
        return Unknown()

    def _stream(self, tokens: int, width: int = 0) -> Array:
        return Array((tokens, width or self.hidden), self.itemsize)

    def _output(self, envoy: Any, module: Any, tokens: int) -> Value:
        kind = type(module).__name__
        above, _, name = envoy.path.rpartition(".")
        if self.layers and above == self.layers:
            parts = 2 if _takes_residual(module) else 1
            arrays = [(self._stream(tokens), 1) for _ in range(parts)]
            return Several(list(arrays)) if parts > 1 else arrays[0][0]
        if "Linear" in kind and hasattr(module, "output_size"):
            out = self._stream(tokens, int(module.output_size))
            return Several([(out, 1), (Plain(None), 1)]) if getattr(module, "return_bias", True) else out
        if hasattr(module, "embedding_dim"):
            return self._stream(tokens, int(module.embedding_dim))
        if kind.endswith(("MLP", "Attention")) and getattr(module, "_modules", None):
            return self._stream(tokens)
        if "Norm" in kind and "q_norm" not in name and "k_norm" not in name:
            first = above == f"{self.layers}.0" and name.startswith(("input", "ln_1"))
            if _takes_residual(module) and not first:
                return Several([(self._stream(tokens), 1), (self._stream(tokens), 1)])
            return self._stream(tokens)
        return Unknown()

    def _input(self, module: Any, tokens: int) -> Value:
        kind = type(module).__name__
        if "Linear" in kind and hasattr(module, "input_size"):
            return self._stream(tokens, int(module.input_size))
        return self._stream(tokens) if kind.endswith("MLP") or "Norm" in kind else Unknown()


def described(value: Any) -> Value:
    """A value of the notebook's; of its own types nothing is called."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, range):
        return Plain(value)
    if kind in (list, tuple) and len(value) <= _LIST:
        return Several([(described(item), 1) for item in value])
    if kind is dict and len(value) <= _LIST:
        held = Several()
        for key, item in value.items():
            held.put(key if type(key) in (int, str) else None, described(item), 1)
        return held
    if is_envoy(value):
        return Place(value)
    if kind.__name__ in ("Tensor", "Parameter") and kind.__module__.startswith("torch"):
        return Array(tuple(value.shape), int(value.element_size()))
    return Unknown()


def is_envoy(value: Any) -> bool:
    """Whether it is a module of an engine's tree."""
    return any(base.__name__ == "Envoy" for base in type(value).__mro__)


def _module(envoy: Any) -> Any:
    return envoy.__dict__.get("_module")


def _takes_residual(module: Any) -> bool:
    try:
        return "residual" in inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return False
