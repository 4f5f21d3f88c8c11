"""What every module of a model takes and gives, found without weights and without the engine.

The tree in this process has shapes and no values, so its forward pass can be run on nothing: a copy of the
tree, on PyTorch's meta device, with what needs a kernel (attention, matrix products of whatever
quantisation, experts) replaced by its shape. That takes 0.1 s for thirty layers, once. What comes out is
exact for any architecture, fused or not, where rules about class names would be guesses: a Llama's first
norm gives a tensor, its others a pair; its layers' first input is positions. The copy shares nothing that
is written to.

Leans on vLLM's layers having ``quant_method``, ``_forward_method`` and ``forward_native``, and on a model's
``do_not_compile`` (0.26 to 0.33). Where they do not run on the meta device nothing is claimed: modules that
ran before are known, the others are not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_LOG = logging.getLogger(__name__)
#: Stands for the number of tokens; a prime that no model has as a width.
_TOKENS = 7919
TOKENS = "tokens"


@dataclass(frozen=True)
class Form:
    """A tensor without values.

    Attributes:
        shape: Its sizes; ``"tokens"`` for those of the request.
        dtype: As in ``"bfloat16"``.
    """

    shape: tuple[int | str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class Passed:
    """What went through a module in one forward pass.

    Attributes:
        args: Each positional argument: a `Form`, a tuple of them, or the name of another type.
        kwargs: Each keyword argument, likewise.
        output: What it returned, likewise; ``None`` is None.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, Passed]] = weakref.WeakKeyDictionary()
# Two shells of a kernel may ask at once.
_lock = threading.Lock()


def passed(model: torch.nn.Module, module: torch.nn.Module) -> Passed | None:
    """What goes through a module of a model without weights; None where that is not known.

    Args:
        model: The whole model. Its first question runs it once.
        module: A part of it.
    """
    with _lock:
        found = _known.get(model)
        if found is None:
            found = _known[model] = _run(model)
    return found.get(id(module))


def _run(model: torch.nn.Module) -> dict[int, Passed]:
    record: dict[int, Passed] = {}
    if not any(value.is_meta for value in model.parameters()):
        return record  # a real model is nothing to play with
    if not hasattr(model, "compute_logits"):
        return (
            record  # a served one's names and shapes: there is nothing in it to run, nor vLLM in this process
        )
    try:
        dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
        copy = _copy(model, record, dtype, {})
        ids = torch.zeros(_TOKENS, dtype=torch.int32, device="meta")  # as in vLLM's runner
        positions = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
        with _alone(), torch.inference_mode():
            hidden = copy(ids, positions)
            copy.compute_logits(hidden[:1])
    except Exception as error:  # whatever upstream's model code raises on the meta device
        _LOG.debug("%s was not run without weights: %r", type(model).__name__, error)
    return record


def _copy(
    module: torch.nn.Module, record: dict[int, Passed], dtype: torch.dtype, memo: dict[int, Any]
) -> Any:
    """The module with parts of its own, whose every call is recorded under the original's id."""
    if id(module) in memo:
        return memo[id(module)]
    copy = memo[id(module)] = type(module).__new__(type(module))
    own = copy.__dict__
    own.update(module.__dict__)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        own[name] = type(own[name])()
    for kind in ("_parameters", "_buffers"):
        own[kind] = {name: None if t is None else t.to("meta") for name, t in own[kind].items()}
    own["_modules"] = {
        name: None if part is None else _copy(part, record, dtype, memo)
        for name, part in own["_modules"].items()
    }
    if "_forward_method" in own:
        own["_forward_method"] = copy.forward_native
    own["do_not_compile"] = True
    if "quant_method" in own:
        own["quant_method"] = _ShapesOnly(own["quant_method"], dtype)
    # On the instance nnsight has put a forward of its own; a decorated model calls it and no hook.
    plain = _stand_in(copy) or type(module).forward.__get__(copy)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        record[id(module)] = Passed(
            tuple(map(_form, args)), {name: _form(value) for name, value in kwargs.items()}, _form(output)
        )
        return output

    own["forward"] = forward
    return copy


class _ShapesOnly:
    """A layer's quantisation, whose products are shapes."""

    def __init__(self, real: Any, dtype: torch.dtype) -> None:
        self._real = real
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def apply(self, layer: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        width = getattr(layer, "output_size_per_partition", None) or layer.num_embeddings_per_partition
        return x.new_empty(*x.shape[:-1], width)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, layer.embedding_dim, dtype=self._dtype, device="meta")


def _stand_in(copy: Any) -> Any:
    """What takes the place of a module's forward pass, where that is a kernel."""
    if hasattr(copy, "impl") and hasattr(copy, "head_size"):

        def attention(query: torch.Tensor, *_: Any, output_shape: Any = None, **__: Any) -> torch.Tensor:
            width = copy.num_heads * (getattr(copy, "head_size_v", None) or copy.head_size)
            return query.new_empty(output_shape or (query.shape[0], width))

        return attention
    if type(copy).__name__ == "FusedMoE":

        def experts(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.empty_like(hidden_states)

        return experts
    return None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Groups of one process in the place of vLLM's, which are gone once the tree was built."""
    from vllm.distributed import parallel_state  # heavy, and there where a tree is

    one = SimpleNamespace(
        is_first_rank=True,
        is_last_rank=True,
        world_size=1,
        rank_in_group=0,
        all_gather=lambda value, dim=-1: value,
        gather=lambda value, dst=0, dim=-1: value,
        all_reduce=lambda value: value,
    )
    with contextlib.ExitStack() as stack:
        for name in ("_PP", "_TP"):
            if getattr(parallel_state, name, one) is None:
                stack.enter_context(mock.patch.object(parallel_state, name, one))
        yield


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = tuple(TOKENS if size == _TOKENS else int(size) for size in value.shape)
        return Form(shape, str(value.dtype).removeprefix("torch."))
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return None if value is None else type(value).__name__


def shape_of(value: torch.Tensor) -> str:
    """A parameter's sizes and type, as in ``"[960, 576] bfloat16"``."""
    try:
        return str(_form(value))
    except Exception:  # one that a quantisation fills in later has no sizes
        return "not known before it is loaded"
