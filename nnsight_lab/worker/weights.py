"""A parameter that a block reads under tensor parallelism is the model's, not a rank's share of it.

``model.lm_head.weight`` is half the vocabulary on each of two ranks, and a lens made of it would be wrong in
silence. What is read here is put together like the values of modules; it is a copy, so writing to it changes
no weight. A parameter whose cut is not known, and which the ranks do not have alike, is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.modeling.vllm.envoys import ParallelEnvoy
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nnsight_lab.worker.sharding import Cut, Section, columns_of, loads_plainly


class _WholeEnvoy(Envoy):
    """An envoy whose parameters are whole."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Parameter):
            return self.interleaver.fragments.parameter(self.path, self._module, name, value)
        return value


class _WholeParallelEnvoy(_WholeEnvoy, ParallelEnvoy):
    """The same of a layer that is cut."""


def read_whole(model: Any) -> None:
    """Have every envoy of a tree give whole parameters."""
    for envoy in model.modules():
        if type(envoy) is Envoy:
            envoy.__class__ = _WholeEnvoy
        elif type(envoy) is ParallelEnvoy:
            envoy.__class__ = _WholeParallelEnvoy


def cut_of(module: nn.Module, name: str, parameter: torch.Tensor) -> Cut | None:
    """How a parameter lies across the ranks; None where that is not known, or it does not."""
    inner = getattr(module, "base_layer", module)
    if getattr(inner, "tp_size", 1) == 1 or name not in ("weight", "bias"):
        return None
    first = -parameter.ndim
    if isinstance(inner, ColumnParallelLinear):
        sections = columns_of(inner)
    elif isinstance(inner, VocabParallelEmbedding) and not inner.num_added_embeddings:
        sections = (Section(inner.num_embeddings_per_partition),)
    elif isinstance(inner, RowParallelLinear) and name == "weight" and loads_plainly(inner):
        first, sections = -1, (Section(inner.input_size_per_partition),)
    else:
        return None
    cut = None if sections is None else Cut(first, sections)
    return cut if cut is not None and parameter.shape[first] == cut.width else None
