"""Which values of a model one tensor-parallel rank has only a piece of, and what the whole looks like.

vLLM cuts a layer by heads and by features, and hands each rank its columns: ``qkv_proj`` gives a rank
``[q k v]`` of its own heads, so the ranks' values side by side are ``[q0 k0 v0 | q1 k1 v1]``, which is no
tensor of the model. Here every kind of module that is cut says of its value's tensors in which sections a
rank holds them, from the module's own description of itself. Key and value heads that are fewer than the
ranks are held by several of them, and are taken from one.

Only what is described by a class that is known is described here. A subclass, a weight loader of its own, a
width that is not the one expected: nothing is said of it, and a block that reads it is told so (see
`nnsight_lab.worker.fragments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

_ACTIVATIONS: Final = ("vllm.model_executor.layers.activation", "torch.nn.modules.activation")
_ATTENTIONS: Final = ("Attention", "EncoderOnlyAttention", "ChunkedLocalAttention", "RSWAAttention")
#: Whose output is linear in that of its last layer, which leaves the sum over ranks to others.
_SUMMANDS: Final = ("Qwen2MoeMLP",)
_NORMS_OF: Final = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "query"),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "key"),
}


class Section(NamedTuple):
    """A run of columns.

    Attributes:
        width: Of one rank.
        copies: How many neighbouring ranks hold the same columns.
    """

    width: int
    copies: int = 1


class Cut(NamedTuple):
    """How a tensor lies across the ranks.

    Attributes:
        axis: Negative.
        sections: Of a rank's piece along it, in the order of the whole.
        inner: How large the last axis is, where the pieces are along the one before it.
    """

    axis: int
    sections: tuple[Section, ...]
    inner: int | None = None

    @property
    def width(self) -> int:
        """Of a rank's piece."""
        return sum(section.width for section in self.sections)

    def whole_width(self, ranks: int) -> int:
        """Of the whole."""
        return sum(width * ranks // copies for width, copies in self.sections)

    def fits(self, shape: torch.Size, width: int) -> bool:
        """Whether a tensor of this shape can be one that is cut so, or put together."""
        if len(shape) < 1 - self.axis or shape[self.axis] != width:
            return False
        return self.inner is None or shape[-1] == self.inner

    def joined(self, gathered: torch.Tensor, ranks: int) -> torch.Tensor:
        """The whole, from the ranks' pieces side by side along `axis`."""
        if len(self.sections) == 1 and self.sections[0].copies == 1:
            return gathered
        pieces = torch.chunk(gathered, ranks, dim=self.axis)
        parts: list[torch.Tensor] = []
        start = 0
        for width, copies in self.sections:
            parts.extend(piece.narrow(self.axis, start, width) for piece in pieces[:ranks:copies])
            start += width
        return torch.cat(parts, dim=self.axis)

    def piece(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """A rank's own piece of the whole."""
        parts: list[torch.Tensor] = []
        start = 0
        for width, copies in self.sections:
            parts.append(whole.narrow(self.axis, start + rank // copies * width, width))
            start += width * ranks // copies
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=self.axis)


class Sum(NamedTuple):
    """Every rank holds some of the terms of a sum.

    Attributes:
        ranks: How many.
    """

    ranks: int


#: Says of a value's tensor by its place in the call or result (a number, or a name) how it may lie: the
#: ways it can, of which the shape decides.
Ways = Callable[[int | str], tuple[Cut | Sum, ...]]


def cuts_of(module: nn.Module, name: str, parent: nn.Module | None, side: str) -> Ways | None:
    """How the value at one side of a module lies across the ranks, where that is known.

    Args:
        module: The module, as it stands in the model.
        name: What its parent calls it.
        parent: What it is a part of.
        side: ``input`` or ``output``.
    """
    inner = getattr(module, "base_layer", module)  # with a LoRA, which adds to each column its own
    if isinstance(inner, ColumnParallelLinear):
        sections = columns_of(inner) if side == "output" and not inner.gather_output else None
        return None if sections is None else _same(Cut(-1, sections))
    if isinstance(inner, RowParallelLinear):
        return _row(inner, side)
    if parent is None:
        return None
    if type(inner).__name__ in _ATTENTIONS and isinstance(inner, Attention):
        copies = _kv_copies(inner, parent)
        return None if copies is None else _attention(inner, copies, side)
    if type(module).__name__ in _SUMMANDS and side == "output":
        layers = [one for one in module.children() if isinstance(one, RowParallelLinear) and one.tp_size > 1]
        return _first(Sum(layers[0].tp_size)) if layers and not layers[0].reduce_results else None
    if type(module).__module__.startswith(_ACTIVATIONS):
        return _activation(parent, side)
    attention = next((one for one in parent.children() if type(one).__name__ in _ATTENTIONS), None)
    copies = None if attention is None else _kv_copies(attention, parent)
    if attention is None or copies is None:
        return None
    query, key = _heads(attention, copies, "query"), _heads(attention, copies, "key")
    if name in _NORMS_OF:
        return _same(*(query if _NORMS_OF[name] == "query" else key))
    if "Rotary" in type(module).__name__:
        places: tuple[Any, ...] = ((), query, key) if side == "input" else (query, key)
        return _placed(places, {"query": query, "key": key})
    return None


def is_beside_cuts(module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether a module stands between layers that are cut, so its value may well be a piece."""
    if parent is None or isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return False
    return any(_is_cut(getattr(one, "base_layer", one)) for one in parent.children())


def _is_cut(module: nn.Module) -> bool:
    return isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.tp_size > 1


def columns_of(layer: ColumnParallelLinear) -> tuple[Section, ...] | None:
    """In which sections a rank has the columns of a layer; None where that is not known, or it has all."""
    if layer.tp_size == 1 or not loads_plainly(layer):
        return None
    if type(layer) is QKVParallelLinear:
        copies = layer.num_kv_head_replicas
        return (
            Section(layer.num_heads * layer.head_size),
            Section(layer.num_kv_heads * layer.head_size, copies),
            Section(layer.num_kv_heads * layer.v_head_size, copies),
        )
    if type(layer) is MergedColumnParallelLinear or type(layer) is ColumnParallelLinear:
        return tuple(Section(width) for width in layer.output_partition_sizes)
    return None


def loads_plainly(layer: nn.Module) -> bool:
    """Whether its weights are cut by the class's own rule: a model may have another one."""
    loader = getattr(getattr(layer, "weight", None), "weight_loader", None)
    return loader is None or getattr(loader, "__self__", None) is layer


def _row(layer: RowParallelLinear, side: str) -> Ways | None:
    if layer.tp_size == 1 or not loads_plainly(layer):
        return None
    if side == "input":
        return _same(Cut(-1, (Section(layer.input_size_per_partition),))) if layer.input_is_parallel else None
    return None if layer.reduce_results else _first(Sum(layer.tp_size))


def _activation(parent: nn.Module, side: str) -> Ways | None:
    """Of an activation between a layer cut by columns and one cut by rows: either's columns."""
    into = _of_children(parent, "output")
    out = _of_children(parent, "input")
    if not into or not out:
        return None
    return _same(*(into + out if side == "input" else out + into))


def _of_children(parent: nn.Module, side: str) -> tuple[Cut, ...]:
    found: dict[Cut, None] = {}
    for child in parent.children():
        inner = getattr(child, "base_layer", child)
        if isinstance(inner, ColumnParallelLinear) and side == "output" and not inner.gather_output:
            sections = columns_of(inner)
            if sections is not None:
                found[Cut(-1, sections)] = None
        elif isinstance(inner, RowParallelLinear) and side == "input":
            ways = _row(inner, side)
            if ways is not None:
                found.update((way, None) for way in ways(0) if isinstance(way, Cut))
    return tuple(found)


def _kv_copies(attention: nn.Module, parent: nn.Module) -> int | None:
    """How many ranks hold the same key and value heads; None where nobody says."""
    for child in parent.children():
        inner = getattr(child, "base_layer", child)
        if isinstance(inner, QKVParallelLinear):
            return int(inner.num_kv_head_replicas)
    total = getattr(parent, "total_num_kv_heads", None)
    ranks = next((one.tp_size for one in parent.children() if isinstance(one, RowParallelLinear)), None)
    if total is None or ranks is None:
        return None
    held: Any = attention.num_kv_heads
    return max(1, int(held) * int(ranks) // int(total))


def _heads(attention: Any, copies: int, of: str) -> tuple[Cut, ...]:
    """By heads where those have an axis of their own, or by features."""
    heads = attention.num_heads if of == "query" else attention.num_kv_heads
    size = attention.head_size
    if of in ("value", "output"):
        size = getattr(attention, "head_size_v", None) or size
    if of == "output":
        heads = attention.num_heads
    copies = copies if of in ("key", "value") else 1
    return Cut(-2, (Section(heads, copies),), size), Cut(-1, (Section(heads * size, copies),))


def _attention(attention: Any, copies: int, side: str) -> Ways:
    if side == "output":
        return _first(*_heads(attention, copies, "output"))
    named = {of: _heads(attention, copies, of) for of in ("query", "key", "value")}
    return _placed(tuple(named.values()), named)


def _same(*ways: Cut | Sum) -> Ways:
    return lambda place: ways


def _first(*ways: Cut | Sum) -> Ways:
    return lambda place: ways if place == 0 else ()


def _placed(places: tuple[Any, ...], named: dict[str, Any]) -> Ways:
    def ways(place: int | str) -> tuple[Cut | Sum, ...]:
        if isinstance(place, str):
            return tuple(named.get(place, ()))
        return tuple(places[place]) if place < len(places) else ()

    return ways


def places_of(value: Any, side: str) -> Iterator[tuple[int | str, torch.Tensor]]:
    """The tensors of a value in their order, each with its place in the call or the result."""
    if side == "input":
        args, kwargs = value
        yield from _numbered(args)
        for name, one in kwargs.items():
            if isinstance(one, torch.Tensor):
                yield name, one
    elif isinstance(value, torch.Tensor):
        yield 0, value
    elif isinstance(value, tuple | list):
        yield from _numbered(value)


def _numbered(values: Any) -> Iterator[tuple[int | str, torch.Tensor]]:
    for place, one in enumerate(values):
        if isinstance(one, torch.Tensor):
            yield place, one
